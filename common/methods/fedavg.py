"""FedAvg: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import ONE_MODEL, LocalTraining


class FedAvg(LocalTraining):
    """Federated averaging."""

    title = "FedAvg"
    summary = "one global model, the sample-weighted mean of what clients trained"
    source = "McMahan et al. 2017"
    evaluates = ("global",)
    sums = ONE_MODEL

    name: Literal["fedavg"] = "fedavg"
