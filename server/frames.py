"""Scenarios of data frames in memory, prepared as tables of sites are: `perennial.from_frames`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from perennial.common.data.columns import LEAST
from perennial.common.data.scenarios.own_data import SITE, SITE_TEXT, OwnData
from perennial.common.data.site_files import LABEL
from perennial.common.data.texts import LONGEST_TEXT
from perennial.common.survey import Rule
from perennial.common.tasks import TaskName
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import path_of
from perennial.server.in_memory import InMemory

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "tables"
"""In the data root, and in it a folder for each content."""
OPTION = re.compile(r"--([a-z][a-z-]*)(?: ([^\s;,.)]+))?")
"""What the command line's sentences recommend."""
ARGUMENTS = {
    "label-column": "label",
    "environment-column": "environment",
    "category": "categories",
    "at-least": "at_least",
    "class-weights": "class_weights",
    "text-column": "text",
    "image-column": "image",
}
"""Names of these options as arguments, where they differ."""


@dataclass(frozen=True, eq=False)
class InFrames(InMemory):
    """A scenario of tables that are in this process until a run writes them where its clients find them."""

    scenario: OwnData
    """What a run's configuration has of it: names, and what becomes of each column."""
    tables: Mapping[str, pa.Table] = field(repr=False, default_factory=dict)

    def save(self, folder: Path | str) -> str:
        """Write a Parquet table of each site below a folder; the whole path of the data root that this makes.

        Raises `UserError` where they cannot be written.
        """
        place = path_of(folder, "folder")
        try:
            with TemporaryDirectory(prefix="perennial-") as other:
                files = _written(self.tables, Path(other))
                digest = sha256()
                for site, file in files.items():
                    digest.update(site.encode() + b"\0" + file.read_bytes())
                root = place / FOLDER / digest.hexdigest()[:16]
                root.mkdir(parents=True, exist_ok=True)
                for file in files.values():
                    if not (root / file.name).exists():
                        (root / file.name).write_bytes(file.read_bytes())
        except OSError as error:
            raise UserError(f"the frames cannot be written into {folder} ({error.strerror or error})") from None
        return str(root.resolve())


def from_frames(
    clients: Mapping[str, Any],
    label: str | Sequence[str] = LABEL,
    *,
    environment: str = "",
    task: TaskName = "classes",
    impute: Rule | Mapping[str, Rule] | None = None,
    categories: Collection[str] = (),
    drop: Collection[str] = (),
    class_weights: Literal["balanced"] | None = None,
    per_site: bool = False,
    at_least: int = LEAST,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.1,
    text: str = "",
    length: int = 64,
    tokenizer: Path | str | None = None,
    image: str = "",
) -> InFrames:
    """A scenario of data frames, `{"site-a": frame, …}`, of pandas or of anything that PyArrow makes a table of.

    `label`: the column of the class, or the columns of other targets, which `task` says. `environment`: a column,
    or "" for none. All other columns are features: numbers are scaled, and texts become categories, as
    `perennial describe` does with the same tables as files. `impute`: what an empty cell of numbers counts as,
    "median", "mean" or "most-frequent", of all columns or by column. `categories`: those whose numbers are names;
    `drop`: those that nobody uses. `class_weights`: "balanced": rare classes count more. `per_site`: each site's
    numbers are scaled by its own mean and deviation. `at_least`: classes and categories of fewer rows of a site
    count as unknown. `test_fraction` and `validation_fraction`: parts of each site's rows. `text`: a column of
    texts, which are all of a sample; their first `length` tokens count, by a `tokenizer` file or by hashing words.
    `image`: a column of pictures beside the others, as bytes or paths of files.

    Warns of what should be looked at. Raises `UserError` with one sentence for frames that do not fit together.
    """

    from pydantic import ValidationError

    from perennial.common.utils.suggestions import sentence
    from perennial.server.survey.describe import describe, describe_pictures, describe_texts, question

    if not isinstance(clients, Mapping) or not clients:
        raise UserError('clients must be a dict of frames by site, such as {"site-a": frame}')
    tables = {str(name): frame_table(str(name), clients[name]) for name in sorted(clients, key=str)}
    if strange := [name for name in tables if not SITE.fullmatch(name)]:
        raise UserError(f"clients: {strange[0]!r} is no name of a site; take {SITE_TEXT}")
    if text and image:
        raise UserError(f"image: {image!r} is not possible beside text; a text is all of a sample")
    if tokenizer is not None and not text:
        raise UserError("tokenizer: it is for texts; say their column with text")
    if not 1 <= length <= LONGEST_TEXT:
        raise UserError(f"length: {length} is not possible; take 1 to {LONGEST_TEXT} tokens of a text")
    if image:
        tables = {name: with_bytes(name, table, image) for name, table in tables.items()}
    of_all: Mapping[str, Rule] = {"": impute} if isinstance(impute, str) else impute or {}
    if class_weights not in (None, "balanced"):
        raise UserError(f"class_weights: {class_weights!r:.100} is not possible; leave it out, or say 'balanced'")
    with TemporaryDirectory(prefix="perennial-") as folder:
        _written(tables, Path(folder))
        try:
            asked = question(
                [f"{column}={rule}" if column else rule for column, rule in of_all.items()],
                categories,
                drop,
                target=task,
                label_column=label if isinstance(label, str) else ",".join(label),
                environment_column=environment,
                least=at_least,
            )
            balance = class_weights is not None
            if text:
                file = None if tokenizer is None else path_of(tokenizer, "tokenizer")
                found = describe_texts(Path(folder), text, asked, length=length, tokenizer=file, balance=balance)
            elif image:
                found = describe_pictures(Path(folder), image, asked, per_site=per_site, balance=balance)
            else:
                found = describe(Path(folder), (), asked, per_site, balance)
        except UserError as error:
            raise UserError(_in_python(str(error), folder)) from None
    if found.left_out:
        site, reason = min(found.left_out.items())
        raise UserError(_in_python(f"{site}: {reason}", folder))
    for remark in found.remarks:
        warnings.warn(_in_python(remark, folder), stacklevel=2)
    parts = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    try:
        scenario = OwnData.model_validate({**found.scenario.model_dump(exclude={"clients"}), **parts})
    except ValidationError as error:
        raise UserError(sentence(error)) from None
    return InFrames(scenario, {}, tables)


