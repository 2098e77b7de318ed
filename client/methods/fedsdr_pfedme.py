"""FedSDR+pFedMe, client half: a personal model solved near a local copy of the global one, which follows it."""

from itertools import islice

from client.objectives import envelope_gradient, proximal
from client.shortcut import ShortcutTrainer
from client.trainer import Means, Received
from client.working import Momentum, Working
from common.methods.fedsdr_pfedme import FedSDRPFedMe
from common.models import Tensors
from common.wire import MODEL, PERSONAL


class FedSDRPFedMeClient(ShortcutTrainer[FedSDRPFedMe]):
    """R times: K steps `f_u ← f_u − η (∇l_SR(f_u; B) + μ (f_u − w))` with Ψ^t, then `w ← w − β μ (w − f_u)`.

    w starts from f^t and is sent, f_u starts from where it was left and is kept (thesis Algorithm 4).
    """

    def remove(self, received: Received) -> tuple[dict[str, Tensors], dict[str, float]]:
        hparams, names, loss = self.hparams, self.network.parameter_names, self.removal_loss(received)
        personal, local = Working(self.personal(received), names), Working(received[MODEL], names)
        momentum, means = Momentum(hparams.momentum), Means()
        batches = self.batches(hparams.local_steps * hparams.personal_steps, received.round)
        for _ in range(hparams.local_steps):
            for batch in islice(batches, self.mini_batches(hparams.personal_steps)):
                gradient, metrics = self.gradient(personal, loss, batch, received)
                gradient = proximal(gradient, personal.values, local.values, hparams.proximity)
                personal.step(momentum.direction(gradient), hparams.personal_learning_rate)
                means.add(metrics)
            local.step(envelope_gradient(local.values, personal.values, hparams.proximity), hparams.learning_rate)
        self.kept[PERSONAL] = personal.result()
        # Buffers (BatchNorm's statistics) are those of the model that saw the data.
        copy = {**self.kept[PERSONAL], **{name: local.result()[name] for name in names}}
        return {MODEL: copy}, means.result()
