"""Ditto, server half: FedAvg's; the personal models stay with the clients."""

from common.methods.ditto import Ditto
from strategies.base import MethodStrategy


class DittoStrategy(MethodStrategy[Ditto]):
    """`w^{t+1} = Σ_u (n_u / Σn) w_u` (Li et al. 2021, Algorithm 1 with FedAvg as its solver)."""
