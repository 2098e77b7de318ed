"""Locks on files. They go with the process that has them, however it ends: nothing is left to block others."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    BYTE = 1 << 30
    """Which byte of a file Windows locks. Nobody else can read that one, so it is none that a file has."""

    def lock(handle: int, wait: bool = True, shared: bool = False) -> None:
        """Windows' `locking` has no shared locks, so two who only look may take one another for the owner."""
        place = os.lseek(handle, 0, os.SEEK_CUR)
        os.lseek(handle, BYTE, os.SEEK_SET)
        try:
            while not _locked(handle):
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                time.sleep(0.05)
        finally:
            os.lseek(handle, place, os.SEEK_SET)

    def _locked(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined] # mypy looks as on Linux
        except PermissionError:
            return False
        return True

    def _opened(folder: Path) -> int:
        return os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)  # it opens no folders

else:

    def lock(handle: int, wait: bool = True, shared: bool = False) -> None:
        """Have an open file to oneself until it is closed, or `shared` with others who say so.

        Raises `BlockingIOError` where another process has it, unless that is to be waited for.
        """
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))

    def _opened(folder: Path) -> int:
        return os.open(folder, os.O_RDONLY)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Have a folder to oneself, once no other process has it."""
    handle = _opened(folder)
    try:
        lock(handle)
        yield
    finally:
        os.close(handle)
