"""The server's half of a survey (`common/survey.py`): from what sites tell to the scenario that is announced.

All statistics are functions of sums over sites. `perennial describe` is the same survey of files in one process
(`server/survey/describe.py`), so that a rehearsal and a deployment write the same configuration.
"""

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar
from uuid import uuid4

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from perennial.common.config import load_config
from perennial.common.data.columns import MOST_CATEGORIES, AnyColumn, CategoryColumn, NumberColumn
from perennial.common.data.scenarios.own_data import SITE, OwnData, balanced
from perennial.common.data.site_files import in_order
from perennial.common.data.tables import like_number
from perennial.common.methods.base import Method
from perennial.common.survey import (
    BINS,
    LIMBS,
    LIMIT,
    MOST_LETTERS,
    REACH,
    RECORD,
    SHAPE,
    SUMS,
    SURVEY,
    TOLD,
    Asked,
    Entry,
    Question,
    Request,
    Shape,
    Spellings,
    all_names,
    edges,
    entered,
    shared_nowhere,
    some,
    spelt_alike,
    total,
    whole,
)
from perennial.common.tasks.event import FINER, INTERVAL_SHARES, censoring_curve
from perennial.common.utils.errors import RunStopped, UserError, some_of
from perennial.common.utils.suggestions import meant, sentence, unknown
from perennial.common.wire import CLIENT, LONGEST_NAME, NUM_EXAMPLES, REFUSED, ROUND, RUN, Scalar
from perennial.server.run import folder
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Exchange, PerClient
from perennial.strategies.privacy.secure_aggregation import SecureStrategy
from perennial.strategies.screening import FLOAT32_MAX, Rejected

V = TypeVar("V")
Sums = Mapping[Entry, float]
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Of the numbers that are below each of the quantiles that are told."""
COUNTED = ("rows", "class", "environment", "empty", "count", "value", "bin", "event", "censored")
"""Entries that are whole numbers."""
THRESHOLDED = ("rows", "class", "environment", "count", "value", "bin", "event", "censored")
"""Those that are 0 or at least the least."""
FLOAT32_DIGITS = 1e5
"""Of a number's seven, those that may be the same in all rows, so that two are left."""
FAR = 2.5
"""Deviation over the width of the middle half: 0.74 of a normal distribution, more where a few cells are far."""
MOST_NUMBERS = 20
"""Classes with whole numbers as names, of which nothing is said."""
NOT_ASKED_FOR = "is none of the sites that were asked for (--site)"


@dataclass
class Surveyed:
    """What came of a survey."""

    scenario: OwnData
    facts: Sequence[str] = ()
    """Rows, classes, empty cells, in words."""
    remarks: Sequence[str] = ()
    """What should be looked at."""
    sites: Mapping[str, str] = field(default_factory=dict)
    """Rows and classes by site, in words; none where only sums are known."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a site is not in it."""


ANSWER = TypeAdapter(Surveyed)


