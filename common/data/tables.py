"""CSV and Parquet tables, cell by cell checked."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from perennial.common.data.dialect import PLAIN, Dialect
from perennial.common.utils.errors import UserError
from perennial.common.utils.free_memory import must_have


class NotNumbers(UserError):  # noqa: N818 - what a column is not
    """A cell has text where a number must be."""


class Commas(UserError):  # noqa: N818 - what a column has
    """All cells have numbers, some of them with a comma."""


CELL_BYTES = 32
"""Of a cell at least: as it is read, as a number, and as it is scaled."""
UNREADABLE = (OSError, ValueError, pa.ArrowException)
"""What reading a file that is no table raises."""


def read_table(path: Path, dialect: Dialect = PLAIN) -> pa.Table:
    """A `.csv` file in its dialect, all of it as text, with points in numbers; or a `.parquet` file.

    Raises one of `UNREADABLE`, and `UserError` for a file that another program would have to write otherwise.
    """
    if path.suffix.lower() == ".parquet":
        size = parquet.ParquetFile(path).metadata
        must_have(path.name, size.num_rows * size.num_columns * CELL_BYTES)
        return parquet.read_table(path)
    if not _is_text(path, encoding := dialect.encoding or "utf-8"):
        raise UserError(
            f"{path.name} is not {encoding.upper()}; say which it is, such as --encoding latin-1 with {WITH}, or "
            "save it as UTF-8, such as with Excel's 'CSV UTF-8'"
        )
    return _csv(path, dialect)


def _is_text(path: Path, encoding: str) -> bool:
    try:
        with path.open(encoding=encoding) as file:
            for _ in file:
                pass
    except UnicodeError:
        return False
    return True


def _csv(path: Path, dialect: Dialect) -> pa.Table:
    wrong = list[csv.InvalidRow]()

    def note(row: csv.InvalidRow) -> str:
        wrong.append(row)  # PyArrow's own error would hold the row's cells
        return "skip"

    # Cells may have line breaks, which PyArrow otherwise takes for ends of rows where its blocks end.
    parse = csv.ParseOptions(delimiter=dialect.mark, newlines_in_values=True, invalid_row_handler=note)
    read = csv.ReadOptions(use_threads=False, encoding=dialect.encoding or "utf8")
    with csv.open_csv(path, read, parse) as reader:
        names = reader.schema.names
    header = "".join(names)
    if mark := next((mark for mark in MARKS if mark != dialect.mark and header.count(mark) >= len(names)), ""):
        raise UserError(
            f"{path.name}: columns are separated by {MARKS[mark]}; say --separator {OPTION[mark]} with {WITH}, "
            'and where numbers are written as 3,5, --decimal ","'
        )
    text = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    table = csv.read_csv(path, read, parse, text)
    if wrong:
        row, cells = wrong[0].number - 1, wrong[0].actual_columns
        hint = (
            "; write numbers with a point, such as 3.5, and text with a comma in quotes; if another character "
            f"separates cells, say which with --separator of {WITH}"
        )
        raise UserError(
            f"{path.name}: row {row} has {cells} cells, but there are {len(names)} columns"
            f"{hint if (cells or 0) > len(names) else ''}"
        )
    table = table.rename_columns([name.strip() for name in names])
    return _with_points(table, path.name) if dialect.decimal == "," else table


def _with_points(table: pa.Table, file: str) -> pa.Table:
    """With points in columns of numbers that have commas. Raises `UserError` for one with both, as in 1.234,5."""
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        cells = _trimmed(column, EMPTY)
        plain, pointed = (pc.match_substring_regex(cells, rule) for rule in (COMMA_NUMBER, POINT_NUMBER))
        numbers = pc.all(pc.or_(plain, pointed)).as_py()  # null where nothing is in the column
        if numbers and pc.any(pointed).as_py():
            row = pointed.to_pylist().index(True) + 1
            raise UserError(
                f"{file}: row {row}, column {name!r} has a number with a point; with decimal ',' write 1234,5 for "
                "1.234,5, and 3,5 for 3.5"
            )
        columns.append(pc.replace_substring(cells, ",", ".") if numbers else column)
    return pa.table(columns, names=table.column_names)


WITH = "`describe` and `join`"
"""The commands that take a dialect; a configuration has it as `separator` and so on of the scenario."""
MARKS = {";": "';'", "\t": "tabs", "|": "'|'", ",": "','"}
"""What separates cells, as a sentence says it."""
OPTION = {";": '";"', "\t": "tab", "|": '"|"', ",": '","'}
COMMA_NUMBER = r"^[+-]?(\d+,?\d*|,\d+)([eE][+-]?\d+)?$"
POINT_NUMBER = r"^[+-]?(\d{1,3}(\.\d{3})+(,\d*)?|\d*\.\d+([eE][+-]?\d+)?)$"
COMMAS = re.compile(r"[+-]?[0-9][0-9.]*(,[0-9.]+)*")
"""A number that may have commas."""
EMPTY = ("", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None")
"""What stands for an empty cell, where one is allowed."""
NO_NAME = tuple(text for text in EMPTY if text != "None")
"""What is no name of a class or environment; None may be one."""
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


def like_number(text: str) -> bool:
    """Whether a cell has a number, also one with a comma."""
    return bool(NUMBER.fullmatch(text) or ("," in text and COMMAS.fullmatch(text)))


def number_cells(table: pa.Table, name: str, file: str, may_be_empty: bool = True) -> npt.NDArray[np.float64]:
    """A column (n,) of numbers, NaN where a cell is empty. Raises `UserError` naming a row with another.

    That is `NotNumbers` where a cell has text, or `Commas`.
    """
    column = _trimmed(table[name], EMPTY) if may_be_empty else _full(table, name, file, EMPTY)
    if column.null_count == len(column):  # of dates, too
        return np.full(len(column), np.nan)
    try:
        numbers: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy()
    except pa.ArrowException:
        if _has_commas(column):
            raise Commas(
                f"{file}: column {name!r} has numbers with a comma; write 3.5 for 3,5, and 1234 for 1,234, or say "
                f'--decimal "," with {WITH}'
            ) from None
        rule = "" if may_be_empty else "; every column but those of label and environment must have numbers"
        row = _first_text(column)
        rule = "; write 3.5 for 3,5, and 1234 for 1,234" if _has_commas(column[row - 1 : row]) else rule
        raise NotNumbers(f"{file}: row {row}, column {name!r} is no number{rule}") from None
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)  # as what a model is given
    wrong = np.isinf(narrow) if may_be_empty else ~np.isfinite(narrow)
    if wrong.any():
        raise UserError(f"{file}: row {int(np.argmax(wrong)) + 1}, column {name!r} is no finite number")
    return numbers


def text_cells(table: pa.Table, name: str, file: str) -> list[str]:
    """A column (n,) as text, "" where a cell is empty; 3.0 is 3, as another site may have it.

    Truth values are True and False, as pandas writes them.
    """
    return plain_texts(_as_text(table[name], name, file))


def plain_texts(column: pa.ChunkedArray | pa.Array) -> list[str]:
    """Texts (n,) without blanks around them, "" for one of `EMPTY`, and 3 for 3.0."""
    return _whole(_trimmed(column, EMPTY).fill_null(""))


def text_column(table: pa.Table, name: str, file: str) -> list[str]:
    """A column (n,) as `text_cells` has it. Raises `UserError` naming the first row that is empty."""
    return _whole(_as_text(_full(table, name, file, NO_NAME), name, file))


def picture_cells(table: pa.Table, name: str, file: str) -> list[str | bytes]:
    """A column (n,) of pictures: paths, or the bytes of files, also as Hugging Face's tables have them.

    Raises `UserError` naming the first row that is empty, or for a column of neither.
    """
    column = table[name]
    if _holds_bytes(column.type):
        column = pc.struct_field(column, "bytes")
    column = _full(table.set_column(table.column_names.index(name), name, column), name, file, NO_NAME)
    if not (_has_bytes(column) or pa.types.is_string(_cell_type(column))):
        raise UserError(f"{file}: column {name!r} has neither paths of pictures nor their bytes")
    cells: list[str | bytes] = column.to_pylist()
    return cells


def has_truth_values(table: pa.Table, name: str) -> bool:
    """Whether a column is of truth values, which a CSV file has as names."""
    return bool(pa.types.is_boolean(_cell_type(table[name])))


def _as_text(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    try:
        if pa.types.is_boolean(_cell_type(column)):
            column = pc.if_else(column.cast(pa.bool_()), "True", "False")
        if pa.types.is_floating(_cell_type(column)):  # Arrow writes 1.2e+10, and a CSV file has 12000000000
            number = column.cast(pa.float64())
            whole = pc.and_(pc.equal(number, pc.floor(number)), pc.less(pc.abs(number), 2.0**53))
            text = number.cast(pa.int64(), safe=False).cast(pa.string())
            column = pc.if_else(whole, text, column.cast(pa.string()))
        return column.cast(pa.string())
    except pa.ArrowException:
        hint = "; bytes of pictures are for describe with --image-column" if _has_bytes(column) else ""
        raise UserError(f"{file}: column {name!r} has neither text nor numbers{hint}") from None


def _has_bytes(column: pa.ChunkedArray) -> bool:
    """Whether its cells are bytes, also as Hugging Face's tables have those of pictures."""
    kind = column.type.field("bytes").type if _holds_bytes(column.type) else _cell_type(column)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def _whole(column: pa.ChunkedArray | pa.Array) -> list[str]:
    texts: list[str] = pc.replace_substring_regex(column, r"^(-?\d+)\.0+$", r"\1").to_pylist()
    return texts


