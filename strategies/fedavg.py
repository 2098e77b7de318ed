"""FedAvg, server half."""

from common.methods.fedavg import FedAvg
from strategies.base import MethodStrategy


class FedAvgStrategy(MethodStrategy[FedAvg]):
    """`w^{t+1} = Σ_u (n_u / Σn) w_u` over the clients that answered (McMahan et al. 2017)."""
