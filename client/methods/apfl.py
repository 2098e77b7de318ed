"""APFL, client half: FedAvg's update, and beside it an own model that is trained inside the mixture of both."""

import torch

from perennial.client.objectives import interpolate, mixing_slope
from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Means, Predictor, Received, Reply
from perennial.common.methods.apfl import APFL
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES, PERSONAL

MIXING = "mixing"
"""Record that this client keeps: its α."""


class APFLClient(LocalTrainer[APFL]):
    """Of the mixture `v̄ = α v + (1 − α) w`, the shared w and the own v take steps on the same mini-batches.

    `w ← w − η ∇R(w; B)`, `v ← v − η α ∇R(v̄; B)`, and with the first batch of a round
    `α ← clip(α − η ⟨v − w, ∇R(v̄; B)⟩, 0, 1)`, all from the values before the step (Deng et al. 2020, Algorithm 1).
    w starts from w^t; v and α are kept across rounds.
    """

    def train(self, received: Received) -> Reply:
        hparams, names = self.hparams, self.network.parameter_names
        shared, own = Working(received[MODEL], names), Working(self.personal(received), names)
        shared_optimizer, own_optimizer = self.optimizer(), self.optimizer("personal")
        alpha, rate, means = self.mixing(), hparams.learning_rate * self.rate_factor, Means()
        for number, batch in enumerate(self.batches(hparams.local_steps, received.round)):
            mixed = Working(self.mixture(shared.tensors, own.tensors, alpha), names)
            at_shared, metrics = self.gradient(shared, self.loss, batch, received)
            at_mixed, _ = self.gradient(mixed, self.loss, batch, received)
            at_own = list(torch._foreach_mul(at_mixed, alpha))
            if hparams.adaptive and number == 0:
                slope = float(mixing_slope(shared.values, own.values, at_mixed))
                alpha = min(max(alpha - rate * slope, 0.0), 1.0)
            self.step(shared, shared_optimizer, at_shared, hparams.learning_rate)
            self.step(own, own_optimizer, at_own, hparams.learning_rate)
            # What BatchNorm has seen of v̄ stays with v.
            own.tensors |= {name: mixed.tensors[name] for name in self.network.buffer_names}
            means.add(metrics)
        self.kept[PERSONAL] = own.result()
        self.kept[MIXING] = {"alpha": torch.tensor(alpha, dtype=torch.float64)}
        metrics_of_round = {**means.result(), "mixing": alpha}
        return Reply({MODEL: shared.result()}, {NUM_EXAMPLES: len(self.data.train), **metrics_of_round})

    def mixing(self) -> float:
        """This client's α."""
        kept = self.kept.get(MIXING)
        return float(kept["alpha"]) if kept else self.hparams.mixing

    def mixture(self, shared: Tensors, own: Tensors, alpha: float) -> Tensors:
        """`v̄ = α v + (1 − α) w`, with v's buffers."""
        return {**own, **interpolate(shared, own, alpha, self.network.parameter_names)}

    def models(self, received: Received) -> dict[str, Predictor]:
        mixture = self.mixture(received[MODEL], self.personal(received), self.mixing())
        return {**super().models(received), "personal": self.predictor(mixture)}
