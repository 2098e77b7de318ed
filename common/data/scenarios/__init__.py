"""The named scenarios: one class per recipe, and one preset per experiment.

A module of this package holds recipes that belong together, and its `PRESETS` by name. Nothing is registered
anywhere.
"""

from perennial.common.data.scenario import Scenario
from perennial.common.errors import UserError
from perennial.common.modules import members, named_subclasses
from perennial.common.suggest import unknown

SCENARIOS: dict[str, Scenario] = {
    name: preset for module in members(__name__, __path__) for name, preset in module.PRESETS.items()
}
"""Every preset by name. The `-oracle` ones show what a model without the shortcut can reach."""


def scenario_class(name: str) -> type[Scenario]:
    """The class of a scenario by its `name` field. Raises `UserError` for a name that is none."""
    classes = named_subclasses(Scenario)  # type: ignore[type-abstract]
    if name not in classes:
        raise UserError(unknown("scenario", name, classes))
    return classes[name]
