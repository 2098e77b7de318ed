"""pFedMe, client half: a personal model solved near a local copy of the global one, which follows it."""

from perennial.client.methods.proximal import envelope_step, repeated, solve
from perennial.client.trainer import LocalTrainer, Received, Reply
from perennial.common.methods.pfedme import PFedMe
from perennial.common.wire import MODEL, NUM_EXAMPLES


class PFedMeClient(LocalTrainer[PFedMe]):
    """R times on a new mini-batch B: `θ ≈ argmin R(θ; B) + (λ/2) ‖θ − w‖²` by S gradient steps, then
    `w ← w − lr λ (w − θ)`, a step of size lr on the Moreau envelope (Dinh et al. 2020, Algorithm 1).

    w starts from the received model, θ from where the last round left it. w travels, θ is kept.
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        hparams = self.hparams
        batches = repeated(self.batches(hparams.local_steps, received.round), hparams.personal_steps)
        follow = envelope_step(hparams.learning_rate, hparams.proximity)
        copy, metrics = solve(self, self.loss, received, batches, follow)
        return Reply({MODEL: copy}, {NUM_EXAMPLES: len(self.data.train), **metrics})
