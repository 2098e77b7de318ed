"""Data as a site has them on its disk: a folder of pictures, a table, or arrays.

What is wrong with them is said in one sentence with names of files, columns and classes and numbers of rows, and
never with the value of a cell: the sentence also goes to the server.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from zipfile import BadZipFile, ZipFile, is_zipfile

from perennial.common.data.dialect import PLAIN, Dialect
from perennial.common.data.environments import unit_range
from perennial.common.data.raw_data import FORMATS, MOST_PIXELS, Files, opened, resized
from perennial.common.utils.errors import UserError
from perennial.common.utils.free_memory import must_have
from perennial.common.utils.samples import PAD, padded, vocabulary_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from torch import Tensor

    from perennial.common.data.columns import AnyColumn

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
TABLES = (".csv", ".parquet")
LABEL = "label"
N = TypeVar("N", str, int | str)


@dataclass(frozen=True)
class Found:
    """Samples as they are on a disk, in an order that depends on nothing else.

    `x`: (n, *shape) numbers, (n,) picture files, or a table of features as PyArrow has it. `labels`: (n,) names of
    classes; or `targets`: (n, targets) numbers, NaN where a cell is empty, and no labels. `environments`: (n,)
    names, or None where the data do not say. `columns`: names of a table's features. `named`: of a table, the
    column that has the class, and the one that has the environment. `folder`: of a table, where its file lies.
    """

    name: str
    x: npt.NDArray[np.generic] | Sequence[Path] | pa.Table
    labels: Sequence[str]
    environments: Sequence[str] | None
    columns: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    targets: npt.NDArray[np.float64] | None = None
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.labels if self.targets is None else self.targets)

    @property
    def of_pictures(self) -> bool:
        """Whether the samples are files of pictures."""
        import numpy as np

        return not self.columns and not isinstance(self.x, np.ndarray)

    def tensor(
        self,
        shape: tuple[int, ...],
        columns: Sequence[str] = (),
        prepared: Mapping[str, AnyColumn] | None = None,
        ignored: Sequence[str] = (),
    ) -> Tensor:
        """All samples (n, *shape) as float32, bytes divided by 255; int64 where `shape` is of ids of tokens; a
        table's features in the order of `columns`.

        `prepared` says what becomes of a column's cells; without, they are numbers. Raises `UserError` where the
        samples do not fit.
        """
        import numpy as np
        import torch

        if self.columns:
            self._must_have(columns, ignored)
            parts = [self._features(name, (prepared or {}).get(name)) for name in columns]
            return torch.from_numpy(np.concatenate(parts, axis=1))
        if not isinstance(self.x, np.ndarray):
            if len(shape) != 3 or shape[0] not in (1, 3):
                raise UserError(f"{self.name} has pictures, but the server announces samples of {_size(shape)}")
            return unit_range(Files(self.x, (shape[0], shape[1], shape[2]))[torch.arange(len(self.x))])
        x = self.x
        if x.shape[1:] != tuple(shape):
            raise UserError(
                f"samples in {self.name} are of {_size(x.shape[1:])}, but the server announces {_size(shape)}"
            )
        if most := vocabulary_of(shape):
            wrong = f"{self.name}: x has what is no whole number from 0 to {most - 1}, which the server announces"
            if x.dtype.kind not in "iu" or x.min() < (PAD if padded(shape) else 0) or x.max() >= most:
                raise UserError(wrong)
            return torch.from_numpy(x.astype(np.int64))
        return unit_range(torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32)))

    def texts(self, column: str) -> list[str]:
        """A table's column of texts (n,). Raises `UserError` where there is none, or a cell is empty."""
        from perennial.common.data.tables import text_column

        if not self.columns or column not in self.columns:
            raise UserError(f"{self.name} has no column {column!r} of texts")
        return text_column(self.x, column, self.name)

    def picture_cells(self, column: str) -> list[Path | bytes]:
        """A table's column of pictures (n,): their files' bytes, or where they lie below the table's folder.

        Raises `UserError` where there is none, or a cell is empty or leads elsewhere.
        """
        from perennial.common.data.tables import picture_cells

        if not self.columns or column not in self.columns:
            raise UserError(f"{self.name} has no column {column!r} of pictures")
        found: list[Path | bytes] = []
        for row, cell in enumerate(picture_cells(self.x, column, self.name), start=1):
            if isinstance(cell, bytes):
                found.append(cell)
                continue
            place = None if self.folder is None else self.folder.resolve()
            try:
                inside = place and (place / cell).resolve()
            except (OSError, ValueError, RuntimeError):  # a loop of links, or what no path has
                inside = None
            if not place or not inside or not inside.is_relative_to(place):
                raise UserError(
                    f"{self.name}: row {row}, column {column!r} is no path below the folder of the table; put the "
                    "pictures there, and write paths from there on"
                )
            found.append(inside)
        return found

    def pictures(self, column: str, shape: tuple[int, ...]) -> Tensor:
        """A table's column of pictures (n, channels, height, width) as float32 from 0 to 1.

        Each becomes `shape`, whatever its own. Raises `UserError` naming the row of one that cannot be read.
        """
        import numpy as np
        import torch

        channels, height, width = shape
        cells = self.picture_cells(column)
        pixels = np.empty((len(cells), channels, height, width), np.uint8)
        for row, cell in enumerate(cells):
            try:
                with opened(BytesIO(cell) if isinstance(cell, bytes) else cell, FORMATS) as found:
                    if found.width * found.height > MOST_PIXELS:
                        raise ValueError(f"it has more than {MOST_PIXELS} pixels")
                    pixels[row] = resized(found, (channels, height, width))
            except ValueError as error:
                where = f"{self.name}: row {row + 1}, column {column!r}: the picture cannot be read"
                why = re.sub(r":? ?'.*'", "", " ".join(str(error).split()))[:200]  # which has a file's place
                raise UserError(f"{where} ({why})", where) from None
        return unit_range(torch.from_numpy(pixels))

    def numbers(self, kind: str, names: Sequence[str], announced: Sequence[str]) -> Tensor:
        """Each name's place (n,) int64 among those announced. Raises `UserError` for one that is not."""
        import torch

        from perennial.common.data.columns import places

        place, column = places(announced), self.named.get(kind)
        for row, name in enumerate(names, start=1):
            if name not in place:
                where = f"folder {name}" if self.of_pictures else f"row {row}"
                why = f"is of no {kind} that the server announces ({', '.join(announced)})"
                if column:
                    why += (
                        f"; correct column {column!r}, take these rows out, or describe again with a smaller "
                        "--at-least"
                    )
                # A server that knew the row could find out the names in any column, list by list.
                raise UserError(f"{self.name}: {where} {why}", f"{self.name}: a sample {why}")
        return torch.tensor([place[name] for name in names])

    def target_numbers(self, names: Sequence[str], may_be_missing: bool = False) -> Tensor:
        """The targets (n, targets) float32, called `names`. Raises `UserError` for one that is missing."""
        import numpy as np
        import torch

        targets = self.targets
        if targets is None:
            raise UserError(f"{self.name} has classes, but the server announces {_and(names)}, which are numbers")
        if targets.shape[1] != len(names):
            raise UserError(
                f"{self.name}: y has {targets.shape[1]} numbers for a sample, but the server announces "
                f"{_and(names)}"
            )
        missing = np.argwhere(np.isnan(targets))
        if len(missing) and not may_be_missing:
            row, place = missing[0]
            why = f"has no {names[place]}; fill it in, or take the row out"
            raise UserError(f"{self.name}: row {row + 1} {why}", f"{self.name}: a row {why}")
        return torch.from_numpy(targets.astype(np.float32))

    def _features(self, name: str, column: AnyColumn | None) -> npt.NDArray[np.float32]:
        """A column's cells (n, width). Raises `UserError` for one that is not as it must be."""
        import numpy as np

        from perennial.common.data.columns import CategoryColumn
        from perennial.common.data.tables import number_cells, text_cells

        if isinstance(column, CategoryColumn):
            return column.features(text_cells(self.x, name, self.name))
        may_be_empty = column is not None and column.fill is not None
        # In the digits that a served model is sent, with which it must be trained, too.
        numbers = number_cells(self.x, name, self.name, may_be_empty).astype(np.float32)
        return column.features(numbers.astype(np.float64)) if column else numbers[:, None]

    def _must_have(self, columns: Sequence[str], ignored: Sequence[str]) -> None:
        if not columns:
            raise UserError(f"{self.name} is a table, but the server announces no columns")
        if lacking := [column for column in columns if column not in self.columns]:
            raise UserError(f"{self.name} lacks column {lacking[0]!r}, which the server announces")
        if beyond := [column for column in self.columns if column not in (*columns, *ignored)]:
            raise UserError(f"{self.name} has column {beyond[0]!r}, which the server does not announce")


