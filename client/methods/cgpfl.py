"""CGPFL, client half: a personal model solved near a local copy of its context's model."""

from typing import TypeVar

import torch
from torch import Tensor

from perennial.client.methods.proximal import repeated, solve
from perennial.client.trainer import LocalTrainer, Received, Reply
from perennial.common.methods.cgpfl import ContextTraining
from perennial.common.wire import MODEL, NUM_EXAMPLES

C = TypeVar("C", bound=ContextTraining)


class CGPFLClient(LocalTrainer[C]):
    """R times on a new mini-batch B: S times `θ ← θ − η (∇R(θ; B) + λ (θ − ω̃))`, then `ω̃ ← (1 − γ) ω̃ + γ θ`
    with γ = lr λ (thesis Algorithm 1, lines 6 to 11).

    ω̃ starts from the received model of the client's context, θ from where the last round left it. ω̃ travels, θ is
    kept.
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        hparams = self.hparams

        def follow(copy: list[Tensor], theta: list[Tensor]) -> None:
            torch._foreach_lerp_(copy, theta, hparams.learning_rate * hparams.proximity)  # ω̃, line 10

        batches = repeated(self.batches(hparams.local_steps, received.round), hparams.personal_steps)
        upload, metrics = solve(self, self.loss, received, batches, follow)  # θ, line 8
        return Reply({MODEL: upload}, {NUM_EXAMPLES: len(self.data.train), **metrics})
