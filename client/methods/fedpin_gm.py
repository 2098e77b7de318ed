"""FedPIN's global side, client half: a global model against a classifier that knows the client."""

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from perennial.client.objectives import anchored, client_information
from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Means, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.mathematics.auxiliary_classifier import (
    AUXILIARY,
    OFFSET,
    OWN,
    SCALE,
    auxiliary_logits,
    initial_scale,
    scaled_logits,
)
from perennial.common.methods.fedpin import AnchorTraining
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES

A = TypeVar("A", bound=AnchorTraining)


class FedPINGMClient(LocalTrainer[A]):
    """`min_{Φ_g, ω_g} max_{ω_a} R(ω_g(Φ_g)) + α [R(ω_g(Φ_g)) − R(ω_a(Φ_g, u))]` (thesis (5.3), (5.5)).

    R times: a step of Φ_g and ω_g down the objective, divided by 1 + α, with ω_a fixed; then `auxiliary_steps` of
    ω_a down its own risk on the features as they were. Algorithm 5 has ω_a descend on the objective, too, in which
    its risk has a minus: that is `literal`.
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        hparams, alpha = self.hparams, float(received.settings["independence"])  # type: ignore[arg-type]
        model = Working(received[MODEL], self.network.parameter_names)
        auxiliary = self.auxiliary(received)
        optimizer, means = self.optimizer(), Means()
        rate, steps = hparams.auxiliary_learning_rate, hparams.auxiliary_steps
        if hparams.literal:
            rate, steps = -hparams.learning_rate * alpha / (1 + alpha), 1
        step, aware_risk = self.each(partial(self.objective, alpha=alpha)), self.each(self.aware_risk)
        for batch in self.batches(hparams.local_steps, received.round):
            value, metrics, z, logits = step(model.tensors, auxiliary.tensors, batch)
            gradient = self.with_decay(self.clipped(model.gradient(value)), model)
            self.step(model, optimizer, gradient, hparams.learning_rate)
            for _ in range(steps):
                risk = aware_risk(auxiliary.tensors, z.detach(), logits.detach(), batch.y)
                auxiliary.step(auxiliary.gradient(risk), rate * self.rate_factor)
            means.add(metrics)
        reached = auxiliary.result()
        self.kept[AUXILIARY] = {name: reached.pop(name) for name in (OWN, SCALE, OFFSET) if name in reached}
        arrays = {MODEL: model.result(), **({AUXILIARY: reached} if reached else {})}
        return Reply(arrays, {NUM_EXAMPLES: len(self.data.train), **means.result()})

    def objective(
        self, params: Tensors, auxiliary: Tensors, batch: Examples, alpha: float
    ) -> tuple[Tensor, Metrics, Tensor, Tensor]:
        """`L_g / (1 + α)` on a mini-batch, its metrics, the features, and ω_g's logits of them."""
        z = self.network.features(params, batch.x, training=True)
        logits = self.network.classify(params, z, training=True)
        return *self.anchor_loss(logits, self.aware(auxiliary, z, logits), batch.y, alpha), z, logits

    def aware_risk(self, auxiliary: Tensors, z: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        """`R(ω_a(Φ_g, u))`, ω_a's own risk on features."""
        return self.criterion(self.aware(auxiliary, z, logits), y)

    def anchor_loss(self, logits: Tensor, aware: Tensor, y: Tensor, alpha: float) -> tuple[Tensor, Metrics]:
        """`L_g(Φ_g, ω_g, ω_a; B) / (1 + α)` from the logits of ω_g and of ω_a.

        With `auxiliary=scale` negative information, which says only that ω_a is behind, counts as none.
        """
        risk = self.criterion(logits, y)
        information = client_information(self.criterion, logits, aware, y)
        counted = information.clamp(min=0) if self.hparams.auxiliary == "scale" else information
        return anchored(risk, counted, alpha), {"risk": risk, "information": information}

    def aware(self, auxiliary: Tensors, z: Tensor, logits: Tensor) -> Tensor:
        """ω_a's logits of features z, which ω_g gives `logits`."""
        if self.hparams.auxiliary == "scale":
            return scaled_logits(auxiliary, logits)
        return auxiliary_logits(auxiliary, z)

    def auxiliary(self, received: Received) -> Working:
        """The received ω_a with this client's own numbers, which are zero at first."""
        own = self.kept.get(AUXILIARY)
        if self.hparams.auxiliary == "scale":
            own = own or self.same(initial_scale(self.network.outputs, self.network.device))
            return Working(own, own)
        shared = received[AUXILIARY]
        own = own or {OWN: torch.zeros_like(shared["hidden.bias"])}
        return Working({**shared, **own}, (*shared, OWN))
