"""From one site's data to what the server announces of all: `perennial describe`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from perennial.common.config import sentence
from perennial.common.data.columns import MOST_CATEGORIES, AnyColumn, CategoryColumn, NumberColumn
from perennial.common.data.own import LABEL, TABLES, Found, read
from perennial.common.data.scenarios.own import OwnData
from perennial.common.data.tables import number_cells, text_cells
from perennial.common.errors import UserError
from perennial.common.suggest import unknown

LONGEST = 64
"""Pixels of a picture's longer side, unless its owner announces more."""
FEW = 20
"""Different texts that a column may have in any case; beyond, more than half of the rows is free text."""
DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}")
IMPUTE = {"median": "median", "mean": "mean", "most-frequent": "most_frequent"}
"""What an empty cell may count as, and scikit-learn's name for it."""


@dataclass(frozen=True)
class Wanted:
    """What the operator says of a table's columns."""

    impute: Mapping[str, str] = field(default_factory=dict)
    """By column, or by "" for all others: one of `IMPUTE`."""
    categories: frozenset[str] = frozenset()
    """Columns whose numbers are names."""
    drop: frozenset[str] = frozenset()
    """Columns that nobody uses."""


def wanted(impute: Sequence[str], categories: Sequence[str], drop: Sequence[str]) -> Wanted:
    """From `RULE` and `COLUMN=RULE`, as the command line has them. Raises `UserError`."""
    rules = {}
    for text in impute:
        column, _, rule = text.rpartition("=")
        if rule not in IMPUTE:
            raise UserError(f"--impute {text}: {unknown('rule', rule, IMPUTE)}")
        rules[column] = rule
    return Wanted(rules, frozenset(categories), frozenset(drop))


def describe(
    path: Path, sites: Sequence[str], label: str = LABEL, environment: str = "", asked: Wanted | None = None
) -> tuple[OwnData, list[str]]:
    """The scenario whose shapes, names and preparation are those of these data, and what should be looked at.

    `path` is one site's data, or a folder with a table of each site. Raises `UserError`.
    """
    asked = asked or Wanted()
    parts = [read(file, label, environment) for file in _files(path)]
    found = parts[0]
    given: dict[str, Any] = {
        "labels": _sorted(name for part in parts for name in part.labels),
        "label_column": label,
        "environment_column": environment,
    }
    if sites or len(parts) > 1:
        given["sites"] = sites or [Path(part.name).stem for part in parts]
    if found.environments is not None:
        given["environments"] = _sorted(name for part in parts for name in part.environments or ())
    if len(given["labels"]) < 2:
        raise UserError(f"{path.name} has samples of class {found.labels[0]!r} alone; there must be two or more")
    notes: list[str] = []
    if found.columns:
        columns, notes = fitted(parts, asked)
        given["inputs"] = tuple(columns)
        plain = {name: own for name, own in columns.items() if isinstance(own, NumberColumn) and own.fill is None}
        if len(plain) == len(columns):
            given["mean"] = [own.mean for own in plain.values()]
            given["scale"] = [own.scale for own in plain.values()]
        else:
            given["columns"] = columns
        given["ignored"] = tuple(sorted(asked.drop))
    else:
        given["inputs"] = _shape(found)
        x = found.tensor(_shape(found))
        std, mean = torch.std_mean(x, dim=[dim for dim in range(x.ndim) if dim != 1], correction=0)
        given["mean"] = [_short(value) for value in mean.tolist()]
        given["scale"] = [_short(value) or 1.0 for value in std.tolist()]
    try:
        return OwnData(**given), notes
    except ValidationError as error:
        raise UserError(sentence(error)) from None


def _files(path: Path) -> list[Path]:
    """The data themselves, or the tables of a folder of several sites, one each."""
    tables = sorted(file for file in path.iterdir() if file.suffix in TABLES) if path.is_dir() else []
    names = [file.stem for file in tables]
    if double := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} has two tables of a site {double[0]!r}; one site is one file")
    return tables or [path]


def fitted(parts: Sequence[Found], asked: Wanted) -> tuple[dict[str, AnyColumn], list[str]]:
    """What becomes of each column of the tables, fitted to the rows of all, and what should be looked at."""
    names = [name for name in parts[0].columns if name not in asked.drop]
    for part in parts:
        if alone := sorted({*names} ^ ({*part.columns} - asked.drop)):
            raise UserError(
                f"{parts[0].name} and {part.name} must have the same columns; only one has {alone[0]!r}"
            )
    options = {"category": asked.categories, "impute": asked.impute.keys() - {""}, "drop": asked.drop}
    for option, own in options.items():
        if strange := sorted(own - {*parts[0].columns}):
            raise UserError(f"--{option}: {unknown('column', strange[0], parts[0].columns)}")
    if not names:
        raise UserError(f"{parts[0].name} has no columns of features that are not dropped")
    found, notes = dict[str, AnyColumn](), list[str]()
    for name in names:
        texts = [part for part in parts if name in asked.categories or not _has_numbers(part, name)]
        if texts and len(texts) < len(parts):
            other = next(part for part in parts if part not in texts)
            raise UserError(
                f"column {name!r} has numbers in {other.name} and text in {texts[0].name}; "
                f"put that right, or say --category {name} or --drop {name}"
            )
        column = _category(parts, name) if texts else _number(parts, name, asked.impute)
        found[name] = column
        notes += _notes(parts, name, column)
    return found, notes


