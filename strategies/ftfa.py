"""FTFA, server half: FedAvg's, with the same weight for every client."""

from common.methods.ftfa import Ftfa
from strategies.uniform import UniformStrategy


class FtfaStrategy(UniformStrategy[Ftfa]):
    """`ν^{t+1} = ν^t − α (ν^t − mean of the ν_i)` (PerInvFL Algorithm 1, line 10)."""
