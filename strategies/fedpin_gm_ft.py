"""FedPIN's global model fine-tuned, server half: that of the global model."""

from common.methods.fedpin import FedPINGMFT
from strategies.fedpin_gm import FedPINGMStrategy


class FedPINGMFTStrategy(FedPINGMStrategy[FedPINGMFT]):
    """`(Φ_g, ω_g, ω_a)^{t+1} = 1/|A_t| Σ_u (Φ_g, ω_g, ω_a)_u` (thesis Algorithm 5)."""