def _has_numbers(part: Found, name: str) -> bool:
    try:
        number_cells(part.x, name, part.name)
    except UserError as error:
        if "no finite number" in str(error):
            raise
        return False
    return True


def _number(parts: Sequence[Found], name: str, impute: Mapping[str, str]) -> NumberColumn:
    """Mean and deviation are those of the cells that are not empty."""
    values = np.concatenate([number_cells(part.x, name, part.name) for part in parts])[:, None]
    empty = np.isnan(values)
    rule = impute.get(name, impute.get("", ""))
    if empty.all():
        raise UserError(f"{_named(parts)}: column {name!r} is empty in every row; leave it out with --drop {name}")
    if empty.any() and not rule:
        part = next(part for part in parts if np.isnan(number_cells(part.x, name, part.name)).any())
        row = int(np.argmax(np.isnan(number_cells(part.x, name, part.name)))) + 1
        raise UserError(
            f"{part.name}: row {row}, column {name!r} is empty; say what empty cells count as, such as "
            f"--impute median, or leave the column out with --drop {name}"
        )
    scaler = StandardScaler().fit(values)
    fill = float(SimpleImputer(strategy=IMPUTE[rule]).fit(values).statistics_[0]) if rule else None
    return NumberColumn(
        mean=_short(scaler.mean_[0]),
        scale=_short(scaler.scale_[0]),
        fill=None if fill is None else _short(fill),
        missing=bool(empty.any()),
    )


def _category(parts: Sequence[Found], name: str) -> CategoryColumn:
    texts = [text for part in parts for text in text_cells(part.x, name, part.name)]
    known = [text for text in texts if text]
    out = f"; leave it out with --drop {name}"
    if not known:
        raise UserError(f"{_named(parts)}: column {name!r} is empty in every row{out}")
    if all(DATE.match(text) for text in known):
        raise UserError(f"{_named(parts)}: column {name!r} has dates; make numbers of them, such as days{out}")
    different = len(set(known))
    if different > MOST_CATEGORIES or different > max(FEW, len(known) // 2):
        raise UserError(
            f"{_named(parts)}: column {name!r} has {different} different texts in {len(known)} rows, "
            f"so it is free text or an identifier{out}"
        )
    (categories,) = OneHotEncoder().fit(np.array(known, dtype=object)[:, None]).categories_
    return CategoryColumn(categories=tuple(_sorted(map(str, categories))))


def _notes(parts: Sequence[Found], name: str, column: AnyColumn) -> list[str]:
    if isinstance(column, CategoryColumn):
        return [] if len(column.categories) > 1 else [f"column {name!r} has the same text in every row"]
    values = np.concatenate([number_cells(part.x, name, part.name) for part in parts])
    known = np.sort(values[~np.isnan(values)])
    if len(known) > 1 and known[0] == known[-1]:
        return [f"column {name!r} has the same number in every row"]
    if len(known) > FEW and (np.diff(known) == 1).all():
        return [f"column {name!r} counts rows; an identifier tells nothing about others (--drop {name})"]
    return []


def _named(parts: Sequence[Found]) -> str:
    return parts[0].name if len(parts) == 1 else f"{parts[0].name} and {len(parts) - 1} more"


def announcement(scenario: OwnData) -> dict[str, Any]:
    """What of it belongs into a run's configuration; what nobody has to say is left out."""
    of_tables = set[str]() if scenario.column_names else {"label_column"}
    every = scenario.model_dump(mode="json", exclude={"test_fraction", "validation_fraction"} | of_tables)
    for name, column in every["columns"].items():
        every["columns"][name] = {key: value for key, value in column.items() if value is not None}
    return {key: value for key, value in every.items() if value not in ("", [], {})}


def _shape(found: Found) -> tuple[int, ...]:
    """A sample's; of pictures the most frequent size, made smaller where it is large, and grey if all are."""
    if not found.of_pictures:
        return tuple(np.asarray(found.x).shape[1:])
    sizes, modes = Counter[tuple[int, int]](), set[str]()
    for path in found.x:
        try:
            with Image.open(path) as picture:
                sizes[picture.size] += 1
                modes.add(picture.mode)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"picture {path} cannot be read ({error})") from None
    width, height = max(sizes, key=lambda size: (sizes[size], size))
    smaller = min(1.0, LONGEST / max(width, height))
    return 1 if modes <= {"1", "L"} else 3, max(1, round(height * smaller)), max(1, round(width * smaller))


def _sorted(names: Iterable[str]) -> list[str]:
    """Each name once; numbers by their size."""
    return sorted(set(names), key=lambda name: (int(name), "") if name.isdecimal() else (10**18, name))


def _short(value: float) -> float:
    return float(f"{value:.6g}")
