"""FedRep, client half: the own classifier first, then the featurizer that all share."""

from typing import TypeVar

from perennial.client.trainer import LocalTrainer, Loss, Predictor, Received, Reply
from perennial.common.methods.fedrep import AlternatingTraining, own_part
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import HEAD, MODEL, NUM_EXAMPLES

A = TypeVar("A", bound=AlternatingTraining)


class FedRepClient(LocalTrainer[A]):
    """`h_u ← h_u − η ∇_h R(h_u∘φ^t; B)`, then `φ_u ← φ_u − η ∇_φ R(h_u∘φ_u; B)` from φ^t.

    h_u is kept across rounds (Collins et al. 2021, Algorithm 1).
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        trained, metrics = self.alternate({**received[MODEL], **self.head()}, self.loss, received)
        own = own_part(trained, self.hparams)
        self.kept[HEAD] = own
        shared = {name: tensor for name, tensor in trained.items() if name not in own}
        return Reply({MODEL: shared}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def alternate(self, start: Tensors, loss: Loss, received: Received) -> tuple[Tensors, dict[str, float]]:
        """`head_steps` updates of the classifier on the risk, then `local_steps` of the featurizer on `loss`."""
        net = self.network
        head, body = net.classifier_names, net.featurizer_names
        if self.hparams.keeps_adapters:
            head, body = net.adapter_names, tuple(n for n in net.parameter_names if n not in net.adapter_names)
        adapted, _ = self.descend(
            start, self.loss, received, steps=self.hparams.head_steps, names=head, purpose="head", optimizer=HEAD
        )
        return self.descend(adapted, loss, received, names=body)

    def head(self) -> Tensors:
        """This client's own part, the classifier; before its first round, the initial model's."""
        return self.kept.get(HEAD) or own_part(self.initial(), self.hparams)

    def models(self, received: Received) -> dict[str, Predictor]:
        return {"personal": self.predictor({**received[MODEL], **self.head()})}
