"""pFedMe, server half: the global model moves towards the mean of the clients' copies."""

from common.methods.pfedme import PFedMe
from strategies.uniform import UniformStrategy


class PFedMeStrategy(UniformStrategy[PFedMe]):
    """`w^{t+1} = (1 − β) w^t + β · mean of w_i` over the clients that answered (Dinh et al. 2020, Algorithm 1)."""
