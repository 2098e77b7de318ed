"""FedIIR, client half: the gradient for the anchor, and steps that pull every gradient to it."""

from functools import partial

from torch import Tensor

from perennial.client.objectives import gradient_alignment
from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Loss, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.fediir import ANCHOR, FedIIR
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, MODEL, NUM_EXAMPLES


class FedIIRClient(LocalTrainer[FedIIR]):
    """`θ_c ← θ_c − η ∇_θ [R_c(θ_c; B) + (γ/2) ‖∇_ω R_c(θ_c; B) − g̃‖²]` (Guo et al. 2023, Algorithm 1).

    Nothing is kept. ω are the classifier's parameters; the penalty's gradient goes to all of θ.
    """

    stacks = ("train", "train.gradient", "evaluate")
    captures = ("train", "train.gradient")

    def train_gradient(self, received: Received) -> Reply:
        """`∇_ω R_c(θ^{t−1}; D_c)`, or the mean over mini-batches of `∇_ω R_c(θ^{t−1}; B)`; no step."""
        names = self.hparams.aligned(self.network)
        gradient, metrics = self.full_gradient(
            Working(received[MODEL], names),
            lambda params, batch, _: self.risk(params, batch, training=False),
            received,
            size=self.hparams.batch_size,
            equal_pieces=self.hparams.anchor_average == "batches",
        )
        answer = dict(zip(names, gradient, strict=True))
        return Reply({GRADIENT: answer}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`R_c(θ; B) + (γ/2) ‖∇_ω R_c(θ; B) − g̃‖²`, the same mini-batch in both."""
        training = not self.hparams.frozen_statistics
        risk, metrics = self.each(partial(self.risk, training=training))(params, batch)
        alignment = gradient_alignment(risk, params, received[ANCHOR], self.each)
        weight = self.hparams.penalty / 2 if self.hparams.halved else self.hparams.penalty
        return risk + weight * alignment, {**metrics, "alignment": alignment}

    def slope(
        self, model: Working, loss: Loss, batch: Examples, received: Received
    ) -> tuple[list[Tensor], Metrics]:
        """As in the base class, but `loss` maps its risk itself: the gradient in it is taken outside."""
        value, metrics = loss(model.tensors, batch, received)
        return model.gradient(value), metrics

    def risk(self, params: Tensors, batch: Examples, training: bool) -> tuple[Tensor, Metrics]:
        """Mean cross-entropy; `training` says whether BatchNorm takes the statistics of the mini-batch."""
        risk = self.criterion(self.network.predict(params, batch.x, training=training), batch.y)
        return risk, {"risk": risk}
