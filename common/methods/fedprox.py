"""FedProx: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import ONE_MODEL, LocalTraining
from perennial.common.utils.knobs import between, knob


class FedProx(LocalTraining):
    """FedAvg with a proximal term in the local risk."""

    title = "FedProx"
    summary = "FedAvg whose clients are pulled back towards the model they received"
    source = "Li et al. 2020"
    evaluates = ("global",)
    sums = ONE_MODEL

    name: Literal["fedprox"] = "fedprox"
    proximity: float = knob(
        0.01,
        "weight of ½‖w − w^t‖², the pull of the local model w to the received global model w^t",
        symbol="μ",
        source="ours; not given in FL Games, whose baseline it is",
        ge=0,
        le=1e4,
        search=between(1e-3, 1.0, log=True),
    )
