"""FedPIN, server half: its global side's; personal models never come here."""

from perennial.common.methods.fedpin import FedPIN
from perennial.common.wire import Scalar
from perennial.strategies.methods.fedpin_gm import FedPINGMStrategy


class FedPINStrategy(FedPINGMStrategy[FedPIN]):
    """`(Φ_g, ω_g, ω_a)^{t+1} = 1/|A_t| Σ_u (Φ_g, ω_g, ω_a)_u` (thesis Algorithm 5)."""

    def settings(self, server_round: int) -> dict[str, Scalar]:
        """α, and whether personal models are trained in this round."""
        personal = server_round > self.hparams.personal_start * self.run.rounds
        return {**super().settings(server_round), "personal": personal}
