"""Hyper-parameters: one frozen class per method, sent by the server with every message.

A subclass of `Method` that has a `name: Literal[...]` field, in any module of this package, is a method: the
command line, the configuration file and the all-methods test suite find it here, its two halves in
`strategies/` and `client/methods/`. Those of plug-ins are found when they are asked for.
"""

from perennial.common import plugins
from perennial.common.errors import UserError
from perennial.common.methods.base import Method
from perennial.common.modules import members, named_subclasses
from perennial.common.suggest import unknown

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
