"""The SuperNode's process: what it takes from inside Flower, and how it keeps an executor."""

import inspect
import logging
import os
import random
import re
import stat
import sys
import threading
import time
import tomllib
from collections import Counter
from logging import INFO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import flwr
import grpc
import pytest
from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.common.logger import FLOWER_LOGGER
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, ObjectUnavailableError, pull_objects
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.superlink.grid import grpc_grid
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from perennial.client.node import supernode
from perennial.client.node.settings import settings_in
from perennial.common.flower import patches, processes
from perennial.common.flower.executor import SECRET
from perennial.common.flower.patches import hasten, insist
from perennial.common.flower.retries import persist

ROOT = Path(__file__).parents[3]


def test_the_pin_has_not_moved() -> None:
    """What is replaced is used in Flower as it was when this was written."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (kept,) = project["tool"]["uv"]["constraint-dependencies"]
    assert kept.split(";")[0] == f"flwr=={processes.GRPC}"
    assert re.findall(r"(?m)^flwr.*?==(\S+)", (ROOT / "requirements.lock").read_text()) == [processes.GRPC]
    assert flwr.__version__ == processes.GRPC
    lines = [line.strip() for line in inspect.getsource(start_client_internal).splitlines()]
    assert "import time" in lines
    used = [line for line in lines if "time." in line and not line.startswith("#") and "total time." not in line]
    assert used == ["time.sleep(3)", "time.sleep(0.5)", "time.sleep(0.5)"]
    for module in (start_client_internal, grpc_grid):
        assert vars(module)["pull_objects"] is pull_objects
    assert inspect.signature(pull_objects).parameters["initial_backoff"].default == 1
    assert "retry_invoker = make_simple_grpc_retry_invoker()" in lines
    assert {"run_id = _pull_and_store_message(", "receive=receive,", "_push_messages("} <= set(lines)
    assert lines.count("if (recv := receive()) is None:") == 1


def test_it_refuses_another_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "has", lambda module: module != "superlink.grid.grpc_grid")
    with pytest.raises(SystemExit, match=r'speaks gRPC, and Flower .* pip install "flwr\[simulation\]==1.34.0"'):
        supernode.main()


def test_it_looks_often_and_less_often_the_longer_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    pauses = patches.Pauses()
    for seconds in (3, 0.5, 0.01):
        pauses.sleep(seconds)
    assert slept == [0.1, 0.1, 0.01]
    slept.clear()
    for _ in range(40):
        pauses.sleep(3)
    assert slept[:6] == [0.1] * 6
    assert slept[-1] == 1.0
    assert all(pause <= max(0.1, sum(slept[:number]) / 5) + 1e-9 for number, pause in enumerate(slept))
    pauses.sleep(0.5)  # a message came
    pauses.sleep(3)
    assert slept[-2:] == [0.1, 0.1]


def test_late_parts_of_a_message_are_waited_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_grid, "pull_objects", grpc_grid.pull_objects)  # to be put back
    hasten(grpc_grid)
    tries = []

    def pull(name: str) -> bytes:
        tries.append(name)
        if len(tries) < 3:
            raise ObjectUnavailableError(name)
        return b"here"

    waits = list[float]()
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds=None: waits.append(seconds))
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)
    assert grpc_grid.pull_objects(["a"], pull) == {"a": b"here"}
    assert [wait for wait in waits if wait] == [0.1, 0.2]


def test_of_a_runs_requests_that_wait_the_newest_is_taken_and_no_run_waits_for_another() -> None:
    """As after a while in which the site hung, and rounds went on without it."""

    def asked(run: int, number: int) -> patches.Found:
        message = Message(RecordDict(), 1, "train", group_id=str(number))
        message.metadata.__dict__["_run_id"] = run
        return message, None

    there = [asked(7, 1), asked(8, 1), asked(7, 2), asked(7, 3)]
    taken = list[tuple[int, str]]()

    def pull_and_store(*, receive: Any, state: str) -> int | None:
        if (found := receive()) is None:
            return None
        of = found[0].metadata
        taken.append((of.run_id, of.group_id))
        return of.run_id if state else 0

    pull = patches.newest_first(pull_and_store)

    def receive() -> patches.Found | None:
        return there.pop(0) if there else None

    assert pull(receive=receive, state="kept") == 7
    there += [asked(8, 2), asked(7, 4)]
    assert [pull(receive=receive, state="kept") for _ in range(3)] == [8, 7, None]
    assert taken == [(7, "3"), (8, "2"), (7, "4")]


def test_the_reply_to_a_request_is_sent_before_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a reply is there to one that Flower has forgotten, as its run was stopped while it came in."""

    def named(name: str, message: Message) -> Message:
        message.metadata.__dict__["_message_id"] = name
        return message

    requests = [named(name, Message(RecordDict(), 1, "train")) for name in ("forgotten", "wanted")]
    late, last = (named(f"to {of.metadata.message_id}", Message(RecordDict(), reply_to=of)) for of in requests)
    store: Any = SimpleNamespace(get_object_tree=lambda _: ObjectTree(), delete=lambda _: None)
    state = InMemoryNodeState(store)

    def pull_and_store(*, receive: Any, state: InMemoryNodeState) -> int | None:
        message, _ = receive()
        state.store_message(message)
        return None if message is requests[0] else 7

    pull, push = patches.in_step(pull_and_store, start_client_internal._push_messages)
    assert [pull(receive=lambda of=of: (of, None), state=state) for of in requests] == [None, 7]
    state.store_message(late)
    monkeypatch.setattr(time, "sleep", lambda _: state.store_message(last))
    sent = list[str]()

    def send(reply: Message, *_: Any) -> tuple[set[str], str]:
        sent.append(reply.metadata.message_id)
        return set(), "session"

    push(state=state, object_store=store, send=send, push_object=None)
    assert sent == ["to forgotten", "to wanted"]
    assert not state.msg_store


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = lambda: code


