"""AND-mask, client half: FedSGD's."""

from perennial.client.methods.fedsgd import FedSGDClient
from perennial.common.methods.and_mask import AndMask


class AndMaskClient(FedSGDClient[AndMask]):
    """Sends `∇R_e(w^t; D_e)` (Parascandolo et al. 2021)."""

    stacks = ("train", "evaluate")
