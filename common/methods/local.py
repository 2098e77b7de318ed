"""Local: hyper-parameters."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from perennial.common.methods.base import LocalTraining


class Local(LocalTraining):
    """Every client for itself."""

    adapts = True
    keeps = frozenset({"personal"})

    title = "Local"
    summary = "no communication: every client trains a model of its own"
    source = "a reference for all others, of no paper"
    evaluates = ("personal",)

    refuses: ClassVar[Mapping[str, str]] = {"server_optimizer": "whose server takes no mean"}

    name: Literal["local"] = "local"

    def no_rule(self) -> str:
        return "whose server takes no mean"
