"""Every claim of the papers on one page: what a table's runs said is kept as numbers, and judged by one rule."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev

from pydantic import BaseModel, ConfigDict

from perennial.common.methods import method_class
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_text
from perennial.common.utils.locks import locked_folder
from perennial.server.papers.reproduce import (
    LESS_IS_BETTER,
    Claim,
    Reproduction,
    load_reproduction,
    reproductions,
    row_name,
)
from perennial.server.results.formatting import assignments
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.selection.summary import SPLIT
from perennial.server.study.batch import read_lines
from perennial.server.study.compare import (
    CONSTANT,
    DECIMALS,
    NO_SELECTION,
    Comparison,
    Plan,
    as_shown,
    budget,
    spread,
    with_baselines,
)

SELECTION = "final"
"""Verdicts are about the last round, which nobody chose."""
VERDICTS = ("confirmed", "partly", "not", "not run")
LEVEL = 2.0
"""Standard errors that a difference must be above."""
LARGE = 10.0
"""Points from which on a gain is a large one."""
METHODS = {
    "cgpfl": "CGPFL",
    "perinvfl": "PerInvFL",
    "fedsdr": "FedSDR",
    "fedpin": "FedPIN",
    "fediir": "FedIIR",
    "fedilc": "FedILC",
    "fl_games": "FL Games",
}
"""The seven, by what the files of each and of its variants begin with."""


# ---------------------------------------------------------------------- what is kept of a table's runs


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
    there = {line.row for line in lines if _seeds(line) == plan.seeds} & labels
    rows = frozenset(label for label in there if row_name(label).casefold() not in wanted)
    for line in lines:
        if line.row in labels - rows and _seeds(line) > plan.seeds:
            raise UserError(
                f"{file} holds {_seeds(line)} seeds of the row {line.row}, which {plan.seeds} would replace; "
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


# ---------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Finding:
    """A claim, and what the runs of its two rows say; the numbers in the column's unit."""

    claim: Claim
    paper: tuple[float, float]
    method: Sequence[float] = ()
    """By seed."""
    reference: Sequence[float] = ()
    constant: Sequence[float] = ()
    """By seed; empty where the constant predictor has no number."""
    made: Kept | None = None
    """The method's line; None: there are no runs."""
    whole: bool = False
    """Whether rounds and data are the paper's."""
    stopped: bool = False
    """Whether a run of either row has no numbers, so nobody knows which seeds the others are of."""

    @property
    def papers_gain(self) -> float | None:
        """What the method gains in the paper, in points; None where the column is not in percent."""
        return None if self.claim.column in DECIMALS else self.paper[0] - self.paper[1]

    @property
    def difference(self) -> float:
        """What the method is better by, in the mean over seeds."""
        return self._better_by(self.reference)[0]

    @property
    def error(self) -> float:
        """The difference's standard error: of the differences seed by seed, where both have all of them."""
        return self._better_by(self.reference)[1]

    def _better_by(self, other: Sequence[float]) -> tuple[float, float]:
        """What the method is better by than these numbers by seed, and its standard error."""
        sign = -1 if self.claim.column in LESS_IS_BETTER else 1
        difference = sign * (fmean(self.method) - fmean(other))
        if len(self.method) == len(other) and not self.stopped:
            pairs = zip(self.method, other, strict=True)
            return difference, stdev(ours - theirs for ours, theirs in pairs) / sqrt(len(other))
        return difference, sqrt(sum(stdev(own) ** 2 / len(own) for own in (self.method, other)))

    @property
    def seeds(self) -> int:
        """How many both have."""
        return min(len(self.method), len(self.reference))

    @property
    def verdict(self) -> str:
        """*confirmed*, *partly* (at another size or on other data), *not*, or *not run*."""
        if self.seeds < 2:
            return "not run"
        if self.difference <= LEVEL * self.error:
            return "not"
        return "confirmed" if self.whole else "partly"

    @property
    def reversed(self) -> bool:
        """Whether the other row is the better one, by the same rule."""
        return self.verdict == "not" and self.difference < -LEVEL * self.error

    @property
    def learnt(self) -> bool | None:
        """Whether the method is better than the constant predictor, by the same rule; None where that has no
        number."""
        if not self.constant:
            return None
        difference, error = self._better_by(self.constant)
        return difference > LEVEL * error


