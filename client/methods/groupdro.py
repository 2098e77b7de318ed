"""Federated GroupDRO, client half: steps on the weighted risk, and the risk for the next weights."""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from client.stateful import StatefulTrainer
from client.trainer import Metrics, Received, Reply
from common.data.examples import Examples
from common.methods.groupdro import GROUP, GroupTraining
from common.models import Tensors
from common.wire import MODEL

G = TypeVar("G", bound=GroupTraining)


class GroupDROClient(StatefulTrainer[G]):
    """`v ← v − γ N q_i ∇R(v; B)`, with the weight N q_i from the server (Sagawa et al. 2020)."""

    def train(self, received: Received) -> Reply:
        """The round's steps, and beside them the risk of the *received* model on all training data."""
        found = self.score(self.predictor(received[MODEL]), self.data.train)
        reply = super().train(received)
        risk = torch.tensor(found.loss / found.count)
        return replace(reply, arrays={**reply.arrays, GROUP: {"risk": risk}})

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`N q_i R(v; B)`."""
        risk = self.risk(params, batch)
        return self.decayed(received[GROUP]["weight"] * risk, params), {"risk": risk}
