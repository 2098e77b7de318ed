"""What a client keeps between rounds, in the versions that a resumed run or a repeated message may ask for.

A version is what the client kept after a request that changed it. The server says with every message which
checkpoints it still holds (`kept`) and at which rounds the run was resumed (`resumed`, in order). From that a
client knows which version is current, and which ones nobody can ask for any more. A version also says which
request made it (`common/flower/request_id.py`): should the process die before the reply is sent, or the reply get
lost, the same request comes again, and starts from the version before.
"""

import hashlib
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from perennial.client.packs import Packs
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import PRIVATE, clear, load_records, private_folder, save_records
from perennial.common.utils.tensors import Tensors

Kept = dict[str, Tensors]
"""What a client keeps, by record name, e.g. {"personal": {...}}."""


@dataclass(frozen=True)
class Version:
    """A client's kept tensors after `round`, in the run's `attempt` (the number of resumes before it).

    `part` numbers the versions of one round from 0. `message` is `digest` of the name of the request that made it.
    """

    round: int
    attempt: int
    kept: Kept
    part: int = 0
    message: str = ""


def digest(name: str) -> str:
    """A request's name as a file name may hold it; empty in the local runtime, whose requests have none."""
    return hashlib.sha256(name.encode()).hexdigest()[:16] if name else ""


def valid(versions: Sequence[Version], resumed: Sequence[int]) -> list[Version]:
    """The versions that belong to the run's present history, oldest first.

    A version of an earlier attempt counts only up to every round at which the run was taken up again since.
    """
    if resumed:
        versions = [v for v in versions if all(v.round <= start for start in resumed[v.attempt :])]
    return sorted(versions, key=lambda version: (version.round, version.part))


def before_message(versions: Sequence[Version], message: str) -> Sequence[Version]:
    """Of valid versions, oldest first: those that were there when this message came for the first time."""
    again = message and versions and versions[-1].message == message
    return versions[:-1] if again else versions


def needed(versions: Sequence[Version], checkpoints: Sequence[int]) -> list[Version]:
    """Of valid versions, oldest first: the newest, the one before it, the newest not after each checkpoint held.

    The one before the newest is for the newest's message, should it come again; without an id, it cannot.
    """
    newest = versions[-1:]
    return [
        version
        for version, following in pairwise(versions)
        if (following is newest[0] and following.message)
        or any(version.round <= c < following.round for c in checkpoints)
    ] + [*newest]


def own_folder(folder: Path) -> Path:
    """A client's folder STATE/RUN/CLIENT, made if need be; nobody but its owner enters it, or the run's."""
    private_folder(folder.parent)
    return private_folder(folder)


