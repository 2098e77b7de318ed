"""APFL, server half: FedAvg's; the own models and their shares stay with the clients."""

from common.methods.apfl import APFL
from strategies.base import MethodStrategy


class APFLStrategy(MethodStrategy[APFL]):
    """`w^{t+1} = Σ_i (n_i / Σn) w_i` over the clients that answered (Deng et al. 2020, Algorithm 1)."""
