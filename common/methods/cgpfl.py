"""CGPFL: hyper-parameters."""

from typing import Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.proximal import ProximalTraining
from perennial.common.utils.knobs import choice, knob


class ContextTraining(ProximalTraining):
    """What CGPFL and CGPFL-Heur have in common."""

    contexts: int = knob(
        4,
        "models at the server, one for each context of clients",
        symbol="K",
        source="Tang 2025 Tab 3.1",
        ge=1,
        le=10_000,
        search=choice(2, 4),
    )
    mixing: float = knob(
        1.0,
        "how far a context's model moves to the mean of its clients' copies in a round",
        symbol="α",
        source="Tang 2025 Tab 3.1",
        ge=0,
        le=1,
        search=choice(0.5, 1.0),
    )

    def misfit(self, scenario: Scenario) -> str:
        if self.contexts > scenario.clients:
            return (
                f"contexts: {self.contexts} is more than the scenario's {scenario.clients} clients; "
                f"take 1 to {scenario.clients}"
            )
        return super().misfit(scenario)


class CGPFL(ContextTraining):
    """Several models at the server, each for the clients whose uploads are alike."""

    title = "CGPFL"
    summary = "K context models found by clustering what clients send, and a personal model near its context's"
    source = "Tang et al. 2022 (IJCAI); Tang 2025, chapter 3"

    name: Literal["cgpfl"] = "cgpfl"