class FileStates(MutableMapping[str, list[Version]]):
    """Versions on disk, one safetensors file each: `FOLDER/RUN/CLIENT/round-7.0.1-0123456789abcdef.safetensors`.

    The numbers are round, attempt and part, then comes the message; no part is part 0. Those that the local
    runtime has written are in `packs`, by the same names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def packs(self) -> Packs:
        """Raises `UserError` for one that is damaged."""
        return Packs(self.folder)

    def __getitem__(self, place: str) -> list[Version]:
        loads: dict[str, Callable[[], Kept]] = {
            path.name: partial(_load, path) for path in sorted((self.folder / place).glob("round-*"))
        }
        loads |= {name: partial(self.packs.load, place, name) for name in self.packs.names(place)}
        versions = [version for name, load in loads.items() if (version := version_named(name, load))]
        if not versions:
            raise KeyError(place)
        return versions

    def __setitem__(self, place: str, versions: list[Version]) -> None:
        folder = own_folder(self.folder / place)
        names = {file_name(version): version for version in versions}
        for name, version in names.items():
            if version is versions[-1] or not (folder / name).exists():
                save_records(folder / name, version.kept, PRIVATE)
        clear(folder)
        for path in folder.glob("round-*"):
            if path.name not in names:
                path.unlink()

    def __delitem__(self, place: str) -> None:
        if place not in set(self):
            raise KeyError(place)
        shutil.rmtree(self.folder / place)

    def __iter__(self) -> Iterator[str]:
        folders = {path.parent for path in self.folder.glob("*/*/round-*") if _NAME.fullmatch(path.name)}
        return iter(sorted({*self.packs, *(folder.relative_to(self.folder).as_posix() for folder in folders)}))

    def __len__(self) -> int:
        return sum(1 for _ in self)


RESIDENT = 1024
"""Clients of a federation whose data, and what they have saved, stay in a process; of more, the latest ones, and
all whose data are small."""


class SavedStates(MutableMapping[str, list[Version]]):
    """Versions in memory, of which `save` writes to disk what has changed since it was last called.

    What is on disk need not be in memory: of that, the `most` places stay that were used last.
    """

    def __init__(self, most: int = RESIDENT) -> None:
        self.most = most
        self._in_memory = OrderedDict[str, list[Version]]()
        self._changed: dict[str, None] = {}
        self._files: FileStates | None = None
        self._on_disk: set[str] = set()

    def read(self, folder: Path) -> None:
        """Go on with what is on disk there."""
        self._files = FileStates(folder)
        self._on_disk = set(self._files)

    def save(self, folder: Path) -> None:
        """Write all that has changed. What is there of it stays readable if that breaks off."""
        if not self._changed:
            return
        if self._files is None or self._files.folder != folder:
            self._files = FileStates(folder)
        wanted = {place: self._in_memory[place] for place in self._changed}
        self._files.packs.write(
            {place: {file_name(one): one.kept for one in versions} for place, versions in wanted.items()}
        )
        for place in wanted:  # of a run that was begun with an earlier release
            for path in (folder / place).glob("round-*"):
                path.unlink()
        self._on_disk.update(self._changed)
        self._changed.clear()
        self._let_go()

    def __getitem__(self, place: str) -> list[Version]:
        versions = self._in_memory.get(place)
        if versions is None:
            if self._files is None or place not in self._on_disk:
                raise KeyError(place)
            self._in_memory[place] = versions = self._files[place]
        self._in_memory.move_to_end(place)
        self._let_go()
        return versions

    def get(self, place: str, default: Any = None, /) -> Any:
        """As of any mapping, but without an exception for a client that keeps nothing, of which there are many."""
        return self[place] if place in self._in_memory or place in self._on_disk else default

    def __setitem__(self, place: str, versions: list[Version]) -> None:
        self._in_memory[place] = versions
        self._in_memory.move_to_end(place)
        self._changed[place] = None

    def __delitem__(self, place: str) -> None:
        raise TypeError("what a client keeps lasts as long as its run")

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._in_memory, *self._on_disk}))

    def __len__(self) -> int:
        return len({*self._in_memory, *self._on_disk})

    def _let_go(self) -> None:
        over = len(self._in_memory) - self.most
        for place in list(self._in_memory)[:over] if over > 0 else ():
            if place not in self._changed:
                del self._in_memory[place]


_NAME = re.compile(r"round-(\d+)\.(\d+)(?:\.(\d+))?(?:-([0-9a-f]{16}))?\.safetensors")


def file_name(version: Version) -> str:
    """What a version is called: all but what is kept."""
    part, message = f".{version.part}" * (version.part > 0), f"-{version.message}" * bool(version.message)
    return f"round-{version.round}.{version.attempt}{part}{message}.safetensors"


def version_named(name: str, load: Callable[[], Kept]) -> Version | None:
    """The version that is called so, with what is kept; None where the name is another file's."""
    if not (found := _NAME.fullmatch(name)):
        return None
    return Version(int(found[1]), int(found[2]), load(), int(found[3] or 0), found[4] or "")


def _load(path: Path) -> Kept:
    try:
        return load_records(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"kept state {path} is damaged ({error}); restore it from a copy or remove it") from None
