"""IRM, server half: every client is one environment."""

from common.methods.irm import Irm
from strategies.uniform import UniformStrategy


class IrmStrategy(UniformStrategy[Irm]):
    """`ν^{t+1} = ν^t − α (ν^t − mean of the ν_i)` (PerInvFL Algorithm 1, line 10)."""
