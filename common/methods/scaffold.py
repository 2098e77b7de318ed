"""SCAFFOLD: hyper-parameters."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.methods.base import CHANGE, OWN_LOOP, LocalTraining, Sum
from perennial.common.utils.knobs import choice, knob

PLAIN_STEPS = "whose control variates are what plain steps of one size add up to (SCAFFOLD, option II)"


class Scaffold(LocalTraining):
    """FedAvg whose local steps are corrected by control variates."""

    refuses: ClassVar[Mapping[str, str]] = {**OWN_LOOP, "optimizer": PLAIN_STEPS}

    title = "SCAFFOLD"
    summary = "FedAvg whose local steps are corrected by control variates, against the drift of unlike clients"
    source = "Karimireddy et al. 2020"
    evaluates = ("global",)
    keeps = frozenset({"control"})
    sends = frozenset({("control", CHANGE)})
    sums = (Sum("train", "model"), Sum("train", "control"))

    name: Literal["scaffold"] = "scaffold"
    momentum: float = knob(
        0.0,
        "none: what plain steps add up to is the control variate",
        source="Karimireddy et al. 2020, Algorithm 1",
        ge=0,
        le=0,
        search=choice(0.0),
    )
    mixing: float = knob(
        1.0,
        "step size of the server: how far it goes from its model to the mean of the clients'",
        symbol="η_g",
        source="Karimireddy et al. 2020 §7",
        gt=0,
        le=2,
        search=choice(0.5, 1.0),
    )
