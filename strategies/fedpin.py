"""FedPIN, server half: its global side's; personal models never come here."""

from common.methods.fedpin import FedPIN
from strategies.fedpin_gm import FedPINGMStrategy


class FedPINStrategy(FedPINGMStrategy[FedPIN]):
    """`(Φ_g, ω_g, ω_a)^{t+1} = 1/|A_t| Σ_u (Φ_g, ω_g, ω_a)_u` (thesis Algorithm 5)."""