def target_columns(own: str, asked: Sequence[str]) -> tuple[str, ...]:
    """The columns of the targets `asked` for; `own`: what the site calls them, with commas, or empty.

    Raises `UserError`.
    """
    names = tuple(name.strip() for name in own.split(",")) if own else tuple(asked)
    if len(names) != len(asked):
        raise UserError(
            f"label column {own!r}: there must be {len(asked)} columns with commas between them, for "
            f"{', '.join(asked)}"
        )
    return names


def for_survey(path: Path, asked: Sequence[str], own: str, environment: str, dialect: Dialect = PLAIN) -> Found:
    """A table whose targets, that are `asked` for, are among its columns; `own`: what the site calls them.

    Raises `UserError`.
    """
    found = read(path, (), environment, dialect)
    if not found.columns:
        return found
    names = target_columns(own, asked)
    if lacking := [name for name in names if name not in found.columns]:
        raise UserError(
            f"{found.name} has no column {lacking[0]!r} for the label; it has {', '.join(found.columns)}"
        )
    called = dict(zip(names, asked, strict=True))
    columns = tuple(called.get(name, name) for name in found.columns)
    return replace(found, x=found.x.rename_columns(list(columns)), columns=columns)  # type: ignore[union-attr]


def place_of(folder: Path, site: str) -> Path:
    """A site's data in a folder that has those of several. Raises `UserError` if there are none, or two."""
    names = [f"{site}{ending}" for ending in (*TABLES, ".npz", "")]
    found = [name for name in names if (folder / name).exists()]
    if not found and folder.is_dir():  # with other capitals, such as .CSV
        files = (file for file in folder.iterdir() if file.stem == site)
        found = sorted(file.name for file in files if file.suffix.lower() in (*TABLES, ".npz"))
    if len(found) != 1:
        raise UserError(
            f"{folder} must have the data of site {site!r} in one of {', '.join(names)}; "
            f"it has {' and '.join(found) or 'none'}"
        )
    return folder / found[0]


