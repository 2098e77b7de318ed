"""What a client keeps between rounds, in the versions that a resumed run may ask for.

A version is what the client kept after a round in which it trained. The server says with every message which
checkpoints it still holds (`kept`) and at which rounds the run was resumed (`resumed`, in order). From that a
client knows which version is current, and which ones nobody can ask for any more.
"""

import re
import shutil
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from safetensors import SafetensorError

from common.errors import UserError
from common.files import load_records, save_records
from common.models import Tensors

Kept = dict[str, Tensors]
"""What a client keeps, by record name, e.g. {"personal": {...}}."""


@dataclass(frozen=True)
class Version:
    """A client's kept tensors after `round`, in the run's `attempt` (the number of resumes before it)."""

    round: int
    attempt: int
    kept: Kept


def valid(versions: Sequence[Version], resumed: Sequence[int]) -> list[Version]:
    """The versions that belong to the run's present history, oldest first.

    A version of an earlier attempt counts only up to every round at which the run was taken up again since.
    """
    return sorted(
        (v for v in versions if all(v.round <= start for start in resumed[v.attempt :])),
        key=lambda version: version.round,
    )


def needed(versions: Sequence[Version], checkpoints: Sequence[int]) -> list[Version]:
    """Of valid versions, oldest first: the newest, and the newest not after each checkpoint still held."""
    return [
        version
        for version, following in zip_longest(versions, versions[1:])
        if following is None or any(version.round <= c < following.round for c in checkpoints)
    ]


class FileStates(MutableMapping[str, list[Version]]):
    """Versions on disk, one safetensors file each: `FOLDER/RUN/CLIENT/round-7.0.safetensors` (round, attempt)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, place: str) -> list[Version]:
        files = [(path, _numbers(path.name)) for path in sorted((self.folder / place).glob("round-*"))]
        versions = [Version(*numbers, _load(path)) for path, numbers in files if numbers]
        if not versions:
            raise KeyError(place)
        return versions

    def __setitem__(self, place: str, versions: list[Version]) -> None:
        folder = self.folder / place
        folder.mkdir(parents=True, exist_ok=True)
        names = {f"round-{v.round}.{v.attempt}.safetensors": v for v in versions}
        for name, version in names.items():
            if version is versions[-1] or not (folder / name).exists():
                save_records(folder / name, version.kept)
        for path in folder.glob("round-*"):
            if path.name not in names:
                path.unlink()

    def __delitem__(self, place: str) -> None:
        if place not in set(self):
            raise KeyError(place)
        shutil.rmtree(self.folder / place)

    def __iter__(self) -> Iterator[str]:
        folders = {path.parent for path in self.folder.glob("*/*/round-*") if _numbers(path.name)}
        return iter(sorted(folder.relative_to(self.folder).as_posix() for folder in folders))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _numbers(name: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"round-(\d+)\.(\d+)\.safetensors", name)
    return (int(match[1]), int(match[2])) if match else None


def _load(path: Path) -> Kept:
    try:
        return load_records(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"kept state {path} is damaged ({error}); restore it from a copy or remove it") from None
