"""Who writes a method is shown where it went wrong, whatever the runtime; a deployment's sites keep theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.run import Run

import perennial
from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.node import installed
from perennial.common.config import RunConfig
from perennial.common.flower.executor import REPLY, Executor, Work
from perennial.common.utils.errors import RunStopped
from perennial.common.wire import CONFIG, KEPT, RESUMED, ROUND, RUN, TASK
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.simulation import Simulation
from perennial.testing.tiny_federation import toy_config

HEAD = "Traceback (most recent call last)"


@pytest.fixture
def slip(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: Any, received: Any) -> Any:
        return received.modle  # what a method's author mistypes

    monkeypatch.setattr(FedAvgClient, "train", train)


@pytest.mark.usefixtures("slip")
def test_a_local_run_shows_it_once_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = toy_config("fedavg", "quorum=0.5")
    with pytest.raises(RunStopped, match="AttributeError"):
        LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    said, kept = capsys.readouterr().err, (tmp_path / "run" / "traceback.txt").read_text()
    for text in (said, kept):
        assert text.count(HEAD) == 1
        assert "return received.modle" in text
        assert "test_authors.py" in text


def train_request(folder: Path) -> tuple[Message, Context, Run]:
    config = {TASK: toy_config("fedavg").task(), RUN: "0123456789ab", ROUND: 1, KEPT: [], RESUMED: []}
    message = Message(RecordDict({CONFIG: ConfigRecord(config)}), 1, "train")  # type: ignore[arg-type]
    run = Run.create_empty(1)
    run.fab_id, run.fab_version = installed.APP, perennial.__version__
    return (
        message,
        Context(1, 1, {"partition-id": 0, "state-dir": str(folder), "device": "cpu"}, RecordDict(), {}),
        run,
    )


@pytest.mark.usefixtures("slip")
def test_a_node_keeps_it_in_its_own_folder_and_tells_the_server_the_message_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message, context, run = train_request(tmp_path / "state")
    nowhere = grpc.insecure_channel("127.0.0.1:1")
    executor = Executor(nowhere, tmp_path, installed.answer, installed.audit)
    for _ in range(3):
        reply = executor.reply(message, context, run, Work("token"))
        assert reply.error.reason == "<class 'AttributeError'>:<''Received' object has no attribute 'modle''>"
        (tmp_path / REPLY).unlink()
    assert caplog.text.count("perennial: 'Received' object has no") == 3
    kept = (tmp_path / "state" / "traceback.txt").read_text()
    assert kept.count(HEAD) == caplog.text.count(HEAD) == 1


class Simulated(Simulation):
    """One whose clients leave a traceback in their state folder, and whose server a word."""

    @contextmanager
    def _started(self, config: RunConfig, out: Path, resume: bool) -> Iterator[Any]:
        (out / "clients").mkdir(exist_ok=True)
        (out / "clients" / "traceback.txt").write_text(f"{HEAD}:\n  of a client\n\n")
        (out / "error.txt").write_text("too few\n")
        yield SimpleNamespace(poll=lambda: 1)


def test_whoever_follows_a_simulation_is_shown_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = toy_config("fedavg", runtime="simulation")
    for _ in range(2):  # taken up again, it has shown it already
        with pytest.raises(RunStopped, match="too few"):
            list(Simulated(tmp_path).execute(config, tmp_path))
    assert capsys.readouterr().err.count(HEAD) == 1
    assert (tmp_path / "traceback.txt").exists()
