"""FTFA, client half: FedAvg's steps, and a personal model some steps away from the shared one."""

from typing import TypeVar

import torch

from perennial.client.stateful import OWN, StatefulTrainer
from perennial.client.steps import Momentum
from perennial.client.trainer import Means, Predictor, Received, Reply
from perennial.common.mathematics.adam import Adam
from perennial.common.methods.ftfa import FineTuning
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL

F = TypeVar("F", bound=FineTuning)


class FtfaClient(StatefulTrainer[F]):
    """The personal model: `θ ← θ − η ∇R(θ; B)`, `fine_tuning_steps` times from the shared one (Cheng et al. 2021).

    As in the paper, it is made for each evaluation from the received model, anew and with a fresh optimizer:
    nothing of it is kept or plays a part in training. In the authors' code of PerInvFL it is made from the local
    copy v before every step of v, on the same mini-batch, and the last one of a round is kept.
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        return super().train(received) if self.hparams.preset == "paper" else self.public_code(received)

    def public_code(self, received: Received) -> Reply:
        """PerInvFL's public code: θ takes steps of Adam from v before every step of v."""
        hparams, v, means = self.hparams, self.working(received[MODEL]), Means()
        for batch in self.batches(hparams.local_steps, received.round):
            theta = self.working(v.tensors)
            for _ in range(hparams.fine_tuning_steps):
                risk = self.each(self.risk)(theta.tensors, batch)
                theta.descend(risk, self.optimizer(OWN), hparams.personal_learning_rate)
            means.add(self.shared_step(v, batch, received))
        self.kept[PERSONAL] = theta.result()
        return self.finish(v, means)

    def visit(self, received: Received) -> None:
        if self.hparams.preset != "paper":  # otherwise `models` does it all
            super().visit(received)

    @torch.enable_grad()
    def fine_tuned(self, received: Received) -> Tensors:
        """The received model after `fine_tuning_steps` steps on the local risk."""
        hparams, theta = self.hparams, self.working(received[MODEL])
        optimizer = Adam() if hparams.optimizer == "adam" else Momentum(hparams.momentum)
        for batch in self.batches(hparams.fine_tuning_steps, received.round, "fine-tuning"):
            theta.descend(self.each(self.risk)(theta.tensors, batch), optimizer, hparams.personal_learning_rate)
        return theta.result()

    def models(self, received: Received) -> dict[str, Predictor]:
        personal = self.fine_tuned if self.hparams.preset == "paper" else self.personal
        return {**super().models(received), "personal": self.predictor(personal(received))}
