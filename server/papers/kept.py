"""What a table's runs said, as numbers: a line of `results/TABLE.jsonl` for each row, a number for each seed."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_text
from perennial.common.utils.locks import locked_folder
from perennial.server.papers.reproduce import Reproduction, row_name
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.study.batch import read_lines
from perennial.server.study.compare import CONSTANT, Comparison, Plan, budget, with_baselines


class Kept(BaseModel):
    """One row of a table, as its runs made it: a line of `results/TABLE.jsonl`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    row: str
    selection: str
    rounds: int
    trials: int
    by: Select
    """What a search chose by, where there was one."""
    quick: bool
    settings: dict[str, bool | int | float | str | None]
    """What the search drew."""
    measures: dict[str, list[float]]
    """One number for each seed: fractions, but those of `DECIMALS` as they are."""
    runs: list[str]
    trial_rounds: int | None = None
    """Where trials had fewer than `rounds`."""
    ended: list[int | None] = []
    """The round in which a game ended, for each seed; None where it did not. Nothing for other methods."""

    @property
    def size(self) -> tuple[int, int, int | None, bool]:
        """What the rows of a file have in common."""
        return self.rounds, self.trials, self.trial_rounds, self.quick

    @property
    def seeds(self) -> int:
        """How many all measures have."""
        return min(map(len, self.measures.values()), default=0)

    @property
    def way(self) -> Select | None:
        """How the settings were chosen: what the search chose by; None without one."""
        return self.by if self.trials > 1 else None


def keep(name: str, table: Reproduction, comparison: Comparison, quick: bool, by: Select, folder: Path) -> Path:
    """Write what the page needs of a table's comparison; the file. There is one for each rule of a search, and for
    each smaller number of rounds.

    Rows that the comparison lacks stay in the file; so a long table is made row by row. `known` sees to it that
    they are of its size.
    """
    shown = {*table.columns, *table.beside}
    choices = {choice.label: choice for choice in comparison.choices}
    lines = []
    for row in comparison.rows:
        choice = choices.get(row.label)
        runs = [Path(run) for run in choice.runs] if choice else []
        ended = list(map(ended_in, runs))
        line = Kept(
            row=row.label,
            selection=row.selection,
            rounds=comparison.rounds,
            trials=comparison.trials,
            trial_rounds=comparison.trial_rounds,
            by=by,
            quick=quick,
            settings=choice.settings if choice else {},
            measures={column: list(own.values) for column, own in row.columns.items() if column in shown},
            runs=[run.name for run in runs],
            ended=ended if any(ended) else [],
        )
        lines.append(line)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _file_name(name, table, comparison, by, quick)
    made = {line.row for line in lines}
    order = {row.title: number for number, row in enumerate(table.rows)}
    with locked_folder(folder):
        lines += [line for line in read_lines(file, Kept) if line.row not in made]
        lines.sort(key=lambda line: (order.get(line.row, len(order)), line.row == CONSTANT))
        write_text(file, "".join(f"{line.model_dump_json()}\n" for line in lines))
    return file


def known(name: str, table: Reproduction, plan: Plan, quick: bool, only: Sequence[str], folder: Path) -> Plan:
    """The plan less what is kept: rows of its size and seeds but for those in `only`, and what a search chose.

    A search is the same at any number of rounds where its trials have rounds of their own. Raises `UserError` for
    a file that does not fit, holds rows of another size, or more seeds of a row that is to be made.
    """
    file = folder / _file_name(name, table, plan, plan.select, quick)
    lines = read_lines(file, Kept)
    size = (plan.rounds or table.rounds, plan.trials, plan.trial_rounds, quick)
    if other := [line.size for line in lines if line.size != size]:
        raise UserError(
            f"{file} holds rows of {_size_words(*other[0])}, which rows of {_size_words(*size)} cannot join; "
            "give another --keep folder"
        )
    labels = {entry.label for entry in with_baselines(plan.entries)}
    wanted = {row_name(row).casefold() for row in only}
    there = {line.row for line in lines if line.seeds == plan.seeds} & labels
    rows = frozenset(label for label in there if row_name(label).casefold() not in wanted)
    for line in lines:
        if line.row in labels - rows and line.seeds > plan.seeds:
            raise UserError(
                f"{file} holds {line.seeds} seeds of the row {line.row}, which {plan.seeds} would replace; "
                "say --seeds, or give another --keep folder"
            )
    search = (plan.trials, plan.trial_rounds, quick, plan.select)
    searched = [line for own in kept(name, folder) for line in own] if plan.trial_rounds else []
    same = [line for line in searched if search == (line.trials, line.trial_rounds, line.quick, line.by)]
    return replace(plan, kept=rows, choices={line.row: line.settings for line in same if line.row in labels})


def kept_beside(name: str, table: Reproduction, plan: Plan, quick: bool, folder: Path) -> list[Kept]:
    """What is kept in the file that the plan's rows go to. Raises `UserError` for a line that does not fit."""
    return read_lines(folder / _file_name(name, table, plan, plan.select, quick), Kept)


def _size_words(rounds: int, trials: int, trial_rounds: int | None, quick: bool) -> str:
    return f"{rounds} rounds with {budget(trials, trial_rounds)}" + " of the small version" * quick


def _file_name(name: str, table: Reproduction, size: Plan | Comparison, by: Select, quick: bool) -> str:
    rounds = size.rounds or table.rounds
    parts = [name, *[by] * (size.trials > 1), *[f"{rounds}-rounds"] * (rounds < table.rounds and not quick)]
    return f"{'-'.join(parts)}.jsonl"


def ended_in(run: Path) -> int | None:
    """The round in which a game ended; None where it did not, or there was none."""
    folder = RunFolder(run)
    try:
        rows = folder.rows() if folder.log.is_file() else []
    except UserError:  # the study has named it, and has no numbers of it
        return None
    return next((row["round"] for row in rows if row["kind"] == "equilibrium"), None)


def kept(name: str, folder: Path) -> list[list[Kept]]:
    """What is there of a table, one list for each file: the largest first, at equal size the table's own settings
    and then `split`. Raises `UserError` for a line that does not fit.
    """
    form = re.compile(rf"{re.escape(name)}(-({'|'.join(Select)}))?(-\d+-rounds)?")
    files = [read_lines(file, Kept) for file in sorted(folder.glob(f"{name}*.jsonl")) if form.fullmatch(file.stem)]

    def order(lines: list[Kept]) -> tuple[bool, int, bool, bool]:
        made = lines[0]
        return made.quick, -made.rounds, made.trials > 1, made.by is not Select.by_split

    return sorted(filter(None, files), key=order)