def read(path: Path, label: str | Sequence[str] = LABEL, environment: str = "", dialect: Dialect = PLAIN) -> Found:
    """A site's samples; `label` and `environment` (empty: none) are columns of a table, a `.csv` in its `dialect`.

    With a sequence of columns as `label` the targets are numbers, and otherwise classes. Raises `UserError` with
    what is wrong.
    """
    if not path.exists():
        raise UserError(f"there is no {path.name}")
    if path.is_dir():
        if not isinstance(label, str):
            raise UserError(
                f"{path.name} is a folder of pictures, whose classes are its folders; it has no numbers"
            )
        return _pictures(path)
    if path.suffix.lower() in TABLES:
        return _rows(path, label, environment, dialect)
    if path.suffix.lower() == ".npz":
        return _arrays(path, numbers=not isinstance(label, str))
    raise UserError(f"{path.name} is no folder of pictures and no .csv, .parquet or .npz file")


def check(path: Path, label: str = "", environment: str = "", dialect: Dialect = PLAIN) -> None:
    """What can be wrong whatever the server will announce; columns may be as announced, then they are empty.

    Raises `UserError`.
    """
    if path.suffix.lower() in TABLES and path.is_file():
        _table(path, label, environment, dialect)
    elif (found := read(path)).of_pictures:
        found.tensor((1, 1, 1))  # every picture can be decoded