def findings(table: Reproduction, lines: Sequence[Kept] = ()) -> Iterator[Finding]:
    """Every claim of a table with the numbers of one file."""
    rows = {line.row: line for line in lines if line.selection in (SELECTION, NO_SELECTION)}
    of_paper = {row.title: row for row in table.rows}
    for claim in table.claims:
        pair = of_paper[claim.row], of_paper[claim.than]
        paper = (pair[0].paper[claim.column], pair[1].paper[claim.column])
        method, reference = rows.get(claim.row), rows.get(claim.than)
        if not (method and reference and claim.column in method.measures.keys() & reference.measures.keys()):
            yield Finding(claim, paper)
            continue
        constant = _shown(rows[CONSTANT], claim.column) if CONSTANT in rows else []
        yield Finding(
            claim,
            paper,
            _shown(method, claim.column),
            _shown(reference, claim.column),
            constant if len(constant) > 1 else (),
            method,
            method.rounds >= table.rounds and not method.quick and all(row.comparable for row in pair),
            any(len(row.measures[claim.column]) < len(row.runs) for row in (method, reference)),
        )


def best(table: Reproduction, files: Sequence[Sequence[Kept]]) -> list[tuple[Finding, int]]:
    """Every claim as the first file with both its rows has it, and that file's number; 0 where none has.

    A search by another rule than `split` and the table's is beside these, and does not count.
    """
    counting = [
        (number, list(findings(table, lines)))
        for number, lines in enumerate(files)
        if lines[0].trials == 1 or lines[0].by in (table.select, Select.by_split)
    ]
    return [
        next(((own[place], number) for number, own in counting if own[place].verdict != "not run"), (waiting, 0))
        for place, waiting in enumerate(findings(table))
    ]


def _shown(line: Kept, column: str) -> list[float]:
    return [as_shown(column, spread([value])).mean for value in line.measures.get(column, ())]


# ---------------------------------------------------------------------- the page

HEAD = """# What the papers claim, and what our runs say

This page is made by `perennial reproduce --overview docs/results.md` from the files in `results/`, never by hand.
A file has one line for each row of a paper's table, with one number for each seed. You can compute every verdict.
The command of a table makes all its rows anew. With `--keep results` it makes those that the file lacks, with the
settings that a search has chosen before, and adds them there. So a table goes on without its runs, row by row.

A claim is "this method is better than that one in this column". Wherever a paper says that its method is better
than the others, each row of its table is a claim in which the paper's numbers say so. The **verdict** follows from
the runs by one rule. It is about the last round, which nobody chose. A game of FL Games ends by itself before it.

- **confirmed**: better by more than two standard errors, with the paper's rounds and data
- *partly*: the same with fewer rounds, other data or a small network, which *size* says, or a row not the paper's
- **not**: not better by more than two standard errors. It is *reversed* where the other row is, by the same rule
- *not run*: there are no runs of two seeds or more yet

Two standard errors are a weak test of three seeds: where two rows are alike, one claim in ten passes by chance.
So count the claims, and look twice at a single one.

Below a table's claims is **why** one is not so here, what shows it, and which rows are not the paper's. Then come
**all its rows** that were run, and what the paper has, in brackets. Rows without brackets are not in the paper.
Some tables were made several times: at another size, or with settings found in another way. All these runs follow
each other. A claim is counted once, by the first runs that have both of its rows; its reason stands there. Some
tables are variants of others, with other data or settings of ours. A claim of both is counted in the paper's own
table if that was run, and else in the variant. "By split" is the rule that was asked for. Where
[`split`](selection.md) does not speak, held-out data chose.

Accuracies are in percent, as mean over seeds ± standard deviation. The difference is ours, ± its standard error.
*Constant* is a predictor that always says the most frequent class. A method that is not above it has learnt
nothing that is of use there, whatever the verdict.
"""

PICTURE = """![What the method of each claim gains in the paper, and in our runs]({})

*One mark for each claim in percent that was run, with two standard errors to either side. On the diagonal we find
what the paper has. Below the dashed line the other method is better.*
"""

BY_METHOD = """By method, with its variants and ablations. *Above the constant* is about claims that are confirmed
or partly so: in how many the better method also beats that predictor, by the same rule. Gains are medians, in
points, over claims that were run:
"""


