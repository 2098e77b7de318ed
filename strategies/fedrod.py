"""FedRoD, server half: FedAvg's; the personal heads stay with the clients."""

from common.methods.fedrod import FedRoD
from strategies.base import MethodStrategy


class FedRoDStrategy(MethodStrategy[FedRoD]):
    """`(φ, ψ)^{t+1} = Σ_u (n_u / Σn) (φ_u, ψ_u)` (Chen & Chao 2022)."""
