"""A server that takes a step towards the mean, with an optimizer of its own, in place of going there."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from perennial.common.config import RunConfig
from perennial.common.training import ServerOptimizer
from perennial.common.utils.tensors import Tensors
from perennial.strategies.base import MethodStrategy

FIRST, SECOND = "server-first", "server-second"
"""Records of a checkpoint: m and v by the names of the model's tensors."""


class ServerSteps:
    """`x ← x + η m/(√v + τ)`, where Δ is the way to the mean (Reddi et al. 2021, Algorithm 2).

    `m ← β₁ m + (1 − β₁) Δ`, and v, which begins as τ², becomes `v + Δ²` (FedAdagrad), `β₂ v + (1 − β₂) Δ²`
    (FedAdam) or `v − (1 − β₂) Δ² sign(v − Δ²)` (FedYogi). FedAvgM has no v: `m ← β m + Δ`,
    `x ← x + η m` (Hsu et al. 2019).
    """

    def __init__(self, settings: ServerOptimizer, first: Tensors, second: Tensors) -> None:
        """`first` and `second` are m and v as they were left, by name; empty at first."""
        self.settings = settings
        self.first, self.second = dict(first), dict(second)

    def step(self, name: str, before: Tensor, mean: Tensor, rate: float) -> Tensor:
        """A tensor of the next model, from the one that was sent and the mean of what came back."""
        own, delta = self.settings, mean - before
        m = self.first.get(name, torch.zeros_like(delta)).to(delta.device)
        if own.name == "fedavgm":
            m = self.first[name] = own.momentum * m + delta
            return before + rate * m
        decay, decay_of_squares = own.betas
        m = self.first[name] = decay * m + (1 - decay) * delta
        v = self.second.get(name, torch.full_like(delta, own.adaptivity**2)).to(delta.device)
        square = delta.square()
        if own.name == "fedadagrad":
            v = v + square
        elif own.name == "fedadam":
            v = decay_of_squares * v + (1 - decay_of_squares) * square
        else:
            v = v - (1 - decay_of_squares) * square * (v - square).sign()
        self.second[name] = v
        return before + rate * m / (v.sqrt() + own.adaptivity)


class OptimizedStrategy(MethodStrategy[Any]):
    """Stands before a server half that takes a mean. Buffers, such as BatchNorm's statistics, are the mean."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        self.steps = ServerSteps(run.server_optimizer, {}, {})

    def state_dict(self) -> dict[str, Tensors]:
        return {**super().state_dict(), FIRST: self.steps.first, SECOND: self.steps.second}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        super().load_state_dict({name: own for name, own in state.items() if name not in (FIRST, SECOND)})
        self.steps = ServerSteps(self.run.server_optimizer, state.get(FIRST, {}), state.get(SECOND, {}))

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """The next global model: a step from the one before towards the mean."""
        usual, buffers = self.run.server_optimizer.learning_rate, self.network.buffer_names
        rate = self.run.rates(self.exchanges[-1].round).get("server", usual)
        return {
            name: self.steps.step(name, model[name].to(mean.device), mean, rate)
            if name in model and name not in buffers and mean.is_floating_point()
            else mean
            for name, mean in super().update(model, means).items()
        }
