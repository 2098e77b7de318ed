"""V-REx: hyper-parameters."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import Sum
from perennial.common.methods.fedsgd import GRADIENTS, ServerTraining
from perennial.common.utils.knobs import between, choice, knob

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors

PRODUCT, RISK = "product", "risk"
"""What is made of a reply: `R_e g_e` and R_e, which enter as means as g_e does."""


class VREx(ServerTraining):
    """Clients as environments whose risks shall be alike."""

    title = "V-REx"
    summary = "FedSGD on the mean of the clients' risks and their variance"
    source = "Krueger et al. 2021"
    evaluates = ("global",)
    sums = (*GRADIENTS, Sum("train", PRODUCT), Sum("train", RISK))

    name: Literal["vrex"] = "vrex"
    penalty: float = knob(
        10.0,
        "weight of the variance of the clients' risks after `anneal_rounds`",
        symbol="λ",
        source="Gulrajani & Lopez-Paz 2021",
        ge=0,
        le=1e6,
        search=between(0.1, 1e3, log=True),
    )
    anneal_rounds: int = knob(
        10,
        "rounds at the start in which the penalty weighs no more than 1",
        source="a tenth of 100 rounds, as 500 of 5,000 steps in Gulrajani & Lopez-Paz 2021",
        ge=0,
        le=1_000_000,
        search=choice(0, 10, 50),
    )

    def terms(self, arrays: Mapping[str, "Tensors"], metrics: Mapping[str, float]) -> Mapping[str, "Tensors"]:
        """g_e, `R_e g_e` and R_e."""
        gradient, risk = arrays["gradient"], metrics[RISK]
        like = next(iter(gradient.values()))
        product = {name: risk * part for name, part in gradient.items()}
        return {**arrays, PRODUCT: product, RISK: {RISK: like.new_tensor(risk)}}

    def caution(self, scenario: Scenario) -> str:
        return "With one client risks have no variance: this is FedSGD." if scenario.clients == 1 else ""
