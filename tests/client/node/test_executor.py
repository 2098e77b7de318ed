"""The resident executor: real processes of it at Flower's own Runtime API, without a SuperLink."""

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.servicer.runtime import run_runtime_api_grpc
from google.protobuf.message import DecodeError

import perennial
from perennial.client.host import Host
from perennial.client.node.installed import APP
from perennial.client.state import FileStates
from perennial.common.config import load_config
from perennial.common.flower import executor
from perennial.common.flower.request_id import NAME, RECORD
from perennial.common.utils.errors import UserError
from perennial.common.wire import CONFIG, KEPT, RESUMED, ROUND, RUN, TASK

RUN_ID, NODE, SECRET = 7, 1, "a secret of this test"

# An executor whose messages say what happens; it needs no PyTorch. Every training is a line of the diary.
TOY = """
import os, signal, sys, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from perennial.common.flower import executor
from perennial.client.node.executor import end_with_parent
from perennial.common.flower.executor import serve
from perennial.common.utils.errors import UserError

end_with_parent(os.getppid())
executor.SECONDS_TO_LOAD = 0.0
here = Path(os.environ["HERE"])

class Outer:
    class Odd(Exception):
        pass

def answer(message, context, run):
    diary, do = here / "diary", message.content["config"]["do"]
    with diary.open("a") as file:
        file.write(f"{message.metadata.message_id} {os.getpid()}\\n")
    lines = len(diary.read_text().splitlines())
    if do == "die once" and lines == 1 or do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "wait":
        while not (here / "go on").exists():
            time.sleep(0.01)
    if do == "hang":
        time.sleep(600)
    if do == "raise":
        raise [ValueError("two\\nlines"), KeyError("a"), UserError("no data"), Outer.Odd("odd")][lines - 1]
    return Message(RecordDict({"config": ConfigRecord({"line": lines})}), reply_to=message)

def audit(message, context, run, reply, seconds, again):
    if message.content["config"]["do"] == "no audit":
        raise OSError(28, "No space left on device")
    with (here / "audit").open("a") as file:
        file.write(f"{again}\\n")

with (here / "started").open("a") as file:
    file.write(f"{os.getpid()}\\n")
"""
SERVE = "serve(sys.argv[1], Path(sys.argv[2]), answer, audit)\n"
# Dies when the reply is stored and before it is sent, once.
DIES_BEFORE_SENDING = """
from perennial.common.flower import executor
send = executor.push_message

def dying(stub, message, context):
    if not (here / "died").exists():
        (here / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    send(stub, message, context)

executor.push_message = dying
"""
QUICK_HEART = """
from flwr.supercore import heartbeat
heartbeat.HEARTBEAT_DEFAULT_INTERVAL, heartbeat.HEARTBEAT_CALL_TIMEOUT = 0.6, 0.3
"""
AHEAD = """
import datetime, importlib
message, hour = importlib.import_module("flwr.app.message.message"), datetime.timedelta(hours=1)
message.now = lambda now=message.now: now() + hour
"""
# The project's own answers; dies when it has stored the second round's state, once.
REAL = """
from perennial.client.node.installed import answer, audit
from perennial.client.state import FileStates

store = FileStates.__setitem__

def store_and_die(self, place, versions):
    store(self, place, versions)
    if versions[-1].round == 2 and not (here / "died").exists():
        (here / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

FileStates.__setitem__ = store_and_die
"""


