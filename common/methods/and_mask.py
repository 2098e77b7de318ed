"""AND-mask: hyper-parameters."""

from typing import Literal

from perennial.common.data.scenario import Scenario
from perennial.common.knobs import between, knob
from perennial.common.methods.fedsgd import ServerTraining


class AndMask(ServerTraining):
    """Steps only where the clients' gradients agree in sign."""

    title = "AND-mask"
    summary = "FedSGD that leaves a parameter alone where clients do not agree which way it should go"
    source = "Parascandolo et al. 2021"
    evaluates = ("global",)

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
        source="Parascandolo et al. 2021, their code",
    )

    def caution(self, scenario: Scenario) -> str:
        return "With one client every sign agrees: this is FedSGD." if scenario.clients == 1 else ""
