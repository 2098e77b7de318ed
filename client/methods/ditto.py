"""Ditto, client half: FedAvg's update, and beside it a personal model pulled towards the received one."""

from typing import TypeVar

from perennial.client.trainer import LocalTrainer, Received, Reply
from perennial.common.methods.ditto import Ditto, PulledTraining
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL

P = TypeVar("P", bound=PulledTraining)


class DittoClient(LocalTrainer[Ditto]):
    """Global: `w_u ← w_u − η ∇R(w_u; B)`. Personal: `v_u ← v_u − η (∇R(v_u; B) + λ (v_u − w^t))`.

    w^t is the received model, fixed for the round; v_u is kept across rounds and takes the same mini-batches as
    w_u (Li et al. 2021, Algorithm 1 and their public code's batches).
    """

    stacks = ("train", "evaluate")
    captures = ("train",)

    def train(self, received: Received) -> Reply:
        reply = super().train(received)
        self.kept[PERSONAL] = pulled(self, received)
        return reply


def pulled(client: LocalTrainer[P], received: Received) -> Tensors:
    """The client's personal model after `personal_steps` steps on `R(v; B) + (λ/2) ‖v − w^t‖²`."""
    start, hparams = client.personal(received), client.hparams
    personal, _ = client.descend(
        start,
        client.loss,
        received,
        steps=hparams.personal_steps,
        optimizer=PERSONAL,
        anchor=received[MODEL],
        proximity=hparams.proximity,
    )
    return personal
