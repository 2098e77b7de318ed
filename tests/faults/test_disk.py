"""A disk that is full while a run writes: one sentence, and nothing of the run is lost."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_contract import assert_same
from toys import toy_config

from client.state import FileStates, Version
from common.config import load_config
from common.files import load_tensors, save_tensors
from server.folder import RunFolder
from server.local import LocalRuntime

PERENNIAL = f"{sys.executable} -c 'from server.cli import main; main()'"


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """In this block a file cannot grow beyond `size` bytes: the same error path as a full disk's, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_tensors_that_cannot_be_written_are_an_error_that_names_their_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": torch.ones(2)})
    with no_file_beyond(1000), pytest.raises(OSError, match="File too large") as caught:
        save_tensors(path, {"w": torch.zeros(10_000)})
    assert caught.value.filename == str(path)
    assert load_tensors(path)["w"].tolist() == [1, 1]
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_client_keeps_stays_when_the_next_version_cannot_be_written(tmp_path: Path) -> None:
    states, small = FileStates(tmp_path), {"personal": {"w": torch.ones(2)}}
    states["run/client-0"] = [Version(1, 0, small)]
    newer = Version(2, 0, {"personal": {"w": torch.zeros(10_000)}})
    with no_file_beyond(1000), pytest.raises(OSError, match="File too large"):
        states["run/client-0"] = [newer]
    (kept,) = FileStates(tmp_path)["run/client-0"]
    assert kept.round == 1
    assert kept.kept["personal"]["w"].tolist() == [1, 1]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_run_whose_log_cannot_grow_is_resumed_as_if_nothing_had_been(share: float, tmp_path: Path) -> None:
    config = toy_config("ditto", rounds=12)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "unbroken", config))
    size = int(share * RunFolder(tmp_path / "unbroken").log.stat().st_size)
    broken = RunFolder.create(tmp_path / "broken", config)
    with no_file_beyond(size), pytest.raises(OSError, match="File too large") as caught:
        LocalRuntime(config).run(broken)
    assert caught.value.filename == str(broken.log)
    assert broken.log.stat().st_size == size  # half a line is there
    origin = broken.load_checkpoint()
    broken.cut_log(origin.log_bytes)
    LocalRuntime(config).run(broken, origin)
    assert_same(tmp_path / "unbroken", broken.path)


def test_a_checkpoint_that_cannot_be_written_leaves_no_torso(tmp_path: Path) -> None:
    config = toy_config("fedavg", rounds=2, model={"name": "mlp", "hidden": [3000]})
    folder = RunFolder.create(tmp_path / "run", config)
    with no_file_beyond(20_000), pytest.raises(OSError, match="File too large"):
        LocalRuntime(config).run(folder)
    assert list((folder.path / "checkpoint").iterdir()) == []


def test_a_disk_that_is_full_and_has_room_again(tmp_path: Path) -> None:
    """A file system of its own, mounted where only the commands of this test see it."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system of its own")
    settings = ("checkpoint_every=2", "evaluate_every=2", "batch_size=16")
    config = load_config(options={"rounds": 12}, settings=settings)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "unbroken", config))
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=400k tmpfs {disk}
        {PERENNIAL} run --rounds 12 --set {" --set ".join(settings)} --out {disk}/run 2>{tmp_path}/full.txt
        echo code $?
        mount -o remount,size=60m {disk}
        {PERENNIAL} resume {disk}/run >/dev/null
        echo code $?
        cp -r {disk}/run {kept}
    """
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    said = (tmp_path / "full.txt").read_text()
    assert done.stdout.split() == ["code", "2", "code", "0"], said + done.stderr
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith(f"perennial: {disk}/run/")
    assert last.endswith(": No space left on device")
    assert_same(tmp_path / "unbroken", kept)
