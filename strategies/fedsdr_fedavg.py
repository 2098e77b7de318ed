"""FedSDR+FedAvg, server half: the discovery, and the mean of the personal models."""

from common.methods.fedsdr_fedavg import FedSDRFedAvg
from strategies.shortcut import ShortcutStrategy


class FedSDRFedAvgStrategy(ShortcutStrategy[FedSDRFedAvg]):
    """`f^{t+1} = 1/|S| Σ_u f_u` beside Ψ and the ω_i (thesis Algorithm 3)."""
