"""FedAvg: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import LocalTraining


class FedAvg(LocalTraining):
    """Federated averaging."""

    title = "FedAvg"
    summary = "one global model, the sample-weighted mean of what clients trained"
    source = "McMahan et al. 2017"
    evaluates = ("global",)
    averages = True

    name: Literal["fedavg"] = "fedavg"
