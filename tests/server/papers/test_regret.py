"""The tables of regret and of no harm."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from split_counts import coloured
from typer.testing import CliRunner

from perennial.common.data import scenarios
from perennial.server.cli.main import app
from perennial.server.papers import regret
from perennial.server.papers.regret import Case, Size, harm_table, judge, measure, regret_figure, regret_table
from perennial.server.run.folder import RunFolder
from perennial.server.study.batch import Outcome, Selected, Summary
from perennial.server.study.leave_one_out import LeftOut
from perennial.testing.tiny_federation import Toy, toy_config


def trial(path: Path, held_out: float, worst: float, a: float, d: float) -> Outcome:
    config = toy_config("fedavg")
    RunFolder.create(path, config).append([{**coloured(a, d), "round": 6}])
    facts: dict[str, Any] = {"round": 6, "accuracy": {"a": worst}, "average": 0.5, "pooled": 0.5, "clients": {}}
    found = Selected(**facts, worst=worst, validation=held_out)
    return Outcome(config, path, Summary(rounds=6, models={"global": {"final": found}}))


def test_a_case_by_hand(tmp_path: Path) -> None:
    """Trial 1 is best on held-out data, 2 by split, 3 in the test."""
    each = [(0.8, 0.1, 0.9, 0.2), (0.9, 0.0, 1.0, 0.0), (0.7, 0.48, 0.72, 0.7), (0.7, 0.52, 0.7, 0.68)]
    outcomes = [trial(tmp_path / str(number), *one) for number, one in enumerate(each)]
    case = judge(outcomes, "cmnist", 0, constant=0.5, leave_not="nobody is left")
    why_not = "leave-one-out does not speak: nobody is left; held-out data decided"
    assert case == Case("fedavg", "cmnist", 0, 0.1, 0.0, 0.48, 0.52, "split", "", 0.5, 6, 4, None, why_not)
    assert case.whole
    assert case.regret == pytest.approx(0.04)
    assert case.harm == pytest.approx(-0.48)
    assert case.choice
    left = [LeftOut(score, 0.01, {}, 10) for score in (0.6, 0.5, 0.5, 0.4)]
    case = judge(outcomes, "cmnist", 0, constant=0.5, left=left)
    assert case
    assert (case.left_out, case.why_not, case.whole) == (0.1, "", True)


def test_the_tables_average_over_seeds() -> None:
    cases = [
        Case("fedsdr", "cmnist", 0, 0.5, 0.0, 0.5, 0.55, "split", "", 0.5, 30, 4, 0.3),
        Case("fedsdr", "cmnist", 1, 0.5, 0.0, 0.5, 0.51, "held-out", "why", 0.5, 30, 4),
        Case("fedavg", "cmnist", 0, 0.0, 0.0, 0.0, 0.4, "held-out", "why", 0.5, 30, 4),  # nothing to choose
        Case("fedsdr", "cmnist-oracle", 0, 0.7, 0.72, 0.71, 0.73, "held-out", "why", 0.5, 30, 4),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(regret_table(cases), harm_table(cases))
    text = " ".join(capture.get().split())
    assert "cmnist │ fedsdr │ 50.00 │ 0.00 │ 30.00 │ 50.00 │ 53.00 │ 3.00 │ 1 of 2" in text
    assert "3.00 in the mean over 2 cases" in text
    assert "cmnist-oracle │ fedsdr │ 70.00 │ 72.00 │ 71.00 │ 73.00 │ 1.00 │ 0 of 1" in text
    assert "the largest of a single seed is 1.00" in text


@pytest.mark.slow
def test_reproduce_selection_runs_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    monkeypatch.setitem(scenarios.SCENARIOS, "toy-oracle", Toy(oracle=True))
    monkeypatch.setattr(regret, "QUICK", Size(("fedavg",), ("toy",), rounds=1, seeds=1, trials=2))
    command = ["reproduce", "selection", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, [*command, "--json"])
    assert first.exit_code == 0, first.output
    cases = json.loads(first.stdout)
    assert [case["scenario"] for case in cases] == ["toy", "toy-oracle"]
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert len(runs) == 6  # two trials and the references of either
    assert "Regret" in CliRunner().invoke(app, command).stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")} == runs
    assert CliRunner().invoke(app, [*command, "--figures", str(tmp_path / "figures")]).exit_code == 0
    assert "chosen by split" in (tmp_path / "figures" / "selection.svg").read_text()


def test_the_figure_has_a_ring_for_each_case_and_way_of_choosing() -> None:
    cases = [Case("fedsdr", "cmnist", seed, 0.5, 0.0, 0.5, 0.55, "split", "", 0.5, 30, 4) for seed in range(3)]
    picture = regret_figure(cases)
    other = regret_figure([*cases, Case("fedsdr", "cmnist", 3, 0.5, 0.0, 0.5, 0.6, "split", "", 0.5, 30, 4)])
    oracle = regret_figure([*cases, Case("fedsdr", "cmnist-oracle", 3, 0.5, 0, 0.5, 0.6, "split", "", 0.5, 30, 4)])
    assert other.count("<use ") - picture.count("<use ") == 2
    assert oracle == picture


@pytest.mark.slow
def test_what_is_kept_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study goes on where its runs are gone, from the numbers alone."""
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    monkeypatch.setitem(scenarios.SCENARIOS, "toy-oracle", Toy(oracle=True))
    monkeypatch.setattr(regret, "QUICK", Size(("fedavg", "ditto"), ("toy",), rounds=1, seeds=1, trials=2))
    kept = tmp_path / "results" / "selection-rule-2.jsonl"

    def reproduced(pool: str, *more: str) -> str:
        command = ["reproduce", "selection", "--quick", "--jobs", "1", "--keep", str(kept.parent)]
        ended = CliRunner().invoke(app, [*command, "--out", str(tmp_path / pool), *more])
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    reproduced("one", "--row", "ditto")
    assert len(kept.read_text().splitlines()) == 2
    shown = reproduced("two")
    assert len(kept.read_text().splitlines()) == 3  # Ditto has shown that split does not speak on toy-oracle
    assert not list((tmp_path / "two").glob("ditto*"))
    assert "toy-oracle │ all others │ – │ – │ – │ – │ 0.00 │ 0 of 1" in " ".join(shown.split())
    assert reproduced("three") == shown
    assert not (tmp_path / "three").exists()
    assert reproduced("four", "--row", "ditto", "--row", "ditto") == reproduced("four", "--row", "ditto")
    kept.write_text('{"method": "fedavg"}\n')
    damaged = CliRunner().invoke(app, ["reproduce", "selection", "--keep", str(kept.parent)])
    assert damaged.exit_code == 2
    assert "selection-rule-2.jsonl, line 1: scenario" in " ".join(damaged.stderr.split())
    other = CliRunner().invoke(app, ["reproduce", "selection", "--row", "fedsdrr"])
    assert other.exit_code == 2
    assert "unknown row 'fedsdrr'" in other.stderr
    rule = CliRunner().invoke(app, ["reproduce", "selection", "--select", "split"])
    assert rule.exit_code == 2
    assert "--trial-rounds and --select are not possible" in rule.stderr


