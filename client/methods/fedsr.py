"""FedSR, client half: steps on random features under two regularisers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.client.objectives import gaussian_divergence
from perennial.client.trainer import LocalTrainer, Metrics, Predictor, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.fedsr import (
    ADDED,
    DISTRIBUTION_BIAS,
    DISTRIBUTION_WEIGHT,
    REFERENCE_MEAN,
    REFERENCE_SCALE,
    FedSR,
)
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES

EVALUATION_SAMPLES = 20
"""Draws of z whose predictions are averaged (the authors' public code)."""


class FedSRClient(LocalTrainer[FedSR]):
    """`E_z[R(w(z); B)] + α^L2R E‖z‖² + α^CMI KL(p(z|x) ‖ r(z|y))` with z ~ p(z|x) = N(μ(x), diag σ²(x)).

    One draw of z per sample and step (Nguyen et al. 2022).
    """

    def train(self, received: Received) -> Reply:
        self.noise = torch_generator(self.seed, self.client, received.round, "noise")
        names = (*self.network.parameter_names, *ADDED)
        trained, metrics = self.descend(received[MODEL], self.loss, received, names=names)
        return Reply({MODEL: trained}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        mean, deviation = self.distribution(params, batch.x, training=True)
        z = mean + deviation * torch.randn(mean.shape, generator=self.noise).to(mean.device)
        risk = self.criterion(self.network.classify(params, z, training=True), batch.y)
        norm = z.square().sum(dim=1).mean()
        reference = params[REFERENCE_MEAN][batch.y], F.softplus(params[REFERENCE_SCALE])[batch.y]
        information = gaussian_divergence(mean, deviation, *reference).mean()
        value = risk + self.hparams.norm_weight * norm + self.hparams.information_weight * information
        return value, {"risk": risk, "norm": norm, "information": information}

    def distribution(self, params: Tensors, x: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """μ(x) and σ(x), each (n, d)."""
        features = self.network.features(params, x, training)
        mean, scale = F.linear(features, params[DISTRIBUTION_WEIGHT], params[DISTRIBUTION_BIAS]).chunk(2, dim=1)
        return mean, F.softplus(scale)

    def models(self, received: Received) -> dict[str, Predictor]:
        """`ln mean_s softmax(w(μ(x) + σ(x) ε_s))`; the ε_s are the same for every sample and in every round."""
        model = received[MODEL]
        generator = torch_generator(self.seed, "evaluation", "noise")
        noise = torch.randn(EVALUATION_SAMPLES, self.network.width, generator=generator).to(self.network.device)

        def predict(x: Tensor) -> Tensor:
            mean, deviation = self.distribution(model, x)
            logits = torch.stack([self.network.classify(model, mean + deviation * draw) for draw in noise])
            return logits.log_softmax(dim=2).logsumexp(dim=0) - math.log(EVALUATION_SAMPLES)

        return {"global": predict}
