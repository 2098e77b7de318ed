"""FedPIN's auxiliary classifier ω_a, which is given features and whose they are, in two forms."""

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors

AUXILIARY = "auxiliary"
"""Record of ω_a but for the clients' own columns."""
WIDTH = 64
"""Hidden units: a linear ω_a could see no change of the relation of features and label."""
OWN = "client.bias"
"""A client's column of the first layer's weights on (z, one-hot u), which is its own bias of the hidden units."""
SCALE = "client.scale"
OFFSET = "client.offset"


def initial_auxiliary(features: int, outputs: int, seed: int) -> Tensors:
    """ω_a on `features` features, drawn from the seed; biases, and what it makes of the client, start at zero."""
    generator = torch_generator(seed, "server", AUXILIARY)

    def weight(units: int, inputs: int) -> Tensor:
        bound = inputs**-0.5
        return torch.empty(units, inputs).uniform_(-bound, bound, generator=generator)

    return {
        "hidden.weight": weight(WIDTH, features),
        "hidden.bias": torch.zeros(WIDTH),
        "output.weight": weight(outputs, WIDTH),
        "output.bias": torch.zeros(outputs),
    }


def auxiliary_logits(tensors: Tensors, z: Tensor) -> Tensor:
    """`ω_a(z, u) = A relu(W z + v_u + b) + c`, outputs (n, outputs) of features (n, d); v_u is `tensors[OWN]`."""
    hidden = F.relu(F.linear(z, tensors["hidden.weight"], tensors["hidden.bias"] + tensors[OWN]))
    return F.linear(hidden, tensors["output.weight"], tensors["output.bias"])


def initial_scale(outputs: int, device: torch.device) -> Tensors:
    """(a_u, b_u) of `scaled_logits`, with which it is ω_g."""
    return {SCALE: torch.zeros(1, device=device), OFFSET: torch.zeros(outputs, device=device)}


def scaled_logits(tensors: Tensors, logits: Tensor) -> Tensor:
    """`ω_a(z, u) = (1 + a_u) ω_g(z) + b_u` of ω_g's outputs (n, outputs). Ours; it has no part that is shared."""
    return logits * (1 + tensors[SCALE]) + tensors[OFFSET]
