"""FedSDR, server half: the discovery alone; personal models never come here."""

from perennial.common.methods.fedsdr import FedSDR
from perennial.common.utils.tensors import Tensors
from perennial.strategies.exchange import Payload
from perennial.strategies.methods.shortcut import ShortcutStrategy


class FedSDRStrategy(ShortcutStrategy[FedSDR]):
    """Ψ, ω and the ω_i travel (thesis Algorithm 2). There is no global model: the global arrays stay as drawn."""

    def payload(self, model: Tensors) -> Payload:
        return {}
