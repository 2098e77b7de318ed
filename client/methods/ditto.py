"""Ditto, client half: FedAvg's update, and beside it a personal model pulled towards the received one."""

from typing import TypeVar

from torch import Tensor

from client.objectives import squared_distance
from client.trainer import LocalTrainer, Metrics, Received, Reply
from common.data.examples import Examples
from common.methods.ditto import PulledTraining
from common.models import Tensors
from common.wire import MODEL, PERSONAL

P = TypeVar("P", bound=PulledTraining)


class DittoClient(LocalTrainer[P]):
    """Global: `w_u ← w_u − η ∇R(w_u; B)`. Personal: `v_u ← v_u − η (∇R(v_u; B) + λ (v_u − w^t))`.

    w^t is the received model, fixed for the round; v_u is kept across rounds and takes the same mini-batches as
    w_u (Li et al. 2021, Algorithm 1 and their public code's batches).
    """

    def train(self, received: Received) -> Reply:
        reply = super().train(received)
        self.kept[PERSONAL], _ = self.descend(
            self.personal(received), self.personal_loss, received, steps=self.hparams.personal_steps
        )
        return reply

    def personal_loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`R(v; B) + (λ/2) ‖v − w^t‖²`, whose gradient is the personal update above."""
        risk, metrics = self.loss(params, batch, received)
        distance = squared_distance(params, received[MODEL], self.network.parameter_names)
        return risk + self.hparams.proximity / 2 * distance, metrics
