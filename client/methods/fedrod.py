"""FedRoD, client half: a balanced risk for the generic predictor, the empirical one for what is added to it."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.client.objectives import balanced_cross_entropy
from perennial.client.trainer import LocalTrainer, Metrics, Predictor, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.fedrod import FedRoD
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import HEAD, MODEL, NUM_EXAMPLES

WEIGHT, BIAS = "personal.weight", "personal.bias"


class FedRoDClient(LocalTrainer[FedRoD]):
    """`(φ, ψ) ← (φ, ψ) − η ∇R_bal(ψ∘φ; B)` and `h_u ← h_u − η ∇_h R(ψ∘φ + h_u∘φ; B)`, from φ^t and ψ^t.

    h_u is kept across rounds, linear, and zero at first: the personal predictor starts as the generic one
    (Chen & Chao 2022).
    """

    def train(self, received: Received) -> Reply:
        names = (*self.network.parameter_names, WEIGHT, BIAS)
        trained, metrics = self.descend({**received[MODEL], **self.head()}, self.loss, received, names=names)
        self.kept[HEAD] = {name: trained.pop(name) for name in (WEIGHT, BIAS)}
        return Reply({MODEL: trained}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """The sum of both risks; stop-gradients let each train its own part alone."""
        z = self.network.features(params, batch.x, training=True)
        generic = self.network.classify(params, z, training=True)
        balanced = balanced_cross_entropy(generic, batch.y, self.counts)
        personal = self.criterion(generic.detach() + F.linear(z.detach(), params[WEIGHT], params[BIAS]), batch.y)
        return balanced + personal, {"risk": balanced, "personal_risk": personal}

    @cached_property
    def counts(self) -> Tensor:
        """This client's training samples of each class."""
        return torch.bincount(self.data.train.y, minlength=self.network.outputs)

    def head(self) -> Tensors:
        """h_u, zero before this client's first round."""
        classes, width, device = self.network.outputs, self.network.width, self.network.device
        zeros = {WEIGHT: torch.zeros(classes, width, device=device), BIAS: torch.zeros(classes, device=device)}
        return self.kept.get(HEAD) or zeros

    def models(self, received: Received) -> dict[str, Predictor]:
        model, head = received[MODEL], self.head()

        def personal(x: Tensor) -> Tensor:
            z = self.network.features(model, x)
            return self.network.classify(model, z) + F.linear(z, head[WEIGHT], head[BIAS])

        return {**super().models(received), "personal": personal}
