"""FedPIN's global model with Ditto's personal ones, server half: that of the global model."""

from common.methods.fedpin import FedPINGML2
from strategies.fedpin_gm import FedPINGMStrategy


class FedPINGML2Strategy(FedPINGMStrategy[FedPINGML2]):
    """`(Φ_g, ω_g, ω_a)^{t+1} = 1/|A_t| Σ_u (Φ_g, ω_g, ω_a)_u` (thesis Algorithm 5)."""
