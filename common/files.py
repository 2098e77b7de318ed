"""Files that are complete or absent: written beside their place, flushed to disk, renamed."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.models import Tensors, divided, joined


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    _replace(path, lambda beside: Path(beside).write_text(text))


def save_tensors(path: Path, tensors: Tensors, facts: Mapping[str, str] | None = None) -> None:
    """Write named tensors, and facts about them as text, as a safetensors file."""
    # safetensors refuses views and shared storage.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # It also sorts them by size; code that walks two models side by side needs the order back.
    metadata = {**(facts or {}), "names": json.dumps(list(plain))}
    _replace(path, lambda beside: save_file(plain, beside, metadata=metadata))


def load_tensors(path: Path) -> Tensors:
    """Read what `save_tensors` wrote, in its order. Raises `OSError`, `SafetensorError` or `ValueError`."""
    return load_with_facts(path)[0]


def load_with_facts(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors, and the facts about them. Raises as `load_tensors` does."""
    with safe_open(path, framework="pt") as file:
        facts: dict[str, str] = file.metadata() or {}
        names: list[str] = json.loads(facts.get("names", "null")) or sorted(file.keys())
        return {name: file.get_tensor(name) for name in names}, facts


def save_records(path: Path, records: Mapping[str, Tensors]) -> None:
    """Write named records of tensors as one safetensors file, with keys `RECORD/TENSOR`."""
    save_tensors(path, joined(records))


def load_records(path: Path) -> dict[str, Tensors]:
    """Read what `save_records` wrote. Raises `OSError`, `SafetensorError` or `ValueError`."""
    return divided(load_tensors(path))


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


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, fill: Callable[[str], object]) -> None:
    with writing(path):
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        os.close(handle)
        try:
            fill(beside)
            os.chmod(beside, 0o644)
            sync(Path(beside))
            os.replace(beside, path)
            sync(path.parent)
        except BaseException:
            os.unlink(beside)
            raise
