"""PerInvFL, client half: a personal model with an invariance loss of its own, held near a shared invariant one."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from perennial.client.methods.groupdro import weighted_loss, with_risk, with_weight
from perennial.client.methods.irm_l2 import IrmL2Client, present
from perennial.client.objectives import contrast
from perennial.client.stateful import OWN, SHARED
from perennial.client.trainer import Means, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.perinvfl import PerInvFL
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL

AUXILIARY = "auxiliary"


class PerInvFLClient(IrmL2Client[PerInvFL]):
    """Shared: federated IRM or GroupDRO, never seeing θ. Personal, S times before each step of v:
    `θ ← θ − η ∇[Σ_j (R(θ; e_j) + λ g_j(θ)²) + β ‖θ − v‖²]` (Algorithm 1)."""

    stacks = ("train", "evaluate")
    captures = ("train",)
    by_environment = True

    def train(self, received: Received) -> Reply:
        if self.hparams.invariance == "irm":
            return super().train(received)
        received = with_weight(self, received)
        return with_risk(super().train(received), self, received)

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """Of the shared model: federated GroupDRO's or IRM's."""
        if self.hparams.invariance == "groupdro":
            return weighted_loss(self, params, batch, received)
        return super().loss(params, batch, received)

    def personal_loss(
        self, params: Tensors, anchor: Tensors, contexts: Sequence[Examples], received: Received
    ) -> Tensor:
        """`Σ_j [R(θ; e_j) + λ_t g_j(θ)²] + β ‖θ − v‖²` (Eq 4), or `max_j R(θ; e_j) + β ‖θ − v‖²`, which is
        GroupDRO's maximum over weights of the environments."""
        risks, penalties = zip(*(self.risk_and_penalty(params, part) for part in contexts), strict=True)
        if self.hparams.invariance == "groupdro":
            stacked, there = torch.stack(risks), present(contexts)
            return self.held((stacked if there is None else stacked.where(there > 0, -inf)).max(), params, anchor)
        value = self.held(self.over_contexts(risks, contexts), params, anchor)
        penalty = self.over_contexts(penalties, contexts)
        return self.penalised(value, penalty, self.hparams.personal_penalty, received.round)

    def public_code(self, received: Received) -> Reply:
        """The authors' code, another algorithm: θ is one step on a contrastive loss away from v.

        h is a plain model of the client's own, never reset. One Adam steps v and h in turn, so v depends on h.
        """
        hparams, means = self.hparams, Means()
        v, h = self.working(received[MODEL]), self.working(self.kept.get(AUXILIARY) or self.initial())
        for batch in self.batches(hparams.local_steps, received.round):
            gradient = v.gradient(self.each(self.contrastive_loss)(v.tensors, h.tensors, batch))
            for _ in range(hparams.personal_steps):  # always from v; only the optimizer's state goes on
                theta = v.moved(self.optimizer(OWN).direction(gradient), hparams.personal_learning_rate)
            means.add(self.shared_step(v, batch, received))
            h.descend(self.each(self.risk)(h.tensors, batch), self.optimizer(SHARED), hparams.learning_rate)
        self.kept |= {PERSONAL: theta.result(), AUXILIARY: h.result()}
        return self.finish(v, means)

    def contrastive_loss(self, params: Tensors, auxiliary: Tensors, batch: Examples) -> Tensor:
        """`R(v; B) + λ_c C(Φ_v(x), Φ_v(x), Φ_h(x)) + (weight_decay/2) ‖v‖²`; the second and third features of C
        are constants."""
        z = self.network.features(params, batch.x, training=True)
        risk = self.criterion(self.network.classify(params, z, training=True), batch.y)
        other = self.network.features(auxiliary, batch.x, training=True)
        return self.decayed(risk + self.hparams.contrast * contrast(z, z.detach(), other.detach()), params)
