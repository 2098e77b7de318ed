"""FedPAC: hyper-parameters, and the names of what its clients send."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import ONE_CLASS
from perennial.common.methods.fedrep import AlternatingTraining
from perennial.common.utils.knobs import between, knob

CENTROIDS = "centroids"
"""Record: mean feature (`mean`, classes x d) and number of samples (`count`, classes) of each class."""
STATISTICS = "statistics"
"""Record: s_u (`mean`, classes x d) and V_u (`variance`), from which the server weighs the classifiers."""


class FedPAC(AlternatingTraining):
    """Features pulled to common centroids, and for each client a combination of all classifiers."""

    title = "FedPAC"
    summary = "a shared featurizer aligned to class centroids, and for each client its own mix of all classifiers"
    source = "Xu et al. 2023"
    evaluates = ("personal",)
    tasks = ("classes",)
    tasks_because = "it aligns features to the centroid of each class"
    nearest = "fedrep"
    refuses: ClassVar[Mapping[str, str]] = ONE_CLASS

    name: Literal["fedpac"] = "fedpac"
    alignment: float = knob(
        1.0,
        "weight of the mean square of a feature's difference to the global centroid of its class",
        symbol="λ",
        source="the authors' public code",
        ge=0,
        le=1e4,
        search=between(0.1, 10.0, log=True),
    )

    def misfit(self, scenario: Scenario) -> str:
        return self.clash(scenario, CENTROIDS)

    def no_rule(self) -> str:
        return "whose server mixes a classifier for each client from all the others'"
