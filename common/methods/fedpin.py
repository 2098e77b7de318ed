"""FedPIN and the ablations of its Table 5.2 that are methods of their own: hyper-parameters."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import CHANGE, ONE_MODEL, OWN_LOOP, LocalTraining, Sum
from perennial.common.methods.ditto import PulledTraining
from perennial.common.utils.knobs import between, choice, knob


class AnchorTraining(LocalTraining):
    """A global model whose features shall leave nothing for the client to tell of the label."""

    # I(E, U; Y | Φ) is a difference of two least risks (Proposition 5.4.1). This is so where the least risk is the
    # entropy H(Y | Φ): where the loss is −log P(Y | Φ). Of labels it is the mean of I(E, U; Y_k | Φ), of an event
    # the information on whether it happens, interval by interval. A squared error says nothing of a distribution.
    tasks = ("classes", "labels", "event")
    tasks_because = "its information terms take a loss that is the logarithm of a probability"
    nearest = "perinvfl"
    refuses: ClassVar[Mapping[str, str]] = {**OWN_LOOP, "loss": "whose information is of a loss that is −log P"}

    fractions: ClassVar[tuple[str, ...]] = ("warm_up",)
    keeps = frozenset({"auxiliary"})
    sends = frozenset({("auxiliary", CHANGE)})
    sums = (*ONE_MODEL, Sum("train", "auxiliary"))

    independence: float = knob(
        25.0,
        "weight of I(E, U; Y | Φ), what knowing the client tells of the label beyond the global features",
        symbol="α",
        source="ours; not given in Tang 2025",
        ge=0,
        le=1e6,
        search=choice(1.0, 5.0, 25.0, 100.0, 300.0),
    )
    warm_up: float = knob(
        0.1,
        "fraction of the rounds, from the first, in which `independence` is 1 at most",
        source="ours; not in Tang 2025",
        ge=0,
        le=1,
        search=choice(0.0, 0.1, 0.3),
    )
    auxiliary: Literal["hidden", "scale"] = knob(
        "hidden",
        "the auxiliary classifier: its own, with a hidden layer, or the global one with a scale and an offset for "
        "each client",
        symbol="ω_a",
        source="ours; Tang 2025 §5.4 gives only its inputs",
    )
    auxiliary_steps: int = knob(
        1,
        "steps of the auxiliary classifier after each update of the global model",
        symbol="n_a",
        source="ours; one joint step in Tang 2025 Algorithm 5",
        ge=1,
        le=1000,
        search=choice(1, 5),
    )
    auxiliary_learning_rate: float = knob(
        0.05,
        "step size of the auxiliary classifier",
        symbol="β_a",
        source="ours, that of the global model",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    literal: bool = knob(
        False,
        "the thesis's Algorithm 5 to the letter, where the auxiliary classifier climbs its own risk without end",
        source="ours, see docs/methods/fedpin.md; true: Tang 2025 Algorithm 5",
    )

    def server(self) -> str:
        return "fedpin_gm"

    def caution(self, scenario: Scenario) -> str:
        if self.literal:
            return (
                "literal=true drives the auxiliary classifier up its own risk, which has no end; the global model "
                "follows until its numbers overflow (docs/methods/fedpin.md)"
            )
        if scenario.clients == 1:
            return "with one client there is nobody to tell apart, so `independence` finds nothing to remove"
        return ""


class FedPIN(AnchorTraining):
    """Personal models drawn to the features of a global invariant one, and away from those of plain training."""

    adapts = True
    keeps = frozenset({"personal", "plain", "auxiliary"})

    title = "FedPIN"
    summary = "personal models drawn to global invariant features and away from those of plain local training"
    source = "Tang 2025 (thesis), chapter 5"
    evaluates = ("global", "personal")
    fractions = ("warm_up", "personal_start")

    name: Literal["fedpin"] = "fedpin"
    contrast: float = knob(
        1.0,
        "weight of the contrastive term; 0 is the ablation PM (λ = 0)",
        symbol="λ",
        source="ours; not given in Tang 2025",
        ge=0,
        le=1e4,
        search=choice(0.1, 0.5, 1.0, 5.0),
    )
    variance: float = knob(
        1e-3,
        "weight of the variance of the personal features; 0 is the ablation PM (γ = 0)",
        symbol="γ",
        source="ours; not given in Tang 2025",
        ge=0,
        le=1e6,
        search=choice(0.0, 1e-4, 1e-3, 1e-2, 1e-1),
    )
    temperature: float = knob(
        0.5,
        "what cosines are divided by in the contrastive term",
        symbol="τ",
        source="ours; not given in Tang 2025",
        ge=0.01,
        le=100,
        search=choice(0.1, 0.5, 1.0),
    )
    personal_start: float = knob(
        0.0,
        "fraction of the rounds, from the first, in which the global model is trained alone; if there are any, a "
        "client's personal and plain models start from it and not from the common initial one",
        source="ours; 0 is Tang 2025 Algorithm 5",
        ge=0,
        lt=1,
        search=choice(0.0),
    )
    personal_steps: int = knob(
        10,
        "updates in a round of the personal model, and as many of the plain local one, in `local_unit`",
        symbol="K",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    personal_learning_rate: float = knob(
        0.05,
        "step size of the personal model and of the plain local one",
        symbol="η",
        source="not given in Tang 2025; that of the global model",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )


class FedPINGM(AnchorTraining):
    """FedPIN's global model alone."""

    title = "FedPIN GM"
    summary = "FedPIN's global invariant model, without personal ones"
    source = "Tang 2025 (thesis), Table 5.2"
    evaluates = ("global",)
    nearest = "irm"

    name: Literal["fedpin-gm"] = "fedpin-gm"


class FedPINGMFT(AnchorTraining):
    """FedPIN's global model, fine-tuned."""

    adapts = True
    title = "FedPIN GM-FT"
    summary = "FedPIN's global invariant model, fine-tuned at every client"
    source = "Tang 2025 (thesis), Table 5.2"
    evaluates = ("global", "personal")
    nearest = "irm-ft"

    name: Literal["fedpin-gm-ft"] = "fedpin-gm-ft"
    fine_tuning_epochs: int = knob(
        10,
        "passes over a client's data that lead from the global model to the personal one",
        source="ours; not given in Tang 2025",
        ge=1,
        le=1000,
        search=choice(1, 5, 10),
    )
    personal_learning_rate: float = knob(
        0.05,
        "step size of the fine-tuning",
        symbol="η",
        source="not given in Tang 2025; that of the global model",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )


class FedPINGML2(AnchorTraining, PulledTraining):
    """FedPIN's global model, and Ditto's personal one."""

    keeps = frozenset({"personal", "auxiliary"})

    title = "FedPIN GM-L2"
    summary = "FedPIN's global invariant model, and personal ones pulled towards it as in Ditto"
    source = "Tang 2025 (thesis), Table 5.2"
    evaluates = ("global", "personal")
    nearest = "irm-l2"

    name: Literal["fedpin-gm-l2"] = "fedpin-gm-l2"