def survey(
    grid: Grid,
    question: Question,
    sites: Collection[str] = (),
    *,
    named: Sequence[str] = (),
    wait: float = 0.0,
    per_site: bool = False,
    balance: bool = False,
    quantiles: bool = False,
    spellings: Mapping[str, Spellings] | None = None,
) -> Surveyed:
    """Ask the sites of these names, or all that are connected; a scenario that fits all who tell enough.

    Its sites are those `named`, or else those who told. Sites that are not there yet are given `wait` seconds;
    without names, the first one is. With `per_site`, each site's numbers are prepared by its own sums. With
    `balance`, classes count in training as `balanced` has it, by the rows of all sites. With `quantiles`, the
    facts have those of all columns of numbers. `spellings` has the names by site, where more are known than sites
    tell, to find one that is spelt in several ways. Raises `UserError` where the answers make no scenario, and
    `RunStopped` where secure aggregation cannot go on.
    """
    if balance and question.targets:
        raise UserError("--class-weights balanced is for classes; leave it out, or say --task classes")
    features = {"category": question.categories, "impute": question.impute, "drop": question.drop}
    for option, names in features.items():
        if predicted := sorted({*names} & {*question.targets}):
            raise UserError(f"--{option} is for features, and {predicted[0]!r} is to be predicted; leave it out")
    if question.target == "event" and len(question.targets) != 2:
        raise UserError(
            f"--label-column {question.label_column}: an event has two columns, its time and whether it happened, "
            "with a comma between them"
        )
    if per_site and question.secure:
        raise UserError(
            "--scope site needs each site's own sums, which secure aggregation hides; choose one of them"
        )
    polled = _Sites(grid, question)
    polled.find(sites, wait)
    polled.must_be_some()
    _must_know(question, polled.shapes)
    kinds, counts = _first_sums(polled)
    found = polled.sums(counts)
    means = {name: found["sum", name, 0] / n for name in counts.numbers if (n := found["count", name, 0])}
    found = polled.sums(Asked(step="squares", means=means))
    bins = {}
    for name, mean in means.items():
        deviation = math.sqrt(found["square", name, 0] / max(1.0, found["count", name, 0]))
        timed = question.target == "event" and name == question.targets[0]
        if deviation and (timed or quantiles or question.rule(name) == "median"):
            bins[name] = (mean - REACH * deviation, mean + REACH * deviation)
    found = polled.sums(Asked(step="bins", bins=bins))
    times = interval_ends(question, found, bins) if question.target == "event" else ()
    found = polled.sums(Asked(step="intervals", times=times))

    fit = _Fit(question, means, bins)
    remarks = list[str]()
    columns = dict[str, AnyColumn]()
    for name, kind in kinds.items():
        if kind == "number":
            columns[name] = fit.number(name, found, remarks)
            remarks += _far(name, found, bins)
            own = [shape.columns[name] for shape in polled.shapes.values()]
            if name not in question.targets and all(one.all_different for one in own if one.kind == "number"):
                remarks.append(
                    f"column {name!r} has another whole number in every row; an identifier tells nothing about "
                    f"others (--drop {name})"
                )
        else:
            columns[name] = category = CategoryColumn(categories=_categories(name, polled))
            if len(category.categories) < 2:
                remarks.append(f"column {name!r} has the same text in every row that counts")
    classes = _classes(polled)
    if classes:
        remarks += _rare("class", "labels", question.label_column, found, question.least)
        remarks += _measured(classes)
    if all(shape.environments is not None for shape in polled.shapes.values()):
        remarks += _rare("environment", "environments", question.environment_column, found, question.least)
    if spellings is None:
        spellings = {site: _spellings(shape, kinds) for site, shape in polled.shapes.items()}
    remarks += spelt_alike(spellings, show=not question.secure)
    if not question.secure:
        remarks += shared_nowhere(spellings, [name for name, kind in kinds.items() if kind == "category"])
    own_columns = {
        site: {
            name: fit.number(name, _with_values(name, sums, found), []).model_copy(
                update={"missing": bool(found["empty", name, 0])}
            )
            for name in counts.numbers
            if sums["count", name, 0] and name not in question.targets
        }
        for site, sums in polled.tables.items()
        if per_site
    }
    # Without the names of sites that were left out since, or that nobody has rows of.
    environments = union(shape.environments or () for shape in polled.shapes.values())
    environments = tuple(name for name in environments if found["environment", name, 0])
    labels = tuple(name for name in classes if found["class", name, 0])
    names = {"labels": labels or question.targets, "environments": environments}
    targets = {name: columns.pop(name) for name in question.targets}
    by_site = {site: _site(sums, labels) for site, sums in polled.tables.items() if not question.secure}
    weights = balancing({name: found["class", name, 0] for name in labels}) if balance else ()
    scenario = _scenario(
        columns,
        own_columns,
        sites=named or sorted(polled.shapes),
        label_column=question.label_column,
        environment_column=question.environment_column,
        ignored=tuple(sorted(question.drop)),
        class_weights=weights,
        **_of_targets(question, targets, found, times, remarks),
        **{key: value for key, value in names.items() if value},
    )
    facts = [*_facts(found, len(polled.shapes), names), *_quantiles(found, bins)]
    return Surveyed(scenario, facts, remarks, by_site, polled.left_out)


