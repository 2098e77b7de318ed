"""Recipes: the scenario, method, settings, model and rounds of one row of a paper's table, for a single run.

The claims of the demo are recipes as well.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perennial.common.config import RunConfig
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown
from perennial.server.papers.demo import load_claims
from perennial.server.papers.reproduce import DEMO, FOLDER, load_reproduction, reproductions, row_name
from perennial.server.study.compare import entry_config, with_baselines

SEEN = "; settings seen on test data"


def recipes(tables: Iterable[str] | None = None) -> dict[str, str]:
    """Every recipe as `TABLE/ROW`, with a line about it; of these `tables` alone where they are given.

    Raises `UserError` for a file that does not fit.
    """
    names = [*(_files(FOLDER) if tables is None else tables)]
    found = {
        f"{name}/{row.name}": (
            f"{row.title}: {row.method} on {table.scenario}, {table.rounds} rounds{SEEN * row.seen}"
        )
        for name in names
        if name != DEMO.stem
        for table in [load_reproduction(name)]
        for row in table.rows
        if row.implemented
    }
    for claim in load_claims(FOLDER / DEMO.name) if DEMO.stem in names else ():
        about = f"{claim.method.title} of the demo: on {claim.scenario}, {claim.rounds} rounds{SEEN * claim.seen}"
        found[f"{DEMO.stem}/{claim.method.name}"] = about
    return found


def recipe_config(
    recipe: str, options: Mapping[str, Any], settings: Iterable[str], folder: Path = FOLDER
) -> tuple[RunConfig, str]:
    """The configuration with which `perennial reproduce` runs a row, and what has to be known of it, if anything.

    `recipe` is `TABLE/ROW`, or `TABLE` where it has but one row. `options` and `settings` are the command line's,
    which are stronger. Raises `UserError` where there is no such row, and as `load_config` does.
    """
    name, _, wanted = recipe.partition("/")
    files = _files(folder)
    if name not in files:
        raise UserError(f"--recipe: {unknown('table', name, files)}")
    if name == DEMO.stem:
        if not wanted:
            raise UserError(_which(name, [own.method.name for own in load_claims(files[name])]))
        (claim,) = load_claims(files[name], [wanted.casefold()], "--recipe demo")
        return claim.config(claim.method, options, settings), _caution(recipe, claim.seen, files[name])
    table = load_reproduction(name, folder)
    rows = {row.name.casefold(): row for row in table.rows if row.implemented}
    names = [row.name for row in rows.values()]
    if not wanted and len(rows) != 1:
        raise UserError(_which(name, names))
    row = rows.get(row_name(wanted).casefold()) if wanted else next(iter(rows.values()))
    if row is None:
        raise UserError(f"--recipe {name}: {unknown('row', wanted, names)}")
    plan = table.plan(quick=False)
    entries = with_baselines(plan.entries)
    entry = next(entry for entry in entries if entry.label == row.title)
    searched = (
        f"perennial reproduce {name} searches for hyper-parameters ({plan.trials} trials); this run has those "
        "that the search starts from"
    )
    cautions = [searched if plan.trials > 1 else "", _caution(recipe, row.seen, files[name])]
    return entry_config(plan, entry, entries, options, settings), "; ".join(filter(None, cautions))


def _caution(recipe: str, seen: bool, file: Path) -> str:
    if not seen:
        return ""
    why = f"were chosen while looking at test data, so its numbers may be too good ({file.name})"
    return f"settings of {recipe} {why}"


def _which(name: str, rows: Iterable[str]) -> str:
    return f"--recipe {name} needs a row of the table: {', '.join(f'{name}/{row}' for row in rows)}"


def _files(folder: Path) -> dict[str, Path]:
    claims = folder / DEMO.name
    return reproductions(folder) | ({DEMO.stem: claims} if claims.is_file() else {})
