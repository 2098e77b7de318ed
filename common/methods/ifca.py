"""IFCA: hyper-parameters."""

from typing import Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import LocalTraining
from perennial.common.utils.knobs import choice, knob


class IFCA(LocalTraining):
    """Several models; each client trains the one that fits its data best."""

    adapts = True
    title = "IFCA"
    summary = "K models, of which each client trains, in every round, the one with the least risk on its data"
    source = "Ghosh et al. 2020"
    evaluates = ("personal",)

    name: Literal["ifca"] = "ifca"
    clusters: int = knob(
        4,
        "number of models",
        symbol="K",
        source="Tang 2025 Tab 3.1",
        ge=1,
        le=1000,
        search=choice(2, 4),
    )
    start: int = knob(
        0,
        "number of the draw of the initial models; the result depends on it, so a sweep tries several",
        source="ours; not given in Tang 2025",
        ge=0,
        le=1_000_000,
        search=choice(0, 1, 2, 3, 4),
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Record names of the models, in the order of the clusters' numbers."""
        return tuple(f"cluster-{number}" for number in range(self.clusters))

    def misfit(self, scenario: Scenario) -> str:
        if self.clusters <= scenario.clients:
            return ""
        return (
            f"clusters: {self.clusters} is more than the scenario's {scenario.clients} clients, "
            f"and a client trains one model; at most {scenario.clients}"
        )