class Order(BaseModel):
    """A survey as a command asks the ServerApp for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: Question
    sites: tuple[str, ...] = ()
    wait: float = 0.0
    per_site: bool = False
    balance: bool = False
    quantiles: bool = False


def carried_out(grid: Grid, order: str) -> dict[str, Any]:
    """What came of the survey that an `Order` as JSON asks for: `Surveyed`, or `error` with a sentence.

    Raises `RunStopped`.
    """
    request = Order.model_validate_json(order)
    try:
        found = survey(grid, **dict(request), named=request.sites)
    except UserError as error:
        return {"error": str(error)}
    return {**asdict(found), "scenario": found.scenario.model_dump(mode="json", exclude={"clients"})}


def surveyed(answer: dict[str, Any]) -> Surveyed:
    """What `carried_out` has told. Raises `UserError`."""
    if error := answer.get("error"):
        raise UserError(str(error))
    try:
        return ANSWER.validate_python(answer)
    except (ValueError, TypeError) as error:
        raise UserError(f"the server's answer to the survey cannot be read: {folder.reason(error)}") from None


# ---------------------------------------------------------------------- from sums to the announcement


def interval_ends(question: Question, sums: Sums, bins: Mapping[str, tuple[float, float]]) -> tuple[float, ...]:
    """Ends of short intervals of time, in each of which about as many rows end. Raises `UserError`."""
    name = question.targets[0]
    if name not in bins:
        raise UserError(f"column {name!r}: no site tells sums of its times, so no intervals can be made of them")
    shares = [
        share * part / FINER
        for share in INTERVAL_SHARES[:1]
        for part in range(1, FINER * len(INTERVAL_SHARES) + 1)
    ]
    ends = [quantile(_bins(sums, name), *bins[name], share=share) for share in shares]
    return tuple(dict.fromkeys(short(end) for end in ends if end > 0))


def _of_targets(
    question: Question,
    targets: Mapping[str, AnyColumn],
    sums: Sums,
    times: Sequence[float],
    remarks: list[str],
) -> dict[str, Any]:
    """What is announced of targets that are no classes. Raises `UserError` for one that cannot be a target."""
    if not targets:
        return {}
    for name, column in targets.items():
        if isinstance(column, CategoryColumn):
            raise UserError(f"column {name!r} has text, and --task {question.target} needs numbers")
        if not sums["count", name, 0]:
            continue
        if column.scale == 1.0 and column.mean * sums["count", name, 0] == sums["sum", name, 0]:
            raise UserError(f"column {name!r} has the same number in every row, so there is nothing to predict")
    found: dict[str, Any] = {"target": question.target}
    if question.target == "numbers":
        numbers = [column for column in targets.values() if isinstance(column, NumberColumn)]
        found |= {"target_mean": [own.mean for own in numbers], "target_scale": [own.scale for own in numbers]}
    if question.target == "event":
        events, censored = (
            [int(sums[kind, "", place]) for place in range(len(times) + 1)] for kind in ("event", "censored")
        )
        if not sum(events):
            raise UserError(
                f"column {question.targets[1]!r}: no site has {question.least} rows in which the event happened"
            )
        if hidden := sums["rows", "", 0] - sum(events) - sum(censored):
            remarks.append(
                f"of {hidden:.0f} rows no time is told, since a site has fewer than {question.least} with or "
                "without the event; the censoring curve is of the others"
            )
        curve, kept = censoring_curve(events, censored)[FINER - 1 :: FINER], times[FINER - 1 :: FINER]
        found |= {"times": kept, "censoring": [short(own) for own in curve] if curve[-1] > 0 else []}
    return found


@dataclass(frozen=True)
class _Fit:
    """From sums to what becomes of a column of numbers."""

    question: Question
    means: Mapping[str, float]
    """What squares are around."""
    bins: Mapping[str, tuple[float, float]]

    def number(self, name: str, sums: Sums, remarks: list[str]) -> NumberColumn:
        """Mean and deviation are those of the cells that are not empty."""
        n, empty, rule = sums["count", name, 0], sums["empty", name, 0], self.question.rule(name)
        if name in self.question.targets:
            rule = None
            if empty and self.question.target != "labels":
                raise UserError(
                    f"column {name!r}, which is to be predicted, has {empty:.0f} empty cells; fill them in, or "
                    "take these rows out"
                )
        elif empty and not rule:
            raise UserError(
                f"column {name!r} has {empty:.0f} empty cells; say what empty cells count as, such as "
                f"--impute median, or leave the column out with --drop {name}"
            )
        if not n:
            if empty:
                raise UserError(
                    f"column {name!r} has empty cells, and no site tells sums of {self.question.least} numbers of "
                    f"it, so nothing is known that they could count as; leave it out with --drop {name}"
                )
            remarks.append(f"column {name!r} is not scaled: no site tells sums of it")
            return NumberColumn()
        mean = sums["sum", name, 0] / n
        # Around another mean m than their own, squares are larger by n (mean − m)², which leaves its rounding.
        apart, eps = abs(mean - self.means[name]), float(np.finfo(np.float64).eps)
        variance = max(0.0, sums["square", name, 0] / n - apart**2)
        least = (n * mean * eps) ** 2 + 64 * eps * apart * (apart + abs(mean))
        if variance <= n * eps * variance + least:  # as scikit-learn's StandardScaler has it
            variance, mean = 0.0, float(np.float32(mean))  # as the cells are, when the mean is subtracted
            if n > 1:
                remarks.append(f"column {name!r} has the same number in every row")
        scale = math.sqrt(variance)
        if abs(mean) > FLOAT32_DIGITS * scale > 0:
            remarks.append(
                f"column {name!r} varies by {scale:.2g} around {mean:.7g}, of which models see 7 digits; subtract "
                "a number from it first"
            )
        return NumberColumn(
            mean=short(mean, scale),
            scale=short(scale) or 1.0,
            fill=None if rule is None else short(self._fill(rule, name, sums, mean, scale), scale),
            missing=bool(empty),
        )

    def _fill(self, rule: str, name: str, sums: Sums, mean: float, deviation: float) -> float:
        if rule == "median":
            found = quantile(_bins(sums, name), *self.bins[name]) if name in self.bins else mean
            return min(max(found, mean - deviation), mean + deviation)  # Hotelling and Solomons 1932
        if rule == "mean":
            return mean
        counts = {entry[2]: count for entry, count in sums.items() if entry[:2] == ("value", name)}
        if not counts or not max(counts.values()):
            raise UserError(
                f"column {name!r} has no number that a site has in {self.question.least} rows, so none is the "
                f"most frequent; say --impute {name}=median"
            )
        return min(counts, key=lambda value: (-counts[value], value))


def quantile(counts: Sequence[float], low: float, high: float, share: float = 0.5) -> float:
    """Below which so many of the numbers are, by bins of equal width from `low` to `high` and one on either side.

    `low` or `high` where it is in one of these two.
    """
    wanted, below, before = share * sum(counts), 0.0, low
    ends: list[float] = [low, *edges(low, high).tolist(), high]
    for count, begin, end in zip(counts, ends, ends[1:], strict=False):
        if count and below + count > wanted:
            return (before + begin) / 2 if below == wanted else begin + (wanted - below) / count * (end - begin)
        below, before = below + count, end if count else before
    return high


def _with_values(name: str, own: Sums, of_all: Sums) -> Sums:
    """A site's sums, with the counts of values of all sites where it tells of none."""
    values = [entry for entry in own if entry[:2] == ("value", name)]
    return own if any(own[entry] for entry in values) else {**own, **{entry: of_all[entry] for entry in values}}


