"""FTFA: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.methods.base import ONE_MODEL
from perennial.common.methods.stateful import StatefulTraining
from perennial.common.utils.knobs import between, choice, knob


class FineTuning(StatefulTraining):
    """What methods have in common whose personal model is some steps away from the shared one."""

    adapts = True
    keeps = frozenset({"optimizer-shared", "optimizer-personal", "personal"})

    CODE: ClassVar[Mapping[str, Any]] = {
        **StatefulTraining.CODE,
        "fine_tuning_steps": 2,
        "personal_learning_rate": 1e-4,
    }

    fine_tuning_steps: int = knob(
        10,
        "steps on the local risk that lead from the shared model to the personal one, in `local_unit`",
        symbol="K",
        source="not given; the length of a round's training",
        ge=1,
        le=10_000,
        search=choice(2, 10, 50),
    )
    personal_learning_rate: float = knob(
        0.05,
        "step size of the personal model",
        symbol="η",
        source="not given; that of the shared model",
        gt=0,
        le=10,
        search=between(1e-4, 0.3, log=True),
    )


class Ftfa(FineTuning):
    """FedAvg, and a few local steps on top of it."""

    title = "FTFA"
    summary = "FedAvg's global model, fine-tuned at every client"
    source = "Cheng et al. 2021"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    name: Literal["ftfa"] = "ftfa"
