"""Models: their settings, how they are built, and the one resident network that runs them. No training."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """What plug-ins written for 0.1 import from here, when this was one file."""
    for module in ("utils.tensors", "models.architectures", "models.network"):
        if name[0] != "_" and hasattr(found := import_module(f"perennial.common.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