def _scenario(
    columns: Mapping[str, AnyColumn], own_columns: Mapping[str, Mapping[str, NumberColumn]], **settings: Any
) -> OwnData:
    """Numbers without empty cells need no more than a mean and a deviation each."""
    plain = [own for own in columns.values() if isinstance(own, NumberColumn) and own.fill is None]
    if len(plain) == len(columns) and not own_columns:
        settings |= {"mean": [own.mean for own in plain], "scale": [own.scale for own in plain]}
    else:
        settings["columns"] = dict(columns)
    if own_columns:
        settings["own_columns"] = own_columns
    return announced({"inputs": tuple(columns), **settings})


def balancing(counts: Mapping[str, float]) -> tuple[float, ...]:
    """The weights by which classes with so many rows count the same. Raises `UserError`."""
    if lacking := next((name for name in counts if not counts[name]), None):
        raise UserError(f"--class-weights balanced: no site tells how many rows it has of class {lacking!r}")
    return tuple(short(weight) for weight in balanced(counts).values())


def announced(settings: Mapping[str, Any]) -> OwnData:
    """The scenario of these settings. Raises `UserError` where there can be none."""
    try:
        return OwnData(**settings)
    except ValidationError as error:
        raise UserError(sentence(error)) from None


def _facts(sums: Sums, sites: int, names: Mapping[str, Sequence[str]]) -> list[str]:
    rows = sums["rows", "", 0]
    facts = [f"{rows:.0f} rows at {sites} site{'s'[: sites > 1]}"]
    for what, title, own in (("class", "classes", "labels"), ("environment", "environments", "environments")):
        counts = [f"{name} {sums[what, name, 0]:.0f}" for name in names[own] if (what, name, 0) in sums]
        facts += [f"{title}: {', '.join(counts)}"] if counts else []
    empty = [f"{name} {100 * n / rows:.1f} %" for (kind, name, _), n in sums.items() if kind == "empty" and n]
    return facts + ([f"empty cells: {', '.join(empty)}"] if empty else [])


def _far(name: str, sums: Sums, bins: Mapping[str, tuple[float, float]]) -> list[str]:
    """A sentence on a column whose deviation a few cells make, such as those with a code for what is unknown."""
    if name not in bins:
        return []
    low, high = bins[name]
    quarter, three = (quantile(_bins(sums, name), low, high, share) for share in (0.25, 0.75))
    deviation = (high - low) / (2 * REACH)
    if not (high - low) / BINS < three - quarter < deviation / FAR:  # in one bin: a column of few numbers
        return []
    return [
        f"column {name!r} has cells far from all others: half are between {quarter:.4g} and {three:.4g}, and the "
        f"deviation is {deviation:.4g}; if a number such as -999 says that nothing is known, empty these cells"
    ]


def _measured(classes: Sequence[str]) -> list[str]:
    """A sentence on classes that are numbers of something."""
    whole = all(name.removeprefix("-").isdigit() for name in classes)
    if not all(map(like_number, classes)) or (whole and len(classes) <= MOST_NUMBERS):
        return []
    return [
        f"the classes are {len(classes)} numbers, each a class of its own; if the column measures something, say "
        "--task numbers"
    ]


