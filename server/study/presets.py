"""From a search to an entry of `common/methods/presets.toml`, and the proof that an entry is from a search."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from perennial.common.config import RunConfig
from perennial.common.presets import FILE, TUNED, Preset, read_presets
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_text
from perennial.server.run.output_files import must_be_ours
from perennial.server.selection.split_rule import Select
from perennial.server.study.batch import Outcome
from perennial.server.study.choose import Verdict
from perennial.server.study.run_names import run_name
from perennial.server.study.sweep import key_of, search_ranges

HEADER = f"""\
# Settings that `perennial tune … --preset-out common/methods/{FILE.name}` chose by `split` (docs/selection.md).
# Not to be edited: tests/server/study/test_presets.py draws every entry again.
"""


def must_take(file: Path, scenario: str | None, optimizers: Sequence[str], given: Sequence[str]) -> None:
    """Raises `UserError` where `add_preset` would find, after the search, that it cannot write."""
    if scenario is None:
        raise UserError("--preset-out is not possible with --config; a preset is for scenarios that have a name")
    if optimizers or any(key_of(setting).startswith("optimizer") for setting in given):
        raise UserError("--preset-out is not possible with another optimizer; a preset holds a method's settings")
    must_be_ours(file, (".toml",), "--preset-out")
    if file.is_file():
        read_presets(file)


def add_preset(
    file: Path, outcomes: Sequence[Outcome], verdict: Verdict, scenario: str, given: Sequence[str], prune: bool
) -> str:
    """Put what a search chose into a file of presets, in the place of what was there; says what was done.

    `scenario` and the settings `given` are as on the command line.
    """
    trial, why = verdict.trial, ""
    if verdict.by is not Select.by_split or trial is None:
        why = "did not choose"
    elif not trial:
        why = "chose the defaults"
    elif not verdict.scores[trial].beats_constant:
        why = "found nothing that is better than a constant in the worst case"
    if why or trial is None:
        return f"no preset is written to {file}, since split {why}"
    config, found = outcomes[trial].config, verdict.scores[trial]
    preset = Preset(
        method=config.method.name,
        scenario=scenario,
        settings=_settings(config, {key_of(setting) for setting in given}),
        trial=trial,
        trials=len(outcomes),
        seed=config.seed,
        rounds=config.rounds,
        given=tuple(given),
        prune=prune,
        by="split",
        score=round(found.score, 4),
        error=round(found.error, 4),
        constant=round(found.constant, 4),
        code=run_name(config).rpartition("-")[2],
    )
    listed = {**(read_presets(file) if file.is_file() else {}), (preset.method, preset.family): preset}
    entries = [own.model_dump(mode="json") for _, own in sorted(listed.items())]
    write_text(file, f"{HEADER}\n{tomli_w.dumps({TUNED: entries})}")
    read_presets.cache_clear()
    return f"written: preset {TUNED} of {preset.method} on {preset.family} to {file}"


def _settings(config: RunConfig, fixed: Collection[str]) -> dict[str, Any]:
    """What was drawn, and what was given by hand."""
    values = config.method.model_dump(mode="json", exclude_none=True)
    wanted = {*search_ranges(type(config.method)), *fixed} - {"name"}
    return {name: value for name, value in values.items() if name in wanted}
