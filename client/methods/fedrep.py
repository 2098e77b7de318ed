"""FedRep, client half: the own classifier first, then the featurizer that all share."""

from typing import TypeVar

from perennial.client.trainer import LocalTrainer, Loss, Predictor, Received, Reply
from perennial.common.methods.fedrep import AlternatingTraining
from perennial.common.utils.tensors import Tensors, part
from perennial.common.wire import HEAD, MODEL, NUM_EXAMPLES

A = TypeVar("A", bound=AlternatingTraining)


class FedRepClient(LocalTrainer[A]):
    """`h_u ← h_u − η ∇_h R(h_u∘φ^t; B)`, then `φ_u ← φ_u − η ∇_φ R(h_u∘φ_u; B)` from φ^t.

    h_u is kept across rounds (Collins et al. 2021, Algorithm 1).
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        trained, metrics = self.alternate({**received[MODEL], **self.head()}, self.loss, received)
        self.kept[HEAD] = part(trained, "classifier")
        return Reply({MODEL: part(trained, "featurizer")}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def alternate(self, start: Tensors, loss: Loss, received: Received) -> tuple[Tensors, dict[str, float]]:
        """`head_steps` updates of the classifier on the risk, then `local_steps` of the featurizer on `loss`."""
        head, body = self.network.classifier_names, self.network.featurizer_names
        adapted, _ = self.descend(
            start, self.loss, received, steps=self.hparams.head_steps, names=head, purpose="head", optimizer=HEAD
        )
        return self.descend(adapted, loss, received, names=body)

    def head(self) -> Tensors:
        """This client's classifier; before its first round, the initial model's."""
        return self.kept.get(HEAD) or part(self.initial(), "classifier")

    def models(self, received: Received) -> dict[str, Predictor]:
        return {"personal": self.predictor({**received[MODEL], **self.head()})}
