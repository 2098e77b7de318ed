"""Local: hyper-parameters."""

from typing import Literal

from perennial.common.methods.base import LocalTraining


class Local(LocalTraining):
    """Every client for itself."""

    adapts = True
    keeps = frozenset({"personal"})

    title = "Local"
    summary = "no communication: every client trains a model of its own"
    source = "a reference for all others, of no paper"
    evaluates = ("personal",)

    name: Literal["local"] = "local"

    def no_rule(self) -> str:
        return "whose server takes no mean"
