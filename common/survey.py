"""A survey: what a server asks sites about their tables, and what they tell. Each side checks the other's words.

First each site tells the *shape* of its table: names and kinds of columns, names of classes and categories. Then
it tells *sums*, up to three times: counts and sums of numbers, squares around the means, counts in bins. A name
leaves a site only if it has so many rows of it or more (`Question.least`), a sum only if it is of so many numbers.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from perennial.common.data.columns import LEAST, MOST_CATEGORIES, Finite
from perennial.common.data.site_files import LABEL
from perennial.common.methods.base import Sum
from perennial.common.tasks import TaskName
from perennial.common.utils.suggestions import alike
from perennial.common.wire import LONGEST_NAME

SHAPE, SUMS = "query.shape", "query.sums"
"""Message types."""
SURVEY = "survey"
"""Key of a request's settings: what is asked, as JSON."""
TOLD = "table"
"""Key of a reply's settings: a `Shape` as JSON."""
RECORD = (Sum(SUMS, SUMS),)
"""The record of sums, which secure aggregation can hide."""
BINS = 128
"""Of equal width within `REACH` deviations of the mean, beside one on either side."""
REACH = 2.0
MOST_NAMES = 1000
"""Classes of a site, and environments."""
MOST_LETTERS = 2**22
"""Of a question as JSON. A `Shape` has a quarter of it (`most_setting_bytes`), so that all its columns fit."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME)]
Rule = Literal["median", "mean", "most-frequent"]
"""What an empty cell may count as."""
Spellings = Mapping[tuple[str, str], Collection[str]]
"""Names by what they are and of which column: ("classes", ""), ("categories", "ward")."""
Entry = tuple[str, str, float]
"""One of the sums: what it is, of which class or column, and of which value or bin where there are several."""


class Part(BaseModel):
    """Has no other keys, and names that a terminal can show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*")
    @classmethod
    def _check_names(cls, value: object) -> object:
        names = value if isinstance(value, (tuple, dict)) else ()
        if any(isinstance(name, str) and not name.isprintable() for name in names):
            raise ValueError("a name has letters that cannot be shown")
        return value


class Question(Part):
    """What the operator wants to know of tables."""

    target: TaskName = "classes"
    label_column: str = LABEL
    """Of the class; of other targets the columns, with commas between them."""
    environment_column: str = ""
    impute: dict[str, Rule] = {}
    """By column, or by "" for all others."""
    categories: tuple[Name, ...] = ()
    """Columns whose numbers are names."""
    drop: tuple[Name, ...] = ()
    """Columns that nobody uses."""
    least: int = Field(default=LEAST, ge=1, le=10**9)
    secure: bool = False
    """Whether sums are to be told under secure aggregation alone."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Columns of numbers that are no features."""
        if self.target == "classes":
            return ()
        return tuple(name.strip() for name in self.label_column.split(","))

    def rule(self, column: str) -> Rule | None:
        """What an empty cell of a column of numbers counts as; None: there must be none."""
        return self.impute.get(column, self.impute.get(""))


class ColumnShape(Part):
    """What a site tells of a column. Of one that is dropped it tells nothing, and has not looked at it."""

    kind: Literal["number", "category", "dates", "text", "empty", "dropped"]
    names: tuple[Name, ...] = Field(default=(), max_length=MOST_CATEGORIES)
    """Categories that enough rows have."""
    values: tuple[Finite, ...] = Field(default=(), max_length=MOST_CATEGORIES)
    """Numbers that enough rows have, where the most frequent one is asked for."""
    all_different: bool = False
    """Whether its numbers are whole and all different, as those of an identifier."""


class Shape(Part):
    """What a site tells first."""

    classes: tuple[Name, ...] = Field(max_length=MOST_NAMES)
    """Those that enough rows have."""
    environments: tuple[Name, ...] | None = Field(default=None, max_length=MOST_NAMES)
    columns: dict[Name, ColumnShape] = Field(min_length=1)


class Asked(Part):
    """Sums that are asked for, in the order of `entries`."""

    step: Literal["counts", "squares", "bins", "intervals"]
    classes: tuple[Name, ...] = ()
    environments: tuple[Name, ...] = ()
    columns: tuple[Name, ...] = ()
    """Whose empty cells are counted."""
    numbers: tuple[Name, ...] = ()
    values: dict[Name, tuple[Finite, ...]] = {}
    """Of columns of numbers, values to be counted."""
    means: dict[Name, Finite] = {}
    """By column of numbers, what squares are around."""
    bins: dict[Name, tuple[Finite, Finite]] = {}
    """By column of numbers, where the equal bins begin and end."""
    times: tuple[Finite, ...] = ()
    """Ends of the intervals in which events, and what is censored, are counted."""

    def entries(self) -> Iterator[Entry]:
        """What each number of the vector is."""
        if self.step == "counts":
            yield "rows", "", 0
            yield from (("class", name, 0) for name in self.classes)
            yield from (("environment", name, 0) for name in self.environments)
            yield from (("empty", name, 0) for name in self.columns)
            yield from (("count", name, 0) for name in self.numbers)
            yield from (("sum", name, 0) for name in self.numbers)
            yield from (("value", name, value) for name, values in self.values.items() for value in values)
        elif self.step == "squares":
            yield from (("square", name, 0) for name in self.means)
        elif self.step == "bins":
            yield from (("bin", name, number) for name in self.bins for number in range(BINS + 2))
        else:
            kinds = ("event", "censored") if self.times else ()
            yield from ((kind, "", number) for kind in kinds for number in range(len(self.times) + 1))