def until(holds: Callable[[], object], within: float = 120.0) -> None:
    """Wait for something that should be so soon."""
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class Node:
    """A SuperNode without a SuperLink: Flower's own Runtime API, and what stands before and behind it."""

    def __init__(self, folder: Path, script: str = TOY + SERVE, **settings: Any) -> None:
        self.folder, self.executors = folder, list["subprocess.Popen[bytes]"]()
        (folder / "script.py").write_text(script)
        (folder / executor.SECRET).write_text(SECRET)
        objects = ObjectStoreFactory()
        states = NodeStateFactory(objects)
        self.state, self.objects = states.state(), objects.store()
        self.server = run_runtime_api_grpc("127.0.0.1:0", states, objects, None, SECRET.encode())
        run = Run.create_empty(RUN_ID)
        run.fab_id, run.fab_version, run.account_name = APP, perennial.__version__, "ann"
        run.fab_hash = self.state.store_fab(Fab("", b"not a zip file: nobody looks into it", {}))
        config = {"state-dir": str(folder / "state"), "device": "cpu", "partition-id": 0, **settings}
        self.state.set_node_id(NODE)
        self.state.set_run_series_context(0, Context(RUN_ID, NODE, config, RecordDict(), {}))
        self.state.store_run(run)

    @property
    def command(self) -> list[str]:
        script = str(self.folder / "script.py")
        return [sys.executable, "-P", script, str(self.server.bound_address), str(self.folder)]

    def start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(self.command, env={**os.environ, "HERE": str(self.folder)})
        self.executors.append(process)
        return process

    def give(self, message: Message, whole: bool = True) -> str:
        """What a SuperNode does with a message from the SuperLink, unless the run is stopped meanwhile; its id."""
        message.metadata.__dict__.update(_run_id=RUN_ID, _src_node_id=1)
        name = message.object_id
        message.metadata.__dict__["_message_id"] = name
        assert self.state.create_task(TaskType.CLIENT_APP, RUN_ID, "hash")
        self.objects.preregister(RUN_ID, get_object_tree(message))
        self.state.store_message(message)
        for object_id, part in get_all_nested_objects(message).items() if whole else ():
            self.objects.put(object_id, part.deflate())
        return name

    def ask(self, do: str, name: str = "", ttl: float = 60.0, node: int = NODE) -> str:
        message = Message(RecordDict({"config": ConfigRecord({"do": do})}), node, "train", ttl=ttl)
        if name:
            message.content[RECORD] = ConfigRecord({NAME: name})
        return self.give(message)

    def reply(self, to: str, within: float = 60.0) -> Message:
        """What a SuperNode sends to the SuperLink."""
        found = list[Message]()
        until(lambda: found.extend(self.state.get_messages(is_reply=True)) or found, within)
        (reply,) = found
        assert reply.metadata.reply_to_message_id == to
        contents = dict[str, bytes]()

        def complete() -> bool:
            for object_id in ids:
                contents[object_id] = self.objects.get(object_id) or b""
            return all(contents.values())

        tree = self.objects.get_object_tree(reply.metadata.message_id)
        ids = [tree.object_id, *_below(tree)]
        until(complete)
        message = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(message, Message)
        return message

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        for process in self.executors:
            process.kill()
            process.wait()
        self.server.stop(0)


def _below(tree: Any) -> list[str]:
    return [name for child in tree.children for name in (child.object_id, *_below(child))]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made = list[Node]()

    def build(script: str = TOY + SERVE, **settings: Any) -> Node:
        made.append(Node(tmp_path, script, **settings))
        return made[-1]

    yield build
    for node in made:
        node.close()


def line(message: Message) -> int:
    number = message.content.config_records["config"]["line"]
    assert isinstance(number, int)
    return number


# ---------------------------------------------------------------------- one executor, many messages


def test_one_executor_answers_all_messages_and_a_request_that_comes_again_gets_the_same_reply(
    make: Callable[..., Node],
) -> None:
    """Also as another message, and after an executor's end; another node's request of the same name is another."""
    node = make()
    first = node.start()
    asked = [("one", NODE), ("one", NODE), ("two", NODE), ("two", 6), ("", NODE), ("", NODE)]
    assert [line(node.reply(node.ask("train", name, node=who))) for name, who in asked] == [1, 1, 2, 3, 4, 5]
    assert len(node.lines("diary")) == 5
    assert node.lines("audit") == ["False", "True", "False", "False", "False", "False"]
    assert line(node.reply(node.ask("train", "last"))) == 6
    first.kill()
    first.wait()
    node.start()
    assert line(node.reply(node.ask("train", "last"))) == 6
    assert len(node.lines("diary")) == 6
    modes = [stat.S_IMODE((node.folder / name).stat().st_mode) for name in (executor.REPLY,)]
    assert modes == [0o600]
    until(lambda: not (node.folder / executor.TASK).exists())


