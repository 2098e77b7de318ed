"""The server half of a run: the method's, behind the privacy mechanism that is set."""

from collections.abc import Collection
from functools import lru_cache
from importlib.util import find_spec
from inspect import getattr_static
from typing import Any

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.methods.base import ONE_MODEL, Method
from perennial.common.models.settings import Module
from perennial.common.utils.discovery import defined_in, names_in
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import meant
from perennial.strategies.base import MethodStrategy
from perennial.strategies.privacy.differential_privacy import PrivateStrategy
from perennial.strategies.privacy.secure_aggregation import SecureStrategy
from perennial.strategies.server_optimizer import OptimizedStrategy

METHODS = "perennial.strategies.methods"
"""Where the server halves are, in files with the methods' names."""

MECHANISMS: dict[str, type[MethodStrategy[Any]]] = {
    "fixed": PrivateStrategy,
    "adaptive": PrivateStrategy,
    "secagg": SecureStrategy,
}
"""What stands before the method, by the privacy mechanism."""

FREE = {
    "payload",
    "training_payload",
    "settings",
    "weight",
    "update",
    "state_dict",
    "load_state_dict",
    "results",
    "robust",
}
"""What a method's server half may override behind a mechanism: none of it sees the tensors of a reply."""


MEAN = {"update", "combined", "collected", "aggregate_train", "ask"}
"""What a server half leaves as it is if all it does is to take the mean of the clients' models."""


def strategy_class(method: Method) -> type[MethodStrategy[Any]]:
    """A method's server half: a plug-in's own, or the one `MethodStrategy` subclass of its file in
    `strategies/methods/`.

    Where it has neither, that of the file that its `server()` names. Raises `UserError` if a plug-in has two, or
    says a file that there is not.
    """
    brought: type[MethodStrategy[Any]] | None = plugins.half(type(method), "server", MethodStrategy)
    if brought:
        return brought
    shared = method.server()
    modules = plugins.of(type(method))
    if not modules:
        return _of_file(method.module(), shared)
    files = ["base", *names_in(METHODS)]
    if shared not in files or not _has_half(shared):
        raise UserError(
            f"plug-in {modules[0]!r}: {type(method).__name__}.server() says {shared!r}, which is no server "
            f"half of ours{meant(shared, filter(_has_half, files))}"
        )
    # Its name may be that of any file here, and what it says itself is stronger than its family's.
    says = not type(method).server.__module__.startswith("perennial.")
    return _of_file(shared if says else method.family or shared, shared)


def _has_half(file: str) -> bool:
    """Whether a file of `strategies/methods/` has a method's server half; "base" is FedAvg's."""
    try:
        return file == "base" or bool(defined_in(f"{METHODS}.{file}", MethodStrategy))
    except TypeError:
        return False


@lru_cache
def _of_file(module: str, shared: str) -> type[MethodStrategy[Any]]:
    file = module if find_spec(f"{METHODS}.{module}") else shared
    if file == "base":
        return MethodStrategy
    found: type[MethodStrategy[Any]] = defined_in(f"{METHODS}.{file}", MethodStrategy)
    return found


def strategy_for(run: RunConfig, run_id: str) -> MethodStrategy[Any]:
    """The server half of a run: the method's, behind the privacy mechanism that is set.

    Raises `UserError` where the method would go past the mechanism, or past the rule of `aggregation`.
    """
    kind = strategy_class(run.method)
    if run.aggregation.rule != "mean" and (past := past_the_rule(kind)):
        raise UserError(
            f"aggregation.rule: {run.aggregation.rule!r} is not possible with method {run.method.name!r}, whose "
            f"server half has its own {', '.join(past)} and does not say `robust`; take 'mean', or use its "
            "`mean()` for all means and say so"
        )
    steps = run.server_optimizer.name
    if steps != "none" and (more := sorted(MEAN.intersection(going_past(kind, free=())))):
        raise UserError(
            f"server_optimizer.name: {steps!r} is not possible with method {run.method.name!r}, whose server "
            f"half has its own {', '.join(more)} and so takes more than a mean; leave it out"
        )
    if mechanism := MECHANISMS.get(run.privacy.mechanism):
        own = {"expect", "optional", "check", "combined", "prepare"} if run.method.summed() != ONE_MODEL else set()
        if past := [name for name in going_past(kind) if name not in own]:
            raise UserError(
                f"privacy.mechanism: {run.privacy.mechanism!r} is not possible with method {run.method.name!r}, "
                f"whose server half has its own {', '.join(past)} and so could use replies that the mechanism has "
                "not seen; take another method or privacy.mechanism=none"
            )
        kind = type(kind.__name__, (mechanism, kind), {})
    if steps != "none":
        kind = type(kind.__name__, (OptimizedStrategy, kind), {})
    strategy = kind(run, run_id)
    # Of somebody else's module the settings alone do not tell.
    theirs = mechanism and isinstance(run.model, Module) and not run.method.keeps_batch_norm
    if theirs and strategy.network.batch_norm_names:
        raise UserError(f"privacy.{run.privacy.no_batch_norm(run.model)}")
    return strategy


def going_past(kind: type[MethodStrategy[Any]], free: Collection[str] = FREE) -> list[str]:
    """What a server half has in place of the base's that is not `free`."""
    return [
        name
        for name in dir(MethodStrategy)
        if not name.startswith("_")
        and name not in free
        and getattr_static(kind, name) is not getattr_static(MethodStrategy, name)
    ]


def past_the_rule(kind: type[MethodStrategy[Any]]) -> list[str]:
    """What a server half makes of replies in place of the base, where its class does not say it is `robust`."""
    return [
        name
        for name in going_past(kind)
        if name not in {"expect", "optional", "check"}
        and not next(vars(owner) for owner in kind.__mro__ if name in vars(owner)).get("robust")
    ]
