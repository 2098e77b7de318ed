"""Per-FedAvg, client half: steps that make the model better after one more step."""

from functools import partial

import torch
from torch import Tensor

from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Means, Metrics, Predictor, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.per_fedavg import PerFedAvg
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES

EPSILON = 1e-3
"""Length of the finite difference, in units of the gradient u; public implementations take 1e-3 to 1e-4."""


class PerFedAvgClient(LocalTrainer[PerFedAvg]):
    """`w ← w − b (u − a h)`, `local_steps` times from w^t, to minimise `F(w) = R(w − a ∇R(w))`.

    u = ∇R(w − a ∇R(w; B); B′), and h is ∇²R(w; B″) u by a finite difference (Fallah et al. 2020, Algorithm 1 and
    its variants FO and HF).
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        hparams = self.hparams
        model, optimizer = Working(received[MODEL], self.network.parameter_names), self.optimizer()
        means = Means()
        # B, B′ and B″ are drawn independently; B′ as FedAvg's batches, which makes a = 0 FedAvg.
        draw = partial(self.batches, hparams.local_steps, received.round)
        for batches in zip(draw("adaptation"), draw("batches"), draw("curvature"), strict=True):
            direction, metrics = self.meta_gradient(model, *batches, received)
            self.step(model, optimizer, direction, hparams.learning_rate)
            means.add(metrics)
        return Reply({MODEL: model.result()}, {NUM_EXAMPLES: len(self.data.train), **means.result()})

    def meta_gradient(
        self, model: Working, inner: Examples, outer: Examples, curvature: Examples, received: Received
    ) -> tuple[list[Tensor], Metrics]:
        """`u − a h`, an estimate of `∇F(w) = (I − a ∇²R(w)) ∇R(w − a ∇R(w))`; and the metrics after adaptation."""

        def gradient(at: Working, batch: Examples) -> tuple[list[Tensor], Metrics]:
            return self.gradient(at, self.loss, batch, received)

        a = self.hparams.adaptation_rate
        g, _ = gradient(model, inner)
        u, metrics = gradient(model.moved(g, a), outer)
        if self.hparams.variant == "fo":
            return u, metrics
        ahead, _ = gradient(model.moved(u, -EPSILON), curvature)
        behind, _ = gradient(model.moved(u, EPSILON), curvature)
        h = torch._foreach_div(torch._foreach_sub(ahead, behind), 2 * EPSILON)
        return list(torch._foreach_add(u, h, alpha=-a)), metrics

    def visit(self, received: Received) -> None:
        """Nothing: `models` does it all."""

    def models(self, received: Received) -> dict[str, Predictor]:
        return {**super().models(received), "personal": self.predictor(self.adapted(received))}

    @torch.enable_grad()
    def adapted(self, received: Received) -> Tensors:
        """`w − a ∇R(w; D)` over all training data D, in pieces that fit where a mini-batch fits."""
        model = Working(received[MODEL], self.network.parameter_names)
        gradient, _ = self.full_gradient(model, self.loss, received, size=self.hparams.batch_size)
        model.step(self.with_decay(gradient, model), self.hparams.adaptation_rate)
        return model.result()
