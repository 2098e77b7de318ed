"""Local: hyper-parameters."""

from typing import Literal

from common.methods.base import LocalTraining


class Local(LocalTraining):
    """Every client for itself."""

    title = "Local"
    summary = "no communication: every client trains a model of its own"
    source = "reference row, spec/cgpfl.md 8-A14"
    evaluates = ("personal",)

    name: Literal["local"] = "local"
