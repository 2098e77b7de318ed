"""FedSDR+pFedMe, client half: a personal model solved near a local copy of the global one, which follows it."""

from itertools import islice

from perennial.client.methods.proximal import envelope_step, solve
from perennial.client.methods.shortcut import ShortcutTrainer
from perennial.client.trainer import Received
from perennial.common.methods.fedsdr_pfedme import FedSDRPFedMe
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL


class FedSDRPFedMeClient(ShortcutTrainer[FedSDRPFedMe]):
    """R times: K steps `f_u ← f_u − η (∇l_SR(f_u; B) + μ (f_u − w))` with Ψ^t, then `w ← w − β μ (w − f_u)`.

    w starts from f^t and is sent, f_u starts from where it was left and is kept (thesis Algorithm 4).
    """

    stacks = ("train", "evaluate")

    def remove(self, received: Received) -> tuple[dict[str, Tensors], dict[str, float]]:
        hparams, constants = self.hparams, self.constants(received)
        batches = self.batches(hparams.local_steps * hparams.personal_steps, received.round)
        size = self.mini_batches(hparams.personal_steps)
        groups = (islice(batches, size) for _ in range(hparams.local_steps))
        follow = envelope_step(hparams.learning_rate, hparams.proximity)
        copy, metrics = solve(self, self.removal_loss, constants, groups, follow)
        return {MODEL: copy}, metrics