def _rare(what: str, names: str, column: str, sums: Sums, least: int) -> list[str]:
    """A sentence on rows whose class or environment their site does not tell."""
    rows, known = (sum(sums[entry] for entry in sums if entry[0] == kind) for kind in ("rows", what))
    of = f" (column {column!r})" if column else ""  # else each site has named one of its own
    return [
        f"the {what}{of} of {rows - known:.0f} rows is one that their site has in fewer than {least} rows; if no "
        f"site has more of it, it is not among the {names}, and sites that have it cannot take part in a run; "
        "describe again with a smaller --at-least, or take these rows out"
    ] * (rows > known)


def _quantiles(sums: Sums, bins: Mapping[str, tuple[float, float]]) -> list[str]:
    """A line for each column in bins. What is below the first bin's begin or above the last one's end says so."""

    def text(name: str, share: float) -> str:
        low, high = bins[name]
        found = quantile(_bins(sums, name), low, high, share)
        beyond = "≤ " if found <= low else "≥ " if found >= high else ""
        return f"{100 * share:.0f} % {beyond}{found:.4g}"

    return [f"quantiles of {name}: {', '.join(text(name, share) for share in SHARES)}" for name in bins]


def _site(sums: Sums, labels: Sequence[str]) -> str:
    classes = ", ".join(f"{name} {sums['class', name, 0]:.0f}" for name in labels)
    return f"{sums['rows', '', 0]:.0f} rows{f'; {classes}' if classes else ''}"


# ---------------------------------------------------------------------- what sites agree on


def _first_sums(sites: "_Sites") -> tuple[dict[str, Literal["number", "category"]], Asked]:
    """Kinds of columns as `agreed`, and the first sums to ask for. Sites whose names are too many are left out."""
    while True:
        kinds = agreed(sites)
        shapes = list(sites.shapes.values())
        numbers = tuple(name for name, kind in kinds.items() if kind == "number")
        asked = Asked(
            step="counts",
            classes=_classes(sites),
            environments=union(shape.environments or () for shape in shapes),
            columns=tuple(kinds),
            numbers=numbers,
            values={
                name: tuple(sorted({value for shape in shapes for value in shape.columns[name].values}))
                for name in numbers
            },
        )
        if len(sites.request(asked)) <= MOST_LETTERS:
            return kinds, asked
        most = max(sites.shapes, key=lambda site: len(sites.shapes[site].model_dump_json()))
        sites.leave_out(most, "it tells of more names than any site that stays, too many to ask all sites about")
        sites.must_be_some()


def agreed(sites: "_Sites") -> dict[str, Literal["number", "category"]]:
    """The kind of each column at most sites; those where it is another are left out.

    Raises `UserError` where no more sites have the one than the other, and for columns that cannot be used.
    """
    used = {
        site: frozenset(name for name, own in shape.columns.items() if own.kind != "dropped")
        for site, shape in sites.shapes.items()
    }
    most = _most(used)
    if most is None:
        one, *others = sorted(used)
        other = next(site for site in others if used[site] != used[one])
        alone = min(used[one] ^ used[other])
        who, lacks = (one, other) if alone in used[one] else (other, one)
        hint = meant(alone, used[lacks] - used[who])
        raise UserError(
            f"{one} and {other} must have the same columns; only {who} has {alone!r}{hint} (--drop {alone} leaves "
            "the column out)"
        )
    if not most:
        raise UserError(f"{some(used)} has no columns of features that are not dropped")
    for site, names in used.items():
        if names != most:
            alone = min(names - most or most - names)
            why = f"it lacks column {alone!r}, which most sites have"
            if alone in names:
                why = f"it has column {alone!r}, which most sites do not have{meant(alone, most - names)}"
            keeps = "an empty column of that name where there is none keeps it"
            sites.leave_out(site, f"{why} (--drop {alone} leaves the column out; {keeps})")
    found, wrong = dict[str, Literal["number", "category"]](), list[str]()
    for name in next(shape for _, shape in sorted(sites.shapes.items())).columns:
        if name in most:
            try:
                found[name] = _kind(name, sites)
            except UserError as error:  # all that is to be put right is told at once
                wrong.append(str(error))
    if wrong:
        raise UserError(some_of(wrong))
    return found


