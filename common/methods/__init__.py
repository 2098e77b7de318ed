"""Hyper-parameters: one frozen class per method, sent by the server with every message.

A subclass of `Method` that has a `name: Literal[...]` field, in any module of this package, is a method: the
command line, the configuration file and the all-methods test suite find it here, its two halves in
`strategies/methods/` and `client/methods/`. Those of plug-ins are found when they are asked for.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from perennial.common import plugins
from perennial.common.methods.base import EVALUATED, Method, PresetTraining
from perennial.common.tasks import EVERY_TASK
from perennial.common.utils.discovery import members, named_subclasses
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown

members(__name__, __path__)

_EVERY = dict(sorted(named_subclasses(Method).items()))
METHODS = {name: method for name, method in _EVERY.items() if method.listed}
"""Every method's hyper-parameter class by the method's name, those of loaded plug-ins last."""


def method_names() -> set[str]:
    """Names that are taken."""
    return {*_EVERY, *METHODS}


def method_class(name: str) -> type[Method]:
    """The hyper-parameter class of a method. Raises `UserError` for a name that is none."""
    if name not in method_names():
        plugins.look_for("methods", name)
    if name not in method_names():
        raise UserError(unknown("method", name, {*METHODS, *plugins.installed("methods")}))
    return _EVERY.get(name) or METHODS[name]


RESERVED = {"preset", *dir(Method), *Method.__class_vars__} - {"name"}
"""What no field of a plug-in's method may be called; `common/config.py` adds the settings of a run, which it would
hide from `--set`, in a study for other methods, too."""


def reserved(kind: type[Method]) -> set[str]:
    """What no field of a method may be called; one that refuses a setting of the run may have its own."""
    free = {"preset"} if issubclass(kind, PresetTraining) else set[str]()
    return RESERVED - free - kind.refuses.keys()


def _accepted(module: ModuleType, kinds: dict[str, Any], usual: Mapping[str, Any]) -> Mapping[str, Any]:
    ours = {kind for kind in METHODS.values() if not plugins.of(kind)}
    titles = {kind.title: name for name, kind in METHODS.items()}  # tables and reports tell methods apart by them
    for kind in kinds.values():
        if not (isinstance(kind.evaluates, tuple) and kind.evaluates):
            raise UserError(
                f"plug-in {module.__name__!r}: {kind.__name__}.evaluates: {kind.evaluates!r} is not possible; "
                'write a tuple of names, such as ("global",)'
            )
        if strange := [name for name in kind.evaluates if name not in EVALUATED]:
            words = unknown("model", strange[0], EVALUATED)
            raise UserError(f"plug-in {module.__name__!r}: {kind.__name__}.evaluates: {words}")
        if not (isinstance(kind.tasks, tuple) and kind.tasks and {*kind.tasks} <= {*EVERY_TASK}):
            raise UserError(
                f"plug-in {module.__name__!r}: {kind.__name__}.tasks: {kind.tasks!r} is not possible; write a "
                f"tuple of some of {', '.join(EVERY_TASK)}"
            )
        if not callable(kind.server):
            raise UserError(
                f"plug-in {module.__name__!r}: {kind.__name__}.server is no method; write def server(self) -> str"
            )
        if kind.title in titles:
            raise UserError(
                f"plug-in {module.__name__!r}: {kind.__name__}.title: {kind.title!r} is that of method "
                f"{titles[kind.title]!r}; give yours another one"
            )
        # A method that is a subclass of one of ours has its halves, unless it brings some.
        kind.family = kind.family or next((base.module() for base in kind.__mro__ if base in ours), "")
    return kinds


plugins.REGISTRIES["methods"] = plugins.Registry(Method, METHODS, method_names, _accepted, reserved)
