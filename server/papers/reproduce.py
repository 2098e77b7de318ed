"""The tables of the papers: `reproduce/*.toml` holds their numbers, a comparison makes ours."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from rich.table import Table
from rich.text import Text

from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.methods import METHODS, method_class
from perennial.common.utils.errors import UserError
from perennial.common.utils.parsing import from_toml
from perennial.common.utils.suggestions import sentence, unknown
from perennial.server.papers import selection_study
from perennial.server.selection.split_rule import Select
from perennial.server.selection.summary import AREAS, SELECTIONS
from perennial.server.study.compare import (
    AREAS_TEXT,
    BASELINES,
    DECIMALS,
    Comparison,
    Entry,
    Plan,
    Spread,
    as_shown,
    budget,
)

FOLDER = Path(__file__).parents[2] / "reproduce"
LESS_IS_BETTER = frozenset({"loss", "variance"})
DEMO = FOLDER / "demo.toml"
"""Not a table of a paper: the claims of `perennial demo`."""


class Part(BaseModel):
    """A table of a file; it has no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


P = TypeVar("P", bound=Part)


def parsed(file: Path, kind: type[P]) -> P:
    """What a TOML file holds. Raises `UserError` where it does not fit."""
    try:
        return kind.model_validate(from_toml(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise UserError(f"{file}: {sentence(error)}") from None
    except ValueError as error:  # TOML's own, and of the encoding
        raise UserError(f"{file} is not valid TOML: {error}") from None


def must_be_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises `ValueError` for the first name that is not known."""
    if strange := [name for name in names if name not in known]:
        raise ValueError(unknown(kind, strange[0], known))


def row_name(title: str) -> str:
    """A title without what a shell or a keyboard has trouble with: `IRM†-FT` is `IRM-FT`, a space is `-`."""
    return re.sub(r"\W+", "-", title).strip("-")


def columns_of(scenario: Scenario) -> tuple[str, ...]:
    """What a table may have as a column on a scenario."""
    overall = ("worst", "average", "pooled", "held-out", *DECIMALS, *(AREAS if scenario.ranking_batch else ()))
    return (*scenario.test_environments, *overall, *(own.title for own in scenario.task.others))


def assignments(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings of a file as the command line has them, `key=value`."""
    return tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())


class PaperRow(Part):
    """A row of the paper's table. Its method may not be implemented yet: then it has the paper's numbers only."""

    title: str
    method: str
    paper: dict[str, float] = Field(default_factory=dict)
    """By column: in percent, but `loss`, `variance` and `entropy` as they are. None where it has a figure."""
    ended: float | None = None
    """The round in which the paper's games ended, in the mean."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Hyper-parameters that the paper gives."""
    searched: tuple[str, ...] = ()
    """Of `settings` those that a search may change, as it may those of other rows; it leaves the others alone."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Settings of this row's model in place of the scenario's."""
    remark: str = ""
    """What has to be known of this row."""
    seen: bool = False
    """Whether its settings were chosen, all or some, while looking at test data."""
    comparable: bool = True
    """Whether the paper's number and ours are of the same objective and data; if not, `remark` says why."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return row_name(self.title)

    @property
    def fixed(self) -> dict[str, Any]:
        """What a search leaves alone."""
        return {key: value for key, value in self.settings.items() if key not in self.searched}

    @property
    def implemented(self) -> bool:
        """Whether there is such a method here."""
        return self.method in METHODS


class Claim(Part):
    """What the paper says of two of its rows: the first is better in a column.

    In a file each may be a list: every row is better than every other in every column.
    """

    row: str
    than: str
    column: str
    why: str = ""
    """Why it is not so in our runs, for the page; what carries the explanation is named in it."""

    @property
    def words(self) -> str:
        """What tells it from other claims."""
        return f"{self.row} > {self.than}, {self.column}"


class Seen(Part):
    """Settings that somebody chose while looking at test data, or at the paper's results."""

    settings: tuple[str, ...] = Field(min_length=1)
    rows: tuple[str, ...] = Field(min_length=1)
    """Titles of the rows that have them. A row is free of this where a search has drawn all of `settings`."""
    why: str


class Quick(Part):
    """The small version: minutes, and not the paper's setting."""

    rounds: int = Field(ge=1)
    seeds: int = Field(1, ge=1)
    trials: int = Field(1, ge=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """In place of the table's, e.g. fewer samples or a smaller model."""


class Reproduction(Part):
    """One table of one paper."""

    title: str
    source: str
    scenario: str
    rounds: int = Field(ge=1)
    seeds: int = Field(ge=1)
    trials: int = Field(ge=1)
    trial_rounds: int | None = Field(None, ge=1)
    """Of each trial of a search; None: all."""
    select: Select = Select.held_out
    """What a search chooses by."""
    columns: tuple[str, ...] = Field(min_length=1)
    """Test environments, `worst`, `average`, `pooled`, `held-out`, `loss`, areas: what a comparison measures."""
    beside: tuple[str, ...] = ()
    """Columns that the paper does not have, shown after its own."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Run settings and hyper-parameters for every method that has them."""
    remarks: tuple[str, ...] = ()
    """What has to be known before the numbers are compared."""
    drawn: tuple[str, ...] = ()
    """Titles of the rows in the figures; none: the first that can be told apart."""
    claims: tuple[Claim, ...] = ()
    claims_of: str = ""
    """Another table that makes the same claims, of the paper's own data and settings; each is counted once."""
    why: str = ""
    """`Claim.why` of those that have none of their own."""
    limit: str = ""
    """What keeps it from the paper's size here: hours, data, a licence."""
    chosen: str = "the table's settings"
    """How its settings were chosen, for runs without a search."""
    seen: Seen | None = None
    other_data: bool = False
    """Whether the data are not the paper's, so that no run is of its size."""
    unsettled: str = ""
    """Why runs that are not the paper's in size and objective say nothing of a claim here, for or against it."""
    paper_round: Literal["final", "validation"] = "final"
    """The selection by which the paper chose the round that it scores, where it says; shown beside the last."""
    paper_test: str = ""
    """By what of the test data the paper chose it, where it did: a test environment, or `loss`. Shown beside the
    last as `as-in-paper`; no verdict is made of it."""
    quick: Quick
    rows: tuple[PaperRow, ...] = Field(min_length=1)

    @field_validator("claims", mode="before")
    @classmethod
    def _one_by_one(cls, values: Any) -> Any:
        def each(value: Any) -> list[Any]:
            return value if isinstance(value, list) else [value]

        if not isinstance(values, list) or not all(isinstance(claim, dict) for claim in values):
            return values
        parts = ("row", "than", "column")
        return [
            {**claim, **dict(zip(parts, chosen, strict=True))}
            for claim in values
            for chosen in product(*(each(claim.get(part)) for part in parts))
        ]

    @model_validator(mode="after")
    def _fits(self) -> "Reproduction":
        must_be_known("scenario", [self.scenario], SCENARIOS)
        must_be_known("column", (*self.columns, *self.beside), columns_of(SCENARIOS[self.scenario]))
        papers = {row.title: row.paper for row in self.rows}
        must_be_known("drawn row", self.drawn, papers)
        known = (*SCENARIOS[self.scenario].test_environments, "loss")
        must_be_known("paper_test", filter(None, [self.paper_test]), known)
        must_be_known("claims_of", filter(None, [self.claims_of]), reproductions())
        if twice := [words for words, times in Counter(claim.words for claim in self.claims).items() if times > 1]:
            raise ValueError(f"the claim {twice[0]} stands twice")
        for claim in self.claims:
            for title in (claim.row, claim.than):
                if claim.column not in papers.get(title, ()):
                    raise ValueError(f"the paper has no number for {claim.column!r} of a row {title!r}")
        if self.seen:
            must_be_known("row of `seen`", self.seen.rows, papers)
            for row in self.rows:
                if row.implemented and row.title in self.seen.rows:
                    fields = method_class(row.method).model_fields
                    must_be_known(f"setting of the row {row.title!r}", self.seen.settings, fields)
        names = Counter(row.name.casefold() for row in self.rows)
        for row in self.rows:
            if names[row.name.casefold()] > 1:
                raise ValueError(f"two rows have the title {row.title!r}, or differ in signs and capitals alone")
            if unset := [key for key in row.searched if key not in row.settings]:
                why = "is searched in any case; `settings` does not have it"
                raise ValueError(f"row {row.title!r}: {unset[0]!r} {why}")
            if not (row.comparable or row.remark):
                raise ValueError(f"row {row.title!r} needs a remark that says why it is not comparable")
            if row.paper and set(row.paper) != set(self.columns):
                raise ValueError(f"row {row.title!r} must have a number for each of {', '.join(self.columns)}")
        return self

    @cached_property
    def remark_numbers(self) -> dict[str, int]:
        """The rows' remarks, numbered in order of appearance."""
        remarks = dict.fromkeys(row.remark for row in self.rows if row.remark)
        return {remark: number for number, remark in enumerate(remarks, 1)}

    def plan(
        self,
        quick: bool,
        data_root: str | None = None,
        device: str | None = None,
        *,
        rounds: int | None = None,
        seeds: int | None = None,
        trials: int | None = None,
        trial_rounds: int | None = None,
        select: Select | None = None,
        only: Sequence[str] = (),
    ) -> Plan:
        """The comparison that makes our side of the table; what is given in place of the table's own.

        With `only` of the rows with these titles or names, and of the baselines. Raises `UserError` for another.
        """
        size = self.quick if quick else self
        settings = {**self.settings, **size.settings}
        every = [row for row in self.rows if row.implemented]
        rows = _only(every, only) if only else every
        if only:  # settings of methods that are left out would be unknown
            of_any, own = (
                {name for row in part for name in method_class(row.method).model_fields} for part in (every, rows)
            )
            settings = {name: value for name, value in settings.items() if name not in of_any - own}
        rounds, trials = rounds or size.rounds, trials or size.trials
        if not trial_rounds and trials > 1 and not quick and (self.trial_rounds or rounds) < rounds:
            trial_rounds = self.trial_rounds
        return Plan(
            entries=tuple(Entry(row.title, row.method, row.settings, row.model, row.searched) for row in rows),
            scenario=self.scenario,
            seeds=seeds or size.seeds,
            trials=trials,
            trial_rounds=trial_rounds,
            rounds=rounds,
            settings=assignments(settings),
            data_root=data_root,
            device=device,
            select=select or self.select,
            as_in_paper=self.paper_test,
            counted=trials > 1,
        )


def _only(rows: Sequence[PaperRow], titles: Sequence[str]) -> list[PaperRow]:
    """The rows with these titles or names, and the baselines. Raises `UserError` for a title of none."""
    known = {row.name.casefold(): row.name for row in rows}
    wanted = {row_name(title).casefold(): title for title in titles}
    if strange := [title for name, title in wanted.items() if name not in known]:
        raise UserError(unknown("row", strange[0], known.values()))
    return [row for row in rows if row.name.casefold() in wanted or row.method in BASELINES]


def reproductions(folder: Path = FOLDER) -> dict[str, Path]:
    """The files by the name that the command line knows them under."""
    return {path.stem: path for path in sorted(folder.glob("*.toml")) if path.name != DEMO.name}


def load_reproduction(name: str, folder: Path = FOLDER) -> Reproduction:
    """A table of a paper. Raises `UserError` for an unknown name and for a file that does not fit."""
    files = reproductions(folder)
    if name not in files:
        raise UserError(unknown("reproduction", name, [*files, selection_study.NAME]))
    return parsed(files[name], Reproduction)


@dataclass(frozen=True)
class Line:
    """One number of the paper and ours, in the column's unit; None where there is none."""

    title: str
    column: str
    paper: float | None
    ours: dict[str, Spread | None]
    """By selection."""
    implemented: bool = True
    comparable: bool = True
    remark: str = ""

    @property
    def decimals(self) -> int:
        """How many the column is shown with."""
        return DECIMALS.get(self.column, 2)

    def difference(self, selection: str) -> float | None:
        """Ours less the paper's."""
        ours = self.ours[selection]
        return None if ours is None or self.paper is None else ours.mean - self.paper


def side_by_side(table: Reproduction, comparison: Comparison) -> list[Line]:
    """The paper's rows that were asked for, then those that only we have: baselines and the constant predictor."""

    def ours(title: str, column: str) -> dict[str, Spread | None]:
        rows = {selection: comparison.row(title, selection) for selection in SELECTIONS}
        found = {selection: row.columns.get(column) if row else None for selection, row in rows.items()}
        return {selection: as_shown(column, spread) if spread else None for selection, spread in found.items()}

    compared = {choice.label for choice in comparison.choices}
    titles = {row.title for row in table.rows}
    missing = {row.title for row in table.rows if not row.implemented}
    shown = [row for row in table.rows if row.title in compared | missing]
    added = [label for label in dict.fromkeys(row.label for row in comparison.rows) if label not in titles]
    every: list[tuple[str, dict[str, float], dict[str, Any]]] = [
        *((row.title, row.paper, row.model_dump(include={"comparable", "remark"})) for row in shown),
        *((label, {}, {}) for label in added),
    ]
    return [
        Line(title, column, paper.get(column), ours(title, column), implemented=title not in missing, **about)
        for title, paper, about in every
        for column in (*table.columns, *table.beside)
    ]


def is_smaller(table: Reproduction, comparison: Comparison, quick: bool) -> bool:
    """Whether other data, rounds or another search make the numbers another thing than the paper's."""
    whole = (table.rounds, table.trials, table.trial_rounds if table.trials > 1 else None)
    made = (comparison.rounds, comparison.trials, comparison.trial_rounds)
    return made != whole or (quick and bool(table.quick.settings))


def reproduction_table(table: Reproduction, comparison: Comparison, quick: bool = False) -> Table:
    """The paper's table with ours beside it; `quick`: made from its small version."""
    used, whole = _size(comparison), _size(table)
    title = f"{table.title}\n{used}"
    smaller = is_smaller(table, comparison, quick)
    title += "\nQUICK VERSION, not comparable with the paper" if smaller else ""
    title += f" (whole: {whole})" if used != whole else ""
    areas = f"; {AREAS_TEXT}" if set(AREAS) & {*table.columns, *table.beside} else ""
    caption = f"accuracy in %{areas}; Δ: ours less the paper's, in brackets if not comparable"
    shown = Table(title=title, caption=caption)
    shown.add_column("method")
    shown.add_column("measure")
    for column in ("paper", "ours,\nfinal", "Δ", "ours,\nvalidation", "Δ"):
        shown.add_column(column, justify="right")
    before = ""
    for line in side_by_side(table, comparison):
        first, before = line.title != before, line.title
        if first:
            shown.add_section()
        number = table.remark_numbers.get(line.remark)
        name = Text(line.title + (f" [{number}]" if number else "") if first else "")
        cells = [cell for s in SELECTIONS for cell in _cells(line, s, smaller or not line.comparable)]
        if not line.implemented:
            cells = ["not implemented yet" if first else ""]
        paper = "–" if line.paper is None else f"{line.paper:.{line.decimals}f}"
        shown.add_row(name, line.column, paper, *cells)
    return shown


def remark_lines(table: Reproduction, comparison: Comparison) -> list[str]:
    """What has to be known before the numbers are compared: the file's remarks, then those of the rows shown."""
    shown = {line.remark for line in side_by_side(table, comparison)}
    of_rows = [f"[{number}] {text}" for text, number in table.remark_numbers.items() if text in shown]
    return [*(f"- {remark}" for remark in table.remarks), *of_rows]


def reproduction_json(table: Reproduction, comparison: Comparison, quick: bool = False) -> dict[str, Any]:
    """The same as plain data, with the whole comparison."""
    lines = [
        {**asdict(line), "difference": {selection: line.difference(selection) for selection in SELECTIONS}}
        for line in side_by_side(table, comparison)
    ]
    about = {
        "title": table.title,
        "source": table.source,
        "quick": is_smaller(table, comparison, quick),
        "remarks": remark_lines(table, comparison),
    }
    return {**about, "lines": lines, "comparison": comparison.json()}


def _cells(line: Line, selection: str, bracketed: bool) -> tuple[str, str]:
    ours, difference = line.ours[selection], line.difference(selection)
    signed = "" if difference is None else f"{difference:+.{line.decimals}f}"
    return ours.text(line.decimals) if ours else "–", f"({signed})" if signed and bracketed else signed


def _size(of: Reproduction | Comparison) -> str:
    one = of.seeds == 1
    return f"{of.rounds} rounds, {of.seeds} seed{'' if one else 's'}, {budget(of.trials, of.trial_rounds)}"