def overview(folder: Path, picture: str) -> tuple[str, str]:
    """The page, and the SVG that it shows as `picture`. Raises `UserError` for a file that does not fit."""
    tables = {name: load_reproduction(name) for name in reproductions()}
    claimed = {name: table for name, table in tables.items() if table.claims}
    files = {name: kept(name, folder) for name in claimed}
    best_of = {name: best(table, files[name]) for name, table in claimed.items()}
    found = {name: [finding for finding, _ in own] for name, own in best_of.items()}
    once = _once(claimed, found)
    verdicts = {name: [finding.verdict for finding in own] for name, own in found.items()}
    order = sorted(claimed, key=lambda name: {*verdicts[name]} == {VERDICTS[-1]})  # what was run comes first
    together = [finding for own in once.values() for finding in own]
    cells = [[f"[{name}](#{name})", claimed[name].source, *_counts(once[name])] for name in order]
    learnt, of = _learnt(together)
    counts = ", ".join(f"{number} {verdict}" for number, verdict in zip(_counts(together), VERDICTS, strict=True))
    parts = [
        HEAD,
        f"Of {len(together)} claims: {counts}.\n"
        f"Of those that are not so, {sum(own.reversed for own in together)} are reversed.\n"
        f"{_large_and_small(together)}\n"
        f"In {learnt} of {of} that are confirmed or partly so, the better method also beats the constant.\n",
        PICTURE.format(picture),
        BY_METHOD,
        *_by_method(claimed, once),
        "",
        *_table(["table", "paper", *VERDICTS], cells),
    ]
    for name in order:
        table = claimed[name]
        parts.append(f"\n## {name}\n\n{table.title} ({table.source}).\n")
        if table.claims_of:
            parts.append(f"A variant of [{table.claims_of}](#{table.claims_of}), whose claims it shares.\n")
        parts += [*(f"- {remark}" for remark in table.remarks), ""] if files[name] and table.remarks else []
        for number, lines in enumerate(files[name] or [[]]):
            counted = [place for place, (_, file) in enumerate(best_of[name]) if file == number]
            parts.append("\n".join(_section(name, table, lines, counted)))
    return "\n".join(parts) + "\n", _gains(together)


def _once(tables: Mapping[str, Reproduction], found: Mapping[str, Sequence[Finding]]) -> dict[str, list[Finding]]:
    """Each claim once: where two tables share it, as the paper's own has it, and else as the variant."""
    left = {name: {own.claim.words: own for own in every} for name, every in found.items()}
    for name, table in tables.items():
        for shared in left[name].keys() & left.get(table.claims_of, {}).keys():
            ran = left[table.claims_of][shared].verdict != VERDICTS[-1]
            del left[name if ran else table.claims_of][shared]
    return {name: list(own.values()) for name, own in left.items()}


def _counts(found: Sequence[Finding]) -> list[str]:
    every = [finding.verdict for finding in found]
    return [str(every.count(verdict)) for verdict in VERDICTS] if found else ["–"] * len(VERDICTS)


def _by_method(tables: Mapping[str, Reproduction], found: Mapping[str, Sequence[Finding]]) -> list[str]:
    """How the claims of each method and its variants stand, and what it gains."""
    files = {
        (name, row.title): method_class(row.method).module()
        for name, table in tables.items()
        for row in table.rows
    }
    cells = []
    for stem, title in METHODS.items():
        every = [of for name, own in found.items() for of in own if files[name, of.claim.row].startswith(stem)]
        gains = [(of.papers_gain, of.difference) for of in every if of.made and of.papers_gain is not None]
        medians = [f"{median(side):+.1f}" for side in zip(*gains, strict=True)] or ["–", "–"]
        cells.append(
            [f"[{title}](methods/{stem}.md)", *_counts(every), " of ".join(map(str, _learnt(every))), *medians]
        )
    return _table(["method", *VERDICTS, "above the constant", "gain in the paper", "gain here"], cells)


