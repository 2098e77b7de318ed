"""A run's own log, what Prometheus is told of it, and `--log-format json`."""

import json
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from typer import Exit
from typer.testing import CliRunner

from perennial.common.utils.addresses import Address
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.events import is_json, logged_to, set_format, tell
from perennial.common.utils.prometheus import expose
from perennial.server.cli.console import sentences
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.prometheus import RunMetrics
from perennial.testing.tiny_federation import toy_config


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def scraped(log: Path, **options: Any) -> dict[tuple[str, ...], float]:
    """By name and values of the labels, as over HTTP."""
    registry = CollectorRegistry()
    registry.register(RunMetrics(log, **options))
    port = expose(registry, Address("127.0.0.1", 0))
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {(one.name, *one.labels.values()): one.value for one in samples}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds of Ditto; evaluated in the second and the last, as a checkpoint is written."""
    folder = tmp_path_factory.mktemp("run") / "run"
    config = toy_config("ditto", "evaluate_every=2", "checkpoint_every=2", rounds=3)
    LocalRuntime(config).run(RunFolder.create(folder, config))
    return folder


def test_a_run_s_log_has_an_event_a_line(run: Path) -> None:
    found = events(run)
    assert all(row["time"].endswith("+00:00") and row["level"] == "info" for row in found)
    assert len({row["run"] for row in found}) == 1
    parts = ["train", "round", "train", "evaluate", "evaluated", "checkpoint", "round"]
    assert [row["event"] for row in found] == [
        "run", *parts, "train", "evaluate", "evaluated", "checkpoint", "round", "ended",
    ]  # fmt: skip
    assert [row["round"] for row in found[1:-1]] == [1] * 2 + [2] * 5 + [3] * 5
    first = found[0]
    assert (first["action"], first["method"], first["rounds"], first["seed"]) == ("start", "ditto", 3, 0)
    assert all(row["seconds"] >= 0 for row in found if row["event"] in ("train", "evaluate", "round", "ended"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in found if row["event"] == "round"][-1]
    traffic = [row for row in rows if row["round"] == 3 and row["kind"] in ("round", "evaluation-traffic")]
    assert last["bytes_down"] == sum(row["bytes_down"] for row in traffic)
    assert last["used"] == sum(row["asked"] for row in traffic)
    summary = json.loads((run / "summary.json").read_text())["models"]
    evaluated = [row for row in found if row["event"] == "evaluated"][-1]["accuracy"]
    assert evaluated == {model: summary[model]["final"]["accuracy"] for model in summary}


def test_prometheus_is_told_what_the_log_says(run: Path) -> None:
    found, rounds = scraped(run / "log.jsonl"), [row for row in events(run) if row["event"] == "round"]
    assert found["perennial_rounds_total",] == found["perennial_round",] == found["perennial_rounds_planned",] == 3
    assert found["perennial_round_duration_seconds_count",] == 3
    total = sum(row["seconds"] for row in rounds)
    assert found["perennial_round_duration_seconds_sum",] == pytest.approx(total)
    for outcome in ("used", "refused", "silent"):
        assert found["perennial_replies_total", outcome] == sum(row[outcome] for row in rounds)
    for way in ("down", "up"):
        assert found["perennial_bytes_total", way] == sum(row[f"bytes_{way}"] for row in rounds) > 0
    clients = len({row["client"] for row in map(json.loads, (run / "metrics.jsonl").open()) if "client" in row})
    assert (found["perennial_clients_connected",], found["perennial_clients_left_out",]) == (clients, 0)
    assert (found["perennial_running",], found["perennial_stopped",]) == (0, 0)
    done = datetime.fromisoformat(rounds[-1]["time"]).timestamp()
    assert found["perennial_last_round_timestamp_seconds",] == pytest.approx(done)
    accuracy = [row for row in events(run) if row["event"] == "evaluated"][-1]["accuracy"]
    for model, environments in accuracy.items():
        for environment, value in environments.items():
            assert found["perennial_accuracy", environment, model] == value


def test_clients_are_named_only_where_that_is_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"event": "left out", "round": 1, "client": "north", "action": "train", "reason": "late"}] * 2
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "rou')  # being written
    named = scraped(log, clients=True)
    assert named["perennial_client_left_out_total", "north"] == 2
    assert not any("north" in key for key in scraped(log))
    log.write_text(json.dumps({"event": "run", "time": "2026-11-22T00:00:00+00:00", "rounds": 9}) + "\n")
    begun = scraped(log)["perennial_last_round_timestamp_seconds",]
    assert begun == datetime(2026, 11, 22, tzinfo=UTC).timestamp()  # or the alarm would sound at once
    assert scraped(tmp_path / "none" / "log.jsonl")["perennial_rounds_total",] == 0


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lost = json.dumps({"event": "left out", "client": "north"})
    kept = json.dumps({"event": "left out", "client": "south"})
    no_events = ("[]", "1", '{"event": "round"}', '{"event": "evaluated", "accuracy": 1}', "[" * 100_000)
    log.write_text("\n".join([lost[:20] + lost, *no_events, kept, ""]))
    found = scraped(log, clients=True)
    assert {key for key in found if key[0] == "perennial_client_left_out_total"} == {
        ("perennial_client_left_out_total", "south")
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_that_cannot_be_written_is_said_once_and_ends_nothing(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERENNIAL_LOG_FORMAT", "text")
    try:
        set_format(form)
        with logged_to(Path("/dev/full")):
            for number in range(500):
                tell(f"event {number} {'.' * 80}")
    finally:
        set_format("text")
    sentence = "/dev/full cannot be written: No space left on device; the program goes on without it"
    said = capsys.readouterr().err.splitlines()
    if form == "text":
        assert said == [f"perennial: {sentence}"]
    else:
        assert len(said) == 501
        assert [json.loads(line)["event"] for line in said].count(sentence) == 1


def test_a_run_that_stops_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config("fedavg", rounds=2)
    folder = RunFolder.create(tmp_path / "run", config)
    runtime = LocalRuntime(config)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the client's fault")

    monkeypatch.setattr("perennial.client.trainer.LocalTrainer.train", broken)
    with pytest.raises(RunStopped):
        runtime.run(folder)
    *_, last = events(tmp_path / "run")
    assert (last["event"], last["level"]) == ("stopped", "error")
    assert "gave a usable answer to 'train'" in last["reason"]
    found = scraped(tmp_path / "run" / "log.jsonl")
    assert (found["perennial_running",], found["perennial_stopped",]) == (0, 1)
    told = (tmp_path / "run" / "log.jsonl").read_text()
    tell("of no run")
    assert (tmp_path / "run" / "log.jsonl").read_text() == told


def test_names_that_no_text_can_hold_or_that_are_none_break_no_answer(tmp_path: Path) -> None:
    """The log is sent by a server, or stands in somebody else's folder."""
    rows: list[dict[str, Any]] = [
        {"event": "evaluated", "accuracy": {"\ud800": {"p\n\x1b[2J": 0.5}}},
        *({"event": "left out", "client": name} for name in ("\ud800", ["x"], None, "client-1")),
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = scraped(tmp_path / "log.jsonl", clients=True)
    assert found["perennial_accuracy", "p ", " "] == 0.5
    assert [key[1] for key in found if key[0] == "perennial_client_left_out_total"] == [" ", "client-1"]


def test_a_command_waits_until_the_end_of_its_run_is_asked_for(tmp_path: Path) -> None:
    log, registry = tmp_path / "log.jsonl", CollectorRegistry()
    run = RunMetrics(log)
    registry.register(run)
    run.tell_end(3600)  # nobody asks, nobody waits
    port = expose(registry, Address("127.0.0.1", 0))
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60):
        log.write_text(json.dumps({"event": "stopped"}) + "\n")
    end = Thread(target=run.tell_end, args=(3600,), daemon=True)
    end.start()
    end.join(0.2)
    assert end.is_alive()
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert "perennial_stopped 1.0" in answer.read().decode()
    end.join(60)
    assert not end.is_alive()


