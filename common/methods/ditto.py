"""Ditto: hyper-parameters."""

from typing import Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import ONE_MODEL, LocalTraining
from perennial.common.methods.proximal import diverging
from perennial.common.utils.knobs import between, choice, knob


class PulledTraining(LocalTraining):
    """A personal model beside the global one, pulled towards it."""

    adapts = True
    keeps = frozenset({"personal"})

    proximity: float = knob(
        0.1,
        "weight of ½‖v − w‖², the pull of the personal model v to the received global model w",
        symbol="λ",
        source="ours; not given in Tang 2025",
        ge=0,
        le=1e4,
        search=between(1e-2, 3.0, log=True),
    )
    personal_steps: int = knob(
        10,
        "updates of the personal model in a round, in `local_unit`",
        symbol="s",
        source="Tang 2025 §4.5.2 (K)",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )

    def misfit(self, scenario: Scenario) -> str:
        return diverging(self.learning_rate, self.proximity + self.weight_decay, self.momentum, "learning_rate")


class Ditto(PulledTraining):
    """FedAvg's global model, and a personal one pulled towards it."""

    title = "Ditto"
    summary = "FedAvg's global model, and a personal one pulled towards it, kept at the client"
    source = "Li et al. 2021"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    name: Literal["ditto"] = "ditto"
