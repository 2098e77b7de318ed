"""Federated GroupDRO, client half: steps on the weighted risk, and the risk for the next weights."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perennial.client.stateful import StatefulTrainer
from perennial.client.trainer import Client, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.group import GROUP
from perennial.common.methods.groupdro import GroupDRO
from perennial.common.models import Tensors
from perennial.common.wire import MODEL


class GroupDROClient(StatefulTrainer[GroupDRO]):
    """`v ← v − γ N q_i ∇R(v; B)`, with the weight N q_i from the server (Sagawa et al. 2020)."""

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        """The round's steps, and beside them the risk of the *received* model on all training data."""
        return with_risk(super().train(received), self, received)

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        return weighted_loss(self, params, batch, received)


def with_risk(reply: Reply, client: Client[Any], received: Received) -> Reply:
    """The reply, and beside it the risk of the received model on all of the client's training data."""
    found = client.score(client.predictor(received[MODEL]), client.data.train)
    risk = torch.as_tensor(found.loss / found.count, dtype=torch.float32)
    return replace(reply, arrays={**reply.arrays, GROUP: {"risk": risk}})


def weighted_loss(
    client: StatefulTrainer[Any], params: Tensors, batch: Examples, received: Received
) -> tuple[Tensor, Metrics]:
    """`N q_i R(v; B)`, and weight decay."""
    risk = client.risk(params, batch)
    return client.decayed(received[GROUP]["weight"] * risk, params), {"risk": risk}
