"""A personal model solved near a local copy of the received one, which follows it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from perennial.client.objectives import proximal, pull
from perennial.client.steps import Momentum, Working
from perennial.client.trainer import LocalTrainer, Loss, Means, Received
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL

Follow = Callable[[list[Tensor], list[Tensor]], None]
"""Moves the parameters of the copy w, in place, given those of θ."""


def solve(
    client: LocalTrainer[Any], loss: Loss, received: Received, batches: Iterable[Iterable[Any]], follow: Follow
) -> tuple[Tensors, dict[str, float]]:
    """For each group of mini-batches: `θ ← θ − η (∇loss(θ; B) + λ (θ − w))` with each B of it, then w follows θ.

    w starts from the received model, θ from where the last round left it; θ is kept. Returns w, to be sent, with
    the buffers of θ (BatchNorm's statistics), the model that saw the data; and the mean metrics of the steps.
    """
    hparams, names = client.hparams, client.network.parameter_names
    personal = Working(client.personal(received), names)
    copy = [received[MODEL][name].detach().clone() for name in names]
    momentum, means = Momentum(hparams.momentum), Means()
    for group in batches:
        for batch in group:
            gradient, metrics = client.gradient(personal, loss, batch, received)
            gradient = proximal(gradient, personal.values, copy, hparams.proximity)
            personal.step(momentum.direction(gradient), hparams.personal_learning_rate)
            means.add(metrics)
        follow(copy, personal.values)
    client.kept[PERSONAL] = personal.result()
    return {**client.kept[PERSONAL], **dict(zip(names, copy, strict=True))}, means.result()


def envelope_step(rate: float, proximity: float) -> Follow:
    """`w ← w − rate λ (w − θ)`, a step on the Moreau envelope `min_θ R(θ) + (λ/2) ‖θ − w‖²` (Dinh et al. 2020)."""

    def follow(copy: list[Tensor], personal: list[Tensor]) -> None:
        torch._foreach_add_(copy, pull(copy, personal, proximity), alpha=-rate)

    return follow


def repeated(batches: Iterable[Any], times: int) -> Iterable[Iterable[Any]]:
    """Groups of one mini-batch each, taken so many times."""
    return ([batch] * times for batch in batches)
