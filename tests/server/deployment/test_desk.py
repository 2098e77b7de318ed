"""A run folder that comes back through the SuperLink: what is sent, in what order, and what is made of it."""

import base64
import json
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.proto.control_pb2 import StreamRunEventsRequest, StreamRunEventsResponse
from flwr.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from flwr.proto.runtime_pb2 import PushTaskEventsRequest
from flwr.proto.task_pb2 import TaskEvent

from perennial.common.errors import UserError
from perennial.server.deployment import desk
from perennial.server.deployment.desk import Receiver, Sender, place, sending
from perennial.server.deployment.remote import place_of


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
    monkeypatch.setattr(desk, "CHUNK", 1000)
    monkeypatch.setattr(desk, "AGAIN_AFTER", 0.01)
    sender, out = Sender(servicer, run_folder), tmp_path / "desk" / "run"
    sender.grown()
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2}\n')
    (run_folder / "summary.json").write_text('{"rounds": 2}')
    (run_folder / "models" / "global.safetensors").write_bytes(bytes(range(256)) * 10)
    sender.ended()
    assert servicer.sent == [
        ("server.txt", 0), ("config.toml", 0), ("metrics.jsonl", 0), ("metrics.jsonl", 13),
        *(("models/global.safetensors", at) for at in (0, 1000, 2000)), ("summary.json", 0),
    ]  # fmt: skip
    servicer.breaks = [2, 5]
    servicer.ended.set()
    with Receiver(grpc.insecure_channel(address), "7", out) as receiver:
        receiver.drained(60)
        assert receiver.log_comes
    assert servicer.asked == [0, 2, 5]
    wanted = files(run_folder)
    there = str(run_folder).encode()
    del wanted[".lock"], wanted["checkpoint/round-2/state.json"]
    assert files(out) == {**wanted, "server.txt": there}
    assert place_of(out) == run_folder
    assert place_of(run_folder) == run_folder


def test_a_run_that_is_taken_up_again_writes_its_log_anew(run_folder: Path, tmp_path: Path) -> None:
    link, out = SuperLink(), tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2, "of": "a round that was lost"}\n')
    Sender(link, run_folder).grown()
    for event in link.events:
        part = json.loads(event.data)
        place(out, part["file"], part["at"], base64.b64decode(part["data"]))
    assert (out / "metrics.jsonl").read_text() == '{"round": 1}\n'


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ".ssh", "a/.hidden", "", "a\nb", "a b"])
def test_a_name_that_leads_out_of_the_folder_is_not_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file of a run folder"):
        place(tmp_path / "run", name, 0, b"x")
    assert not list(tmp_path.rglob("*"))


def test_events_that_are_no_files_are_left_alone_and_a_full_disk_is_told(
    link: tuple[SuperLink, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = link
    good = json.dumps({"file": "summary.json", "at": 0, "data": base64.b64encode(b"{}").decode()})
    for name, data in (
        ("other", "{}"),
        (desk.EVENT, "{}"),
        (desk.EVENT, '{"file": "../x", "at": 0, "data": ""}'),
        (desk.EVENT, good),
    ):
        servicer.PushTaskEvents(PushTaskEventsRequest(events=[TaskEvent(event=name, data=data)]))
    servicer.ended.set()
    with Receiver(grpc.insecure_channel(address), "7", tmp_path / "run") as receiver:
        receiver.drained(60)
    assert files(tmp_path) == {"run/summary.json": b"{}"}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "summary.json")

    monkeypatch.setattr(desk, "place", full)
    told = pytest.raises(UserError, match=r"summary\.json: No space left on device")
    with Receiver(grpc.insecure_channel(address), "7", tmp_path / "run") as receiver, told:
        receiver.drained(60)


def test_a_superlink_that_does_not_take_the_files_does_not_end_the_run(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses:
        def PushTaskEvents(self, _: object) -> None:  # noqa: N802
            raise grpc.RpcError("no")

    with sending(Refuses(), run_folder):
        pass
    assert "the run's files do not go to who follows it" in caplog.text