@pytest.mark.slow
def test_damaged_references_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    monkeypatch.setitem(scenarios.SCENARIOS, "toy-oracle", Toy(oracle=True))
    size = Size(("fedavg",), ("toy",), rounds=1, seeds=1, trials=2)
    arguments: Any = (size, tmp_path / "pool", 1, lambda _: None, None, None, tmp_path / "kept")
    whole, _ = measure(*arguments)
    (tmp_path / "kept" / "selection-rule-2.jsonl").unlink()
    files = {file: file.read_bytes() for file in (tmp_path / "pool").glob("references-*/summary.json")}
    for file in files:
        file.write_text("{")
    cases, troubles = measure(*arguments)
    assert cases == []
    assert [trouble.split(": ")[0] for trouble in troubles] == ["fedavg on toy", "fedavg on toy-oracle"]
    assert all(f"delete {file.parent} to run it again" in " ".join(troubles) for file in files)
    for file, text in files.items():
        file.write_bytes(text)
    assert measure(*arguments) == (whole, [])


@pytest.mark.slow
def test_cases_that_another_process_keeps_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    monkeypatch.setitem(scenarios.SCENARIOS, "toy-oracle", Toy(oracle=True))
    monkeypatch.setattr(regret, "_constant", lambda *_: 0.5)
    other = Case("ditto", "toy", 0, 0.5, 0.0, 0.5, 0.55, "split", "", 0.5, 1, 2, 0.3)
    mine = replace(other, method="fedavg")

    def judged(*_: object) -> Case:
        (tmp_path / "selection-rule-2.jsonl").write_text(f"{json.dumps(asdict(other))}\n")
        return mine

    monkeypatch.setattr(regret, "judge", judged)
    monkeypatch.setattr(regret, "run_all", lambda configs, *_: [Outcome(own, tmp_path) for own in configs])
    monkeypatch.setattr(regret, "with_references", lambda configs, *_: (configs, ""))
    monkeypatch.setattr(regret, "leave_one_out", lambda configs, *_: ([None] * len(configs), ""))
    size = Size(("fedavg",), ("toy",), rounds=1, seeds=1, trials=2)
    measure(size, tmp_path / "pool", 1, lambda _: None, results=tmp_path)
    there = [json.loads(line)["method"] for line in (tmp_path / "selection-rule-2.jsonl").read_text().splitlines()]
    assert there == ["ditto", "fedavg"]
