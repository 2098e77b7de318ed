"""CGPFL, client half: a personal model solved near a local copy of its context's model."""

from typing import TypeVar

import torch

from client.objectives import proximal
from client.trainer import LocalTrainer, Means, Received, Reply
from client.working import Momentum, Working
from common.methods.cgpfl import ContextTraining
from common.wire import MODEL, NUM_EXAMPLES, PERSONAL

C = TypeVar("C", bound=ContextTraining)


class CGPFLClient(LocalTrainer[C]):
    """R times on a new mini-batch B: S times `θ ← θ − η (∇R(θ; B) + λ (θ − ω̃))`, then `ω̃ ← (1 − γ) ω̃ + γ θ`
    with γ = lr λ (thesis Algorithm 1, lines 6 to 11).

    ω̃ starts from the received model of the client's context, θ from where the last round left it. ω̃ travels, θ is
    kept.
    """

    def train(self, received: Received) -> Reply:
        hparams, names = self.hparams, self.network.parameter_names
        personal = Working(self.personal(received), names)
        copy = [received[MODEL][name].clone() for name in names]
        momentum, means = Momentum(hparams.momentum), Means()
        for batch in self.batches(hparams.local_steps, received.round):
            for _ in range(hparams.personal_steps):
                risk_gradient, metrics = self.gradient(personal, self.loss, batch, received)
                gradient = proximal(risk_gradient, personal.values, copy, hparams.proximity)
                personal.step(momentum.direction(gradient), hparams.personal_learning_rate)  # θ, line 8
                means.add(metrics)
            torch._foreach_lerp_(copy, personal.values, hparams.learning_rate * hparams.proximity)  # ω̃, line 10
        self.kept[PERSONAL] = personal.result()
        # Buffers (BatchNorm's statistics) are those of the model that saw the data.
        upload = {**self.kept[PERSONAL], **dict(zip(names, copy, strict=True))}
        return Reply({MODEL: upload}, {NUM_EXAMPLES: len(self.data.train), **means.result()})
