"""FedBN, client half: FedAvg's steps, with BatchNorm layers that stay here."""

from perennial.client.trainer import LocalTrainer, Predictor, Received, Reply
from perennial.common.methods.fedbn import NORMS, FedBN
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES


class FedBNClient(LocalTrainer[FedBN]):
    """`(w_u, b_u) ← (w_u, b_u) − η ∇R(w_u, b_u; B)` from (w^t, b_u); b_u, with its running statistics, is kept.

    Li et al. 2021, Algorithm 1.
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        trained, metrics = self.descend(self.whole(received), self.loss, received)
        if self.network.batch_norm_names:
            self.kept[NORMS] = {name: trained[name] for name in self.network.batch_norm_names}
        shared = {name: trained[name] for name in received[MODEL]}
        return Reply({MODEL: shared}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def whole(self, received: Received) -> Tensors:
        """The shared layers and this client's own; before its first round, those of the initial model."""
        own = self.kept.get(NORMS)
        return {**(self.initial() if own is None else own), **received[MODEL]}

    def models(self, received: Received) -> dict[str, Predictor]:
        return {"personal": self.predictor(self.whole(received))}
