"""What PerInvFL and IRM-L2 have in common: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.methods.irm import InvariantTraining
from perennial.common.utils.knobs import between, choice, knob


class PersonalInvariantTraining(InvariantTraining):
    """What PerInvFL and IRM-L2 have in common: a personal model θ held near the local copy v of the shared one."""

    adapts = True
    keeps = frozenset({"optimizer-shared", "optimizer-personal", "personal"})

    CODE: ClassVar[Mapping[str, Any]] = {
        **InvariantTraining.CODE,
        "personal_steps": 2,
        "personal_learning_rate": 1e-4,
        "proximity": 0.5,
    }

    personal_steps: int = knob(
        1,
        "updates of the personal model before each update of the shared one, on the same mini-batch",
        symbol="S",
        source="ours; not given in PerInvFL",
        ge=1,
        le=10_000,
        search=choice(1, 2, 5),
    )
    personal_learning_rate: float = knob(
        0.05,
        "step size of the personal model",
        symbol="η",
        source="ours, that of the shared model; not given in PerInvFL",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    proximity: float = knob(
        0.1,
        "weight of ‖θ − v‖² (no ½), the pull of the personal model θ to the local copy v of the shared one",
        symbol="β",
        source="ours; not given in PerInvFL",
        ge=0,
        le=1e4,
        search=between(1e-3, 1.0, log=True),
    )
    context_reduction: Literal["sum", "mean"] = knob(
        "sum",
        "whether the personal loss is the sum or the mean over the client's training environments",
        source="PerInvFL Eq 4; mean: ours",
    )
