"""AND-mask: hyper-parameters."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import Sum
from perennial.common.methods.fedsgd import GRADIENTS, ServerTraining
from perennial.common.utils.knobs import between, knob

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors

SIGNS = "signs"
"""What is made of a reply: the signs of its gradient."""


class AndMask(ServerTraining):
    """Steps only where the clients' gradients agree in sign."""

    title = "AND-mask"
    summary = "FedSGD that leaves a parameter alone where clients do not agree which way it should go"
    source = "Parascandolo et al. 2021"
    evaluates = ("global",)
    sums = (*GRADIENTS, Sum("train", SIGNS, bounded=True))

    name: Literal["and-mask"] = "and-mask"
    agreement: float = knob(
        1.0,
        "least |mean sign| of the clients' gradients for a parameter to move; 1: all have the same sign",
        symbol="τ",
        source="Gulrajani & Lopez-Paz 2021, their code",
        ge=0,
        le=1,
        search=between(0.5, 1.0),
    )
    rescale: bool = knob(
        False,
        "divide a tensor's gradient by the share of its parameters that move",
        source="Parascandolo et al. 2021 §2.3; their code: true",
    )

    def terms(self, arrays: Mapping[str, "Tensors"], metrics: Mapping[str, float]) -> Mapping[str, "Tensors"]:
        """g_e, and its signs."""
        return {**arrays, SIGNS: {name: part.sign() for name, part in arrays["gradient"].items()}}

    def caution(self, scenario: Scenario) -> str:
        return "With one client every sign agrees: this is FedSGD." if scenario.clients == 1 else ""
