"""A run folder that comes back through the SuperLink: what is sent, in what order, and what is made of it."""

import base64
import json
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.proto.control_pb2 import StreamRunEventsRequest, StreamRunEventsResponse
from flwr.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from flwr.proto.runtime_pb2 import PushTaskEventsRequest
from flwr.proto.task_pb2 import TaskEvent
from pydantic import ValidationError

from perennial.common.utils.errors import UserError
from perennial.server.deployment import remote_folder
from perennial.server.deployment.remote_folder import COMES, Part, Receiver, Sender, place, sending
from perennial.server.deployment.submission import place_of
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config


class SuperLink(ControlServicer):  # type: ignore[misc]
    """Keeps events as a SuperLink does; `breaks`: after how many the connection breaks, each once."""

    def __init__(self) -> None:
        self.events = list[TaskEvent]()
        self.breaks = list[int]()
        self.asked = list[int]()
        self.ended = threading.Event()

    def PushTaskEvents(self, request: PushTaskEventsRequest) -> None:  # noqa: N802
        for event in request.events:
            assert isinstance(json.loads(event.data), dict)  # as Flower demands
            event.id = len(self.events) + 1
            self.events.append(event)

    def StreamRunEvents(  # noqa: N802
        self, request: StreamRunEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[StreamRunEventsResponse]:
        self.asked.append(request.after_task_event_id)
        after = request.after_task_event_id
        while True:
            last = self.ended.wait(0.05)
            for event in self.events[after:]:
                if self.breaks and event.id > self.breaks[0]:
                    self.breaks.pop(0)
                    context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")
                after = event.id
                yield StreamRunEventsResponse(task_event=event)
            if last:
                return

    @property
    def sent(self) -> list[tuple[str, int]]:
        return [(part["file"], part["at"]) for part in (json.loads(event.data) for event in self.events)]


@pytest.fixture
def link() -> Iterator[tuple[SuperLink, str]]:
    servicer, server = SuperLink(), grpc.server(futures.ThreadPoolExecutor(4))
    add_ControlServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.ended.set()
    server.stop(0)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "server" / "run"
    for name in ("models", "checkpoint/round-2"):
        (folder / name).mkdir(parents=True)
    (folder / "config.toml").write_text("rounds = 2\n")
    (folder / "metrics.jsonl").write_text('{"round": 1}\n')
    (folder / "checkpoint" / "round-2" / "state.json").write_text("{}")
    (folder / ".lock").write_text("me")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_arrives_whole_whatever_breaks_and_its_end_comes_last(
    link: tuple[SuperLink, str], run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = link
    monkeypatch.setattr(remote_folder, "CHUNK", 1000)
    monkeypatch.setattr(remote_folder, "AGAIN_AFTER", 0.01)
    sender, out = Sender(servicer, run_folder), tmp_path / "desk" / "run"
    (run_folder / "report.html").write_text("nobody sends it")
    sender.grown()
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2}\n')
    (run_folder / "summary.json").write_text('{"rounds": 2}')
    (run_folder / "models" / "global.safetensors").write_bytes(bytes(range(256)) * 10)
    sender.ended()
    assert servicer.sent == [
        ("server.txt", 0), ("metrics.jsonl", 0), ("metrics.jsonl", 13),
        *(("models/global.safetensors", at) for at in (0, 1000, 2000)), ("summary.json", 0),
    ]  # fmt: skip
    servicer.breaks = [2, 5]
    servicer.ended.set()
    with Receiver(grpc.insecure_channel(address), "7", out, "rounds = 3\n") as receiver:
        receiver.drained(60)
        assert receiver.log_comes
    assert servicer.asked == [0, 2, 5]
    wanted = files(run_folder)
    there = str(run_folder).encode()
    del wanted[".lock"], wanted["checkpoint/round-2/state.json"], wanted["report.html"]
    assert files(out) == {**wanted, "server.txt": there, "config.toml": b"rounds = 3\n"}
    assert place_of(out) == run_folder
    assert place_of(run_folder) == run_folder


def test_a_run_that_is_taken_up_again_writes_its_log_anew(run_folder: Path, tmp_path: Path) -> None:
    link, out = SuperLink(), tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2, "of": "a round that was lost"}\n')
    Sender(link, run_folder).grown()
    for event in link.events:
        place(out, Part.model_validate_json(event.data))
    assert (out / "metrics.jsonl").read_text() == '{"round": 1}\n'


