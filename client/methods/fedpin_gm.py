"""FedPIN's global side, client half: a global model against a classifier that knows the client."""

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client.objectives import anchored, client_information
from client.trainer import LocalTrainer, Means, Metrics, Received, Reply
from client.working import Momentum, Working
from common.auxiliary import AUXILIARY, OWN, auxiliary_logits
from common.methods.fedpin import AnchorTraining
from common.models import Tensors
from common.wire import MODEL, NUM_EXAMPLES

A = TypeVar("A", bound=AnchorTraining)


class FedPINGMClient(LocalTrainer[A]):
    """`min_{Φ_g, ω_g} max_{ω_a} R(ω_g(Φ_g)) + α [R(ω_g(Φ_g)) − R(ω_a(Φ_g, u))]` (thesis (5.3), (5.5)).

    R times: a step of Φ_g and ω_g down the objective, divided by 1 + α, with ω_a fixed; then `auxiliary_steps` of
    ω_a down its own risk on the features as they were. Algorithm 5 has ω_a descend on the objective, too, in which
    its risk has a minus: that is `literal`.
    """

    def train(self, received: Received) -> Reply:
        hparams, alpha = self.hparams, float(received.settings["independence"])  # type: ignore[arg-type]
        model = Working(received[MODEL], self.network.parameter_names)
        auxiliary = self.auxiliary(received)
        momentum, means = Momentum(hparams.momentum), Means()
        rate, steps = hparams.auxiliary_learning_rate, hparams.auxiliary_steps
        if hparams.literal:
            rate, steps = -hparams.learning_rate * alpha / (1 + alpha), 1
        for batch in self.batches(hparams.local_steps, received.round):
            z = self.network.features(model.tensors, batch.x, training=True)
            value, metrics = self.anchor_loss(model.tensors, auxiliary.tensors, z, batch.y, alpha)
            gradient = self.with_decay(model.gradient(value), model)
            model.step(momentum.direction(gradient), hparams.learning_rate)
            for _ in range(steps):
                risk = F.cross_entropy(auxiliary_logits(auxiliary.tensors, z.detach()), batch.y)
                auxiliary.step(auxiliary.gradient(risk), rate)
            means.add(metrics)
        reached = auxiliary.result()
        self.kept[AUXILIARY] = {OWN: reached.pop(OWN)}
        arrays = {MODEL: model.result(), AUXILIARY: reached}
        return Reply(arrays, {NUM_EXAMPLES: len(self.data.train), **means.result()})

    def anchor_loss(
        self, params: Tensors, auxiliary: Tensors, z: Tensor, y: Tensor, alpha: float
    ) -> tuple[Tensor, Metrics]:
        """`L_g(Φ_g, ω_g, ω_a; B) / (1 + α)` from the features z = Φ_g(x)."""
        logits = self.network.classify(params, z, training=True)
        risk = F.cross_entropy(logits, y)
        information = client_information(logits, auxiliary_logits(auxiliary, z), y)
        return anchored(risk, information, alpha), {"risk": risk, "information": information}

    def auxiliary(self, received: Received) -> Working:
        """The received ω_a with this client's own bias, which is zero at first."""
        shared = received[AUXILIARY]
        own = self.kept.get(AUXILIARY) or {OWN: torch.zeros_like(shared["hidden.bias"])}
        return Working({**shared, **own}, (*shared, OWN))
