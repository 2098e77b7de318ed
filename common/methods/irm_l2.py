"""IRM-L2: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import ONE_MODEL
from perennial.common.methods.personal_invariant import PersonalInvariantTraining


class IrmL2(PersonalInvariantTraining):
    """Federated IRM, and a personal model of least risk held near it."""

    title = "IRM-L2"
    summary = "federated IRM's global model, and a personal one that is only held near it: PerInvFL's ablation"
    source = "Tang et al. (PerInvFL) §5.2, Tab 5"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    name: Literal["irm-l2"] = "irm-l2"
