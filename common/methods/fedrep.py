"""FedRep: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import ONE_MODEL, LocalTraining
from perennial.common.utils.knobs import choice, knob


class AlternatingTraining(LocalTraining):
    """What methods have in common whose clients train the classifier first and the featurizer after it."""

    local_steps: int = knob(
        10,
        "updates of the featurizer in a round, its classifier frozen",
        symbol="R",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    head_steps: int = knob(
        10,
        "updates of the classifier in a round, before the featurizer's, in `local_unit`",
        symbol="τ_h, K",
        source="Tang 2025 §4.5.2 (K)",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )


class FedRep(AlternatingTraining):
    """A shared featurizer under classifiers that stay with the clients."""

    adapts = True
    keeps = frozenset({"head"})

    title = "FedRep"
    summary = "one shared featurizer, and a classifier that each client keeps"
    source = "Collins et al. 2021"
    evaluates = ("personal",)
    sums = ONE_MODEL

    name: Literal["fedrep"] = "fedrep"
