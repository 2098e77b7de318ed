"""FedPIN's global model fine-tuned, client half."""

import torch

from perennial.client.methods.fedpin_gm import FedPINGMClient
from perennial.client.trainer import Predictor, Received
from perennial.common.methods.fedpin import FedPINGMFT
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL


class FedPINGMFTClient(FedPINGMClient[FedPINGMFT]):
    """The personal model: `θ ← θ − η ∇R(θ; B)` over `fine_tuning_epochs` passes from the global model.

    It is made for each evaluation, anew; nothing of it is kept or plays a part in training.
    """

    stacks = ("train", "evaluate")

    @torch.enable_grad()
    def fine_tuned(self, received: Received) -> Tensors:
        """The received model after the passes."""
        hparams = self.hparams
        steps = hparams.fine_tuning_epochs * (1 if hparams.local_unit == "epoch" else self.per_pass)
        tuned, _ = self.descend(
            received[MODEL],
            self.loss,
            received,
            steps=steps,
            rate=hparams.personal_learning_rate,
            purpose="fine-tuning",
            optimizer="",
        )
        return tuned

    def visit(self, received: Received) -> None:
        """Nothing: `models` does it all."""

    def models(self, received: Received) -> dict[str, Predictor]:
        return {**super().models(received), "personal": self.predictor(self.fine_tuned(received))}