@pytest.mark.slow
def test_what_answering_raises_reaches_flower_in_its_own_words_and_what_is_not_written_down_does_not_leave(
    make: Callable[..., Node],
) -> None:
    node = make()
    node.start()
    expected = [
        "<class 'ValueError'>:<'two\nlines'>",
        "<class 'KeyError'>:<''a''>",
        "<class 'perennial.common.utils.errors.UserError'>:<'no data'>",
        "<class '__main__.Outer.Odd'>:<'odd'>",
    ]
    for number, words in enumerate(expected):
        for _ in range(2):
            reply = node.reply(node.ask("raise", str(number)))
            assert (reply.error.code, reply.error.reason) == (2, words)
    assert len(node.lines("diary")) == 4
    reply = node.reply(node.ask("no audit"))
    assert "cannot write its audit file, and sends nothing: No space left on device" in reply.error.reason
    assert len(node.lines("started")) == 1


def test_what_is_not_the_servers_to_know_does_not_leave() -> None:
    error = UserError("row 2 is of no class", "a row is of no class")
    reply = executor._failure(Message(RecordDict(), 1, "train"), error)
    assert reply.error.reason == f"{UserError}:<'a row is of no class'>"


def test_what_an_exception_says_has_a_bound_and_can_be_sent() -> None:
    reply = executor._failure(Message(RecordDict(), 1, "train"), FileNotFoundError("caf\udce9" + "x" * 10_000_000))
    assert reply.error.reason.startswith(f"{FileNotFoundError}:<'caf?xxx")
    assert len(reply.error.reason) < 3000
    assert reply.object_id


# ---------------------------------------------------------------------- killed and started again


def killed_and_started_again(node: Node) -> None:
    process = node.start()
    assert process.wait(60) == -9
    node.start()


@pytest.mark.slow
def test_what_a_killed_executor_had_taken_is_answered_by_the_next_unless_it_kills_that_too(
    make: Callable[..., Node],
) -> None:
    node = make()
    asked = node.ask("die once")
    killed_and_started_again(node)
    assert line(node.reply(asked)) == 2
    assert [entry.split()[0] for entry in node.lines("diary")] == [asked, asked]
    asked = node.ask("die")
    for _ in range(2):
        assert node.executors[-1].wait(60) == -9
        node.start()
    assert "ExecutorFailed'>:<'the site's executor died twice over this message" in node.reply(asked).error.reason
    assert len(node.lines("diary")) == 4
    assert line(node.reply(node.ask("train"))) == 5


@pytest.mark.slow
def test_killed_while_the_content_of_its_message_arrives(make: Callable[..., Node]) -> None:
    """The SuperNode announces a message once; the next executor has to know of it from the one before."""
    node = make()
    message = Message(RecordDict({"config": ConfigRecord({"do": "train"})}), NODE, "train")
    asked = node.give(message, whole=False)
    process, task = node.start(), node.folder / executor.TASK
    until(lambda: task.exists() and json.loads(task.read_bytes()).get("messages"), within=30)
    process.kill()
    process.wait()
    node.start()
    for object_id, part in get_all_nested_objects(message).items():
        node.objects.put(object_id, part.deflate())
    assert line(node.reply(asked)) == 1


@pytest.mark.slow
def test_a_reply_that_was_made_and_not_sent_is_sent_by_the_next_and_nothing_is_trained_twice(
    make: Callable[..., Node],
) -> None:
    node = make(TOY + DIES_BEFORE_SENDING + SERVE)
    asked = node.ask("train")
    killed_and_started_again(node)
    assert line(node.reply(asked)) == 1
    assert len(node.lines("diary")) == 1


