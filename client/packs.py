"""What many clients keep, in few files: each tensor of a pack has clients as first axis."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import (
    PRIVATE,
    Header,
    checksum,
    clear,
    load_row,
    private_folder,
    read_header,
    save_tensors,
)
from perennial.common.utils.parsing import from_json
from perennial.common.utils.tensors import Tensors, flattened

Records = Mapping[str, Mapping[str, Tensor]]
Row = tuple[str, str, Records]
"""Place, name and records of something that is kept."""

PACK_BYTES = 2**27
"""Of the tensors in a pack, which are in memory twice while it is written."""
ROWS = "rows"
"""The fact that says what each row is: client, name, checksum."""


class Packs:
    """Records by RUN/CLIENT and a name, each a row of a file `FOLDER/RUN/pack-7.safetensors`.

    A pack is never changed. Of two that have the same, the later one counts. A pack of which less than half is
    still wanted is written anew with the next one, so the files hold at most about twice what is wanted.
    """

    def __init__(self, folder: Path) -> None:
        """What is there already. Raises `UserError` for a pack that is damaged."""
        self.folder = folder
        self._rows: dict[str, dict[str, tuple[Path, int, str]]] = {}
        """By place and name: pack, row and checksum."""
        self._sizes: dict[Path, int] = {}
        """How many rows each pack has."""
        self._headers: dict[Path, Header] = {}
        for path in sorted(folder.glob("*/pack-*.safetensors"), key=_number):
            self._take_up(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def names(self, place: str) -> list[str]:
        """What there is of a place."""
        return list(self._rows.get(place, ()))

    def load(self, place: str, name: str) -> dict[str, Tensors]:
        """Raises `UserError` where the pack is damaged."""
        path, row, digest = self._rows[place][name]
        try:
            return load_row(path, self._headers[path], row, digest)
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(path, error) from None

    def write(self, wanted: Mapping[str, Mapping[str, Records]]) -> None:
        """From now on these places have these records by name, and no others.

        The last of a place's is written anew, others where they are not there. What was there stays whole if that
        breaks off.
        """
        new: list[Row] = []
        for place, records in wanted.items():
            there = self._rows.get(place, {})
            self._rows[place] = {name: there[name] for name in records if name in there}
            new += [
                (place, name, own)
                for number, (name, own) in enumerate(records.items(), 1)
                if name not in there or number == len(records)
            ]
        coming = {(place, name) for place, name, _ in new}
        alive = Counter(path for names in self._rows.values() for path, *_ in names.values())
        sparse = {path for path, size in self._sizes.items() if alive[path] < size / 2}
        new += [
            (place, name, self.load(place, name))
            for place, names in self._rows.items()
            for name, (path, *_) in names.items()
            if path in sparse and (place, name) not in coming
        ]
        for pack in _packs(new):
            self._write(pack)
        held = {path for names in self._rows.values() for path, *_ in names.values()}
        for path in [path for path in self._sizes if path not in held]:
            path.unlink(missing_ok=True)
            del self._sizes[path], self._headers[path]

    def _write(self, rows: Sequence[Row]) -> None:
        run = rows[0][0].rpartition("/")[0]
        folder = private_folder(self.folder / run)
        clear(folder)
        path = folder / f"pack-{max(map(_number, self._sizes), default=0) + 1}.safetensors"
        each = [_here(records) for _, _, records in rows]
        stack = {key: torch.stack([own[key] for own in each]) for key in each[0]}
        facts = [
            (place.rpartition("/")[2], name, checksum(own))
            for (place, name, _), own in zip(rows, each, strict=True)
        ]
        save_tensors(path, stack, {ROWS: json.dumps(facts)}, PRIVATE)
        self._take_up(path)

    def _take_up(self, path: Path) -> None:
        """What is in a pack, which counts from now on."""
        try:
            self._headers[path] = header = read_header(path)
            rows = [tuple(map(str, row)) for row in from_json(header.facts[ROWS])]
            found = {(f"{path.parent.name}/{client}", name): digest for client, name, digest in rows}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from None
        for row, ((place, name), digest) in enumerate(found.items()):
            self._rows.setdefault(place, {})[name] = path, row, digest
        self._sizes[path] = len(found)


def _packs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of one run and form, in packs of bounded size."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        tensors = flattened({name: dict(own) for name, own in row[2].items()})
        form = tuple((key, tensor.shape, tensor.dtype) for key, tensor in tensors.items())
        alike.setdefault((row[0].rpartition("/")[0], form), []).append(row)
    for own in alike.values():
        size = sum(tensor.nbytes for tensors in own[0][2].values() for tensor in tensors.values())
        most = max(1, PACK_BYTES // max(1, size))
        for start in range(0, len(own), most):
            yield own[start : start + most]


def _here(records: Records) -> Tensors:
    tensors = flattened({name: dict(own) for name, own in records.items()})
    return {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}


def _number(path: Path) -> int:
    number = path.stem.removeprefix("pack-")
    return int(number) if number.isdecimal() else 0


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"kept state {path} is damaged ({error}); restore it from a copy or remove it")
