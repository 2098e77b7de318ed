"""FedSDR+FedAvg: hyper-parameters."""

from typing import Literal

from common.methods.shortcut import ShortcutTraining


class FedSDRFedAvg(ShortcutTraining):
    """FedSDR whose personal models start every round from their mean."""

    title = "FedSDR+FedAvg"
    summary = "FedSDR whose personal models are averaged and start every round from their mean"
    source = "Tang et al. 2024, thesis chapter 4, Algorithm 3"
    evaluates = ("global", "personal")

    name: Literal["fedsdr-fedavg"] = "fedsdr-fedavg"
