"""Federated GroupDRO: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.methods.base import Sum
from perennial.common.methods.group_weights import GROUP_SUMS, MASS, GroupTraining


class GroupDRO(GroupTraining):
    """The worst-off client counts most."""

    CODE: ClassVar[Mapping[str, Any]] = {**GroupTraining.CODE, "literal_weights": True}

    title = "GroupDRO"
    summary = "one global model, clients of high risk weigh more and more"
    source = "Sagawa et al. 2020; federated in Tang et al. (PerInvFL) §4.1"
    evaluates = ("global",)

    keeps = GroupTraining.keeps | {MASS}
    sums = GROUP_SUMS

    name: Literal["groupdro"] = "groupdro"

    def summed(self) -> tuple[Sum, ...]:
        return GROUP_SUMS if self.preset == "paper" else ()  # the code weighs models by q, which nobody may see
