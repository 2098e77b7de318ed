"""FedSDR+pFedMe, server half: the discovery, and the mean of the clients' copies of the global model."""

from common.methods.fedsdr_pfedme import FedSDRPFedMe
from strategies.shortcut import ShortcutStrategy


class FedSDRPFedMeStrategy(ShortcutStrategy[FedSDRPFedMe]):
    """`f^{t+1} = 1/|S| Σ_u w_u` beside Ψ and the ω_i (thesis Algorithm 4)."""
