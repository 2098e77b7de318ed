"""The server half of a method, by its module's name."""

from functools import lru_cache
from typing import Any

from common.modules import defined_in
from strategies.base import MethodStrategy


@lru_cache
def strategy_class(module: str) -> type[MethodStrategy[Any]]:
    """The one `MethodStrategy` subclass that `strategies/MODULE.py` defines."""
    found: type[MethodStrategy[Any]] = defined_in(f"strategies.{module}", MethodStrategy)
    return found