def _kind(name: str, sites: "_Sites") -> Literal["number", "category"]:
    out = f", or leave it out with --drop {name}"
    kinds = {site: shape.columns[name].kind for site, shape in sites.shapes.items()}
    kinds = {site: kind for site, kind in kinds.items() if kind != "empty"}
    if not kinds:
        raise UserError(
            f"{some(sites.shapes)}: column {name!r} is empty in every row; leave it out with --drop {name}"
        )
    words = {"number": "numbers", "category": "text", "dates": "dates", "text": "free text"}
    kind = _most(kinds)
    if kind is None:
        one, *others = sorted(kinds, key=lambda site: (kinds[site] != "number", site))
        other = next(site for site in others if kinds[site] != kinds[one])
        names = f"--category {name} or " if kinds[one] == "number" else ""
        raise UserError(
            f"column {name!r} has {words[kinds[one]]} in {one} and {words[kinds[other]]} in {other}; "
            f"put that right, or say {names}--drop {name}"
        )
    for site, own in kinds.items():
        if own != kind:
            names = f"--category {name} makes names of them, " if {own, kind} == {"number", "category"} else ""
            differs = f"column {name!r} has {words[own]}, and {words[kind]} at most sites"
            sites.leave_out(site, f"{differs}; {names}--drop {name} leaves the column out")
    if kind == "number":
        return kind
    if kind == "category":
        if name in sites.question.impute:
            raise UserError(f"--impute {name}: its cells are names; an empty one has a feature of its own")
        _categories(name, sites)
        return kind
    where = some([site for site, own in kinds.items() if own == kind])
    if kind == "dates":
        raise UserError(f"{where}: column {name!r} has dates; make numbers of them, such as days{out}")
    raise UserError(
        f"{where}: column {name!r} has free text or identifiers (more than {MOST_CATEGORIES} different ones, more "
        f"than half as many as rows, or one of more than {LONGEST_NAME} letters); group them{out}"
    )


def _classes(sites: "_Sites") -> tuple[str, ...]:
    """Of all sites; none where the targets are numbers. Raises `UserError` where there are not two."""
    if sites.question.targets:
        return ()
    classes = union(shape.classes for shape in sites.shapes.values())
    if len(classes) < 2:
        least = sites.question.least
        has = f"samples of class {classes[0]!r} alone" if classes else f"no class that has {least} rows"
        number = "" if classes else "; if it is a number, such as days, say --task numbers"
        raise UserError(
            f"{some(sites.shapes)} has {has} (column {sites.question.label_column!r}); "
            f"there must be two or more{number}"
        )
    return classes


def _categories(name: str, sites: "_Sites") -> tuple[str, ...]:
    """A column's names at all sites. Raises `UserError` where there are none, or too many."""
    names, out = union(shape.columns[name].names for shape in sites.shapes.values()), f"--drop {name}"
    if not names:
        raise UserError(
            f"column {name!r} has no text that a site has in {sites.question.least} rows; leave it out with {out}"
        )
    if len(names) > MOST_CATEGORIES:
        raise UserError(
            f"column {name!r} has {len(names)} texts at all sites, and at most {MOST_CATEGORIES} are possible; "
            f"group them, or leave it out with {out}"
        )
    return names


def _spellings(shape: Shape, kinds: Mapping[str, str]) -> Spellings:
    """What a site tells of names, of columns that are categories everywhere."""
    columns = {name: shape.columns[name].names for name, kind in kinds.items() if kind == "category"}
    return all_names(shape.classes, shape.environments, columns)


def _must_know(question: Question, shapes: Mapping[str, Shape]) -> None:
    known = {name for shape in shapes.values() for name in shape.columns}
    special = {question.environment_column: "environment", question.label_column: "label"}
    options = {"category": question.categories, "impute": question.impute.keys() - {""}, "drop": question.drop}
    for option, own in options.items():
        if strange := sorted(set(own) - known):
            if kind := special.get(strange[0]):
                raise UserError(
                    f"--{option} is for features, and {strange[0]!r} is the column of the {kind}; leave it out, "
                    f"or name another one with --{kind}-column"
                )
            raise UserError(f"--{option}: {unknown('column', strange[0], known)}")


def _most(values: Mapping[str, V]) -> V | None:
    """What more sites have than anything else."""
    (first, count), *others = Counter(values.values()).most_common(2)
    return None if others and others[0][1] == count else first


