"""FedSDR, client half: a personal model, kept and not sent, from which shortcuts are removed."""

from perennial.client.methods.shortcut import ShortcutTrainer
from perennial.client.trainer import Received
from perennial.common.methods.fedsdr import FedSDR
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import PERSONAL


class FedSDRClient(ShortcutTrainer[FedSDR]):
    """K steps `f_u ← f_u − η ∇l_SR(f_u; B)` with Ψ^t, from where f_u was left (thesis Algorithm 2)."""

    stacks = ("train", "evaluate")
    captures = ("train",)

    def remove(self, received: Received) -> tuple[dict[str, Tensors], dict[str, float]]:
        hparams = self.hparams
        self.kept[PERSONAL], metrics = self.descend(
            self.personal(received),
            self.removal_loss,
            self.constants(received),
            steps=hparams.personal_steps,
            rate=hparams.personal_learning_rate,
        )
        return {}, metrics
