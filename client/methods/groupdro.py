"""Federated GroupDRO, client half: steps on the weighted risk, and the risk for the next weights."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perennial.client.stateful import StatefulTrainer
from perennial.client.trainer import Client, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.group_weights import GROUP, MASS
from perennial.common.methods.groupdro import GroupDRO
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL


class GroupDROClient(StatefulTrainer[GroupDRO]):
    """`v ← v − γ N q_i ∇R(v; B)`, with the weight N q_i from the server (Sagawa et al. 2020)."""

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        """The round's steps, and beside them the risk of the *received* model on all training data."""
        received = with_weight(self, received)
        return with_risk(super().train(received), self, received)

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        return weighted_loss(self, params, batch, received)


def with_weight(client: Client[Any], received: Received) -> Received:
    """What was received, with the client's weight in it: where the server may not know that, the client has kept
    `a_i = η_q Σ risk_i`, and `N q_i = e^(a_i − level)`, at most `most`."""
    group = received[GROUP]
    if "weight" in group:
        return received
    kept = client.kept.get(MASS, {MASS: torch.zeros_like(group["level"])})[MASS]
    above = torch.minimum(kept - group["level"], group["most"].log())
    weight = (group["scale"] * above.exp()).float()
    return replace(received, arrays={**received.arrays, GROUP: {**group, "above": above, "weight": weight}})


def with_risk(reply: Reply, client: Client[Any], received: Received) -> Reply:
    """The reply, and beside it the risk of the received model on all of the client's training data; or what that
    makes of the client's weight, in units of `most` before and after."""
    found, group = client.mean_loss(client.predictor(received[MODEL]), client.data.train), received[GROUP]
    risk = torch.as_tensor(found, dtype=torch.float32)
    if "level" not in group:
        return replace(reply, arrays={**reply.arrays, GROUP: {"risk": risk}})
    grown = group["above"] + (client.hparams.group_rate * risk.double().to(group["above"])).clamp(0, 700)
    client.kept[MASS] = {MASS: grown + group["level"]}
    after = torch.minimum(grown.exp(), group["top"])
    sent = {"before": group["above"].exp() / group["most"], "after": after / group["most"]}
    return replace(reply, arrays={**reply.arrays, GROUP: sent})


def weighted_loss(
    client: StatefulTrainer[Any], params: Tensors, batch: Examples, received: Received
) -> tuple[Tensor, Metrics]:
    """`N q_i R(v; B)`, and weight decay."""
    risk = client.risk(params, batch)
    return client.decayed(received[GROUP]["weight"] * risk, params), {"risk": risk}