class Request(Part):
    """All of a request's question."""

    question: Question
    asked: Asked | None = None


def all_names(
    classes: Iterable[str],
    environments: Iterable[str] | None,
    categories: Mapping[str, Iterable[str]] | None = None,
) -> Spellings:
    """All names of somewhere, `categories` by column."""
    found = {("classes", ""): {*classes}, ("environments", ""): {*(environments or ())}}
    return found | {("categories", column): {*names} for column, names in (categories or {}).items()}


def spelt_alike(sites: Mapping[str, Spellings], show: bool = True) -> list[str]:
    """A sentence for each name that seems to be spelt in several ways; with `show`, by which of several sites."""
    found, show = [], show and len(sites) > 1
    for what, column in sorted({key for own in sites.values() for key in own}):
        having = dict[str, list[str]]()
        for site, own in sorted(sites.items()):
            for name in own.get((what, column), ()):
                having.setdefault(name, []).append(site)
        for names in alike(having):
            said = [f"{name!r}{f' ({some(having[name])})' if show else ''}" for name in names]
            of = f" of column {column!r}" if column else ""
            found.append(
                f"{what} {' and '.join(said)}{of} look like the same one; if so, spell them alike in the tables"
            )
    return found


def shared_nowhere(sites: Mapping[str, Spellings], columns: Iterable[str] = ()) -> list[str]:
    """A sentence where a site has no class, or no category of a column, in common with any other site."""
    found = []
    for key in (("classes", ""), *(("categories", column) for column in columns)):
        what, of = ("category", f"of column {key[1]!r} ") if key[1] else ("class", "")
        every = {site: {*own[key]} for site, own in sorted(sites.items()) if own.get(key)}
        others = {site: set[str]().union(*(every[other] for other in every if other != site)) for site in every}
        if len(every) > 1 and (alone := [site for site in every if every[site].isdisjoint(others[site])]):
            here, there = (", ".join(sorted(names[alone[0]])[:3]) for names in (every, others))
            found.append(
                f"{of}{some(alone)} shares no {what} with any other site ({here}, elsewhere {there}); if they "
                "mean the same, spell them alike in the tables"
            )
    return found


def some(sites: Collection[str]) -> str:
    """The first one, and how many more."""
    first, *others = sorted(sites)
    return f"{first} and {len(others)} more" if others else first


def edges(low: float, high: float) -> npt.NDArray[np.float64]:
    """The `BINS` + 1 numbers between bins."""
    return np.linspace(low, high, BINS + 1)


# ---------------------------------------------------------------------- whole numbers, for secure aggregation

LIMB, LIMBS, FRACTION = 16, 10, 64
"""A number goes as so many whole ones of so many bits, from a 2^64th up to ± 2^95: the sum is exact."""
LIMIT = float(2**LIMB)


def limbs(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Numbers as (n · LIMBS) whole ones from 0 to 2^16 − 1. Raises `ValueError` for one that is too large."""
    if any(abs(value) >= 2.0 ** (LIMB * LIMBS - FRACTION - LIMB) for value in values):
        raise ValueError("a sum is too large for secure aggregation")
    steps = [int(value * 2.0**FRACTION) % 2 ** (LIMB * LIMBS) for value in values]
    return np.array([step >> (LIMB * place) & (2**LIMB - 1) for step in steps for place in range(LIMBS)], float)


def whole(sums: Sequence[float]) -> list[float]:
    """What `limbs` was given, summed over sites, from the sums of limbs."""
    found = []
    for first in range(0, len(sums), LIMBS):
        total = sum(round(part) << (LIMB * place) for place, part in enumerate(sums[first : first + LIMBS]))
        total %= 2 ** (LIMB * LIMBS)
        found.append((total - 2 ** (LIMB * LIMBS) * (total >> (LIMB * LIMBS - 1))) / 2**FRACTION)
    return found


def entered(asked: Asked, vector: Sequence[float]) -> dict[Entry, float]:
    """A vector's numbers by what they are."""
    return dict(zip(asked.entries(), vector, strict=True))


def total(tables: Mapping[str, Mapping[Entry, float]]) -> dict[Entry, float]:
    """Sums over sites, in the order of their names."""
    every = [tables[site] for site in sorted(tables)]
    return {entry: float(sum(table[entry] for table in every)) for entry in every[0]} if every else {}
