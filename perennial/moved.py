"""Where modules are that plug-ins written for 0.1 import: `perennial new` and the pages named them."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

MOVED = {
    "perennial.client.proximal": "perennial.client.methods.proximal",
    "perennial.client.shortcut": "perennial.client.methods.shortcut",
    "perennial.client.working": "perennial.client.steps",
    "perennial.common.errors": "perennial.common.utils.errors",
    "perennial.common.knobs": "perennial.common.utils.knobs",
    "perennial.common.model_settings": "perennial.common.models.settings",
    "perennial.common.seeding": "perennial.common.utils.seeding",
    "perennial.common.suggest": "perennial.common.utils.suggestions",
}


class Moved(MetaPathFinder, Loader):
    """Finds a module under its name of before; asked for what nothing else finds alone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, self) if place_of(name) else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is {place_of(name)} now", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(place_of(name))


def place_of(name: str) -> str:
    """A module's name of today; empty where it has not moved."""
    package, _, module = name.rpartition(".")
    if package == "perennial.strategies" and find_spec(f"perennial.strategies.methods.{module}"):
        return f"perennial.strategies.methods.{module}"
    return MOVED.get(name, "")