def _pictures(path: Path) -> Found:
    """`PATH/CLASS/*`, or `PATH/ENVIRONMENT/CLASS/*`."""
    tops = _folders(path)
    deep = [top for top in tops if _folders(top)]
    if not tops:
        raise UserError(
            f"{path.name} has neither tables ({', '.join(TABLES)}), one of each site, nor folders of pictures, "
            "one of each class"
        )
    if beside := sorted(file.name for file in path.iterdir() if _picture(file)):
        raise UserError(f"{path.name}: {beside[0]} is in no folder of a class; move it into one, or away")
    if deep and len(deep) < len(tops):
        flat = next(top for top in tops if top not in deep)
        raise UserError(f"{path.name}: {deep[0].name} has folders and {flat.name} has none; all must be alike")
    files, labels, environments = list[Path](), list[str](), list[str]()
    for folder in [child for top in tops for child in _folders(top)] if deep else tops:
        own = sorted(filter(_picture, folder.iterdir()))
        if not own:
            tables = any(file.suffix.lower() in TABLES for file in folder.iterdir())
            inside = f"; its tables are data, too, if you name the folder {folder}" if tables else ""
            raise UserError(
                f"{path.name}: {folder.relative_to(path)} has no pictures ({', '.join(PICTURES)}){inside}"
            )
        files += own
        labels += [folder.name] * len(own)
        environments += [folder.parent.name] * len(own)
    return Found(path.name, files, labels, environments if deep else None)


def _folders(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir() and shown(child))


def _picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES and shown(path)


def shown(path: Path) -> bool:
    """Whether a file is somebody's own, and not one that a system hides, such as `._north.csv` of macOS."""
    return not path.name.startswith(".")


def _rows(path: Path, label: str | Sequence[str], environment: str, dialect: Dialect) -> Found:
    from perennial.common.data.tables import number_cells, text_column

    table = _table(path, label, environment, dialect)
    classes = isinstance(label, str)
    targets = [label] if isinstance(label, str) else list(label)
    columns = tuple(name for name in table.column_names if name not in (*targets, environment))
    if not columns:
        raise UserError(f"{path.name} has no columns of features, only {', '.join(table.column_names)}")
    return Found(
        path.name,
        table.select(columns),
        text_column(table, targets[0], path.name) if classes else (),
        text_column(table, environment, path.name) if environment else None,
        columns,
        {"class": targets[0] if classes else "", "environment": environment},
        None if classes else _stacked([number_cells(table, name, path.name) for name in targets], len(table)),
        path.parent,
    )


def _stacked(columns: Sequence[npt.NDArray[np.float64]], rows: int) -> npt.NDArray[np.float64]:
    import numpy as np

    return np.stack(columns, axis=1) if columns else np.empty((rows, 0))


def _table(path: Path, label: str | Sequence[str], environment: str, dialect: Dialect) -> Any:
    """A table that has rows and these columns, as PyArrow's, without columns that have no name."""
    # PyArrow takes its time to import, and only sites with tables need it.
    from perennial.common.data.tables import UNREADABLE, like_number, read_table

    try:
        table = read_table(path, dialect)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None
    # Without a name are the row numbers of pandas and R, and the empty columns of spreadsheets.
    table = table.select([place for place, name in enumerate(table.column_names) if name])
    names = table.column_names
    numbers = [name for name in names if like_number(name)]
    if numbers != [str(number) for number in _counting(numbers)]:  # a row of cells, which is nobody's business
        raise UserError(
            f"{path.name}: the first row has numbers where names of columns must be; write a name for each, with "
            "a letter in it"
        )
    if double := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path.name} has more than one column {double[0]!r}")
    targets = [label] if isinstance(label, str) else label
    for kind, column in (*(("label", name) for name in targets), ("environment", environment)):
        if column and column not in names:
            has = "its first row must have names of columns" if numbers else f"it has {', '.join(names)}"
            raise UserError(
                f"{path.name} has no column {column!r} for the {kind}; {has}; rename one, or say which it is "
                f"({kind}_column of the scenario, --{kind}-column of `describe`, `survey` and `join`)"
            )
    if not table.num_rows:
        raise UserError(f"{path.name} has no rows")
    return table


