"""Local training, client half: plain SGD on a model that is kept."""

from perennial.client.trainer import LocalTrainer, Received, Reply
from perennial.common.methods.local import Local
from perennial.common.wire import NUM_EXAMPLES, PERSONAL


class LocalClient(LocalTrainer[Local]):
    """`v_u ← v_u − η ∇R(v_u; B)`; v_u starts from the common initial model and is kept across rounds."""

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        self.kept[PERSONAL], metrics = self.descend(self.personal(received), self.loss, received)
        return Reply(metrics={NUM_EXAMPLES: len(self.data.train), **metrics})
