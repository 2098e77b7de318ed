"""A disk that is full while a run writes: one sentence, and nothing of the run is lost."""

import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from perennial.client.node.answer import answer
from perennial.client.state import FileStates, Version
from perennial.common.config import RunConfig, load_config
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_tensors, save_tensors
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.grid import LocalGrid
from perennial.server.run.loop import run_rounds, start
from perennial.testing.methods import assert_same
from perennial.testing.tiny_federation import toy_config

PERENNIAL = f"{sys.executable} -c 'from perennial.server.cli.main import main; main()'"


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


class Sites(LocalGrid):
    """Clients as nodes with state below `folder`; client-1 is not asked in `absent` rounds, and cannot write in
    `full` ones."""

    def __init__(
        self, config: RunConfig, folder: Path, absent: Sequence[int] = (), full: Sequence[int] = ()
    ) -> None:
        super().__init__(ClientApp(), len(config.scenario.client_ids))
        self.folder, self.absent, self.full = folder, absent, full

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        for message in messages:
            number, trains = message.metadata.dst_node_id - 1, message.metadata.message_type == "train"
            client_1 = int(message.metadata.group_id) if number == 1 and trains else 0
            if client_1 in self.absent:
                continue
            settings = {"partition-id": str(number), "data-root": "", "device": "cpu"}
            try:
                with no_file_beyond(100) if client_1 in self.full else nullcontext():
                    yield answer(message, {**settings, "state-dir": str(self.folder / str(number))})
            except UserError as error:
                yield Message(Error(2, f"{UserError}:<'{error}'>"), reply_to=message)


def test_a_site_whose_disk_is_full_is_left_out_and_goes_on_from_what_it_had(tmp_path: Path) -> None:
    config = toy_config("ditto", rounds=5)
    runs = {"full": {"full": (2, 3)}, "absent": {"absent": (2, 3)}}
    for name, rounds in runs.items():
        folder = RunFolder.create(tmp_path / name, config)
        run_rounds(config, folder, Sites(config, tmp_path / f"{name}-sites", **rounds), start(config))
    rows = [row for row in RunFolder(tmp_path / "full").rows() if row["kind"] == "round"]
    word = "failed: this site cannot read or write one of its files: File too large (UserError)"
    assert [row["left_out"] for row in rows] == [{}, {"client-1": word}, {"client-1": word}, {}, {}]
    models = [load_tensors(tmp_path / name / "models" / "global.safetensors") for name in runs]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    ((full, *_), (absent, *_)) = (FileStates(tmp_path / f"{name}-sites" / "1").values() for name in runs)
    assert [version.round for version in full] == [version.round for version in absent]
    assert all(torch.equal(full[-1].kept["personal"][n], t) for n, t in absent[-1].kept["personal"].items())


@pytest.mark.parametrize(
    "share", [0.7, *(pytest.param(own, marks=pytest.mark.slow) for own in (0.3, 0.5, 0.9, 0.99))]
)
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


@pytest.mark.slow
def test_a_disk_that_is_full_and_has_room_again(tmp_path: Path) -> None:
    """A file system of its own, mounted where only the commands of this test see it."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system of its own")
    settings = ("checkpoint_every=2", "evaluate_every=2", "batch_size=16")
    config = load_config(options={"method": "ditto", "rounds": 12}, settings=settings)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "unbroken", config))
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    said_to = tmp_path / "full.txt"
    script = f"""
        mount -t tmpfs -o size=400k tmpfs {disk}
        {PERENNIAL} run --method ditto --rounds 12 --set {" --set ".join(settings)} --out {disk}/run 2>{said_to}
        echo code $?
        mount -o remount,size=60m {disk}
        {PERENNIAL} resume {disk}/run >/dev/null
        echo code $?
        cp -r {disk}/run {kept}
    """
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    said = said_to.read_text()
    assert done.stdout.split() == ["code", "2", "code", "0"], said + done.stderr
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith(f"perennial: {disk}/run/")
    assert ": No space left on device" in last
    assert_same(tmp_path / "unbroken", kept)