def _cell_type(column: pa.ChunkedArray | pa.Array) -> pa.DataType:
    return column.type.value_type if pa.types.is_dictionary(column.type) else column.type


def _full(table: pa.Table, name: str, file: str, empty: Sequence[str]) -> pa.ChunkedArray:
    """A column with something in each cell, and no blanks around text."""
    column = _trimmed(table[name], empty)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    if column.null_count:
        row = column.is_null().to_pylist().index(True) + 1
        raise UserError(f"{file}: row {row}, column {name!r} is empty; fill it in, or take the row out")
    return column


def _trimmed(column: pa.ChunkedArray | pa.Array, empty: Sequence[str]) -> pa.ChunkedArray:
    """A column without blanks around text, and null where there is nothing but one of `empty`."""
    # The latter two are pandas' and Polars'.
    if _cell_type(column) not in (pa.string(), pa.large_string(), pa.string_view()):
        return column
    column = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.is_in(column, pa.array(empty)), None, column)


def _has_commas(column: pa.ChunkedArray) -> bool:
    if column.type != pa.string():
        return False
    texts: list[str] = column.drop_null().to_pylist()
    return any("," in text for text in texts) and all(map(COMMAS.fullmatch, texts))


def _first_text(column: pa.ChunkedArray) -> int:
    for row, cell in enumerate(column, start=1):
        try:
            if cell.is_valid:
                cell.cast(pa.float64())
        except pa.ArrowException:
            return row
    raise AssertionError("one cell could not be cast")