@pytest.mark.parametrize(("error", "told"), [(None, 1), (RunStopped("why"), 1), (KeyboardInterrupt(), 0)])
def test_what_is_left_to_do_follows_the_sentence_unless_interrupted(
    error: BaseException | None, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    with suppress(Exit), sentences() as working:
        working.at_end = lambda: said.append(capsys.readouterr().err)
        if error:
            raise error
    assert len(said) == told
    assert all("the run stopped: why" in text for text in said if error)


def test_a_port_that_is_taken_is_said() -> None:
    port = expose(CollectorRegistry(), Address("127.0.0.1", 0))
    with pytest.raises(UserError, match=rf"--metrics 127.0.0.1:{port}: cannot listen there \(Address already"):
        expose(CollectorRegistry(), Address("127.0.0.1", port))


# ---------------------------------------------------------------------- --log-format json


@pytest.mark.slow
def test_with_json_every_line_of_standard_error_is_an_event(tmp_path: Path) -> None:
    code = "from perennial.server.cli.main import main; main()"
    out = tmp_path / "run"
    command = ["run", "--method", "fedavg", "--rounds", "1", "--json", "--log-format", "json"]
    command += ["--set", "scenario.clients=2"]
    path = ":".join(sys.path)
    for arguments, status in (([*command, "--out", str(out)], 0), ([*command, "--out", str(out)], 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": path},
            check=False,
        )
        assert done.returncode == status, done.stderr
        told = [json.loads(line) for line in done.stderr.splitlines()]
        if status:
            assert told[-1]["exit_code"] == 2
            assert "already holds a run" in told[-1]["event"]
        else:
            assert told == events(out)
            json.loads(done.stdout)


def test_every_command_takes_the_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERENNIAL_LOG_FORMAT", "text")
    for name in ("run", "resume", "join", "serve", "sweep", "rollback"):
        assert "--log-format" in CliRunner().invoke(app, [name, "--help"], terminal_width=200).stdout
    try:
        set_format("json")
        assert is_json()
        tell("something", client="x", seconds=1.5)
    finally:
        set_format("text")
    line = json.loads(capsys.readouterr().err)
    assert {name: line[name] for name in ("event", "level", "client", "seconds")} == {
        "event": "something", "level": "info", "client": "x", "seconds": 1.5,
    }  # fmt: skip
    tell("nobody hears this")
    assert capsys.readouterr().err == ""