def _counting(names: Sequence[str]) -> range:
    """0, 1, 2 and so on, or 1, 2, 3, as pandas and others name columns of arrays."""
    first = 1 if names[:1] == ["1"] else 0
    return range(first, first + len(names))


def _arrays(path: Path, numbers: bool) -> Found:
    """Arrays `x` (n, …) and `y` (n,), or numbers (n, targets), and `environment` (n,) where there are several."""
    import numpy as np

    try:
        with ZipFile(path) as archive:
            must_have(path.name, 2 * sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("x", "y", "environment") if name in file.files}
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, BadZipFile, zlib.error) as error:
        if not is_zipfile(path):  # NumPy would advise to load it unsafely
            raise UserError(f"{path.name} is no .npz file; numpy.savez writes one") from None
        raise _unreadable(path, error) from None
    if missing := [name for name in ("x", "y") if name not in arrays]:
        raise UserError(f"{path.name} has no array {missing[0]!r}")
    x, n = arrays["x"], len(arrays["y"]) if numbers and arrays["y"].ndim else len(arrays["y"].ravel())
    if not n:
        raise UserError(f"{path.name} has no rows")
    if x.dtype.kind not in "fiub" or x.ndim < 2 or len(x) != n:
        raise UserError(f"{path.name}: x must be numbers, {n} rows as in y; it is {x.dtype} of {_size(x.shape)}")
    with np.errstate(over="ignore"):
        finite = np.isfinite(x.astype(np.float32)).reshape(n, -1).all(axis=1)
    if not finite.all():
        raise UserError(f"{path.name}: row {int(np.argmin(finite)) + 1} of x has what is no finite number")
    targets = _target_array(path, arrays.pop("y")) if numbers else None
    names = {name: _texts(path, name, array, n) for name, array in arrays.items() if name != "x"}
    return Found(path.name, x, names.get("y", ()), names.get("environment"), targets=targets)


def _target_array(path: Path, y: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Targets (n, targets) of y (n,) or (n, targets)."""
    import numpy as np

    if y.dtype.kind not in "fiub" or y.ndim not in (1, 2):
        raise UserError(f"{path.name}: y must be numbers, one or several for each row; it is {y.dtype}")
    if np.isinf(y := y.astype(np.float64)).any():
        raise UserError(f"{path.name}: row {int(np.argwhere(np.isinf(y))[0][0]) + 1} of y is no finite number")
    return y[:, None] if y.ndim == 1 else y


def _and(names: Sequence[str]) -> str:
    """Names as a person lists them."""
    return " and ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))


def _texts(path: Path, name: str, array: npt.NDArray[np.generic], n: int) -> list[str]:
    if array.dtype.kind not in "iuU" or array.shape != (n,):
        raise UserError(
            f"{path.name}: {name} must be {n} whole numbers or texts; it is {array.dtype} of {_size(array.shape)}"
        )
    texts = [str(value).strip() for value in array.tolist()]
    if "" in texts:
        raise UserError(f"{path.name}: row {texts.index('') + 1} of {name} is empty; fill it in, or leave it out")
    return texts


def in_order(names: Iterable[N]) -> list[N]:
    """Different names, numbers among them by their size, and first."""
    return sorted(set(names), key=_text_or_number)


def _text_or_number(value: int | str) -> tuple[bool, int, str]:
    text = str(value)
    number = text.removeprefix("-").isdecimal()
    return (not number, int(text) if number else 0, text)


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path.name} cannot be read ({' '.join(str(error).split())[:200]})")


def _size(shape: Sequence[int]) -> str:
    return f"size {'x'.join(map(str, shape))}"
