"""FedPIN's global model and personal ones pulled towards it, client half."""

from client.methods.ditto import DittoClient
from client.methods.fedpin_gm import FedPINGMClient
from common.methods.fedpin import FedPINGML2


class FedPINGML2Client(DittoClient[FedPINGML2], FedPINGMClient[FedPINGML2]):
    """`train` is Ditto's: the global side's, then steps on `R(θ) + (μ/2) ‖θ − θ_GM‖²` with the received θ_GM."""
