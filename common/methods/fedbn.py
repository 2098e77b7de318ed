"""FedBN: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import ONE_MODEL, LocalTraining
from perennial.common.models.settings import ModelSettings, Module

NORMS = "norms"
"""The record of a client's own BatchNorm layers."""


class FedBN(LocalTraining):
    """Clients whose features are scaled differently, each with its own normalisation."""

    adapts = True
    keeps = frozenset({"norms"})

    title = "FedBN"
    summary = "FedAvg whose clients keep their BatchNorm layers to themselves"
    source = "Li et al. 2021"
    evaluates = ("personal",)
    sums = ONE_MODEL
    keeps_batch_norm = True

    name: Literal["fedbn"] = "fedbn"

    def model_caution(self, model: ModelSettings) -> str:
        if model.batch_norm or isinstance(model, Module):  # a module of somebody's, which only running it tells
            return ""
        return f"model {model.name!r} as set here has no BatchNorm layers, so this is FedAvg."