def _gains(found: Sequence[Finding]) -> str:
    """What methods gain in points, in the papers and here, by verdict."""
    from perennial.server.results.figures import gains_figure  # matplotlib takes its time

    gains: dict[str, list[tuple[float, float, float]]] = {verdict: [] for verdict in VERDICTS[:-1]}
    for finding in found:
        if finding.verdict in gains and finding.papers_gain is not None:
            gains[finding.verdict].append((finding.papers_gain, finding.difference, LEVEL * finding.error))
    return gains_figure(gains, "gain in the paper (points)", "gain in our runs (points)")


def _large_and_small(found: Sequence[Finding]) -> str:
    """How many of the large gains, and of the small ones, there are here, too."""
    gains = [(own.papers_gain, own.verdict != "not") for own in found if own.verdict != "not run"]
    large = [holds for gain, holds in gains if gain is not None and gain >= LARGE]
    small = [holds for gain, holds in gains if gain is not None and gain < LARGE]
    return (
        f"Where the paper gains {LARGE:.0f} points or more, {sum(large)} of {len(large)} claims that were run are "
        f"confirmed or partly so.\nWhere it gains less, {sum(small)} of {len(small)} are."
    )


def _learnt(found: Sequence[Finding]) -> tuple[int, int]:
    """In how many claims that hold the better method beats the constant, of those that have one."""
    learnt = [own.learnt for own in found if own.verdict in ("confirmed", "partly") and own.learnt is not None]
    return sum(learnt), len(learnt)


def _section(name: str, table: Reproduction, lines: Sequence[Kept], counted: Collection[int]) -> list[str]:
    """One file of a table; `counted`: the claims that are judged, and explained, by it and by no other."""
    found = list(findings(table, lines))
    ran = next((finding for finding in found if finding.made), None)
    made = ran.made if ran else next((line for line in lines if line.selection == SELECTION), None)
    if made is None:
        why = f": {table.limit}" if table.limit else ""
        summary = f"Not run yet{why}. The command is `perennial reproduce {name} --keep results`."
    else:
        command = _command(name, table, made, ran.seeds if ran else _seeds(made))
        search = f"{budget(made.trials, made.trial_rounds)} by {made.by}"
        chosen = table.chosen if made.trials == 1 else search
        waiting = any(finding.verdict == "not run" for finding in found)
        whole = ran.whole if ran else made.rounds >= table.rounds and not made.quick
        summary = f"Size: {_size(table, made, whole, waiting)}. Settings: {chosen}. Command: `{command}`"
    heads = ["claim", "paper", "ours", "difference", "seeds", "constant", "verdict"]
    shown = [finding for place, finding in enumerate(found) if finding.made or place in counted]
    claims = [*_table(heads, map(_cells, shown)), ""] if shown else []
    reasons = _reasons(table, [found[place] for place in counted])
    return [summary, "", *claims, *reasons, *_rows(table, lines), *_drawn(table, lines)]


def _size(table: Reproduction, made: Kept, whole: bool, waiting: bool) -> str:
    """What the runs are of the paper's, whether claims wait, and what keeps the table from being whole here."""
    of = "rounds for the paper's {}" if made.rounds > table.rounds else "of {} rounds"
    rounds = f"{made.rounds} {of.format(table.rounds)}"
    if whole:
        parts = ["the paper's"]
    elif made.quick:
        changed = ", ".join(f"{key}={value}" for key, value in table.quick.settings.items())
        parts = [f"the small version ({changed})" if changed else "the small version", rounds]
    else:
        parts = [rounds, *["other data than the paper's"] * (made.rounds >= table.rounds)]
    parts += ["not all rows yet"] * waiting
    why = f" ({table.limit})" if table.limit and (waiting or not whole) else ""
    return ", ".join(parts) + why


