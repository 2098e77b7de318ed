"""V-REx, client half: FedSGD's, whose metric `risk` the server needs too."""

from perennial.client.methods.fedsgd import FedSGDClient
from perennial.common.methods.vrex import VREx


class VRExClient(FedSGDClient[VREx]):
    """Sends `∇R_e(w^t; D_e)` and `R_e(w^t; D_e)` (Krueger et al. 2021)."""

    stacks = ("train", "evaluate")
