"""Finding things by where and what they are: a method's halves by their file, settings by their name."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


def defined_in(module: str, base: type) -> Any:
    """The one subclass of `base` that a module itself defines. Raises `TypeError` if there is not just one."""
    found = [
        value
        for value in vars(import_module(module)).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module
    ]
    if len(found) != 1:
        raise TypeError(f"{module} must define one subclass of {base.__name__}, not {len(found)}")
    return found[0]


def members(package: str, path: Iterable[str]) -> list[ModuleType]:
    """Every module of a package, imported, so that what they define can be found by what it is."""
    return [import_module(f"{package}.{name}") for name in sorted(found.name for found in iter_modules(path))]


def names_in(package: str) -> list[str]:
    """The modules of a package by their names, not imported."""
    return [found.name for found in iter_modules(import_module(package).__path__)]


def named_subclasses(parent: type[M]) -> dict[str, type[M]]:
    """All subclasses of a settings class that have a `name` of their own, by that name."""
    found: dict[str, type[M]] = {}
    for child in parent.__subclasses__():
        if isinstance(name := child.model_fields["name"].default, str):
            found[name] = child
        found |= named_subclasses(child)
    return found