def test_a_call_that_fails_inside_the_superlink_is_repeated_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its database is locked: Flower's SuperNode drops the reply that it was sending."""
    now, calls = [0.0], list[grpc.StatusCode]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    invoker = persist(make_simple_grpc_retry_invoker())

    def rest(seconds: float) -> None:
        now[0] += max(seconds, 1.0)

    invoker.wait_function = rest

    def send(code: grpc.StatusCode, times: int) -> str:
        calls.append(code)
        if len(calls) <= times:
            raise Failed(code)
        return "sent"

    assert invoker.invoke(send, grpc.StatusCode.INTERNAL, 3) == "sent"
    for code, tries in ((grpc.StatusCode.NOT_FOUND, 1), (grpc.StatusCode.INTERNAL, None)):
        calls.clear()
        begun = now[0]
        with pytest.raises(Failed):
            invoker.invoke(send, code, 1000)
        assert len(calls) == tries if tries else 60 < now[0] - begun < 200
    calls.clear()
    assert invoker.invoke(send, grpc.StatusCode.UNAVAILABLE, 100) == "sent"


def test_a_clock_that_the_superlink_does_not_take_is_a_sentence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's SuperNode ends without a word; to the site's owner it was a session that the SuperLink forgot."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)

    class WrongTime(Failed):
        def details(self) -> str:
            return "Invalid timestamp"

    def call() -> None:
        raise WrongTime(grpc.StatusCode.UNAUTHENTICATED)

    monkeypatch.setattr(os, "kill", lambda *_: None)  # with which Flower ends its own process
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(WrongTime):
        persist(make_simple_grpc_retry_invoker()).invoke(call)
    line = next(text for text in caplog.messages if text.startswith("perennial: "))
    assert re.search(r"takes nothing that is signed at 20\d\d-.* UTC, .*so set the clock$", line)


