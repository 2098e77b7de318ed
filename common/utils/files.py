"""Files that are complete or absent: written beside their place, flushed to disk, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from perennial.common.utils.errors import UserError
from perennial.common.utils.parsing import from_json

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors

OPEN, PRIVATE = 0o644, 0o600
"""Modes of files, whatever the umask: results, which a container writes as another user than the one who looks at
them; and what a site keeps, which nobody else reads."""


LONGEST, DEEPEST = 255, 4095
"""Bytes of a name and of a whole path, as systems have them."""
CHECKSUM = "sha256"
"""The fact by which a damaged file is known; kept beside those that a caller gives."""

UNFINISHED = ".new-"
"""What the name of a file or folder begins with until it is whole."""


def write_text(path: Path, text: str, mode: int = OPEN) -> None:
    """Write a text file."""
    _replace(path, lambda beside: Path(beside).write_text(text, encoding="utf-8"), mode)


def write_bytes(path: Path, content: bytes, mode: int = OPEN) -> None:
    """Write a file of bytes."""
    _replace(path, lambda beside: Path(beside).write_bytes(content), mode)


def save_tensors(path: Path, tensors: Tensors, facts: Mapping[str, str] | None = None, mode: int = OPEN) -> None:
    """Write named tensors, and facts about them as text, as a safetensors file."""
    from safetensors.torch import save_file

    # safetensors refuses views and shared storage.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # It also sorts them by size; code that walks two models side by side needs the order back.
    metadata = {**(facts or {}), "names": json.dumps(list(plain)), CHECKSUM: checksum(plain)}

    def fill(beside: str) -> None:
        save_file(plain, beside, metadata=metadata)
        _in_order(beside)

    _replace(path, fill, mode)


def _in_order(file: str) -> None:
    """Sort the facts in a safetensors file, which come in another order each time: equal models, equal bytes."""
    with open(file, "r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        opened.seek(8)
        opened.write(text.ljust(length))  # as long as it was, and filled up with spaces as the format has it


def load_tensors(path: Path) -> Tensors:
    """Read what `save_tensors` wrote, in its order. Raises `OSError`, `SafetensorError` or `ValueError`."""
    return load_with_facts(path)[0]


def load_with_facts(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors, and the facts about them. Raises as `load_tensors` does."""
    # Not a memory map, as of `safe_open`: whoever overwrites the file in place would end the process by SIGBUS.
    return _decoded(path.read_bytes())


def _decoded(data: bytes) -> tuple[Tensors, dict[str, str]]:
    from safetensors.torch import load

    tensors = load(data)
    header = from_json(data[8 : 8 + int.from_bytes(data[:8], "little")])  # `load` has checked it
    facts: dict[str, str] = header.get("__metadata__", {})
    names = from_json(facts.get("names", "null")) or sorted(tensors)
    if not isinstance(names, list) or set(map(str, names)) != tensors.keys():
        raise ValueError("its list of names is not that of its tensors")
    ordered = {name: tensors[name] for name in names}
    if facts.pop(CHECKSUM, None) not in (None, checksum(ordered)):  # a file of somebody else's has none
        raise ValueError("its tensors are not those that were written")
    return ordered, facts


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself."""

    start: int
    """Of the tensors' bytes in the file."""
    tensors: dict[str, Any]
    facts: dict[str, str]


def read_header(path: Path) -> Header:
    """Raises `OSError` or `ValueError`."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = from_json(file.read(length))
    facts = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(facts, dict):
        raise ValueError("its header has no facts")
    return Header(8 + length, header, facts)


def load_row(path: Path, header: Header, row: int, digest: str) -> dict[str, Tensors]:
    """The records of one row of a file whose tensors all have the rows as first axis, and nothing else is read.

    `digest` is their `checksum`. Raises `OSError`, `SafetensorError` or `ValueError`.
    """
    own: dict[str, Any] = {"__metadata__": {"names": header.facts.get("names", "null"), CHECKSUM: digest}}
    parts: list[bytes] = []
    at = 0
    with path.open("rb") as file:
        try:
            for name, about in header.tensors.items():
                (begin, end), (rows, *shape) = about["data_offsets"], about["shape"]
                size = (end - begin) // rows
                file.seek(header.start + begin + row * size)
                parts.append(file.read(size))
                own[name] = {**about, "shape": shape, "data_offsets": [at, at := at + size]}
        except (KeyError, TypeError, ArithmeticError):
            raise ValueError("its header is none of such a file") from None
    text = json.dumps(own).encode()
    return records_in(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def checksum(tensors: Tensors) -> str:
    """SHA-256 of names, types, shapes and values."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_records(path: Path, records: Mapping[str, Tensors], mode: int = OPEN) -> None:
    """Write named records of tensors as one safetensors file, with keys `RECORD/TENSOR`."""
    from perennial.common.utils.tensors import flattened

    save_tensors(path, flattened(records), mode=mode)


def load_records(path: Path) -> dict[str, Tensors]:
    """Read what `save_records` wrote. Raises `OSError`, `SafetensorError` or `ValueError`."""
    return records_in(path.read_bytes())


def records_in(data: bytes) -> dict[str, Tensors]:
    """The records in the bytes of such a file. Raises `SafetensorError` or `ValueError`."""
    from perennial.common.utils.tensors import unflattened

    return unflattened(_decoded(data)[0])


def added(path: Path, offset: int) -> tuple[bytes, int]:
    """Whole lines that were written to a file after a byte offset, and the offset after them."""
    if not path.exists():
        return b"", offset
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return whole, offset + len(whole)


class Tail:
    """The lines that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def lines(self) -> list[str]:
        """Whole lines since the last look."""
        whole, self._at = added(self._path, self._at)
        return whole.decode(errors="replace").splitlines()


def private_folder(path: Path) -> Path:
    """A folder that nobody else enters (0700), whatever the umask; what is missing above it is made like it.

    One that is there is closed to others if it is this user's own. Raises `OSError`.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
        place.chmod(0o700)
    if not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid():  # Windows has none
        path.chmod(0o700)
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a file is written, a full disk for one, is an `OSError` that names the file."""
    try:
        yield
    except SafetensorError as error:  # its own error, with the number in the text
        if not (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    except OSError as error:
        error.filename = str(path)  # a file beside it, or none
        raise


def clear(folder: Path) -> None:
    """Remove what a process that was killed has left in a folder unfinished."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":  # which opens no folder, and flushes only what may be written
        return
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, fill: Callable[[str], object], mode: int) -> None:
    with writing(path):
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
        os.close(handle)
        try:
            fill(beside)
            os.chmod(beside, mode)
            sync(Path(beside))
            os.replace(beside, path)
            sync(path.parent)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise


def path_of(given: object, name: str) -> Path:
    """The path that a caller gave as the argument of this name. Raises `UserError` for what can be none."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UserError(f"{name}: {given!r:.100} is not possible; give a path, as a text or a pathlib.Path")
    try:
        parts = [len(os.fsencode(part)) for part in text.split("/")]
    except UnicodeEncodeError:  # half a character
        parts = []
    if not text or not parts or "\0" in text:
        raise UserError(f"{name}: {text!r:.100} is no path; it must have letters, and no NUL or half a character")
    if max(parts) > LONGEST or sum(parts) + len(parts) > DEEPEST:
        raise UserError(f"{name}: {text[:40]!r}… is too long for a path; a name has {LONGEST} bytes at most")
    return Path(text)
