"""Federated GroupDRO: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.methods.group import GroupTraining


class GroupDRO(GroupTraining):
    """The worst-off client counts most."""

    CODE: ClassVar[Mapping[str, Any]] = {**GroupTraining.CODE, "literal_weights": True}

    title = "GroupDRO"
    summary = "one global model, clients of high risk weigh more and more"
    source = "Sagawa et al. 2020; federated in Tang et al. (PerInvFL) §4.1"
    evaluates = ("global",)

    name: Literal["groupdro"] = "groupdro"
