"""FedSDR+FedAvg, client half: a personal model that starts from the received one, and is sent."""

from perennial.client.methods.shortcut import ShortcutTrainer
from perennial.client.trainer import Received
from perennial.common.methods.fedsdr_fedavg import FedSDRFedAvg
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL


class FedSDRFedAvgClient(ShortcutTrainer[FedSDRFedAvg]):
    """R steps `f_u ← f_u − η ∇l_SR(f_u; B)` with Ψ^t, from f^t; f_u is kept and sent (thesis Algorithm 3)."""

    stacks = ("train", "evaluate")

    def remove(self, received: Received) -> tuple[dict[str, Tensors], dict[str, float]]:
        rate = self.hparams.personal_learning_rate
        trained, metrics = self.descend(received[MODEL], self.removal_loss, self.constants(received), rate=rate)
        self.kept[PERSONAL] = trained
        return {MODEL: trained}, metrics
