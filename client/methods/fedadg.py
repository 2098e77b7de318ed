"""FedADG, client half: discriminator, model and generator take steps in turn."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Means, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.fedadg import DISCRIMINATOR, GENERATOR, FedADG, layers
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES

ONE = 0.7
"""What stands for 1 in a one-hot label (public code for PACS)."""
OWN = "discriminator"


class FedADGClient(LocalTrainer[FedADG]):
    """F: featurizer, C: classifier, G: generator, D: discriminator, which is kept across rounds.

    With every mini-batch (x, y) and noise ε, in this order (Zhang et al. 2021; signs of their code for PACS):
    D on `E[(1 − D(y, G(ε, y)))² + D(y, F(x))²]` (1), F and C on `α R + (1 − α) E[(1 − D(y, F(x)))²]` (2),
    G on `E[D(y, G(ε, y))²]` (3).
    """

    def train(self, received: Received) -> Reply:
        hparams, start = self.hparams, received[MODEL]
        if hparams.risk_steps:
            start, _ = self.descend(
                start, self.loss, received, steps=hparams.risk_steps, purpose="risk", optimizer="risk"
            )
        model = Working(start, self.network.parameter_names)
        generator = Working({name: start[name] for name in GENERATOR}, GENERATOR)
        discriminator = Working(self.discriminator(), DISCRIMINATOR)
        names = {model: MODEL, generator: "generator", discriminator: OWN}
        optimizers = {part: self.optimizer(name) for part, name in names.items()}
        noise, projection = torch_generator(self.seed, self.client, received.round, "noise"), self.projection()
        means = Means()

        def judge(y: Tensor, z: Tensor) -> Tensor:
            """D(y, z), of each sample."""
            seen = torch.cat([F.linear(z, projection), y], dim=1)
            return two_layers(discriminator.tensors, DISCRIMINATOR, seen).sigmoid()

        def step(part: Working, value: Tensor, rate: float) -> None:
            self.step(part, optimizers[part], self.with_decay(part.gradient(value), part), rate)

        for batch in self.batches(hparams.local_steps, received.round):
            y = ONE * F.one_hot(batch.y, self.network.outputs).to(batch.x.dtype)
            epsilon = torch.rand(len(y), hparams.noise_size, generator=noise).to(y.device)
            made = two_layers(generator.tensors, GENERATOR, torch.cat([epsilon, y], dim=1)).relu()
            z = self.network.features(model.tensors, batch.x, training=True)
            known = (1 - judge(y, made.detach())).square().mean() + judge(y, z.detach()).square().mean()
            step(discriminator, known, hparams.adversary_rate)  # (1)
            risk = self.smoothed(self.network.classify(model.tensors, z, training=True), batch)
            unlike = (1 - judge(y, z)).square().mean()
            step(
                model, hparams.risk_share * risk + (1 - hparams.risk_share) * unlike, hparams.learning_rate
            )  # (2)
            step(generator, judge(y, made).square().mean(), hparams.adversary_rate)  # (3)
            means.add({"risk": risk, "discriminator": known, "unlike": unlike})

        self.kept[OWN] = discriminator.result()
        trained = {**model.result(), **generator.result()}
        return Reply({MODEL: trained}, {NUM_EXAMPLES: len(self.data.train), **means.result()})

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """R with smoothed labels."""
        risk = self.smoothed(self.network.predict(params, batch.x, training=True), batch)
        return risk, {"risk": risk}

    def smoothed(self, logits: Tensor, batch: Examples) -> Tensor:
        """R of a mini-batch's logits."""
        smoothing = self.hparams.label_smoothing
        return self.task.loss(logits, batch.y, smoothing=smoothing)

    def discriminator(self) -> Tensors:
        """D; before this client's first round, a draw of its own."""
        if OWN in self.kept:
            return self.kept[OWN]
        size, generator = self.hparams.projection_size, torch_generator(self.seed, self.client, "init", OWN)
        drawn = layers(DISCRIMINATOR, (size + self.network.outputs, size, 1), generator)
        return {name: tensor.to(self.network.device) for name, tensor in drawn.items()}

    def projection(self) -> Tensor:
        """Rows of length 1 through which D sees features; the same for all clients, never trained."""
        shape = self.hparams.projection_size, self.network.width
        rows = torch.randn(shape, generator=torch_generator(self.seed, "init", "projection"))
        return F.normalize(rows, dim=1).to(self.network.device)


def two_layers(params: Tensors, names: Sequence[str], x: Tensor) -> Tensor:
    """Linear, LeakyReLU, linear, by the names of their weights and biases."""
    first, bias, second, last = (params[name] for name in names)
    return F.linear(F.leaky_relu(F.linear(x, first, bias)), second, last)
