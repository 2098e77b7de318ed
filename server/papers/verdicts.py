"""What runs say of a claim, by one rule: the verdict, its marks, and what is counted once."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

from perennial.server.papers.kept import Kept
from perennial.server.papers.reproduce import LESS_IS_BETTER, Claim, Reproduction
from perennial.server.selection.split_rule import Select
from perennial.server.study.compare import CONSTANT, DECIMALS, NO_SELECTION, as_shown, spread

SELECTION = "final"
"""Verdicts are about the last round, which nobody chose."""
VERDICTS = ("confirmed", "partly", "undecided", "partly not", "not", "not comparable", "not run")
HOLDS = frozenset({"confirmed", "partly"})
FAILS = frozenset({"not", "partly not"})
JUDGED = (*HOLDS, "undecided", *FAILS)
LEVEL = 2.0
"""Standard errors that a difference must be above."""
SAME = 0.001
"""What two copies of one row differ by at most, in each seed and column, in the unit of `Kept.measures`."""
LOCAL = "Local"


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
    local: Sequence[float] = ()
    """The same of a model that each client trains alone."""
    made: tuple[Kept, Kept] | None = None
    """The lines of the two rows; None: there are no runs."""
    size: bool = False
    """Whether rounds, seeds and data are the paper's."""
    own: bool = True
    """Whether both rows are the paper's: the same objective, on its data."""
    unsettled: bool = False
    """Whether such runs say nothing of the claim, for or against it."""
    seen: bool = False
    """Whether settings of either row were chosen while looking at test data or at the paper's results."""
    stopped: bool = False
    """Whether a run of either row has no numbers, so nobody knows which seeds the others are of."""

    @property
    def papers_gain(self) -> float:
        """What the method gains in the paper, in the column's unit."""
        return self._sign * (self.paper[0] - self.paper[1])

    @property
    def in_points(self) -> bool:
        """Whether the column is in percent."""
        return self.claim.column not in DECIMALS

    @property
    def difference(self) -> float:
        """What the method is better by, in the mean over seeds."""
        return self._better_by(self.reference)[0]

    @property
    def error(self) -> float:
        """The difference's standard error: of the differences seed by seed, where both have all of them."""
        return self._better_by(self.reference)[1]

    @property
    def _sign(self) -> int:
        return -1 if self.claim.column in LESS_IS_BETTER else 1

    def _better_by(self, other: Sequence[float]) -> tuple[float, float]:
        """What the method is better by than these numbers by seed, and its standard error."""
        difference = self._sign * (fmean(self.method) - fmean(other))
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
        """One of `VERDICTS`. What holds and what fails are cut down alike where runs are not the paper's."""
        if self.seeds < 2:
            return "not run"
        whole = self.size and self.own
        if self.unsettled and not whole:
            return "not comparable"
        if self.difference > LEVEL * self.error:
            return "confirmed" if whole else "partly"
        if self.difference + LEVEL * self.error >= self.papers_gain:
            return "undecided"
        return "not" if whole else "partly not"

    @property
    def reversed(self) -> bool:
        """Whether the other row is the better one, by the same rule."""
        return self.verdict in FAILS and self.difference < -LEVEL * self.error

    @property
    def above_constant(self) -> bool | None:
        """Whether the method is better than the constant predictor, by the same rule; None where that has no
        number."""
        return self._above(self.constant)

    @property
    def above_local(self) -> bool | None:
        """The same of a model that each client trains alone."""
        return self._above(self.local)

    def _above(self, other: Sequence[float]) -> bool | None:
        if len(other) < 2:
            return None
        difference, error = self._better_by(other)
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
        both = method, reference
        numbers = {name: _shown(line, claim.column) for name, line in rows.items()}
        found = Finding(
            claim,
            paper,
            method=numbers[method.row],
            reference=numbers[reference.row],
            constant=numbers.get(CONSTANT, ()),
            local=numbers.get(LOCAL, ()),
            made=both,
            own=all(row.comparable for row in pair),
            unsettled=bool(table.unsettled),
            seen=any(_seen(table, line) for line in both),
            stopped=any(len(line.measures[claim.column]) < len(line.runs) for line in both),
        )
        size = method.rounds >= table.rounds and found.seeds >= table.seeds
        yield replace(found, size=size and not (method.quick or table.other_data))


