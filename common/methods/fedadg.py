"""FedADG: hyper-parameters, and the two networks that it adds."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

from perennial.common.methods.base import (
    CROSS_ENTROPY,
    ONE_CLASS,
    ONE_MODEL,
    OWN_GRADIENT,
    OWN_LOOP,
    LocalTraining,
)
from perennial.common.utils.knobs import between, choice, knob

if TYPE_CHECKING:
    import torch

    from perennial.common.utils.tensors import Tensors

GENERATOR = ("generator.0.weight", "generator.0.bias", "generator.1.weight", "generator.1.bias")
"""G's tensors, which travel with the model."""
DISCRIMINATOR = (
    "discriminator.0.weight",
    "discriminator.0.bias",
    "discriminator.1.weight",
    "discriminator.1.bias",
)
"""D's tensors, which stay at the client."""


def layers(names: Sequence[str], sizes: Sequence[int], generator: "torch.Generator") -> "Tensors":
    """Linear layers of these sizes, weights and biases in turn, as PyTorch draws them."""
    import torch

    drawn = []
    for wide, narrow in pairwise(sizes):
        for shape in ((narrow, wide), (narrow,)):
            drawn.append(torch.empty(shape).uniform_(-(wide**-0.5), wide**-0.5, generator=generator))
    return dict(zip(names, drawn, strict=True))


class FedADG(LocalTraining):
    """All clients' features of a class made to look like one learnt distribution."""

    refuses: ClassVar[Mapping[str, str]] = {
        **OWN_LOOP,
        **OWN_GRADIENT,
        **ONE_CLASS,
        **CROSS_ENTROPY,
        "label_smoothing": "which has method.label_smoothing",
    }

    keeps = frozenset({"discriminator"})

    title = "FedADG"
    summary = "one global model whose features, class by class, cannot be told from those of a common generator"
    source = "Zhang et al. 2021"
    evaluates = ("global",)
    tasks = ("classes",)
    tasks_because = "it makes the features of each class look like one distribution"
    nearest = "fediir"
    sums = ONE_MODEL

    name: Literal["fedadg"] = "fedadg"
    risk_share: float = knob(
        0.85,
        "share of the risk in the model's objective; the rest is what the discriminator says",
        symbol="α",
        source="public code",
        ge=0,
        le=1,
        search=choice(0.5, 0.85, 0.95),
    )
    label_smoothing: float = knob(
        0.01,
        "share of a label that is spread over all classes in the risk",
        source="public code, 0.01 to 0.2",
        ge=0,
        lt=1,
        search=choice(0.01, 0.1, 0.2),
    )
    adversary_rate: float = knob(
        0.035,
        "step size of discriminator and generator",
        symbol="lr1",
        source="0.7 times that of the model, as in the public code",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    risk_steps: int = knob(
        0,
        "updates on the risk alone at the start of a round, in `local_unit`",
        symbol="E0",
        source="ours; PACS script of the public code: 3 epochs",
        ge=0,
        le=10_000,
        search=choice(0),
    )
    noise_size: int = knob(
        2048,
        "numbers of noise that the generator is given",
        source="PACS script of the public code",
        ge=1,
        le=100_000,
        search=choice(2048),
    )
    projection_size: int = knob(
        1024,
        "numbers that the discriminator sees of the features, and width of its hidden layer",
        source="public code",
        ge=1,
        le=100_000,
        search=choice(1024),
    )
