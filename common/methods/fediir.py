"""FedIIR: hyper-parameters, and which gradients are aligned."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import ONE_MODEL, PresetTraining, Sum
from perennial.common.utils.knobs import between, choice, knob

if TYPE_CHECKING:
    from perennial.common.models.network import Network

ANCHOR = "anchor"
"""The record that all clients' gradients are pulled to; of the same tensors."""


class FedIIR(PresetTraining):
    """FedAvg whose clients' classifier gradients are pulled to a common one."""

    CODE: ClassVar[Mapping[str, Any]] = {
        "halved": False,
        "anchor_average": "batches",
        "momentum": 0.9,
        "local_unit": "epoch",
        "local_steps": 1,
        "learning_rate": 0.01,
    }
    """The authors' public code, YamingGuo98/FedIIR; the step size is the one for RotatedMNIST (FedIIR Tab 3)."""

    title = "FedIIR"
    summary = "one global model; clients' classifier gradients are pulled to their running mean at the server"
    source = "Guo et al. 2023"
    evaluates = ("global",)
    actions = ("train", "train.gradient", "evaluate")
    sums = (Sum("train.gradient", "gradient"), *ONE_MODEL)

    name: Literal["fediir"] = "fediir"
    preset: Literal["paper", "code"] = knob(
        "paper",
        "the paper's algorithm, or its authors' public code's, whose settings are then defaults (docs/methods)",
        source="FedIIR Algorithm 1; code: YamingGuo98/FedIIR",
    )
    penalty: float = knob(
        0.01,
        "weight of ‖∇_ω R − g̃‖², the distance of a mini-batch's gradient to the anchor",
        symbol="γ",
        source="FedIIR Tab 3 (RotatedMNIST)",
        ge=0,
        le=1e6,
        search=between(1e-4, 1e-1, log=True),
    )
    halved: bool = knob(True, "whether the weight is γ/2 or γ", source="FedIIR §3.2; authors' code: false")
    anchor_ema: float = knob(
        0.95,
        "share of the last round's anchor in the new one",
        symbol="v",
        source="FedIIR Tab 3",
        ge=0,
        lt=1,
        search=choice(0.9, 0.95, 0.99),
    )
    bias_correction: bool = knob(
        False,
        "divide the anchor, which starts at 0, by 1 − v^t",
        source="authors' code; not given in FedIIR",
    )
    anchor_average: Literal["clients", "batches"] = knob(
        "clients",
        "mean over clients of the gradient on all their data, or over all mini-batches of all clients",
        source="FedIIR Algorithm 1; authors' code: batches",
    )
    align: Literal["classifier", "all"] = knob(
        "classifier",
        "the parameters ω whose gradients are aligned; all: Koyama and Yamaguchi's IGA, federated",
        source="FedIIR §3.2",
    )
    frozen_statistics: bool = knob(
        False,
        "train with BatchNorm's running statistics and leave them as they are, as for a pre-trained model",
        source="ours, for models that start from scratch; authors' code: true",
    )

    def aligned(self, network: "Network") -> tuple[str, ...]:
        """The names of ω's tensors."""
        return network.classifier_names if self.align == "classifier" else network.parameter_names

    def caution(self, scenario: Scenario) -> str:
        return "With one client there is no other gradient to align with." if scenario.clients == 1 else ""