def _seen(table: Reproduction, line: Kept) -> bool:
    """Whether a row has a setting that was chosen on test data, and no search drew another."""
    if not table.seen or line.row not in table.seen.rows:
        return False
    return not set(table.seen.settings) <= line.settings.keys()


def _shown(line: Kept, column: str) -> list[float]:
    return [as_shown(column, spread([value])).mean for value in line.measures.get(column, ())]


def judged(table: Reproduction, files: Sequence[Sequence[Kept]]) -> list[tuple[Finding, int]]:
    """Every claim with the numbers of one file, and that file's place; 0 where it was not run.

    All claims of a row are judged by runs whose settings were chosen in one way (`Kept.way`): the one with runs of
    most of them, the first at equal numbers. Of its files the first that has both rows counts. A search by another
    rule than `split` and the table's does not.
    """
    counting = {None, table.select, Select.by_split}
    ways: dict[Select | None, list[tuple[int, list[Finding]]]] = {}
    for number, lines in enumerate(files):
        if lines[0].way in counting:
            ways.setdefault(lines[0].way, []).append((number, list(findings(table, lines))))
    of_row: dict[str, list[int]] = {}
    for place, claim in enumerate(table.claims):
        of_row.setdefault(claim.row, []).append(place)
    found = [(waiting, 0) for waiting in findings(table)]
    for places in of_row.values():
        in_each_way = [
            {place: first for place in places if (first := _first(own, place))} for own in ways.values()
        ]
        for place, first in max(in_each_way, key=len, default={}).items():
            found[place] = first
    return found


def _first(files: Iterable[tuple[int, Sequence[Finding]]], place: int) -> tuple[Finding, int] | None:
    return next(((own[place], number) for number, own in files if own[place].verdict != "not run"), None)


def leaders(table: Reproduction, found: Sequence[Finding]) -> list[int]:
    """For each claim the place of the one that it is counted with, which is its own for most.

    Where the same runs of a row are compared, in the same column, with several copies of one row, that counts
    once.
    """
    places: list[int] = []
    for place, own in enumerate(found):
        earlier = (other for other in dict.fromkeys(places) if _is_copy(table, found[other], own))
        places.append(next(earlier, place))
    return places


def _is_copy(table: Reproduction, one: Finding, other: Finding) -> bool:
    if not (one.made and other.made):
        return False
    (row, than), (same, copy) = one.made, other.made
    return row is same and one.claim.column == other.claim.column and alike(than, copy, table.columns)


def alike(one: Kept, other: Kept, columns: Collection[str]) -> bool:
    """Whether two rows have the same number, but for `SAME`, in every seed and column."""
    pairs = [(one.measures.get(column, []), other.measures.get(column, [])) for column in columns]
    return all(
        len(ours) == len(theirs) and all(round(abs(a - b), 9) <= SAME for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in pairs
    )


def counted(
    tables: Mapping[str, Reproduction], found: Mapping[str, Sequence[Finding]]
) -> dict[str, list[Finding]]:
    """Each claim once: of copies the first; and where two tables share it, as the paper's own has it if that was
    run, and else as the variant."""
    left = {name: {own.claim.words: own for own in every} for name, every in found.items()}
    for name, table in tables.items():
        for shared in left[name].keys() & left.get(table.claims_of, {}).keys():
            ran = left[table.claims_of][shared].verdict != "not run"
            del left[name if ran else table.claims_of][shared]
    of_tables = {name: list(own.values()) for name, own in left.items()}
    return {
        name: [own[place] for place in dict.fromkeys(leaders(tables[name], own))]
        for name, own in of_tables.items()
    }