@pytest.mark.slow
def test_an_executor_whose_parent_has_ended_before_it_could_look_ends_too(tmp_path: Path) -> None:
    """It imports Flower for seconds first. Its parent is then another process, which stays."""
    (tmp_path / executor.SECRET).write_text(SECRET)
    parent = """
import os, subprocess, sys
from perennial.client.node.supernode import EXECUTOR
command, nowhere = [*EXECUTOR, str(os.getpid()), *sys.argv[1:]], subprocess.DEVNULL
print(subprocess.Popen(command, stdout=nowhere, stderr=nowhere).pid, flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", parent, "127.0.0.1:1", str(tmp_path)]
    child = Path("/proc") / subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        until(
            lambda: not child.exists() or child.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        )
    finally:
        if child.exists():
            os.kill(int(child.name), signal.SIGKILL)


WHOLE = {"token": "t", "tries": 1, "input": "", "messages": ""}


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff",
        b"[]",
        *(json.dumps({**WHOLE, **part}).encode() for part in ({"input": "a"}, {"input": 1}, {"messages": "/w=="})),
        json.dumps({"token": "t"}).encode(),
    ],
)
def test_a_task_that_cannot_be_read_is_dropped_and_said(
    damaged: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    task = tmp_path / executor.TASK
    task.write_bytes(damaged)
    with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError):  # it asks for another
        executor.Executor(channel, tmp_path, lambda *_: pytest.fail("answered"), lambda *_: None).step()
    assert caplog.messages == [f"perennial: {task} is damaged; the task in it is not gone on with"]
    assert not task.exists()


def test_a_message_that_the_supernode_has_let_go_of_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a run that has stopped; it was shown as Python shows an exception."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    steps = iter([executor.ExecutorFailed("the SuperNode has let go of this message"), KeyboardInterrupt()])
    monkeypatch.setattr(executor.Executor, "step", lambda _: (_ for _ in ()).throw(next(steps)))
    (tmp_path / executor.SECRET).write_text("secret")
    with pytest.raises(KeyboardInterrupt):
        executor.serve("127.0.0.1:1", tmp_path, lambda *_: pytest.fail("answered"), lambda *_: None)
    assert caplog.messages[-1] == "perennial: a task was dropped: the SuperNode has let go of this message"


@pytest.mark.slow
def test_killed_between_the_stored_state_and_the_reply(make: Callable[..., Node]) -> None:
    """The message comes again, and the personal model is trained as often as if nothing had happened."""
    node = make(TOY + REAL + SERVE)
    host = Host(FileStates(node.folder / "unbroken"))
    expected = [host.handle(train_message(number), 0) for number in (1, 2, 3)]
    process = node.start()
    replies = []
    for number in (1, 2, 3):
        asked = node.give(train_message(number))
        if number == 2:
            assert process.wait(60) == -9
            node.start()
        replies.append(node.reply(asked))
    for reply, wanted in zip(replies, expected, strict=True):
        assert dict(reply.content) == dict(wanted.content)
    left, right = (FileStates(node.folder / name)["run-1/client-0"] for name in ("unbroken", "state"))
    assert [(v.round, v.part, v.message) for v in left] == [(v.round, v.part, v.message) for v in right]
    for one, other in zip(left, right, strict=True):
        for name, tensor in one.kept["personal"].items():
            assert torch.equal(tensor, other.kept["personal"][name])
    rows = [json.loads(text) for text in node.lines("state/audit.jsonl")]
    assert [(row["account"], row["action"], row["round"], row["outcome"]) for row in rows] == [
        ("ann", "train", str(number), "answered") for number in (1, 2, 3)
    ]


def train_message(round_: int) -> Message:
    task = load_config(options={"method": "local", "scenario": "colored-digits"}, settings=["scenario.clients=2"])
    values: dict[str, Any] = {TASK: task.task(), RUN: "run-1", ROUND: round_, KEPT: [], RESUMED: []}
    content = RecordDict({CONFIG: ConfigRecord(values), RECORD: ConfigRecord({NAME: f"request {round_}"})})
    return Message(content, NODE, "train")


@pytest.mark.slow
def test_a_long_training_keeps_its_heartbeat(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's minute is 1.2 seconds here; the training takes three times as long."""
    monkeypatch.setattr(in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL", 0.6)
    node = make(QUICK_HEART + TOY + SERVE)
    asked = node.ask("wait")
    node.start()
    until(lambda: node.lines("diary"))
    end = time.monotonic() + 3.6
    while time.monotonic() < end:
        assert not node.state.get_messages(is_reply=True)  # looks for tasks that have missed their heartbeats
        time.sleep(0.1)
    (node.folder / "go on").touch()
    assert line(node.reply(asked)) == 1


@pytest.mark.slow
def test_a_message_that_is_not_answered_in_its_time_to_live_ends_the_executor(make: Callable[..., Node]) -> None:
    node = make()
    asked = node.ask("hang", ttl=0.5)
    assert node.start().wait(60) == 1
    node.start()
    assert "ExecutorFailed" in node.reply(asked).error.reason
    assert len(node.lines("diary")) == 1


@pytest.mark.slow
def test_a_reply_is_in_the_servers_time(make: Callable[..., Node]) -> None:
    """By the clock of a site that is an hour ahead, it would be too late, and the SuperLink refuse it."""
    node = make(AHEAD + TOY + SERVE)
    node.start()
    for do in ("", "raise"):
        reply = node.reply(asked := node.ask(do, ttl=60.0)).metadata
        assert reply.reply_to_message_id == asked
        assert reply.ttl == 60.0
        assert abs(reply.created_at - time.time()) < 60


def test_it_ends_with_its_supernode_at_once(make: Callable[..., Node]) -> None:
    node = make()
    node.ask("hang")
    code = f"import subprocess; subprocess.run({node.command!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "HERE": str(node.folder)})
    until(lambda: node.lines("diary"))
    pid = int(node.lines("diary")[0].split()[1])
    parent.kill()
    parent.wait()
    until(lambda: not _lives(pid), 10)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_nobody_without_the_secret_takes_a_task(make: Callable[..., Node]) -> None:
    node = make()
    (node.folder / executor.SECRET).write_text("another secret")
    node.ask("train")
    node.start()
    until(lambda: node.lines("started"))
    time.sleep(1)
    assert not node.lines("diary")


@pytest.mark.slow
def test_a_message_of_a_run_that_was_stopped_meanwhile_holds_up_no_other(make: Callable[..., Node]) -> None:
    """Its task and its announcement are at the SuperNode; its content never comes."""
    node = make()
    node.start()
    stopped = Message(RecordDict({"config": ConfigRecord({"do": "train", "of": "it"})}), NODE, "train")
    node.give(stopped, whole=False)
    until(lambda: (node.folder / executor.TASK).exists())
    assert line(node.reply(node.ask("train"))) == 1
    until(lambda: not (node.folder / executor.TASK).exists())
    assert not node.state.get_tasks(statuses=["pending", "starting", "running"])


# ---------------------------------------------------------------------- what the next one needs


def test_a_task_and_a_reply_survive_their_files(tmp_path: Path) -> None:
    work = executor.Work("token", tries=1)
    work.input.run.fab_id = "a/b"
    work.messages.message_object_trees.add().object_id = "x"
    assert executor.Work.read(work.text()) == work
    message = Message(RecordDict({"b": ConfigRecord({"x": 1}), "a": ConfigRecord({"y": [2.0]})}), 1, "train")
    message.metadata.__dict__["_message_id"] = "id"
    model = ArrayRecord([np.arange(6.0).reshape(2, 3), np.ones(2, np.float32), np.ones(2, np.float32)])
    for reply in (
        Message(message.content, reply_to=message),
        Message(RecordDict({"model": model, "same": model, "none": ArrayRecord()}), reply_to=message),
        Message(Error(2, "no data"), reply_to=message),
    ):
        file = BytesIO(b"".join(executor.written(reply)))
        read = executor.read(file)
        assert read.object_id == reply.object_id
        assert read.metadata.reply_to_message_id == "id"
        for part in (file.getvalue()[:-7], file.getvalue()[:3], b"", b"\1\0\0\0\0\0\0\0x"):
            with pytest.raises((ValueError, KeyError, TypeError, DecodeError)):
                executor.read(BytesIO(part))


@pytest.mark.slow
def test_a_damaged_reply_is_made_anew(make: Callable[..., Node]) -> None:
    node = make()
    node.start()
    assert line(node.reply(node.ask("train", "one"))) == 1
    file = node.folder / executor.REPLY
    whole = file.read_bytes()
    asked = whole.partition(b"\n")[0] + b"\n"
    for count, damaged in enumerate((whole[:-7], asked + b"\xff" * 9, asked + b"\0" * 5 + b"\x7f\0\0more"), 2):
        file.write_bytes(damaged)
        assert [line(node.reply(node.ask("train", "one"))) for _ in range(2)] == [count, count]


@pytest.mark.slow
def test_a_proxy_of_this_machine_is_not_asked_for_the_supernode(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "localhost")
    node = make()
    node.start()
    assert line(node.reply(node.ask("train"))) == 1


@pytest.mark.slow
def test_the_executor_does_not_import_pytorch_before_it_answers() -> None:
    code = "import sys, perennial.client.node.executor, perennial.client.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
