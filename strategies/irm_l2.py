"""IRM-L2, server half: federated IRM's; the personal models stay with the clients."""

from common.methods.irm_l2 import IrmL2
from strategies.uniform import UniformStrategy


class IrmL2Strategy(UniformStrategy[IrmL2]):
    """`ν^{t+1} = ν^t − α (ν^t − mean of the ν_i)` (PerInvFL Algorithm 1, line 10)."""
