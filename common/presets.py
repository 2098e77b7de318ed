"""Named presets: settings of a method that `perennial tune` found, and how it found them.

The file holds what `perennial tune … --preset-out` wrote; `server/study/presets.py` draws every entry again.
"""

import shlex
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perennial.common.data.scenarios import SCENARIOS, scenario_preset
from perennial.common.methods import method_class
from perennial.common.utils.errors import UserError
from perennial.common.utils.parsing import from_toml
from perennial.common.utils.suggestions import unknown

FILE = Path(__file__).parent / "methods" / "presets.toml"
TUNED = "tuned"
"""The one preset that there is: chosen by `split`, so without target data (docs/selection.md)."""


class Preset(BaseModel):
    """Settings of a method for a family of scenarios, and the search that they are from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    scenario: str
    """As on the command line; the settings are for its whole family (`cmnist-80` is one of `cmnist`)."""
    settings: dict[str, Any] = Field(min_length=1)
    """Hyper-parameters that were drawn, or given by hand."""
    trial: int = Field(ge=1)
    """Which of the `trials`; 0 would be the defaults."""
    trials: int = Field(ge=2)
    seed: int = Field(ge=0)
    rounds: int = Field(ge=1)
    given: tuple[str, ...] = ()
    """What was given with `--set`."""
    prune: bool
    by: Literal["split"]
    score: float = Field(ge=0, le=1)
    error: float = Field(ge=0, le=1)
    """Standard error of the score."""
    constant: float = Field(ge=0, le=1)
    """Score of the best constant."""
    code: str = Field(pattern=r"^[0-9a-f]{8}$")
    """Version of the code that the method's runs import, as in the names of a study's folders."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        method_class(self.method)
        scenario_preset(self.scenario)
        return self

    @property
    def family(self) -> str:
        """What all its scenarios are called in a configuration."""
        return SCENARIOS[self.scenario].name

    @property
    def command(self) -> str:
        """The search again."""
        words = ["perennial", "tune", self.method, "--scenario", self.scenario, "--trials", str(self.trials)]
        words += ["--seed", str(self.seed), "--rounds", str(self.rounds)]
        words += [word for setting in self.given for word in ("--set", setting)]
        return shlex.join([*words, "--prune" if self.prune else "--no-prune"])


def presets() -> dict[tuple[str, str], Preset]:
    """The entries of `tuned` by method and family. Raises `UserError` for a file that does not fit."""
    return read_presets(FILE)


@cache
def read_presets(file: Path) -> dict[tuple[str, str], Preset]:
    """Those of any such file."""
    try:
        values = from_toml(file.read_text(encoding="utf-8"))
        if other := values.keys() - {TUNED}:
            raise ValueError(f"it has {min(other)!r}, so it is another kind of file; give another name")
        entries = values.get(TUNED, [])
        listed = [Preset.model_validate(entry) for entry in entries]
    except OSError as error:
        raise UserError(f"presets {file}: {error.strerror or error}") from None
    except (ValidationError, UserError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"presets {file}: {' '.join(str(error).split()):.300}") from None
    found = {(entry.method, entry.family): entry for entry in listed}
    if len(found) < len(listed):
        raise UserError(f"presets {file}: two entries are of the same method and family of scenarios")
    return found


def preset_settings(name: object, method: str, family: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of a preset. Raises `UserError` naming the methods that have one.

    `others` are presets that the method has itself.
    """
    if name != TUNED:
        raise UserError(f"preset: {unknown('preset', name, [*others, TUNED])}")
    found = presets()
    if entry := found.get((method, family)):
        return dict(entry.settings)
    there = ", ".join(f"{own} on {of}" for own, of in sorted(found)) or "none"
    raise UserError(
        f"preset: {method} has no preset {name!r} for {family} (there are: {there}); a file that `tune` "
        "wrote is for --config"
    )
