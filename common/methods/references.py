"""The references of the selection `split`: hyper-parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from perennial.common.methods.base import STEPS, LocalTraining, Sum

ROUNDS = 10
"""Rounds in which studies make them: a shortcut is what is learnt first."""


FILE = Path("models") / "references.safetensors"
"""The models, in the run folder."""


SHARED = "shared"
"""Setting of a request: whether a client's models are to enter as sums, which secure aggregation can hide."""
PARTS = "parts"
"""The record of the environments' shares in a client's samples, by the name of the environment's model."""


def model_of(environment: int) -> str:
    """Name of the record that holds the model of a training environment, by its number."""
    return f"model-{environment}"


def samples_of(environment: int) -> str:
    """Name of the metric that says how many training samples of an environment a client has."""
    return f"samples-{environment}"


class References(LocalTraining):
    """FedAvg once for each training environment, on the samples of that environment alone."""

    title = "References"
    summary = "a FedAvg model for each training environment, for the selection split"
    source = "after Bao, Chang and Barzilay 2021"
    evaluates = ("personal",)
    tasks = ("classes", "labels")  # FedAvg has every task; what its models are for is to be right or wrong
    tasks_because = "references tell answers apart by whether they are right"
    nearest = "fedavg"
    listed = False
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(STEPS, "which serves the selection split alone")
    sums = (Sum("train", "model-*"), Sum("train", PARTS))

    name: Literal["references"] = "references"
