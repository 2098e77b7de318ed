"""APFL: hyper-parameters."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.methods.base import ONE_MODEL, OWN_GRADIENT, OWN_LOOP, LocalTraining
from perennial.common.utils.knobs import choice, knob


class APFL(LocalTraining):
    """A mixture of the global model and one of the client's own, in proportions that each client learns."""

    refuses: ClassVar[Mapping[str, str]] = {**OWN_LOOP, **OWN_GRADIENT}

    adapts = True
    keeps = frozenset({"personal", "mixing"})

    title = "APFL"
    summary = "a personal mixture of the global model and an own one; each client learns its proportions"
    source = "Deng et al. 2020"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    name: Literal["apfl"] = "apfl"
    mixing: float = knob(
        0.5,
        "share of the own model v in the mixture αv + (1 − α)w; where α is `adaptive`, its start",
        symbol="α",
        source="ours; not given in Tang 2025",
        ge=0,
        le=1,
        search=choice(0.25, 0.5, 0.75),
    )
    adaptive: bool = knob(
        True, "whether each client moves its α by one gradient step a round", source="Deng et al. 2020"
    )
