"""IRM-FT, server half: federated IRM's; fine-tuning is the clients' affair."""

from common.methods.irm_ft import IrmFt
from strategies.uniform import UniformStrategy


class IrmFtStrategy(UniformStrategy[IrmFt]):
    """`ν^{t+1} = ν^t − α (ν^t − mean of the ν_i)` (PerInvFL Algorithm 1, line 10)."""
