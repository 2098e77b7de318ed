"""Per-FedAvg, server half: FedAvg's."""

from common.methods.per_fedavg import PerFedAvg
from strategies.base import MethodStrategy


class PerFedAvgStrategy(MethodStrategy[PerFedAvg]):
    """`w^{t+1} = Σ_i (n_i / Σn) w_i` over the clients that answered (Fallah et al. 2020, Algorithm 1)."""
