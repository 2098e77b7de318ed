"""Of which tables a site has told, so that two surveys do not tell of few rows by their difference."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from perennial.client.state import own_folder
from perennial.common.data import tables
from perennial.common.data.dialect import Dialect
from perennial.common.data.site_files import read
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import PRIVATE, load_tensors, save_tensors

Sketch = npt.NDArray[np.uint64]
"""Of a column: the number of its cells that are not empty, and the sums of their hashes in each bucket."""
BUCKETS = 1024
FOLDER = "surveys"
"""In the state folder: a file for each table of which the site has told. It has sums of hashes, and no cell."""


def must_differ_enough(data: Path, dialect: Dialect, state: Path, least: int) -> None:
    """Raises `UserError` for a table that differs in few numbers of a column from one that was told of before.

    Else this table becomes one of those, before anything is told of it. Few are fewer than `least`, or than a
    quarter of `BUCKETS`: the difference of two sums would tell of them.
    """
    stat = data.stat()
    now = _sketches(data, dialect, stat.st_mtime_ns, stat.st_size)
    folder = own_folder(state / FOLDER / data.name)
    for file in sorted(folder.glob("*.safetensors")):
        before = {name: tensor.numpy().view(np.uint64) for name, tensor in load_tensors(file).items()}
        for name in sorted(now.keys() & before.keys()):
            told = now[name][0] >= least and before[name][0] >= least
            if told and 0 < apart(now[name], before[name]) < min(least, BUCKETS // 4):
                day = time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))
                why = (
                    f"{data.name} has fewer than {least} other numbers in column {name!r} than on {day}, when "
                    "this site told of it, and two surveys would tell them by their difference"
                )
                raise UserError(f"{why}; if that is no harm, remove {folder}", f"{why}; its owner may allow it")
    kept = {name: torch.from_numpy(own.view(np.int64)) for name, own in now.items()}
    digest = sha256(b"".join(name.encode() + own.tobytes() for name, own in sorted(now.items()))).hexdigest()
    if not (file := folder / f"{digest[:16]}.safetensors").exists():
        save_tensors(file, kept, mode=PRIVATE)


def apart(one: Sketch, other: Sketch) -> float:
    """At most the larger of two numbers: of cells that `one` has and `other` has not, and the other way round."""
    touched = int((one[1:] != other[1:]).sum())
    return (touched + abs(int(one[0]) - int(other[0]))) / 2


def sketch(cells: Iterable[str]) -> Sketch:
    """Of a column's cells, "" where one is empty; in whatever order they are.

    The k-th cell of a value has a hash of its own, so each cell more or less is another sum in one bucket.
    """
    counts = Counter(cells)
    counts.pop("", None)
    times = np.fromiter(counts.values(), np.int64, len(counts))
    words = (blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in counts)
    each = np.repeat(np.frombuffer(b"".join(words), np.uint64), times)
    place = np.arange(len(each)) - np.repeat(np.cumsum(times) - times, times)
    hashes = _mixed(each ^ _mixed(place.astype(np.uint64)))
    sums = np.zeros(BUCKETS, np.uint64)
    np.add.at(sums, hashes % np.uint64(BUCKETS), hashes)  # which wraps around
    return np.concatenate([np.array([len(each)], np.uint64), sums])


def _mixed(words: Sketch) -> Sketch:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@lru_cache(maxsize=1)
def _sketches(data: Path, dialect: Dialect, changed: int, size: int) -> Mapping[str, Sketch]:
    """Of each column of numbers. `changed` and `size` are those of the file as it is now."""
    table = read(data, (), "", dialect)
    found = {}
    for name in table.columns:
        try:
            tables.number_cells(table.x, name, table.name)
        except UserError:  # which the survey says itself, where it needs numbers; text counts as names
            continue
        found[name] = sketch(tables.text_cells(table.x, name, table.name))
    return found
