"""`perennial watch`: what is seen of a run, from the events of its log."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from perennial.server.cli import console
from perennial.server.cli.main import app
from perennial.server.cli.watch import Seen, picture, sparkline, watched_superlink
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


def seen_after(*events: dict[str, Any]) -> tuple[Seen, str]:
    """What is known of a run after these events, and what is drawn of it."""
    seen = Seen(toy_config("fedavg", rounds=10))
    for event in events:
        seen.take(event)
    console = Console(width=120)
    with console.capture() as drawn:
        console.print(picture(seen))
    return seen, drawn.get()


def round_of(number: int, **changed: Any) -> dict[str, Any]:
    time = f"2026-11-28T05:00:{number:02}.000+00:00"
    return {
        "event": "round",
        "round": number,
        "time": time,
        "seconds": 2.0,
        "bytes_down": 10,
        "bytes_up": 5,
        **changed,
    }


@pytest.mark.parametrize(
    ("values", "bars"), [([0, 0.5, 1], "▁▅█"), ([0.25, float("nan"), 0.75], "▃ ▇"), ([1] * 99, "█" * 30)]
)
def test_a_bar_for_each_of_the_last_values(values: list[float], bars: str) -> None:
    assert sparkline(values, 0.0, 1.0) == bars


def test_a_site_that_went_silent_is_seen_with_its_last_reply_and_why() -> None:
    gone = {"event": "left out", "client": "client-1", "reason": "did not answer before the deadline"}
    seen, drawn = seen_after(
        {"event": "run", "round": 0},
        round_of(1),
        *({**gone, "round": number} for number in (2,)),
        {"event": "evaluated", "round": 2, "accuracy": {"global": {"p=0.1": 0.25, "p=0.9": 0.75}}},
        round_of(2),
    )
    assert seen.answered["client-0"][0] == 2
    assert seen.answered["client-1"][0] == 1
    assert (seen.lost, seen.left, seen.down) == (1, "0:00:16 left", 20)
    lines = {line.split("│")[1].strip(): line for line in drawn.splitlines() if line.startswith("│")}
    assert "round 1, 05:00:01" in lines["client-1"]
    assert "round 2: did not answer before the deadline" in lines["client-1"]
    assert "round 2, 05:00:02" in lines["client-0"]
    assert "round 2 of 10, 0:00:16 left, 1 replies left out" in drawn
    assert any("p=0.9" in line and "75.00 %" in line for line in drawn.splitlines())


def test_the_end_of_a_run_is_seen() -> None:
    assert "stopped: too few" in seen_after(round_of(1), {"event": "stopped", "round": 1, "reason": "too few"})[1]
    assert "round 1 of 10, ended" in seen_after(round_of(1), {"event": "ended"})[1]


def test_a_folder_is_watched_and_what_is_none_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config("ditto", rounds=2)
    folder = RunFolder.create(tmp_path / "one", config)
    with folder.held():
        LocalRuntime(config).run(folder)
    result = call("watch", str(tmp_path / "one"))
    assert result.exit_code == 0, result.output
    assert "round 2 of 2, ended" in result.stdout
    assert "personal" in result.stdout
    monkeypatch.chdir(tmp_path)
    wrongs = {
        str(tmp_path / "none"): "is no run folder",
        "none": "there is no run folder none",
        "no:port": "is no address",
    }
    for place, said in wrongs.items():
        wrong = call("watch", place)
        assert (wrong.exit_code, said in wrong.stderr) == (2, True), wrong.output
    headline = config.predicts.headline.name
    for line in (
        *("[]", "7", "{}", '{"event": "round", "seconds": "1"}', '{"event": "round", "bytes_up": 1.5}'),
        *('{"event": "round", "round": 1e9}', '{"event": "left out", "client": ["a"]}', '{"event": "evaluated"}'),
        f'{{"event": "evaluated", "{headline}": {{"global": {{"test": "{"9" * 5000}"}}}}}}',
    ):
        folder.events.write_text(f"{line}\n")
        wrong = call("watch", str(tmp_path / "one"))
        assert (wrong.exit_code, "log.jsonl is damaged (" in wrong.stderr) == (2, True), line
        assert len(wrong.stderr) < 600


def test_values_without_a_difference_are_drawn() -> None:
    assert sparkline([-1e308, 0.0, 1e308, float("nan")], -1e308, 1e308) == "▁▅█ "
    assert sparkline([0.5, 0.5], 0.5, 0.5) == "▁▁"


def test_names_and_reasons_from_a_server_are_shown_as_they_are() -> None:
    evil = "[/]\x1b[2J[bold]"
    drawn = seen_after({"event": "left out", "round": 1, "client": "client-1", "reason": evil}, round_of(1))[1]
    assert "\x1b" not in drawn
    assert "[/]" in drawn
    assert "[bold]" in drawn


def drawn_of(look: Any) -> str:
    console = Console(width=120)
    with console.capture() as text:
        console.print(look()[0])
    return text.get()


@pytest.mark.parametrize("same_machine", [True, False])
def test_of_a_superlink_the_newest_run_that_goes_on_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_machine: bool
) -> None:
    """From its folder where that is on this machine, else from what its server sends."""
    wanted = toy_config("ditto", rounds=9)
    events = [{"event": "run"}, round_of(1), round_of(2)]
    log = "".join(json.dumps({"round": 0, **event}) + "\n" for event in events)
    there = tmp_path / "run"
    if same_machine:
        there.mkdir()
        (there / "log.jsonl").write_text(log)

    class Sent:
        """What its server sends, in place of a connection."""

        def __init__(self, channel: str, run: str, folder: Path) -> None:
            assert (channel, run, same_machine) == ("channel", "7", False)
            (folder / "log.jsonl").write_text(log)

        def __enter__(self) -> "Sent":
            return self

        def __exit__(self, *_: object) -> None:
            closed.append("7")

    class Connection:
        def control(self) -> str:
            return "channel"

    def started(number: int, **settings: str) -> SimpleNamespace:
        return SimpleNamespace(run_id=number, override_config=settings)

    closed: list[str] = []
    run: list[SimpleNamespace | None] = [None]
    monkeypatch.setattr("perennial.server.deployment.remote_folder.Receiver", Sent)
    monkeypatch.setattr("perennial.server.deployment.control.going_on", lambda _: run[0])
    monkeypatch.setattr("perennial.server.cli.sites.status_tables", lambda *_: ["its sites"])
    with watched_superlink(Connection(), []) as look:  # type: ignore[arg-type]
        assert drawn_of(look) == "its sites\n"
        run[0] = started(7, config=wanted.model_dump_json(), out=str(there))
        assert "Ditto on toy, seed 0: round 2 of 9" in drawn_of(look)
        run[0] = None  # it has ended, and is still seen
        assert "round 2 of 9" in drawn_of(look)
        for number, settings in enumerate([{"survey": "{}"}, {"config": '{"plugins": ["none"]}'}], start=8):
            run[0] = started(number, **settings)
            assert drawn_of(look) == "its sites\n"
    assert closed == ([] if same_machine else ["7"])


def test_a_folder_whose_run_goes_on_is_shown_and_reported(tmp_path: Path) -> None:
    config = toy_config("fedavg", rounds=4)
    folder = RunFolder.create(tmp_path / "one", config)
    with folder.held():
        assert (
            "nothing has been evaluated yet; 0 of 4 rounds are done, and process"
            in call("show", str(folder.path)).stderr
        )
        LocalRuntime(config).run(folder)
        rows = folder.rows()
        (folder.path / "summary.json").unlink()
        kept = [json.dumps(row) for row in rows if row["round"] <= 2]
        (folder.path / "metrics.jsonl").write_text("\n".join([*kept, '{"kind": "rou']))  # as it is being written
        shown = call("show", str(folder.path))
        assert shown.exit_code == 0, shown.output
        assert "not ended: 2 of 4 rounds are done, and process" in shown.stdout
        page = call("report", str(folder.path), "--format", "markdown", "--out", str(tmp_path / "page.md"))
        assert page.exit_code == 0, page.output
        assert "| FedAvg, after 2 of 4 rounds |" in (tmp_path / "page.md").read_text()
    assert "has no summary yet" in call("show", str(folder.path)).stderr  # nobody is at work on it any more


def test_a_log_file_has_a_line_of_its_own_after_a_silent_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    silence = console.Silence()
    said = []
    for done in range(10):
        said.append(silence.line("", "rounds", done, 30))
        now[0] += 20.0
    left = {3: "0:09:00", 6: "0:08:00", 9: "0:07:00"}
    assert said == [f"rounds {n}/30, about {left[n]} left" if n in left else "" for n in range(10)]
    assert silence.line("round 10/30  global 50.0 %", "rounds", 10, 30) == "round 10/30  global 50.0 %"
    now[0] += 20.0
    assert silence.line("", "rounds", 11, 30) == ""
