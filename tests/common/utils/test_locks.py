"""Locks on files, with `flock` and as on Windows, whose `locking` is stood in for by Linux' locks on bytes."""

import fcntl
import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from perennial.common.utils import locks as on_unix


def locking(handle: int, mode: int, count: int) -> None:
    """`msvcrt.locking`: from the file's position on, until the handle is closed."""
    assert mode == 2
    place = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, place, count, 0))
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None


@pytest.fixture(params=["Unix", "Windows"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "Unix":
        return on_unix
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    spec = spec_from_file_location("locks_on_windows", on_unix.__file__)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    yield handle
    os.close(handle)


def test_a_file_is_one_owner_s_until_it_is_closed(locks: ModuleType, tmp_path: Path) -> None:
    with opened(tmp_path / "x") as second:
        with opened(tmp_path / "x") as first:
            os.write(first, b"the first")
            locks.lock(first, wait=False)
            for shared in (False, True):
                with pytest.raises(BlockingIOError):
                    locks.lock(second, wait=False, shared=shared)
            assert os.read(second, 100) == b"the first"  # whose it is
            os.write(first, b", still")
            assert (tmp_path / "x").read_bytes() == b"the first, still"
        locks.lock(second, wait=False)


def test_who_waits_has_it_next(locks: ModuleType, tmp_path: Path) -> None:
    order = []

    def wait() -> None:
        with opened(tmp_path / "x") as second:
            locks.lock(second)
            order.append("second")

    with opened(tmp_path / "x") as first:
        locks.lock(first)
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_a_folder_too(locks: ModuleType, tmp_path: Path) -> None:
    order = []

    def wait() -> None:
        with locks.locked_folder(tmp_path):
            order.append("second")

    with locks.locked_folder(tmp_path):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    assert {path.name for path in tmp_path.iterdir()} == (set() if locks is on_unix else {".lock"})


def test_those_who_only_look_do_not_meet(tmp_path: Path) -> None:
    with opened(tmp_path / "x") as first, opened(tmp_path / "x") as second:
        for handle in (first, second):
            on_unix.lock(handle, wait=False, shared=True)
