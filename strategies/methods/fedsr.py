"""FedSR, server half: FedAvg over the model and all that FedSR adds to it."""

import torch

from perennial.common.config import RunConfig
from perennial.common.methods.fedsr import (
    DISTRIBUTION_BIAS,
    DISTRIBUTION_WEIGHT,
    REFERENCE_MEAN,
    REFERENCE_SCALE,
    FedSR,
)
from perennial.common.models.network import Network
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import Payload


class FedSRStrategy(MethodStrategy[FedSR]):
    """`θ^{t+1} = Σ_u (n_u / Σn) θ_u`; θ also holds the layer for p(z|x) and all r(z|y) (Nguyen et al. 2022)."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        self.added = initial(self.network, run.seed)

    def payload(self, model: Tensors) -> Payload:
        # After the first round the global arrays hold all.
        return {MODEL: {**self.added, **model}}


def initial(net: Network, seed: int) -> Tensors:
    """The tensors that FedSR adds to a model: a layer as PyTorch draws it, references of mean 0 and scale 1."""
    d, generator = net.width, torch_generator(seed, "init", "fedsr")
    layer = torch.empty(2 * d, d + 1).uniform_(-(d**-0.5), d**-0.5, generator=generator)
    return {
        DISTRIBUTION_WEIGHT: layer[:, 1:].contiguous(),
        DISTRIBUTION_BIAS: layer[:, 0].contiguous(),
        REFERENCE_MEAN: torch.zeros(net.outputs, d),
        REFERENCE_SCALE: torch.ones(net.outputs, d),
    }
