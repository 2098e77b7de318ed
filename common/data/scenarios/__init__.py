"""The named scenarios: one class per recipe, and one preset per experiment.

A module of this package holds recipes that belong together, and its `PRESETS` by name. Nothing is registered
anywhere. Those of plug-ins are found when they are asked for.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from perennial.common import plugins
from perennial.common.data.scenario import Scenario
from perennial.common.utils.discovery import members, named_subclasses
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown

SCENARIOS: dict[str, Scenario] = {
    name: preset for module in members(__name__, __path__) for name, preset in module.PRESETS.items()
}
"""Every preset by name, those of loaded plug-ins last. The `-oracle` ones show what a model without the shortcut
can reach."""
_OURS = {
    name: kind
    for name, kind in named_subclasses(Scenario).items()  # type: ignore[type-abstract]
    if kind.__module__.startswith(f"{__name__}.")  # a plug-in may have been imported before
}


def scenario_names() -> set[str]:
    """Names that are taken, of presets and of classes."""
    return {*SCENARIOS, *_OURS, *plugins.scenario_classes()}


def scenario_preset(name: str) -> Scenario:
    """A preset by its name. Raises `UserError` for a name that is none."""
    if name not in SCENARIOS:
        plugins.look_for("scenarios", name)
    if name not in SCENARIOS:
        raise UserError(unknown("scenario", name, {*SCENARIOS, *plugins.installed("scenarios")}))
    return SCENARIOS[name]


def scenario_class(name: str) -> type[Scenario]:
    """The class of a scenario by its `name` field. Raises `UserError` for a name that is none."""
    if name not in scenario_names():
        plugins.look_for("scenarios", name)
    # Ours last: a plug-in that was refused has left its classes.
    classes = {**named_subclasses(Scenario), **plugins.scenario_classes(), **_OURS}  # type: ignore[type-abstract]
    if name not in classes:
        raise UserError(unknown("scenario", name, classes))
    return classes[name]


def _accepted(module: ModuleType, kinds: dict[str, Any], usual: Mapping[str, Any]) -> Mapping[str, Any]:
    presets = getattr(module, "PRESETS", usual)
    if not (isinstance(presets, Mapping) and all(isinstance(preset, Scenario) for preset in presets.values())):
        raise UserError(f"plug-in {module.__name__!r}: PRESETS must be scenarios by name")
    return presets


plugins.REGISTRIES["scenarios"] = plugins.Registry(Scenario, SCENARIOS, scenario_names, _accepted)
