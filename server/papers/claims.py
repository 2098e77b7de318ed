"""What all tables of the seven papers say: claims by paper, counts, and what pages of them have in common."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perennial.common.methods import method_class
from perennial.server.papers.kept import Kept, kept
from perennial.server.papers.reproduce import Reproduction, load_reproduction, reproductions
from perennial.server.papers.verdicts import (
    HOLDS,
    JUDGED,
    VERDICTS,
    Finding,
    counted,
    findings,
    judged,
    leaders,
)
from perennial.server.selection.split_rule import Select


@dataclass(frozen=True)
class Paper:
    """One of the seven, for somebody who has not read it."""

    stem: str
    """What the files of its method and of its variants begin with, and the name of its pages."""
    title: str
    promise: str
    found: str


PAPERS = (
    Paper(
        "cgpfl",
        "CGPFL",
        "Clients that are alike form groups. A model for each beats one for all, and other personal models.",
        "It beats one model for all. With the thesis's λ Ditto, APFL and clients that train alone are better. "
        "With λ from held-out data they mostly are not.",
    ),
    Paper(
        "perinvfl",
        "PerInvFL",
        "Personal models leave out what helps at some sites only, such as a colour.",
        "It beats methods that follow the colour, but rarely a constant answer. Its step size was found on test "
        "results.",
    ),
    Paper(
        "fedsdr",
        "FedSDR",
        "It finds the shortcut, and its personal models do without. So they are best in the worst case.",
        "It gives up a large part of the shortcut, and most others none. In the worst case a constant answer is "
        "better still.",
    ),
    Paper(
        "fedpin",
        "FedPIN",
        "A global model without shortcuts guides personal models.",
        "Its global model keeps the shortcut. It beats most others, but mostly not clients that train alone.",
    ),
    Paper(
        "fediir",
        "FedIIR",
        "Clients agree on the direction in which they learn. So the model is better where nobody trained.",
        "No gain over FedAvg. With the authors' own update rules it gains +0.4 ± 0.5 points where the paper has "
        "+2.2.",
    ),
    Paper(
        "fedilc",
        "FedILC",
        "Geometric means keep what all clients agree on. So the model is better at new sites.",
        "The loss is lower in most tables. Answers are right about as often as with plain means.",
    ),
    Paper(
        "fl_games",
        "FL Games",
        "Clients play a game whose end is a model without the shortcut.",
        "True if a game stops at the training accuracy that the paper prints. It rarely beats a constant answer.",
    ),
)
NONE = "–"
OF_THESE = "of these that hold, ‡"


@dataclass(frozen=True)
class Study:
    """All tables with claims, what is kept of them, and what it says."""

    tables: dict[str, Reproduction]
    files: dict[str, list[list[Kept]]]
    found: dict[str, list[tuple[Finding, int]]]
    counted: dict[str, list[Finding]]

    @classmethod
    def read(cls, folder: Path) -> "Study":
        """From a folder of results. Raises `UserError` for a file that does not fit."""
        every = {name: load_reproduction(name) for name in reproductions()}
        tables = {name: table for name, table in every.items() if table.claims}
        files = {name: kept(name, folder) for name in tables}
        found = {name: judged(table, files[name]) for name, table in tables.items()}
        only = {name: [finding for finding, _ in own] for name, own in found.items()}
        return cls(tables, files, found, counted(tables, only))

    def is_of(self, name: str, row: str, paper: Paper) -> bool:
        """Whether a row's method is the paper's, or a variant of it."""
        (method,) = (own.method for own in self.tables[name].rows if own.title == row)
        return method_class(method).module().startswith(paper.stem)

    def of(self, paper: Paper, found: Mapping[str, Iterable[Finding]]) -> list[Finding]:
        """What is of this paper's method."""
        return [own for name, every in found.items() for own in every if self.is_of(name, own.claim.row, paper)]

    def searched(self, way: Select) -> dict[str, list[Finding]]:
        """Every claim with settings that were chosen in this way, by the longest runs there are; copies once."""
        found = {}
        for name, table in self.tables.items():
            files = [list(findings(table, lines)) for lines in self.files[name] if lines[0].way is way]
            of_claims = zip(*files, strict=True)
            first = [next((own for own in every if own.verdict in JUDGED), None) for every in of_claims]
            there = [own for own in first if own]
            found[name] = [there[place] for place in dict.fromkeys(leaders(table, there))]
        return found

    def papers_of(self, name: str) -> list[Paper]:
        """Whose claims a table has; the first paper's page has all its rows."""
        rows = dict.fromkeys(claim.row for claim in self.tables[name].claims)
        return list(dict.fromkeys(paper for row in rows for paper in PAPERS if self.is_of(name, row, paper)))


def counts_of(found: Iterable[Finding]) -> list[int]:
    """How many have each of `VERDICTS`."""
    every = Counter(finding.verdict for finding in found)
    return [every[verdict] for verdict in VERDICTS]


def count_cells(found: Sequence[Finding]) -> list[str]:
    """The same as cells of a table, and how many of those that hold are marked."""
    if not found:
        return [NONE] * (len(VERDICTS) + 1)
    return [*map(str, counts_of(found)), str(sum(own.seen and own.verdict in HOLDS for own in found))]


def counts_text(found: Sequence[Finding]) -> str:
    """How many claims have which verdict, in a sentence; in brackets how many of them are marked."""
    seen = Counter(own.verdict for own in found if own.seen)
    counts = [
        f"{number} {verdict}" + (f" ({seen[verdict]} ‡)" if seen[verdict] else "")
        for number, verdict in zip(counts_of(found), VERDICTS, strict=True)
    ]
    return f"Of {len(found)} claims: {', '.join(counts)}.\n"


def lines_of(lines: Iterable[str]) -> Iterator[str]:
    """With their ends."""
    return (f"{line}\n" for line in lines)
