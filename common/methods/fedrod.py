"""FedRoD: hyper-parameters."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import CROSS_ENTROPY, ONE_CLASS, ONE_MODEL, LocalTraining


class FedRoD(LocalTraining):
    """A generic predictor that is fair to all classes, and a personal one on top of it."""

    refuses: ClassVar[Mapping[str, str]] = {
        **ONE_CLASS,
        **CROSS_ENTROPY,
        "label_smoothing": "whose risks are its own",
    }

    adapts = True
    keeps = frozenset({"head"})

    title = "FedRoD"
    summary = "a generic predictor trained on a class-balanced risk, and personal logits added to its own"
    source = "Chen & Chao 2022"
    evaluates = ("global", "personal")
    tasks = ("classes",)
    tasks_because = "its balanced risk counts a client's samples of each class"
    nearest = "fedrep"
    sums = ONE_MODEL

    name: Literal["fedrod"] = "fedrod"

    def misfit(self, scenario: Scenario) -> str:
        if scenario.loss_weights:
            return f"name: {self.name!r} balances classes itself; leave out scenario.class_weights"
        return super().misfit(scenario)
