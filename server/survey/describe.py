"""From files on this machine to what the server announces of them: `perennial describe`.

Tables are surveyed as those of sites are, in this process; pictures and arrays are measured.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from flwr.app import Context, Message
from pydantic import ValidationError

from perennial.client.app import OneHandlerApp
from perennial.client.node.settings import Consent
from perennial.client.node.survey import Respondent
from perennial.common.data.columns import LEAST
from perennial.common.data.dialect import PLAIN, Dialect
from perennial.common.data.raw_data import opened
from perennial.common.data.scenarios.own_data import SITE, SITE_TEXT, OwnData
from perennial.common.data.site_files import TABLES, Found, for_survey, read, shown
from perennial.common.data.texts import BUCKETS, tokenizer_facts
from perennial.common.survey import Question, Rule, Spellings, all_names, spelt_alike
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import sentence, unknown
from perennial.server.local import number
from perennial.server.run.grid import LocalGrid
from perennial.server.survey.survey import Surveyed, announced, balancing, short, survey, union

LONGEST = 64
"""Pixels of a picture's longer side, unless its owner announces more."""
OTHER_TABLES = (".tsv", ".txt", ".xls", ".xlsx", ".ods", ".feather", ".sav", ".dta", ".sas7bdat", ".rds")
OF_TABLES = {
    "impute": "--impute",
    "categories": "--category",
    "drop": "--drop",
    "label_column": "--label-column",
    "environment_column": "--environment-column",
    "least": "--at-least",
}
"""Options that say something of a table's columns or rows, by the question's names."""
NO_TABLE = "is no .csv or .parquet file; save it as one"


def question(
    impute: Sequence[str] = (), categories: Collection[str] = (), drop: Collection[str] = (), **others: object
) -> Question:
    """From `RULE` and `COLUMN=RULE`, as the command line has them, and other fields. Raises `UserError`."""
    rules = {}
    for text in impute:
        column, _, rule = text.rpartition("=")
        if rule not in get_args(Rule):
            raise UserError(f"--impute {text}: {unknown('rule', rule, get_args(Rule))}")
        rules[column] = rule
    names = {"categories": tuple(sorted({*categories})), "drop": tuple(sorted({*drop}))}
    try:
        return Question.model_validate({"impute": rules, **names, **others})
    except ValidationError as error:
        raise UserError(sentence(error)) from None


def describe(
    path: Path,
    sites: Sequence[str] = (),
    asked: Question | None = None,
    per_site: bool = False,
    balance: bool = False,
    quantiles: bool = False,
    dialect: Dialect = PLAIN,
) -> Surveyed:
    """The scenario whose shapes, names and preparation are those of these data, and what should be looked at.

    `path` is a folder with a table of each site, of which those of `sites` count, or all. Or it is data such as
    each site has, and `sites` are their names. With `balance`, rare classes count more, until all count the same;
    with `quantiles`, the facts have those of columns of numbers; `dialect` is that of `.csv` files. Raises
    `UserError`.
    """
    asked = asked or question()
    if not path.exists():  # readers name no folders, because a site's sentences leave it
        raise UserError(f"there is no file or folder {path}")
    files, others = _files(path)
    if files[0].suffix.lower() not in TABLES:
        stated = asked.model_dump(exclude_defaults=True)
        option = next((option for name, option in OF_TABLES.items() if name in stated), "")
        if option := option or next((f"--{name}" for name in dialect.said()), ""):
            what = f"{path} has none ({', '.join(TABLES)})" if path.is_dir() else f"{path.name} is none"
            raise UserError(f"{option} is for tables, and {what}; leave it out")
        if asked.target != "classes":
            raise UserError(f"--task {asked.target} is for tables, and {files[0].name} is none; see from_arrays")
        found = read(files[0], asked.label_column, asked.environment_column)
        remarks = spelt_alike({found.name: all_names(found.labels, found.environments)})
        if isinstance(found.x, np.ndarray) and found.x.dtype.kind in "iu" and found.x.dtype != np.uint8:
            ids = f"announce vocabulary = {found.x.max() + 1} in place of mean and scale"
            remarks = [*remarks, f"{found.name}: x has whole numbers; if they are ids of tokens, {ids}"]
        return Surveyed(_measured(found, sites, balance), remarks=remarks)
    if path.is_dir():
        files = _of(files, sites)
        names = [file.stem for file in files]
    else:
        names, sites = [path.stem if SITE.fullmatch(path.stem) else "table"], sites or OwnData().sites
    if strange := [file for file, name in zip(files, names, strict=True) if not SITE.fullmatch(name)]:
        raise UserError(
            f"{path} has a table of {strange[0].stem!r}, which is no name of a site; rename {strange[0].name}: "
            f"take {SITE_TEXT}"
        )
    loads = [partial(_load, file, dialect) for file in files]
    least = min(LEAST, asked.least)  # as at sites, unless fewer rows are asked for, which are here
    respondents = [Respondent(name, load, Consent.full, least) for name, load in zip(names, loads, strict=True)]

    def reply(message: Message, context: Context) -> Message:
        return respondents[number(context)].answer(message)

    spellings = dict[str, Spellings]()
    for respondent in respondents:
        with suppress(UserError):  # the survey says it
            spellings[respondent.name] = respondent.table(asked).spellings()
    grid = LocalGrid(OneHandlerApp(reply), len(files))
    told = survey(
        grid, asked, named=sites, per_site=per_site, balance=balance, quantiles=quantiles, spellings=spellings
    )
    scenario = told.scenario.model_copy(update=dialect.said())
    return replace(told, scenario=scenario, left_out={**told.left_out, **dict.fromkeys(others, NO_TABLE)})


