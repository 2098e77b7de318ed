"""L2SGD, server half: the mean of the personal models."""

from perennial.common.methods.l2sgd import L2SGD
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply


class L2SGDStrategy(MethodStrategy[L2SGD]):
    """`x̄ = (1/n) Σ_i x_i` over the clients that answered (Hanzely and Richtárik 2020, Algorithm 1)."""

    def weight(self, reply: AcceptedReply) -> float:
        """1: in the objective each client counts the same."""
        return 1.0
