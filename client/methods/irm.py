"""Federated IRM, client half: steps on the risk and the IRM penalty, the client being one environment."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from perennial.client.objectives import irm_penalty
from perennial.client.stateful import Chosen, StatefulTrainer
from perennial.client.trainer import Metrics, Received
from perennial.common.data.examples import Examples
from perennial.common.methods.irm import InvariantTraining
from perennial.common.training import Training
from perennial.common.utils.tensors import Tensors

I = TypeVar("I", bound=InvariantTraining)  # noqa: E741


class IrmClient(StatefulTrainer[I]):
    """`v ← v − γ ∇[R(v; D_i) + λ g(v; D_i)²]` (PerInvFL Algorithm 1, line 9; Arjovsky et al. 2019, IRMv1)."""

    stacks = ("train", "evaluate")
    captures = ("train",)

    @classmethod
    def phase(cls, hparams: Any, training: Training, round_: int) -> Hashable:
        return super().phase(hparams, training, round_), round_ <= hparams.anneal_rounds

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`R(v; B) + λ_t g(v; B)²`, all environments of the client as one."""
        risk, penalty = self.risk_and_penalty(params, batch)
        value = self.penalised(self.decayed(risk, params), penalty, self.hparams.penalty, received.round)
        return value, {"risk": risk, "penalty": penalty}

    def risk_and_penalty(self, params: Tensors, part: Examples) -> tuple[Tensor, Tensor]:
        """R and g² on samples of one environment."""
        logits = self.network.predict(params, part.x, training=True)
        halves = self.hparams.penalty_estimator == "halves"
        if isinstance(part, Chosen):
            penalty = self.penalty_of(part, self.task.scale_slopes(logits, part.y), halves)
        else:
            penalty = irm_penalty(self.task.scale_slopes, logits, part.y, halves)
        return self.risk_of(logits, part), penalty

    def penalty_of(self, part: Chosen, slopes: Tensor, halves: bool) -> Tensor:
        """`irm_penalty` over the samples that count, given the slopes of all."""
        mean = part.mean(slopes)
        if not halves:
            return mean.square()
        even = (part.counts.cumsum(0) - 1) % 2 == 0
        pair = [replace(part, counts=part.counts * half) for half in (even, ~even)]
        product = pair[0].mean(slopes) * pair[1].mean(slopes)
        return torch.where(part.counts.sum() > 1, product, mean.square())

    def penalised(self, value: Tensor, penalty: Tensor, weight: float, round_: int) -> Tensor:
        """`value + λ_t · penalty`, with `rescale` divided by max(1, λ_t); λ_t is at most 1 while annealing."""
        if round_ <= self.hparams.anneal_rounds:
            weight = min(weight, 1.0)
        scale = max(weight, 1.0) if self.hparams.rescale else 1.0
        return value / scale + weight / scale * penalty
