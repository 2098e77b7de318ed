"""pFedMe, client half: a personal model solved near a local copy of the global one, which follows it."""

from client.objectives import envelope_gradient, proximal
from client.trainer import LocalTrainer, Means, Received, Reply
from client.working import Momentum, Working
from common.methods.pfedme import PFedMe
from common.wire import MODEL, NUM_EXAMPLES, PERSONAL


class PFedMeClient(LocalTrainer[PFedMe]):
    """R times on a new mini-batch B: `θ ≈ argmin R(θ; B) + (λ/2) ‖θ − w‖²` by S gradient steps, then
    `w ← w − lr λ (w − θ)`, a step of size lr on the Moreau envelope (Dinh et al. 2020, Algorithm 1).

    w starts from the received model, θ from where the last round left it. w travels, θ is kept.
    """

    def train(self, received: Received) -> Reply:
        hparams, names = self.hparams, self.network.parameter_names
        personal, local = Working(self.personal(received), names), Working(received[MODEL], names)
        momentum, means = Momentum(hparams.momentum), Means()
        for batch in self.batches(hparams.local_steps, received.round):
            for _ in range(hparams.personal_steps):
                risk_gradient, metrics = self.gradient(personal, self.loss, batch, received)
                gradient = proximal(risk_gradient, personal.values, local.values, hparams.proximity)
                personal.step(momentum.direction(gradient), hparams.personal_learning_rate)
                means.add(metrics)
            local.step(envelope_gradient(local.values, personal.values, hparams.proximity), hparams.learning_rate)
        self.kept[PERSONAL] = personal.result()
        # Buffers (BatchNorm's statistics) are those of the model that saw the data.
        copy = {**self.kept[PERSONAL], **{name: local.result()[name] for name in names}}
        return Reply({MODEL: copy}, {NUM_EXAMPLES: len(self.data.train), **means.result()})
