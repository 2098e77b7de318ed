"""Per-FedAvg: hyper-parameters."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.methods.base import ONE_MODEL, OWN_GRADIENT, OWN_LOOP, LocalTraining
from perennial.common.utils.knobs import choice, knob


class PerFedAvg(LocalTraining):
    """A global model made to be adapted: one gradient step turns it into a client's own."""

    refuses: ClassVar[Mapping[str, str]] = {**OWN_LOOP, **OWN_GRADIENT}

    adapts = True
    title = "Per-FedAvg"
    summary = "a global model trained so that one gradient step on a client's data makes a good personal one"
    source = "Fallah et al. 2020"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    name: Literal["per-fedavg"] = "per-fedavg"
    adaptation_rate: float = knob(
        0.01,
        "step size of the adaptation w − a ∇R(w), in training as in evaluation",
        symbol="a (α in the paper)",
        source="ours; not given in Tang 2025",
        ge=0,
        le=10,
        search=choice(0.005, 0.01, 0.03),
    )
    variant: Literal["hf", "fo"] = knob(
        "hf",
        "Hessian-free: the Hessian's term by a finite difference; or first-order: without it",
        source="Tang 2025 Tab 3.1",
    )
