"""SCAFFOLD, client half: steps along the gradient, corrected by the control variates."""

import torch
from torch import Tensor

from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Loss, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.scaffold import Scaffold
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES

CONTROL = "control"
"""The server's control variate c, and what this client makes of it: c + Δc_u. What is kept is c_u."""


class ScaffoldClient(LocalTrainer[Scaffold]):
    """`w_u ← w_u − η (∇R(w_u; B) − c_u + c)`, K times from w^t, and then `c_u ← c_u − c + (w^t − w_u) / (K η)`
    (Karimireddy et al. 2020, Algorithm 1, option II)."""

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        common = received[CONTROL]
        own: Tensors = self.kept.get(CONTROL) or {name: torch.zeros_like(c) for name, c in common.items()}
        self.correction = [common[name] - own[name] for name in self.network.parameter_names]
        start = received[MODEL]
        trained, metrics = self.descend(start, self.loss, received)
        steps = self.mini_batches(self.hparams.local_steps) * self.hparams.learning_rate * self.rate_factor
        new = {name: own[name] - c + (start[name] - trained[name]) / steps for name, c in common.items()}
        self.kept[CONTROL] = new
        changed = {name: c + (new[name] - own[name]) for name, c in common.items()}
        return Reply({MODEL: trained, CONTROL: changed}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def gradient(
        self, model: Working, loss: Loss, batch: Examples, received: Received
    ) -> tuple[list[Tensor], Metrics]:
        """`∇R(w_u; B) − c_u + c`."""
        gradient, metrics = super().gradient(model, loss, batch, received)
        return list(torch._foreach_add(gradient, self.correction)), metrics
