"""DRFA: hyper-parameters, and the names that its two halves share."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.methods.base import OWN_LOOP, LocalTraining
from perennial.common.utils.knobs import between, knob

SNAPSHOT = "snapshot"
"""Record of the model after t′ local updates."""
SNAPSHOT_STEP = "snapshot-step"
"""Setting: t′."""
LOSS = "loss"
"""Record, and its one tensor: a client's mean loss of the snapshot."""


class DRFA(LocalTraining):
    """One global model for the worst mixture of the clients."""

    refuses: ClassVar[Mapping[str, str]] = OWN_LOOP

    title = "DRFA"
    summary = "a global model for the worst mixture of clients: those with a high loss are drawn more often"
    source = "Deng et al. 2020"
    evaluates = ("global",)
    actions: ClassVar[tuple[str, ...]] = ("train", "train.loss", "evaluate")

    name: Literal["drfa"] = "drfa"
    mixture_rate: float = knob(
        0.01,
        "step size of the mixture λ; a round moves it by `mixture_rate` · `local_steps` · losses",
        symbol="γ",
        source="not given in Tang 2025; a loss gap of 0.1 moves λ by 0.01 a round at τ = 10, not tuned",
        ge=0,
        le=10,
        search=between(1e-3, 0.1, log=True),
    )
