"""FedSR: hyper-parameters, and the names of the tensors that it adds to a model."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.methods.base import ONE_CLASS, ONE_MODEL, LocalTraining
from perennial.common.utils.knobs import between, knob

DISTRIBUTION_WEIGHT, DISTRIBUTION_BIAS = "distribution.weight", "distribution.bias"
"""A linear layer from d features to the d means of z and d numbers whose softplus is its deviations."""
REFERENCE_MEAN, REFERENCE_SCALE = "reference.mean", "reference.scale"
"""Of r(z|y), for each class: d means, and d numbers whose softplus is the deviations."""
ADDED = (DISTRIBUTION_WEIGHT, DISTRIBUTION_BIAS, REFERENCE_MEAN, REFERENCE_SCALE)


class FedSR(LocalTraining):
    """A stochastic representation, kept small and close to one distribution per class."""

    title = "FedSR"
    summary = "a global model on random features whose norm and information on the input are penalised"
    source = "Nguyen et al. 2022"
    evaluates = ("global",)
    tasks = ("classes",)
    tasks_because = "it keeps features near one distribution r(z|y) for each class y"
    nearest = "fediir"
    sums = ONE_MODEL
    refuses: ClassVar[Mapping[str, str]] = ONE_CLASS

    name: Literal["fedsr"] = "fedsr"
    norm_weight: float = knob(
        1e-2,
        "weight of E‖z‖², the norm of the representation",
        symbol="α^L2R",
        source="command for PACS on the authors' page",
        ge=0,
        le=1e3,
        search=between(1e-4, 1e-1, log=True),
    )
    information_weight: float = knob(
        1e-3,
        "weight of KL(p(z|x) ‖ r(z|y)), a bound on what z tells of x beyond the label",
        symbol="α^CMI",
        source="command for PACS on the authors' page",
        ge=0,
        le=1e3,
        search=between(1e-5, 1e-1, log=True),
    )