def union(every: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Each name once; numbers by their size."""
    return tuple(in_order(name for names in every for name in names))


def short(value: float, scale: float | None = None) -> float:
    """Six digits; of a number of which parts as small as `scale` count (0: as small as 1), six digits of these."""
    more = 0 if scale is None or not value else max(0, math.floor(math.log10(abs(value) / (scale or 1.0))))
    return float(f"{value:.{min(6 + more, 17)}g}")


def _bins(sums: Sums, name: str) -> list[float]:
    return [sums["bin", name, place] for place in range(BINS + 2)]


# ---------------------------------------------------------------------- the exchanges


class _Surveys(Method):
    """What secure aggregation has to know of a survey."""

    title, summary, source = "survey", "", ""
    evaluates = ()
    sums = RECORD
    listed = False
    name: Literal["survey"] = "survey"


class _Asking(MethodStrategy[Any]):
    """The toolbox of all methods, for requests that bring a question in place of a task."""

    def __init__(self, settings: Sequence[str], survey_id: str, nodes: Mapping[str, int]) -> None:
        sites = sorted(nodes) if all(map(SITE.fullmatch, nodes)) else ["any"]
        options: dict[str, Any] = {"method": "fedavg", "scenario": {"name": "own-data", "sites": sites}}
        super().__init__(load_config(options=options, settings=["largest=1e100", *settings]), survey_id)
        self.roster.nodes = dict(nodes)
        self.hparams = _Surveys()
        self.text = ""
        """The request, as JSON."""

    def _requests(
        self, exchange: Exchange, payload: PerClient, settings: Mapping[str, Scalar] | None = None
    ) -> Sequence[Message]:
        self.exchanges.append(exchange)
        asked: dict[str, Any] = {RUN: self.run_id, ROUND: exchange.round, SURVEY: self.text}
        return exchange.requests(payload, ConfigRecord({**asked, **(settings or {})}))


class _Masked(_Asking, SecureStrategy):
    """The same under secure aggregation, in which every site counts as one."""

    def accepted(self, *args: Any, **options: Any) -> Iterator[AcceptedReply]:
        for reply in super().accepted(*args, **options):
            yield replace(reply, metrics=MetricRecord({NUM_EXAMPLES: 1}))


class _Sites:
    """The sites of a survey: who takes part and what they have told, and why others do not."""

    def __init__(self, grid: Grid, question: Question) -> None:
        self.grid, self.question, self.survey_id = grid, question, uuid4().hex[:12]
        self.nodes = dict[str, int]()
        self.shapes = dict[str, Shape]()
        self.left_out = dict[str, str]()
        self.tables = dict[str, dict[Entry, float]]()
        """Sums by site, of those that stay to the end; under secure aggregation those of all by one name."""
        self._holders = dict[str, list[int]]()
        """The nodes that say that they are a site, which should be one."""
        self._step = 0

    def leave_out(self, site: str, reason: str) -> None:
        """Go on without a site."""
        self.shapes.pop(site, None)
        self.nodes.pop(site, None)
        self.left_out[site] = str(Rejected(reason))

    def must_be_some(self) -> None:
        """Raises `UserError` where nobody is left."""
        if not self.shapes:
            order = sorted(self.left_out, key=lambda site: (self.left_out[site] == NOT_ASKED_FOR, site))
            reasons = [f"{site}: {self.left_out[site]}" for site in order]
            only = next(iter(self.left_out.values())) if len(reasons) == 1 else ""
            why = some_of(reasons) or "none is connected"
            raise UserError(only or f"no site can be surveyed ({why})")

    def request(self, asked: Asked | None = None) -> str:
        """What a site is asked, as JSON."""
        return Request(question=self.question, asked=asked).model_dump_json(exclude_defaults=True)

    def find(self, wanted: Collection[str], wait: float) -> None:
        """Ask who is there, and what their tables look like; those wanted may take `wait` seconds to come."""
        end, seen = time.monotonic() + wait, set[int]()
        while True:
            if new := sorted(set(self.grid.get_node_ids()) - seen):
                seen |= {*new}
                self._ask_shapes(new)
            there = {*self._holders, *self.left_out}
            if time.monotonic() >= end or (there.issuperset(wanted) if wanted else seen):
                break
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        for site, nodes in self._holders.items():
            if len(nodes) > 1:
                who = " and ".join(f"node {node}" for node in nodes)
                self.leave_out(site, f"{who} say that they are {site}; every site needs a name of its own")
            elif wanted and site not in wanted:
                self.leave_out(site, NOT_ASKED_FOR)
        for site in {*wanted} - {*self._holders, *self.left_out}:
            self.leave_out(site, "is not connected")

    def _ask_shapes(self, nodes: Sequence[int]) -> None:
        asking = _Asking([], self.survey_id, {f"node {node}": node for node in nodes})
        asking.text = self.request()
        messages = asking.messages(0, list(asking.roster.nodes), SHAPE, {})
        for reply in asking.accepted(asking.send(self.grid, messages), quorum=0.0):
            site, node = str(reply.settings.get(CLIENT, "")), asking.roster.nodes[reply.client]
            if not SITE.fullmatch(site):
                self.leave_out(reply.client, "does not say which site it is")
                continue
            self._holders.setdefault(site, []).append(node)
            if refusal := reply.settings.get(REFUSED):
                self.leave_out(site, str(refusal))
                continue
            try:
                self.shapes[site] = Shape.model_validate_json(str(reply.settings.get(TOLD, "")))
                self.nodes[site] = node
            except ValidationError as error:
                self.leave_out(site, f"what it tells of its table cannot be read: {sentence(error)}")
        for name, reason in asking.exchanges[-1].left_out.items():
            self.leave_out(name, reason)

    @cached_property
    def _asking(self) -> _Asking:
        if self.question.secure:
            secure = ["privacy.mechanism=secagg", f"privacy.range={LIMIT:g}"]
            return _Masked(secure, self.survey_id, self.nodes)
        return _Asking([], self.survey_id, self.nodes)

    def sums(self, asked: Asked) -> dict[Entry, float]:
        """Ask for sums too; those over all sites that are left, which are those that answer as they should.

        Raises `UserError`, `RunStopped`.
        """
        self._step += 1
        if size := len(list(asked.entries())):
            self._asking.text = self.request(asked)
            found = self._masked(asked, size) if isinstance(self._asking, _Masked) else self._plain(asked, size)
            self.tables = {
                site: {**self.tables.get(site, {}), **sums}
                for site, sums in found.items()
                if self._step == 1 or site in self.tables
            }
            self.must_be_some()
        return total(self.tables)

    def _plain(self, asked: Asked, size: int) -> dict[str, dict[Entry, float]]:
        expect = {SUMS: {SUMS: torch.zeros(size, dtype=torch.float64)}}
        messages = self._asking.messages(self._step, sorted(self.nodes), SUMS, {}, expect=expect)

        def check(reply: AcceptedReply) -> None:
            sums = {**self.tables.get(reply.client, {}), **entered(asked, reply[SUMS][SUMS].tolist())}
            if wrong := implausible(sums, asked, self.question.least, self.shapes[reply.client]):
                raise Rejected(wrong)

        replies = self._asking.accepted(self._asking.send(self.grid, messages), quorum=0.0, check=check)
        found = {reply.client: entered(asked, reply[SUMS][SUMS].tolist()) for reply in replies}
        for site, reason in self._asking.exchanges[-1].left_out.items():
            self.leave_out(site, reason)
        return found

    def _masked(self, asked: Asked, size: int) -> dict[str, dict[Entry, float]]:
        before, first = sorted(self.nodes), len(self._asking.exchanges)
        like = {SUMS: {SUMS: torch.zeros(size * LIMBS, dtype=torch.float64)}}
        mean = self._asking.averaged(self.grid, self._step, before, SUMS, {}, like, lambda _: 1.0)
        exchanges = self._asking.exchanges[first:]
        (vectors,) = (exchange for exchange in exchanges if exchange.action == SUMS)
        lost = {site: reason for exchange in exchanges for site, reason in exchange.left_out.items()}
        survivors = sorted({*vectors.clients.values()} - vectors.left_out.keys())
        for site in set(before) - {*survivors}:
            self.leave_out(site, lost.get(site, "did not stay to the end"))
            if self._step > 1:  # the sums of before have its numbers, and new ones without would tell them
                raise RunStopped(f"{site} has left the survey in its midst: {self.left_out[site]}")
        sums = entered(asked, whole((mean[SUMS][SUMS] * len(survivors)).tolist()))
        if wrong := implausible({**total(self.tables), **sums}, asked, 0):
            raise RunStopped(f"the sites' sums cannot be right: {wrong}; whose they are cannot be seen")
        return {"": sums}


def implausible(sums: Sums, asked: Asked, least: int, shape: Shape | None = None) -> str:
    """Why no table (of this shape) has these sums, in a few words; empty where one may."""
    named = {"class": shape.classes, "environment": shape.environments or ()} if shape else {}
    for what, names in named.items():
        if lacking := [name for name in names if not sums[what, name, 0]]:
            return f"it names {what} {lacking[0]!r} and counts no row of it"
    for (what, name, _), value in sums.items():
        if what in COUNTED and not (value >= 0 and value == int(value)):
            return f"its count of {what} {name} is {value:g}"
        if what in THRESHOLDED and 0 < value < least:
            return f"it tells of {value:g} rows, and {least} are the least"
    rows = sums["rows", "", 0]
    if rows < max(1, least):
        return f"it has {rows:g} rows"
    for what in ("class", "environment", "event", "censored"):
        if sum(value for (kind, _, _), value in sums.items() if kind == what) > rows:
            return f"it counts more of {what} than rows"
    counts = {name: value for (what, name, _), value in sums.items() if what == "count"}
    empty = {name: value for (what, name, _), value in sums.items() if what == "empty"}
    if worst := next((name for name in empty if empty[name] + counts.get(name, 0) > rows), ""):
        return f"column {worst!r} has more cells than rows"
    most = float(FLOAT32_MAX)
    for (what, name, _), value in sums.items():
        if what == "sum" and not abs(value) <= counts[name] * most:
            return f"column {name!r} has a sum of {value:g} of {counts[name]:g} numbers"
        if what == "square" and not 0 <= value <= counts[name] * (2 * most) ** 2:
            return f"column {name!r} has a sum of squares of {value:g} of {counts[name]:g} numbers"
    for name in asked.bins:
        if (inside := sum(_bins(sums, name))) != counts[name]:
            return f"column {name!r} has {inside:g} numbers in bins and {counts[name]:g} in all"
    return ""