def part(name: str, data: bytes = b"x", at: object = 0) -> str:
    """An event's text; JSON as Python writes it has an Infinity, too."""
    return json.dumps({"file": name, "at": at, "data": base64.b64encode(data).decode()})


NO_FILES = (
    *("../x", "/etc/x", "a/../../x", ".ssh", "models/.hidden", "models/a/b.safetensors", "", "error.txt\n"),
    *("config.toml", "checkpoint/round-2/state.json", "own.py", "models/own.py", "report.html", ".lock"),
)
NO_PARTS = (
    *("{}", "[]", "{", "[" * 100_000, '{"file": "summary.json", "at": 0, "data": "eA"}'),
    *(part("metrics.jsonl", at=at) for at in (float("inf"), float("nan"), 2**70, 2**40, 1, -1, 0.5, True, "0")),
    *(part("summary.json", b"\xff"), part("summary.json", b'{"rounds": 2}', at=5)),
)


@pytest.mark.parametrize("name", NO_FILES)
def test_no_other_file_comes_than_data_of_a_run(name: str) -> None:
    with pytest.raises(ValidationError, match="no file of a run that comes back"):
        Part.model_validate_json(part(name))


def test_all_that_a_run_folder_has_comes_but_configuration_and_checkpoints(tmp_path: Path) -> None:
    LocalRuntime(config := toy_config("fedavg")).run(RunFolder.create(tmp_path, config))
    names = {name for name in files(tmp_path) if not name.startswith("checkpoint/")}
    assert {name for name in names if not re.fullmatch(COMES, name)} <= {"config.toml", ".lock"}
    assert {"models/global.safetensors", "summary.json", "log.jsonl"} <= names


def test_a_server_names_no_code_that_this_machine_imports(
    link: tuple[SuperLink, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = link
    (tmp_path / "wipe_old_runs.py").write_text("raise SystemExit('it was run')")
    monkeypatch.chdir(tmp_path)
    config, out = toy_config("fedavg"), tmp_path / "run"
    evil = b'plugins = ["wipe_old_runs"]\n' + config.toml().encode()
    push(servicer, part("config.toml", evil), part("server.txt", b"/there"), part("config.toml", evil))
    with Receiver(grpc.insecure_channel(address), "7", out, config.toml()) as receiver:
        receiver.drained(60)
    assert RunFolder(out).config() == config
    assert files(out) == {"config.toml": config.toml().encode(), "server.txt": b"/there"}


def push(servicer: SuperLink, *texts: str) -> None:
    """All that comes of a run, which has ended."""
    for text in texts:
        servicer.events.append(TaskEvent(id=len(servicer.events) + 1, event=remote_folder.EVENT, data=text))
    servicer.ended.set()


def test_events_that_are_no_files_are_left_alone_and_a_full_disk_is_told(
    link: tuple[SuperLink, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, address = link
    servicer.events.append(TaskEvent(id=1, event="other", data="{}"))
    push(servicer, *map(part, NO_FILES), *NO_PARTS, part("summary.json", b"{}"))
    with Receiver(grpc.insecure_channel(address), "7", tmp_path / "run") as receiver:
        receiver.drained(60)
    assert files(tmp_path) == {"run/summary.json": b"{}"}
    told = [record.getMessage() for record in caplog.records if "its server sent is none" in record.getMessage()]
    assert len(told) == len(NO_FILES) + len(NO_PARTS)
    assert all(line.isprintable() and len(line) < 400 for line in told)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "summary.json")

    monkeypatch.setattr(remote_folder, "place", full)
    told = pytest.raises(UserError, match=r"summary\.json: No space left on device")
    with Receiver(grpc.insecure_channel(address), "7", tmp_path / "run") as receiver, told:
        receiver.drained(60)


def test_a_server_that_sends_without_end_leaves_room_on_this_desk_s_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(total=2**40, free=2**30 + 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    ten = Part(file="models/a.safetensors", at=0, data=base64.b64encode(bytes(10)))
    place(tmp_path, ten)
    disk.free -= 10
    with pytest.raises(OSError, match="the rest of it is not a server's to fill"):
        place(tmp_path, Part(file="models/b.safetensors", at=0, data=base64.b64encode(b"1")))
    disk.total = 2**30  # a small one
    place(tmp_path, ten)


def test_a_superlink_that_does_not_take_the_files_does_not_end_the_run(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses:
        def PushTaskEvents(self, _: object) -> None:  # noqa: N802
            raise grpc.RpcError("no")

    with sending(Refuses(), run_folder):
        pass
    assert "the run's files do not go to who follows it" in caplog.text