def describe_texts(
    path: Path,
    column: str,
    asked: Question,
    sites: Sequence[str] = (),
    *,
    length: int,
    tokenizer: Path | None = None,
    balance: bool = False,
    dialect: Dialect = PLAIN,
) -> Surveyed:
    """The scenario of tables with a column of texts, of which all else is ignored but label and environment.

    `path` is a folder with a table of each site, or one table. Words are never collected: ids come of a
    tokenizer's file, or of hashes. Raises `UserError`.
    """
    if asked.target != "classes":
        raise UserError(f"--task {asked.target} is not possible with --text-column; texts have classes")
    for name in ("impute", "categories"):
        if getattr(asked, name):
            raise UserError(f"leave out {OF_TABLES[name]}; with --text-column, a text is all of a sample")
    files = _tables(path, sites, "--text-column")
    tables = [read(file, asked.label_column, asked.environment_column, dialect) for file in files]
    for table in tables:
        table.texts(column)
    settings: dict[str, Any] = {
        "sites": tuple(file.stem for file in files) if path.is_dir() else tuple(sites) or OwnData().sites,
        "inputs": (length,),
        "labels": union([table.labels for table in tables]),
        "label_column": asked.label_column,
        "text_column": column,
        "padded": True,
        **(tokenizer_facts(tokenizer) if tokenizer else {"vocabulary": BUCKETS}),
    }
    if balance:
        counts = Counter(name for table in tables for name in table.labels)
        settings["class_weights"] = balancing({name: counts[name] for name in settings["labels"]})
    if asked.environment_column:
        settings["environment_column"] = asked.environment_column
        settings["environments"] = union([table.environments or () for table in tables])
    facts = [f"{file.stem}: {len(table)} texts" for file, table in zip(files, tables, strict=True)]
    return Surveyed(announced({**settings, **dialect.said()}), facts)


def describe_pictures(
    path: Path,
    column: str,
    asked: Question,
    sites: Sequence[str] = (),
    *,
    dialect: Dialect = PLAIN,
    **preparation: bool,
) -> Surveyed:
    """The scenario of tables of which a column has pictures, as paths or bytes; else as `describe` has it.

    Raises `UserError`.
    """
    files = _tables(path, sites, "--image-column")
    tables = list[Found]()
    for file in files:
        with suppress(UserError):  # describe says it
            tables.append(_load(file, dialect, asked))
    shape = _picture_shape(
        (f"{own.name}: row {row}, column {column!r}: the picture", cell)
        for own in tables
        for row, cell in enumerate(own.picture_cells(column), start=1)
    )
    told = describe(path, sites, beside_pictures(asked, column), dialect=dialect, **preparation)
    pixels = torch.cat([own.pictures(column, shape) for own in tables])
    return with_pictures(told, asked, column, shape, **_scaling(pixels))


def beside_pictures(asked: Question, column: str) -> Question:
    """What is asked of all columns but that of the pictures, which nobody looks at."""
    return asked.model_copy(update={"drop": tuple(sorted({*asked.drop, column}))})


def with_pictures(
    told: Surveyed, asked: Question, column: str, shape: Sequence[int], **scaling: Sequence[float]
) -> Surveyed:
    """What was told `beside_pictures`, with their column; `scaling` has mean and scale of their channels.

    Raises `UserError` for a shape that pictures do not have.
    """
    settings = {"image_column": column, "image_shape": tuple(shape), "ignored": asked.drop, **scaling}
    return replace(told, scenario=announced(told.scenario.model_dump(exclude={"clients"}) | settings))


def _tables(path: Path, sites: Sequence[str], option: str) -> list[Path]:
    """A table, or those of a folder. Raises `UserError` where there is none for the option."""
    files = _of(_files(path)[0], sites) if path.is_dir() else [path]
    if files[0].suffix.lower() not in TABLES:
        raise UserError(f"{option} is for tables, and {files[0].name} is none; leave it out")
    return files


