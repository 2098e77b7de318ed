"""IRM-FT: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.methods.base import ONE_MODEL
from perennial.common.methods.ftfa import FineTuning
from perennial.common.methods.irm import InvariantTraining


class IrmFt(FineTuning, InvariantTraining):
    """Federated IRM, and a few local steps on top of it."""

    CODE: ClassVar[Mapping[str, Any]] = {**InvariantTraining.CODE, **FineTuning.CODE}

    title = "IRM-FT"
    summary = "federated IRM's global model, fine-tuned at every client: PerInvFL's ablation"
    source = "Tang et al. (PerInvFL) §5.2, Tab 5"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    name: Literal["irm-ft"] = "irm-ft"
