"""FedILC, the methods of its tables and federated Fishr: hyper-parameters, and the names of what travels."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from perennial.common.data.scenario import Scenario
from perennial.common.mathematics.geometric_mean import GeometricMean, Zeros
from perennial.common.methods.base import EVERY
from perennial.common.methods.fedsgd import ServerTraining
from perennial.common.utils.knobs import between, choice, knob

VARIANCE = "variance"
"""The record of a client's gradient variances c_e, and of their mean c̄ that comes back, under its own name."""
PULL = "pull"
"""The record of `J_eᵀ (c_e − c̄)`, a client's part of the gradient of Fishr's penalty."""
CLIENTS = "clients"
"""Setting of a request: how many clients were asked."""

Place = Literal["clients", "batches"]


class FedILC(ServerTraining):
    """What the methods of FedILC's tables have in common: gradients up, and at the server a step of Adam."""

    refuses: ClassVar[Mapping[str, str]] = {
        **ServerTraining.refuses,
        "label_smoothing": "whose variances are of the risk as it is",
    }

    source = "Zhu et al. 2022, arXiv 2205.09305"
    evaluates = ("global",)
    family = "fedilc"

    optimizer: Literal["sgd", "adam"] = knob(
        "adam",
        "the server's steps: along the gradient, or Adam's, whose state stays at the server",
        source="FedILC §5.1",
    )
    learning_rate: float = knob(
        3e-4,
        "step size of the server",
        symbol="η",
        source="FedILC §5.1 (Color-MNIST)",
        gt=0,
        le=10,
        search=between(1e-4, 1e-2, log=True),
    )
    weight_decay: float = knob(
        0.01,
        "weight of ½‖w‖² in the risk",
        source="FedILC §5.1 (Color-MNIST)",
        ge=0,
        le=1,
        search=choice(0.0, 1e-3, 1e-2),
    )

    def no_rule(self) -> str:
        return "whose server takes a geometric mean" if self.geometric_mean("clients") else ""

    def geometric_mean(self, place: Place) -> GeometricMean | None:
        """For the gradients of all clients, or of a client's mini-batches; None where the plain mean is taken."""
        return None


class Geometry(FedILC):
    """What the methods with a geometric mean have in common."""

    place: ClassVar[Place]
    """Where gradients are averaged geometrically."""

    zeros: Zeros = knob(
        "exclude",
        "where a gradient of zero belongs: to no sign; official: to the negative, as 1e-10; paper: to both",
        source="ours; official: authors' code; paper: FedILC §3.1",
    )
    agreement: float = knob(
        0.0,
        "least magnitude of the gradients' mean sign for a parameter to move; 0: all move",
        symbol="τ",
        source="authors' code, all published commands",
        ge=0,
        le=1,
        search=choice(0.0, 0.1),
    )

    def geometric_mean(self, place: Place) -> GeometricMean | None:
        return GeometricMean(self.zeros, self.agreement) if place == self.place else None


class MiniBatches(FedILC):
    """What the methods have in common that average a client's gradient over its mini-batches."""

    batch_size: int = knob(
        32,
        "samples in a mini-batch; all are at the received model",
        source="authors' code (Color-MNIST; 64 for the others)",
        ge=1,
        le=100_000,
        search=choice(32, 64, 128),
    )


class Fishr(FedILC):
    """What the methods with Fishr's penalty have in common."""

    keeps = frozenset({"fishr-model", "fishr-statistics"})
    sends = frozenset({("fishr-statistics", EVERY)})

    actions = ("train", "train.fishr", "evaluate")

    penalty: float = knob(
        15.0,
        "weight of Fishr's penalty, the spread of the clients' gradient variances",
        symbol="λ",
        source="FedILC §5.1 (Color-MNIST)",
        ge=0,
        le=1e6,
        search=between(0.1, 100.0, log=True),
    )
    reduction: Literal["mean", "sum"] = knob(
        "mean",
        "whether the spread is the mean or the sum over clients, which weighs as many times as much",
        source="FedILC §3.2; authors' code: sum",
    )
    fishr_mode: Literal["exact", "stale", "central"] = knob(
        "exact",
        "the penalty's gradient: in a second exchange; at last round's mean variances; at a server with all data",
        source="ours, see docs/methods/fedilc.md; central: authors' code",
    )

    def slope(self, clients: int) -> float:
        """The weight of the mean of `J_eᵀ (c_e − c̄)` over clients in the step: 2λ, or 2λ times their number."""
        return 2 * self.penalty * (clients if self.reduction == "sum" else 1)

    def misfit(self, scenario: Scenario) -> str:
        if scenario.loss_weights and self.fishr_mode == "central":
            return "fishr_mode: 'central' has no class weights; take 'exact', or leave out scenario.class_weights"
        return super().misfit(scenario)

    def caution(self, scenario: Scenario) -> str:
        return "With one client gradient variances have no spread." if scenario.clients == 1 else ""


class Geometric(Geometry):
    """Geometric means of the clients' gradients, no penalty."""

    title = "Geometric"
    summary = "FedSGD with the weighted geometric mean of the clients' gradients"
    place = "clients"

    name: Literal["geometric"] = "geometric"


class FedCurv(Fishr):
    """Fishr's penalty, plain means. The paper has it under FedCurv's name, whose method it is not."""

    title = "FedCurv (as FedILC runs it)"
    summary = "FedSGD with Fishr's penalty on the spread of the clients' gradient variances"

    name: Literal["fedcurv"] = "fedcurv"


class FishrInterGeo(Fishr, Geometry):
    """FedILC between silos."""

    title = "Fishr+Inter-Geo"
    summary = "FedILC: Fishr's penalty, and the weighted geometric mean of the clients' gradients"
    place = "clients"

    name: Literal["fishr-inter-geo"] = "fishr-inter-geo"


class FishrIntraGeo(Fishr, Geometry, MiniBatches):
    """FedILC within silos."""

    title = "Fishr+Intra-Geo"
    summary = "FedILC: Fishr's penalty, and at each client the weighted geometric mean over its mini-batches"
    place = "batches"

    name: Literal["fishr-intra-geo"] = "fishr-intra-geo"


class FishrIntraArith(Fishr, MiniBatches):
    """The control of FedILC within silos."""

    title = "Fishr+Intra-Arith"
    summary = "Fishr's penalty, and at each client the plain mean over its mini-batches"

    name: Literal["fishr-intra-arith"] = "fishr-intra-arith"


class FederatedFishr(Fishr):
    """Fishr as published, with clients as its domains."""

    keeps = Fishr.keeps | {"fishr-running"}
    sends = Fishr.sends | {("fishr-running", EVERY)}

    title = "Fishr"
    summary = "FedSGD with Fishr's penalty on running means of the clients' gradient variances"
    source = "Ramé et al. 2022"

    name: Literal["fishr"] = "fishr"
    smoothing: float = knob(
        0.95,
        "share of the rounds before in a client's running mean of its gradient variances",
        symbol="γ",
        source="Ramé et al. 2022, their code",
        ge=0,
        lt=1,
        search=choice(0.9, 0.95, 0.99),
    )

    @model_validator(mode="after")
    def _no_running_means_at_the_server(self) -> "FederatedFishr":
        if self.smoothing and self.fishr_mode == "central":
            raise ValueError("fishr_mode 'central' has no running means; set smoothing to 0")
        return self