def frame_table(what: str, frame: Any) -> pa.Table:
    """A frame as PyArrow's table, with the cells that a CSV file would have of it. Raises `UserError`."""
    import pyarrow as pa

    if not hasattr(frame, "columns"):
        raise UserError(f"{what} must be a data frame (`uv pip install pandas`), not {type(frame).__name__}")
    try:
        if not hasattr(frame, "iloc"):  # Polars, or a table already
            return _flat(what, pa.table(frame))
        plain = frame.set_axis([str(name) for name in frame.columns], axis=1)
        if not plain.columns.is_unique:
            raise UserError(f"{what} has more than one column {plain.columns[plain.columns.duplicated()][0]!r}")
        table = pa.table({name: _column(plain[name]) for name in plain.columns})
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"{what} cannot be read ({' '.join(map(str, error.args))[:200]})") from None
    return _flat(what, table)


def with_bytes(what: str, table: pa.Table, column: str) -> pa.Table:
    """A table with the files of pictures in place of their paths. Raises `UserError` for one that is not there."""
    import pyarrow as pa

    from perennial.common.data.tables import picture_cells

    if column not in table.column_names:
        raise UserError(f"{what} has no column {column!r} of pictures; it has {', '.join(table.column_names)}")
    files = []
    for row, cell in enumerate(picture_cells(table, column, what), start=1):
        if isinstance(cell, bytes):
            files.append(cell)
            continue
        try:
            files.append(Path(cell).read_bytes())
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{what}: row {row}, column {column!r}: {cell} cannot be read ({why})") from None
    return table.set_column(table.column_names.index(column), column, pa.array(files, pa.binary()))


def _flat(what: str, table: pa.Table) -> pa.Table:
    """A table whose cells are texts or numbers. Raises `UserError`."""
    import pyarrow as pa

    if nested := [column.name for column in table.schema if pa.types.is_nested(column.type)]:
        raise UserError(f"{what}: column {nested[0]!r} has neither text nor numbers")
    return table


def _column(series: Any) -> pa.Array:
    import pyarrow as pa

    if hasattr(series, "cat"):
        series = series.astype(object)
    try:
        return pa.Array.from_pandas(series)
    except (pa.ArrowException, TypeError):  # texts and numbers in one column
        empty = series.isna()
        return pa.array([None if no else str(cell) for no, cell in zip(empty, series, strict=True)], pa.string())


def _written(tables: Mapping[str, pa.Table], folder: Path) -> dict[str, Path]:
    from pyarrow import parquet

    files = {site: folder / f"{site}.parquet" for site in sorted(tables)}
    for site, file in files.items():
        parquet.write_table(tables[site].replace_schema_metadata(None), file)
    return files


def _in_python(text: str, folder: str) -> str:
    """A sentence of the command line's, as one of Python's: of frames, and of arguments."""

    def argument(option: re.Match[str]) -> str:
        name, value = ARGUMENTS.get(option[1], option[1]), option[2]
        if option[1] == "scope":
            return "per_site=True"
        if not value:
            return name
        column, _, rule = value.rpartition("=")
        if column:
            return f"{name}={{{column!r}: {rule!r}}}"
        return f"{name}=[{value!r}]" if name in ("drop", "categories") else f"{name}={value!r}"

    plain = text.replace(f"{folder}/", "").replace(".parquet", "").replace(folder, "clients")
    plain = re.sub(r"\((label|environment)_column of the scenario[^)]*\)", r"(\1=…)", plain)
    return OPTION.sub(argument, plain)