def _load(file: Path, dialect: Dialect, asked: Question) -> Found:
    if asked.targets:
        return for_survey(file, asked.targets, "", asked.environment_column, dialect)
    return read(file, asked.label_column, asked.environment_column, dialect)


def _of(tables: Sequence[Path], sites: Collection[str]) -> list[Path]:
    """The tables of these sites, or all. Raises `UserError` for a site that has none."""
    names = [table.stem for table in tables]
    if strangers := [site for site in sites if site not in names]:
        raise UserError(f"--site: {unknown('site', strangers[0], names)}")
    return [table for table in tables if not sites or table.stem in sites]


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """The data themselves, or the tables of a folder of several sites, one each; names of others beside them."""
    files = sorted(filter(shown, path.iterdir())) if path.is_dir() else []
    tables = [file for file in files if file.suffix.lower() in TABLES]
    strange = [file.name for file in files if file.suffix.lower() in OTHER_TABLES]
    if not tables and (arrays := [file.name for file in files if file.suffix.lower() == ".npz"]):
        raise UserError(f"{path} has arrays of several sites; describe one site's, such as {path / arrays[0]}")
    names = [file.stem for file in tables]
    if double := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} has two tables of a site {double[0]!r}; one site is one file")
    if strange and not tables:
        raise UserError(f"{path} has no table that can be read: {strange[0]} {NO_TABLE}")
    return tables or [path], strange


def announcement(scenario: OwnData) -> dict[str, Any]:
    """What of it belongs into a run's configuration; what nobody has to say is left out."""
    tables = scenario.column_names or scenario.text_column
    of_tables = set[str]() if tables and scenario.target == "classes" else {"label_column"}
    of_tables |= {"target"} if scenario.target == "classes" else set()
    of_tables |= {"loss"} if scenario.target != "numbers" else set()
    of_tables |= set() if scenario.vocabulary else {"vocabulary", "padded"}
    every = scenario.model_dump(mode="json", exclude={"test_fraction", "validation_fraction"} | of_tables)
    for columns in (every["columns"], *every["own_columns"].values()):
        for name, column in columns.items():
            columns[name] = {key: value for key, value in column.items() if value is not None}
    return {key: value for key, value in every.items() if value not in ("", [], {})}


# ---------------------------------------------------------------------- pictures and arrays


def _measured(found: Found, sites: Sequence[str], balance: bool) -> OwnData:
    """Shape, and mean and deviation of each channel."""
    shape = _shape(found)
    settings: dict[str, Any] = {"labels": union([found.labels]), "inputs": shape}
    if len(settings["labels"]) < 2:
        raise UserError(f"{found.name} has samples of class {found.labels[0]!r} alone; there must be two or more")
    if sites:
        settings["sites"] = sites
    if found.environments is not None:
        settings["environments"] = union([found.environments])
    if balance:
        counts = Counter(found.labels)
        settings["class_weights"] = balancing({name: counts[name] for name in settings["labels"]})
    return announced({**settings, **_scaling(found.tensor(shape))})


def _scaling(x: torch.Tensor) -> dict[str, list[float]]:
    """Mean and deviation of each channel or feature of samples (n, channels, ...), as they are announced."""
    std, mean = torch.std_mean(x, dim=[dim for dim in range(x.ndim) if dim != 1], correction=0)
    means = [short(value, scale) for value, scale in zip(mean.tolist(), std.tolist(), strict=True)]
    return {"mean": means, "scale": [short(value) or 1.0 for value in std.tolist()]}


def _shape(found: Found) -> tuple[int, ...]:
    """A sample's."""
    if not found.of_pictures:
        return tuple(np.asarray(found.x).shape[1:])
    return _picture_shape((f"picture {path}", path) for path in found.x)


def _picture_shape(pictures: Iterable[tuple[str, Path | bytes]]) -> tuple[int, int, int]:
    """The most frequent size, made smaller where it is large, and grey if all are; each with what it is called.

    Raises `UserError` for one that cannot be read.
    """
    sizes, modes = Counter[tuple[int, int]](), set[str]()
    for name, own in pictures:
        try:
            with opened(BytesIO(own) if isinstance(own, bytes) else own) as picture:
                sizes[picture.size] += 1
                modes.add(picture.mode)
        except ValueError as error:
            raise UserError(f"{name} cannot be read ({error})") from None
    width, height = max(sizes, key=lambda size: (sizes[size], size))
    smaller = min(1.0, LONGEST / max(width, height))
    return 1 if modes <= {"1", "L"} else 3, max(1, round(height * smaller)), max(1, round(width * smaller))