@pytest.mark.parametrize(
    ("module", "name"),
    [(start_client_internal, "push_object_contents_from_iterable"), (grpc_grid, "push_objects")],
)
def test_a_part_that_the_superlink_did_not_store_is_sent_again(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it says where its database was locked, and where the message is not wanted any more."""
    monkeypatch.setattr(module, name, vars(module)[name])  # to be put back
    waits, tries = list[float](), Counter[str]()
    monkeypatch.setattr(time, "sleep", waits.append)
    insist(module, name)

    def push(part: str, content: bytes) -> None:
        tries[part] += 1
        if content == b"never" or tries[part] < 3:
            raise ObjectPushError(part, 1, "session")

    class Part:
        def __init__(self, content: bytes) -> None:
            self.deflate = lambda: content

    def parts(**named: bytes) -> Any:
        return {n: Part(c) for n, c in named.items()} if name == "push_objects" else named.items()

    vars(module)[name](parts(a=b"late"), push_object_fn=push)
    assert (tries["a"], waits) == (3, [0.5, 1])
    with pytest.raises(ObjectPushError):
        vars(module)[name](parts(b=b"never"), push_object_fn=push)
    assert tries["b"] == 6


def test_the_supernode_gets_a_port_and_a_secret_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen, kept = list[list[str]](), list[Any]()
    changed = ("time", "pull_objects", "make_simple_grpc_retry_invoker", "push_object_contents_from_iterable")
    for name in (*changed, "_pull_and_store_message", "_push_messages"):  # to be put back
        monkeypatch.setattr(start_client_internal, name, vars(start_client_internal)[name])
    monkeypatch.setattr(FLOWER_LOGGER, "filters", [])
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    monkeypatch.setattr(supernode, "flower_supernode", lambda: seen.append(sys.argv))
    monkeypatch.setattr(supernode, "keep_executor", lambda *call: kept.append(call))
    config = f'partition-id=1 state-dir="{tmp_path}"'
    monkeypatch.setenv("PERENNIAL_SUPERLINK", "another:9092")
    where = ["--insecure", "--superlink", "here:9092", "--node-config", config]
    monkeypatch.setattr(sys, "argv", ["supernode", *where])
    supernode.main()
    log(INFO, "[RUN %s, ROUND %s]", 7, "1\n\x1b[2JINFO :      perennial: do as I say")
    assert caplog.messages[-1] == "[RUN 7, ROUND 1 INFO :      perennial: do as I say]"
    assert settings_in({})["superlink"] == "here:9092", "what the executor compares with the policy"
    ((address, name),) = kept
    folder = Path(name)
    secret = folder / SECRET
    own = [
        "--isolation",
        "process",
        "--clientappio-api-address",
        address,
        "--superexec-auth-secret-file",
        str(secret),
    ]
    assert seen == [["flower-supernode", *where, *own]]
    assert address.startswith("127.0.0.1:")
    assert folder.parent == tmp_path / ".executor"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (secret, folder, folder.parent)] == [0o600, 0o700, 0o700]
    before = secret.read_text()
    supernode.main()
    assert secret.read_text() != before
    assert kept[1][1] == str(folder)
    other = supernode.folder_of({"state-dir": str(tmp_path), "partition-id": "2"})
    assert other.parent == folder.parent
    assert other != folder
    same = {"state-dir": str(tmp_path), "partition-id": "2", "device": "cpu", "policy": "other.toml"}
    assert supernode.folder_of(same) == other, "two executors over one state"


def test_a_second_supernode_leaves_the_secret_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the executor that the first one starts next shows the second one's secret, and never gets a task.

    The second may be another site's: what else is in the folder is one site's.
    """
    folder = supernode.folder_of({"state-dir": str(tmp_path), "partition-id": "1"})
    monkeypatch.setattr(supernode, "folder_of", lambda _: folder)
    monkeypatch.setattr(supernode, "flower_supernode", lambda: pytest.fail("it goes on"))
    config = f'partition-id=1 state-dir="{tmp_path}"'
    monkeypatch.setattr(sys, "argv", ["supernode", "--insecure", "--node-config", config])
    (folder / SECRET).write_text("the first one's")
    with supernode.alone(tmp_path):
        sentence = f"^process {os.getpid()} has joined with the state folder {tmp_path} already; give each site a "
        with pytest.raises(SystemExit, match=sentence):
            supernode.main()
    assert (folder / SECRET).read_text() == "the first one's"
    supernode.alone(tmp_path).close()


class Enough(Exception):  # noqa: N818
    pass


def test_an_executor_that_ends_is_started_again_later_where_it_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rests, started = [0.0], list[float](), list[list[str]]()
    lives = iter([1.0, 1.0, None, 1.0, 1.0, 1.0, 100.0, 1.0])

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)
            self.life = next(lives, 0.0)
            if self.life is None:
                raise BlockingIOError(11, "Resource temporarily unavailable")

        def wait(self) -> int:
            if not self.life:
                raise Enough
            now[0] += self.life
            return -9

    monkeypatch.setattr(supernode.subprocess, "Popen", Process)
    monkeypatch.setattr(supernode.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(supernode.time, "sleep", rests.append)
    with pytest.raises(Enough):
        supernode.keep_executor("127.0.0.1:1", "/folder")
    assert rests == [1, 3, 7, 15, 30, 30, 0, 1]
    command = [sys.executable, "-P", "-m", "perennial.client.node.executor", str(os.getpid())]
    assert started[0] == [*command, "127.0.0.1:1", "/folder"]
