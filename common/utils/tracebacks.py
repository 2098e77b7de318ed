"""Where an exception of a client half was raised: told once, however many clients and rounds it meets."""

import os
import traceback
from contextlib import suppress
from pathlib import Path

from perennial.common.utils.locks import lock

NAME = "traceback.txt"
"""In a run folder, and in a site's state folder, from which it is never sent."""


class Tracebacks:
    """The distinct tracebacks that this process has met: by kind and lines of code, not by message."""

    def __init__(self, file: Path | None = None) -> None:
        """`file`: where each of them is also written, once, whichever process meets it."""
        self.file = file
        self._met: set[str] = set()

    def first(self, error: BaseException) -> str:
        """The traceback of an exception that was met for the first time; empty of one that is known."""
        frames = traceback.extract_tb(error.__traceback__)
        code = "".join(f"{frame.filename}:{frame.lineno}\n" for frame in frames) + type(error).__qualname__
        if code in self._met:
            return ""
        self._met.add(code)
        text = "".join(traceback.format_exception(error))
        if self.file:
            with suppress(OSError):  # the disk may be full, which is then what the run ends with
                _append(self.file, text, frames)
        return text


def _append(file: Path, text: str, frames: traceback.StackSummary) -> None:
    known = "".join(traceback.format_list(frames))
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # It may quote data, and a link that somebody put there could lead anywhere.
    handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(handle, "r+", encoding="utf-8") as opened:
        lock(opened.fileno())  # a simulation's clients are in several processes
        if known not in opened.read():
            opened.write(f"{text}\n")
