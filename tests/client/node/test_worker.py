"""The client worker and the way to it, with real processes, without Flower's."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from perennial.client.host import Host
from perennial.client.node import relay
from perennial.client.node.worker_pb2 import Failure, StatusReply, StatusRequest
from perennial.client.node.worker_pb2_grpc import WorkerStub
from perennial.client.state import FileStates
from perennial.common.asked import NAME, RECORD
from perennial.common.config import load_config
from perennial.common.errors import UserError
from perennial.common.wire import CONFIG, KEPT, RESUMED, ROUND, RUN, TASK, from_record, to_record

# A worker whose messages say what happens; it needs no PyTorch. Every training is a line of the diary.
TOY = """
import os, signal, sys, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from perennial.client.node.worker import serve
from perennial.common.errors import UserError

class Outer:
    class Odd(Exception):
        pass

def answer(message, settings):
    diary = Path(settings["diary"])
    with diary.open("a") as file:
        file.write(f"{message.metadata.message_id} {os.getpid()}\\n")
    lines = len(diary.read_text().splitlines())
    if message.content["config"]["do"] == "die once" and lines == 1 or message.content["config"]["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if message.content["config"]["do"] == "wait":
        while not diary.with_name("go on").exists():
            time.sleep(0.01)
    if message.content["config"]["do"] == "hang":
        time.sleep(600)
    if message.content["config"]["do"] == "raise":
        raise [ValueError("two\\nlines"), KeyError("a"), UserError("no data"), Outer.Odd("odd")][lines - 1]
    return Message(RecordDict({"config": ConfigRecord({"line": lines})}), reply_to=message)

with open(os.environ["STARTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
serve(sys.argv[1], answer)
"""

# The project's own worker, which dies when it has stored the second round's state, once.
DYING = """
import os, signal
from pathlib import Path
from perennial.client.node import worker
from perennial.client.state import FileStates

store, marker = FileStates.__setitem__, Path(os.environ["STARTED"] + "-and-died")

def store_and_die(self, place, versions):
    store(self, place, versions)
    if versions[-1].round == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

FileStates.__setitem__ = store_and_die
with open(os.environ["STARTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
worker.main()
"""


def until(holds: Callable[[], object]) -> None:
    """Wait for something that should be so soon."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class Site:
    """A stand-in for a SuperExec, and what its ClientApps do."""

    def __init__(self, folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.parent = subprocess.Popen(["sleep", "600"])
        (folder / "script.py").write_text(script)
        self.short = tempfile.mkdtemp(prefix="w", dir="/tmp")  # a socket's path must be short
        patch.setattr(tempfile, "tempdir", self.short)
        patch.setenv("TMPDIR", self.short)
        patch.setenv("STARTED", str(folder / "started"))
        patch.setattr(relay, "WORKER", [sys.executable, "-P", str(folder / "script.py")])
        patch.setattr(os, "getppid", lambda: self.parent.pid)

    def ask(self, do: str, id_: str = "", ttl: float = 60.0, name: str = "", node: int = 1) -> int:
        """The number of trainings so far, this one included."""
        message = Message(RecordDict({"config": ConfigRecord({"do": do})}), node, "train", ttl=ttl)
        if name:
            message.content[RECORD] = ConfigRecord({NAME: name})
        message.metadata.__dict__["_message_id"] = id_
        reply = relay.relay(message, {"diary": str(self.folder / "diary")})
        assert reply.metadata.reply_to_message_id == id_
        line = reply.content.config_records["config"]["line"]
        assert isinstance(line, int)
        return line

    def status(self) -> StatusReply:
        path = relay.socket_of(relay.identity(self.parent.pid))
        with grpc.insecure_channel(f"unix:{path}") as channel:
            reply: StatusReply = WorkerStub(channel).Status(StatusRequest(), timeout=10)
        return reply

    @property
    def diary(self) -> list[str]:
        return (self.folder / "diary").read_text().splitlines()

    @property
    def starts(self) -> int:
        return len((self.folder / "started").read_text().splitlines())

    def close(self) -> None:
        self.parent.kill()
        self.parent.wait()
        if (self.folder / "started").exists():
            for pid in (self.folder / "started").read_text().split():
                until(lambda pid=pid: not relay.identity(int(pid)))  # the worker goes by itself
        shutil.rmtree(self.short)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One worker for the tests that leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        site = Site(tmp_path_factory.mktemp("site"), TOY, patch)
        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(site.ask, ["train"] * 3, ["at", "once", "three"])) == [1, 2, 3]
        yield site
        site.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    found = Site(tmp_path, TOY, monkeypatch)
    yield found
    found.close()


@pytest.fixture
def fresh(shared: Site) -> Site:
    (shared.folder / "diary").unlink(missing_ok=True)
    (shared.folder / "go on").unlink(missing_ok=True)
    return shared


# ---------------------------------------------------------------------- one worker, many messages


def test_three_apps_at_once_start_one_worker_and_it_answers_all_messages(fresh: Site) -> None:
    before = fresh.ask("train", "first") and fresh.status()
    assert fresh.ask("train", "second") == 2
    assert fresh.status() == StatusReply(pid=before.pid, code=relay.CODE, handled=before.handled + 1)
    assert fresh.starts == 1


def test_a_message_that_comes_again_does_not_train_again(fresh: Site) -> None:
    assert [fresh.ask("train", id_) for id_ in ("a", "a", "b", "b", "b", "", "")] == [1, 1, 2, 2, 2, 3, 4]
    assert len(fresh.diary) == 4


def test_a_request_that_comes_again_as_another_message_does_not_train_again(fresh: Site) -> None:
    ids, names = ("a", "b", "c", "d"), ("one", "one", "two", "two")
    assert [fresh.ask("train", id_, name=name) for id_, name in zip(ids, names, strict=True)] == [1, 1, 2, 2]
    assert [line.split()[0] for line in fresh.diary] == ["a", "c"]


def test_another_node_s_request_of_the_same_name_is_another_one(fresh: Site) -> None:
    """All requests of an exchange have one name."""
    nodes = (5, 5, 6, 6)
    asked = [fresh.ask("train", id_, name="one", node=node) for id_, node in zip("abcd", nodes, strict=True)]
    assert asked == [1, 1, 2, 2]
    assert [line.split()[0] for line in fresh.diary] == ["a", "c"]


def test_a_message_that_comes_again_while_it_trains_waits_for_the_same_reply(fresh: Site) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fresh.ask, "wait", "slow") for _ in range(2)]
        until((fresh.folder / "diary").exists)
        assert fresh.status().code == relay.CODE  # it answers this meanwhile
        (fresh.folder / "go on").touch()
        assert [one.result() for one in both] == [1, 1]
    assert len(fresh.diary) == 1


def test_what_answering_raises_reaches_flower_as_if_it_were_raised_here(fresh: Site) -> None:
    expected: list[tuple[str, str]] = [
        (str(ValueError), "two\nlines"),
        (str(KeyError), "'a'"),
        (str(UserError), "no data"),
        ("<class '__main__.Outer.Odd'>", "odd"),
    ]
    for number, words in enumerate(expected):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is what is tested
            fresh.ask("raise", str(number))
        assert (str(caught.type), str(caught.value)) == words
        assert isinstance(caught.value, UserError) == (number == 2)
        with pytest.raises(Exception) as again:  # noqa: PT011
            fresh.ask("raise", str(number))
        assert (str(again.type), str(again.value)) == words
    assert len(fresh.diary) == 4
    assert fresh.starts == 1


def test_an_exception_in_flower_s_words() -> None:
    error = relay.exception(Failure(module="torch.cuda", name="OutOfMemoryError", text="2 GiB"))
    assert f"{type(error)}:<{str(error)!r}>" == "<class 'torch.cuda.OutOfMemoryError'>:<'2 GiB'>"


def test_a_message_survives_its_bytes() -> None:
    tensors = {"w": torch.tensor([[1.5, -2.0]]), "n": torch.tensor([3])}
    content = RecordDict({"model": to_record(tensors), "config": ConfigRecord({"round": 7, "names": ["a", "b"]})})
    message = Message(content, 5, "train.gradient", ttl=9.0, group_id="7")
    message.metadata.__dict__["_message_id"] = "some id"
    found = relay.unpack(relay.pack(message))
    assert vars(found.metadata) == vars(message.metadata)
    assert found.content["config"] == content["config"]
    read = from_record(found.content.array_records["model"])
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


# ---------------------------------------------------------------------- beginning and end


def test_a_worker_that_dies_over_a_message_is_started_again_once(site: Site) -> None:
    assert site.ask("die once", "a") == 2
    assert [line.split()[0] for line in site.diary] == ["a", "a"]
    with pytest.raises(relay.WorkerFailed, match="died twice over this message; the SuperNode's log"):
        site.ask("die", "b")
    assert [line.split()[0] for line in site.diary] == ["a", "a", "b", "b"]
    assert site.starts == 3


def test_it_ends_with_its_superexec_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(site.ask, "hang", "a")
        until((site.folder / "diary").exists)
        worker = relay.identity(site.status().pid)
        left = Path(site.short) / f"perennial-{os.getuid()}" / "1-1.socket"  # of one that was killed
        left.touch()
        assert len(list(left.parent.iterdir())) == 3
        monkeypatch.setattr(relay, "WORKER", ["false"])  # its ClientApp would end, too; here it goes on
        site.parent.kill()
        site.parent.wait()
        until(lambda: not relay.lives(worker))
        with pytest.raises(relay.WorkerFailed, match="did not start"):
            asked.result()
        assert not list(left.parent.glob("*.socket"))


def test_another_run_s_code_gets_another_worker_after_the_message_at_hand(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(site.ask, "wait", "a")
        until((site.folder / "diary").exists)
        old = relay.identity(site.status().pid)
        (site.folder / "perennial").symlink_to(Path(relay.CODE) / "perennial")
        monkeypatch.setattr(relay, "CODE", str(site.folder))
        other = pool.submit(site.ask, "train", "b")
        time.sleep(0.2)
        assert relay.lives(old)
        (site.folder / "go on").touch()
        assert (one.result(), other.result()) == (1, 2)
    assert not relay.lives(old)
    assert site.status().code == str(site.folder)


def test_a_reply_that_nobody_waits_for_any_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SECONDS_TO_STOP", 0.2)
    with pytest.raises(relay.WorkerFailed, match="did not answer: DEADLINE_EXCEEDED"):
        site.ask("hang", "a", ttl=0.5)
    pid = int(site.diary[0].split()[1])
    assert not relay.identity(pid)


def test_a_worker_that_cannot_start_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "WORKER", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(relay.WorkerFailed, match=r"did not start \(exit code 3\); the SuperNode's log"):
        site.ask("train")


def test_the_code_is_not_taken_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "__init__.py").write_text("raise SystemExit(9)")
    command = [
        *relay.WORKER[:2],
        "-c",
        "from client.node.worker import serve; serve('1-1', None)",
    ]  # SuperExec 1-1 has ended
    environment = {**os.environ, "PYTHONPATH": relay.CODE, "TMPDIR": "/tmp"}
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 0


# ---------------------------------------------------------------------- whom to trust


def test_the_folder_of_the_sockets_is_the_user_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody else can enter the first place, or has made it, it is the next one."""
    monkeypatch.setattr(relay, "LONGEST_FOLDER", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tempdir"))
    monkeypatch.setattr(relay, "TMP", tmp_path / "tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    name = f"perennial-{os.getuid()}"
    places = [tmp_path / "tempdir" / name, tmp_path / "tmp" / name, tmp_path / "run" / "perennial"]
    places.append(tmp_path / "home" / ".perennial" / "sockets")
    for spoil in (
        lambda path: path.chmod(0o750),
        lambda path: (path.rmdir(), path.touch(0o600)),
        lambda path: (path.rmdir(), (path.parent / "own").mkdir(0o700), path.symlink_to(path.parent / "own")),
    ):
        for place in places:
            assert relay.folder() == place
            assert place.stat().st_mode & 0o777 == 0o700
            spoil(place)
        with pytest.raises(UserError, match=f"one of {places[0]}, .* must be a folder of yours that nobody else"):
            relay.folder()
        for place in places:
            shutil.rmtree(place.parent)
    for place in places:
        place.mkdir(0o700, parents=True)
    monkeypatch.setattr(os, "getuid", lambda: 987654321)
    with pytest.raises(UserError, match="must be a folder of yours"):
        relay.folder()


def test_a_socket_s_path_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "long" * 20)
    assert len(str(relay.socket_of("4194304-99999999999"))) < 100


def test_processes_are_told_apart_by_their_start() -> None:
    me = relay.identity(os.getpid())
    assert me.startswith(f"{os.getpid()}-")
    assert relay.lives(me)
    assert not relay.lives(me + "0")
    ended = subprocess.Popen(["true"])
    until(lambda: not relay.identity(ended.pid))  # nobody has waited for it yet: a zombie
    ended.wait()
    assert not relay.identity(ended.pid)


# ---------------------------------------------------------------------- the state


def train_message(round_: int) -> Message:
    task = load_config(options={"method": "local", "scenario": "colored-digits"}, settings=["scenario.clients=2"])
    values: dict[str, Any] = {TASK: task.task(), RUN: "run-1", ROUND: round_, KEPT: [], RESUMED: []}
    message = Message(RecordDict({CONFIG: ConfigRecord(values)}), 1, "train")
    message.metadata.__dict__["_message_id"] = f"message {round_}"
    return message


def test_killed_between_the_stored_state_and_the_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message comes again, and the personal model is trained as often as if nothing had happened."""
    host = Host(FileStates(tmp_path / "unbroken"))
    expected = [host.handle(train_message(number), 0) for number in (1, 2, 3)]
    site = Site(tmp_path, DYING, monkeypatch)
    settings = {"state-dir": str(tmp_path / "killed"), "data-root": "", "device": "cpu", "partition-id": "0"}
    replies = [relay.relay(train_message(number), settings) for number in (1, 2, 3)]
    site.close()
    assert (tmp_path / "started-and-died").exists()
    assert site.starts == 2
    for reply, wanted in zip(replies, expected, strict=True):
        assert dict(reply.content) == dict(wanted.content)
    left, right = (FileStates(tmp_path / name)["run-1/client-0"] for name in ("unbroken", "killed"))
    assert [(v.round, v.part, v.message) for v in left] == [(v.round, v.part, v.message) for v in right]
    for one, other in zip(left, right, strict=True):
        for name, tensor in one.kept["personal"].items():
            assert torch.equal(tensor, other.kept["personal"][name])
