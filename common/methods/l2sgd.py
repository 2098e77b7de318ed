"""L2SGD: hyper-parameters."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import EVERY, ONE_MODEL, LocalTraining
from perennial.common.utils.knobs import choice, knob


class L2SGD(LocalTraining):
    """Personal models that are pulled towards their mean at random times (L2GD with mini-batches)."""

    adapts = True
    keeps = frozenset({"personal"})
    sends = frozenset({("personal", EVERY)})

    title = "L2SGD"
    summary = "personal models that take local steps and, when a common coin says so, steps towards their mean"
    source = "Hanzely and Richtárik 2020"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    refuses: ClassVar[Mapping[str, str]] = {"server_optimizer": "whose clients step towards the mean itself"}

    name: Literal["l2sgd"] = "l2sgd"
    local_steps: int = knob(
        10,
        "expected local updates between two steps towards the mean, which are taken with p = 1/(R + 1)",
        symbol="R",
        source="Tang 2025 §4.5.2; p: ours",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    proximity: float = knob(
        1.0,
        "weight of ½‖x_i − x̄‖², the distance of each personal model to the mean of all",
        symbol="λ",
        source="ours; not given in Tang 2025",
        ge=0,
        le=1e4,
        search=choice(0.1, 1.0, 10.0),
    )

    @property
    def averaging_probability(self) -> float:
        """p: how likely ξ = 1 is, so that R local steps are expected before it."""
        return 1 / (self.local_steps + 1)

    @property
    def pull(self) -> float:
        """`aλ/(np)`: the part of the way to the mean that a step ξ = 1 goes.

        With the local step size η = a/(n(1 − p)) it is ηλ(1 − p)/p, and (1 − p)/p is R.
        """
        return self.learning_rate * self.proximity * self.local_steps

    def caution(self, scenario: Scenario) -> str:
        if self.pull <= 1:
            return ""
        return (
            f"learning_rate · proximity · local_steps is {self.pull:g}, so that a step towards the mean of the "
            "models goes past it (above 1), or runs away from it (above 2)"
        )