def _reasons(table: Reproduction, found: Sequence[Finding]) -> list[str]:
    """Why claims are not what we find, one line for each reason; and which rows are not the paper's."""
    several = len({claim.column for claim in table.claims}) > 1
    reasons: dict[str, list[str]] = {}
    for finding in found:
        claim = finding.claim
        if finding.verdict == "not" and (why := claim.why or table.why):
            name = f"{claim.row} > {claim.than}" + f", {claim.column}" * several
            reasons.setdefault(why, []).append(name)
    lines = [f"- **not** {'; '.join(claims)}: {why}" for why, claims in reasons.items()]
    ran = {row for finding in found if finding.made for row in (finding.claim.row, finding.claim.than)}
    lines += [f"- {row.title}: {row.remark}" for row in table.rows if row.title in ran and not row.comparable]
    return [*lines, ""] if lines else []


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _rows(table: Reproduction, lines: Sequence[Kept]) -> list[str]:
    """All rows of two seeds or more, the paper's numbers in brackets; also by `split` and by the paper's rule."""
    chosen = (SELECTION, SPLIT, NO_SELECTION, table.paper_round)
    lines = [line for line in lines if line.selection in chosen and _seeds(line) > 1]
    if not lines:
        return []
    of_paper = {row.title: row for row in table.rows}
    columns = [*table.columns, *table.beside]
    games = any(line.ended for line in lines)
    several = any(line.selection not in (SELECTION, NO_SELECTION) for line in lines)
    cells = []
    for line in lines:
        paper, ended = (row.paper, row.ended) if (row := of_paper.get(line.row)) else ({}, None)
        numbers = [_cell(line, column, paper) for column in columns]
        games_cell = [_endings(line.ended, ended)] * games
        cells.append([line.row, *[line.selection] * several, *numbers, *games_cell, str(_seeds(line))])
    heads = ["row", *["round"] * several, *columns, *["ended in round"] * games, "seeds"]
    return [*_table(heads, cells), ""]


def _drawn(table: Reproduction, lines: Sequence[Kept]) -> list[str]:
    """What a search chose for each row, to four digits, and what it left as it was; the files have all digits."""
    own = [line for line in lines if line.trials > 1 and line.selection == SELECTION]
    if not own:
        return []
    fixed = {row.title: row.fixed for row in table.rows}
    chosen = [
        f"- {line.row}: {assignments(line.settings) or 'the defaults, its first trial'}"
        + (f"; not searched: {assignments(left)}" if (left := fixed.get(line.row)) else "")
        for line in own
    ]
    everywhere = f" Not searched for any row: {assignments(table.settings)}." if table.settings else ""
    return [f"The settings that the search chose.{everywhere}", "", *chosen, ""]


def _seeds(line: Kept) -> int:
    return min(map(len, line.measures.values()), default=0)


def _cell(line: Kept, column: str, paper: Mapping[str, float]) -> str:
    places = DECIMALS.get(column, 2)
    ours = spread(_shown(line, column)).text(places) if column in line.measures else "–"
    return f"{ours} ({paper[column]:.{places}f})" if column in paper else ours


def _endings(ended: Sequence[int | None], paper: float | None) -> str:
    rounds = [number for number in ended if number]
    if not ended:
        return "–"
    parts = [spread(rounds).text(0)] if rounds else []
    parts += [f"{len(rounds)} of {len(ended)}"] if len(rounds) < len(ended) else []
    return ", ".join(parts) + (f" ({paper:.0f})" if paper else "")


def _command(name: str, table: Reproduction, made: Kept, seeds: int) -> str:
    """With what differs from the table; a search's rule belongs to a search."""
    search = {"trial_rounds": made.trial_rounds, "select": made.by} if made.trials > 1 else {}
    size = {"rounds": made.rounds, "seeds": seeds, "trials": made.trials, **search}
    of_table = table.quick if made.quick else table
    other = {key: value for key, value in size.items() if value not in (None, getattr(of_table, key, None))}
    options = ["--quick"] * made.quick + [f"--{key.replace('_', '-')} {value}" for key, value in other.items()]
    return " ".join([f"perennial reproduce {name}", *options])


def _cells(finding: Finding) -> list[str]:
    claim, places = finding.claim, DECIMALS.get(finding.claim.column, 2)
    paper = " / ".join(f"{number:.{places}f}" for number in finding.paper)
    if finding.verdict == "not run":
        return [claim.words, paper, "–", "–", "–", "–", "*not run*"]
    ours = " / ".join(spread(own).text(places) for own in (finding.method, finding.reference))
    difference = f"{finding.difference:+.{places}f} ± {finding.error:.{places}f}"
    constant = f"{fmean(finding.constant):.{places}f}" if finding.constant else "–"
    verdict = "*partly*" if finding.verdict == "partly" else f"**{finding.verdict}**"
    verdict += ", reversed" * finding.reversed
    return [claim.words, paper, ours, difference, str(finding.seeds), constant, verdict]
