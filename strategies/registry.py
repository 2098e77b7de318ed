"""The server half of a method, by its module's name."""

from functools import lru_cache
from typing import Any

from common.config import RunConfig
from common.modules import defined_in
from strategies.base import MethodStrategy
from strategies.privacy import PrivateStrategy
from strategies.secagg import SecureStrategy

MECHANISMS: dict[str, type[MethodStrategy[Any]]] = {
    "fixed": PrivateStrategy,
    "adaptive": PrivateStrategy,
    "secagg": SecureStrategy,
}
"""What stands before the method, by the privacy mechanism."""


@lru_cache
def strategy_class(module: str) -> type[MethodStrategy[Any]]:
    """The one `MethodStrategy` subclass that `strategies/MODULE.py` defines."""
    found: type[MethodStrategy[Any]] = defined_in(f"strategies.{module}", MethodStrategy)
    return found


def strategy_for(run: RunConfig, run_id: str) -> MethodStrategy[Any]:
    """The server half of a run: the method's, behind the privacy mechanism that is set."""
    kind = strategy_class(run.method.module())
    if mechanism := MECHANISMS.get(run.privacy.mechanism):
        kind = type(kind.__name__, (mechanism, kind), {})
    return kind(run, run_id)
