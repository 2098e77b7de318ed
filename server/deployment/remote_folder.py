"""A run that is followed from another desk: its folder comes back on the connection that there is.

The ServerApp writes its run folder where it runs. Where whoever started the run does not see that folder, it also
sends each file as *run events* of Flower's: `PushTaskEvents` of the Runtime API, with the app's own token, and
`StreamRunEvents` of the Control API, on the port and under the TLS that the run was started with. The SuperLink
keeps events with the run, so a connection that breaks is taken up again after the last one. Checkpoints stay where
they are; `resume` names the folder there. So does the configuration, which names code to import: whoever follows
writes the one that they sent. What comes back is data, and not believed.
"""

import base64
import errno
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
from pydantic import Base64Bytes, BaseModel, ConfigDict, NonNegativeInt, field_validator

from perennial.common.flower.control_api import EventStream, TaskEvent, push_event
from perennial.common.flower.names import log
from perennial.common.utils.errors import UserError, printable
from perennial.common.utils.files import write_text
from perennial.server.run.folder import INPUTS, reason

EVENT = "perennial.file"
CHUNK = 2**20
"""Bytes of a file in one event."""
LOGS = ("metrics.jsonl", "log.jsonl")
"""Files that grow, and are sent as they do."""
LAST = ("summary.json", "error.txt")
"""Whoever sees one of these knows that the run has ended."""
PLACE = "server.txt"
"""In a run folder that has come from a server: where it is there."""
SPARE = 2**30
"""Bytes of this desk's disk that no run fills, or a twentieth of a small one: the server says how much comes."""
SEND_EVERY, AGAIN_AFTER = 0.5, 1.0
MODEL = r"models/[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors"
COMES = "|".join([*map(re.escape, (PLACE, INPUTS, *LOGS, *LAST)), MODEL])
"""The files that come back, none of which names code."""


class Part(BaseModel):
    """What an event holds: some bytes of a file, and where they begin."""

    model_config = ConfigDict(strict=True)

    file: str
    at: NonNegativeInt
    data: Base64Bytes

    @field_validator("file")
    @classmethod
    def _comes(cls, name: str) -> str:
        if not re.fullmatch(COMES, name):
            raise ValueError("it is no file of a run that comes back")
        return name


class Sender:
    """What a run folder gets, as events."""

    def __init__(self, stub: Any, folder: Path) -> None:
        self.stub, self.folder = stub, folder
        self._sent = Counter[str]()
        self._push(PLACE, 0, str(folder.resolve()).encode())

    def grown(self) -> None:
        """Send what the logs have got."""
        for name in LOGS:
            if (self.folder / name).exists():
                self._send(name)

    def ended(self) -> None:
        """Send everything else that comes back."""
        self.grown()
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = sorted(path.relative_to(self.folder).as_posix() for path in files)
        rest = [name for name in names if re.fullmatch(COMES, name) and name not in (*LOGS, PLACE)]
        for name in sorted(rest, key=lambda name: name in LAST):
            self._send(name)

    def _send(self, name: str) -> None:
        with (self.folder / name).open("rb") as file:
            file.seek(self._sent[name])
            while data := file.read(CHUNK):
                self._push(name, self._sent[name], data)
                self._sent[name] += len(data)

    def _push(self, name: str, at: int, data: bytes) -> None:
        text = json.dumps({"file": name, "at": at, "data": base64.b64encode(data).decode()})
        push_event(self.stub, EVENT, text)


@contextmanager
def sending(stub: Any, folder: Path) -> Iterator[None]:
    """Send a run folder while the block works in it, and all of it at the end. Nothing is raised."""
    over = Event()

    def send() -> None:
        try:
            sender = Sender(stub, folder)
            while not over.wait(SEND_EVERY):
                sender.grown()
            sender.ended()
        except (grpc.RpcError, OSError) as error:
            log(WARNING, "perennial: the run's files do not go to who follows it: %s", printable(repr(error)))

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Receiver:
    """Writes the files of a run that come as events into a folder, as long as the block lasts."""

    def __init__(self, channel: grpc.Channel, run_id: str, folder: Path, config: str = "") -> None:
        """`config` is what config.toml is to hold once the first file comes; empty leaves it alone."""
        self.channel, self.folder, self.config = channel, folder, config
        self.error: OSError | None = None
        self.log_comes = False
        """Whether what the folder has of the run's log is of this run, which sends all of it."""
        self._after = 0
        self._events = EventStream(channel, int(run_id))
        self._over = Event()
        self._thread = Thread(target=self._receive, daemon=True)

    def __enter__(self) -> "Receiver":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.channel.close()

    def drained(self, seconds: float) -> None:
        """Wait until all events of a run that has ended have come. Raises `UserError` for a file that cannot be
        written."""
        self._thread.join(seconds)
        if self.error:
            raise UserError(f"{self.error.filename or self.folder}: {self.error.strerror}")

    def _receive(self) -> None:
        while not self._over.is_set():
            try:
                for event in self._events.after(self._after):
                    self._take(event)
                return  # the run has ended
            except grpc.RpcError:
                time.sleep(AGAIN_AFTER)  # whether the SuperLink is gone for good, its status says
            except ValueError:  # the channel was closed
                return
            except OSError as error:
                self.error = error
                return

    def _take(self, event: TaskEvent) -> None:
        self._after = event.id
        if event.event != EVENT:
            return
        try:
            part = Part.model_validate_json(event.data)
            place(self.folder, part)
        except ValueError as error:
            why = printable(reason(error))
            log(WARNING, "perennial: a part of the run that its server sent is none: %s", why)
            return
        if self.config:
            write_text(self.folder / "config.toml", self.config)
            self.config = ""
        self.log_comes |= part.file == LOGS[0]


def place(folder: Path, part: Part) -> None:
    """Write a part of a run folder's file. Raises `OSError`, and `ValueError` where it cannot be one."""
    path = folder / part.file
    length = path.stat().st_size if path.exists() else 0
    if part.at > length:
        raise ValueError(f"{part.file} has {length} bytes, so none comes after {part.at}")
    path.parent.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(path.parent)
    if disk.free - len(part.data) < min(SPARE, disk.total // 20):
        raise OSError(
            errno.ENOSPC, "the disk is nearly full, and the rest of it is not a server's to fill", str(path)
        )
    if part.file in LAST and not part.at and len(part.data) < CHUNK:  # whole, so that nobody sees half of it
        write_text(path, part.data.decode())
        return
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(part.at)
        file.seek(part.at)
        file.write(part.data)
