"""FedPIN, client half: beside the global side a plain local model, and a personal one between the two."""

from dataclasses import replace

import torch
from torch import Tensor

from perennial.client.methods.fedpin_gm import FedPINGMClient
from perennial.client.objectives import contrastive_loss, total_variance
from perennial.client.trainer import Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.fedpin import FedPIN
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL

PLAIN = "plain"
"""Kept record of (Ψ_u, ω_ψu), trained on the local risk alone."""


class FedPINClient(FedPINGMClient[FedPIN]):
    """K steps of (Ψ_u, ω_ψu) on R, K of (Φ_u, ω_u) on L_loc with Φ_g^t and the new Ψ_u, then the global side
    (thesis Algorithm 5).

    Both models take the same mini-batches and are kept across rounds. They start from the common initial model or,
    after rounds in which the global one was trained alone, from that.
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        if not received.settings["personal"]:
            return super().train(received)
        own, metrics = self.own_side(received)
        reply = super().train(received)
        self.kept |= own
        return Reply(reply.arrays, {**metrics, **reply.metrics})

    def visit(self, received: Received) -> None:
        own, _ = self.own_side(received)
        self.kept |= own

    def own_side(self, received: Received) -> tuple[dict[str, Tensors], dict[str, float]]:
        """(Ψ_u, ω_ψu) and (Φ_u, ω_u) after their steps, to be kept, and the latter's metrics."""
        steps, rate = self.hparams.personal_steps, self.hparams.personal_learning_rate
        start = self.own(PLAIN, received)
        plain, _ = self.descend(start, self.loss, received, steps=steps, rate=rate, optimizer=PLAIN)
        constants = replace(received, arrays={**received.arrays, PLAIN: plain})
        start = self.own(PERSONAL, received)
        personal, metrics = self.descend(
            start, self.local_loss, constants, steps=steps, rate=rate, optimizer=PERSONAL
        )
        return {PLAIN: self.finite(plain), PERSONAL: self.finite(personal)}, metrics

    def local_loss(self, params: Tensors, batch: Examples, constants: Received) -> tuple[Tensor, Metrics]:
        """`L_loc = R(ω_u(Φ_u); B) + λ L_con(Φ_u; Φ_g^t, Ψ_u) + γ Var(Φ_u(x))` (thesis (5.11)).

        The constants are what was received, with Φ_g^t, and beside it the record `PLAIN` with Ψ_u.
        """
        hparams, net = self.hparams, self.network
        with torch.no_grad():
            anchors = net.features(constants[MODEL], batch.x)
            negatives = net.features(constants[PLAIN], batch.x)
        z = net.features(params, batch.x, training=True)
        risk = self.criterion(net.classify(params, z, training=True), batch.y)
        contrast = contrastive_loss(z, anchors, negatives, hparams.temperature)
        variance = total_variance(z)
        value = risk + hparams.contrast * contrast + hparams.variance * variance
        return value, {"personal_risk": risk, "contrast": contrast, "variance": variance}

    def own(self, name: str, received: Received) -> Tensors:
        """A kept model; before its first steps, what it starts from."""
        return self.kept.get(name) or (received[MODEL] if self.hparams.personal_start else self.initial())

    def finite(self, tensors: Tensors) -> Tensors:
        """The tensors, if they may be kept. Raises `FloatingPointError`, which leaves this client out."""
        if all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            return tensors
        used = ("personal_learning_rate", "contrast", "variance")
        found = ", ".join(f"{name}={getattr(self.hparams, name):g}" for name in used)
        raise FloatingPointError(f"its personal model overflowed; one of {found} is too large")

    def personal(self, received: Received) -> Tensors:
        return self.own(PERSONAL, received)
