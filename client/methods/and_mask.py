"""AND-mask, client half: FedSGD's."""

from client.methods.fedsgd import FedSGDClient
from common.methods.and_mask import AndMask


class AndMaskClient(FedSGDClient[AndMask]):
    """Sends `∇R_e(w^t; D_e)` (Parascandolo et al. 2021)."""

    stacks = ("train", "evaluate")
