"""L2SGD, client half: local steps on a personal model, and steps towards the mean of all of them."""

from perennial.client.objectives import interpolate
from perennial.client.trainer import LocalTrainer, Predictor, Received, Reply
from perennial.common.methods.l2sgd import L2SGD
from perennial.common.utils.seeding import numpy_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES, PERSONAL


class L2SGDClient(LocalTrainer[L2SGD]):
    """Per coin ξ, the same for all: `x_i ← x_i − η ∇R(x_i; B)` (ξ = 0) or `x_i ← x_i − c (x_i − x̄)` (ξ = 1).

    η = a/(n(1 − p)), c = aλ/(np) (Hanzely and Richtárik 2020, Algorithm 1). A round is a run of zeros and the run
    of ones after it, since the models change hands only where ξ goes from 0 to 1: the zeros are taken before the
    upload, the ones as soon as the mean is there, which is with the next request. x̄ stays the same through a run
    of ones. x_i is kept as it was uploaded.
    """

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        zeros, _ = self.coins(received.round)
        start = self.pulled(received, received.round - 1)
        self.kept[PERSONAL], metrics = self.descend(start, self.loss, received, steps=zeros)
        return Reply({MODEL: self.kept[PERSONAL]}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def coins(self, round_: int) -> tuple[int, int]:
        """Lengths, at least 1, of a round's runs of ξ = 0 and ξ = 1, the same at every client."""
        p = self.hparams.averaging_probability
        generator = numpy_generator(self.seed, "all clients", round_, "coins")
        return int(generator.geometric(p)), int(generator.geometric(1 - p))

    def pulled(self, received: Received, round_: int) -> Tensors:
        """x_i after the run of ones of the round that the received mean is from."""
        x, mean, names = self.personal(received), received[MODEL], self.network.parameter_names
        _, ones = self.coins(round_)
        for _ in range(ones):
            x = {**x, **interpolate(x, mean, self.hparams.pull, names)}
        return x

    def models(self, received: Received) -> dict[str, Predictor]:
        return {**super().models(received), "personal": self.predictor(self.pulled(received, received.round))}
