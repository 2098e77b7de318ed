"""FedProx, server half: FedAvg's."""

from common.methods.fedprox import FedProx
from strategies.base import MethodStrategy


class FedProxStrategy(MethodStrategy[FedProx]):
    """`w^{t+1} = Σ_u (n_u / Σn) w_u` over the clients that answered."""
