"""FedADG, server half: the uniform mean of the models and of the generators; discriminators never come here."""

from perennial.common.config import RunConfig
from perennial.common.methods.fedadg import GENERATOR, FedADG, layers
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Payload


class FedADGStrategy(MethodStrategy[FedADG]):
    """`(F, C, G)^{t+1} = 1/C Σ_c (F, C, G)_c` over the C clients that answered (Zhang et al. 2021)."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        width, classes = self.network.width, self.network.outputs
        sizes = (self.hparams.noise_size + classes, width, width)
        self.generator = layers(GENERATOR, sizes, torch_generator(run.seed, "init", "generator"))

    def payload(self, model: Tensors) -> Payload:
        # After the first round the global arrays hold the generator.
        return {MODEL: {**self.generator, **model}}

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0
