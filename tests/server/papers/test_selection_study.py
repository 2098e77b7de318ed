"""The study of selections: what each rule chooses on searches that were made by hand, and the study's own runs."""

import json
from dataclasses import asdict, replace
from math import sqrt
from pathlib import Path

import pytest
from split_counts import coloured
from typer.testing import CliRunner

from perennial.common.data import scenarios
from perennial.server.cli.main import app
from perennial.server.papers import selection_study
from perennial.server.papers.selection_study import (
    RULES,
    VARIANTS,
    Size,
    Trial,
    Variant,
    case,
    figure,
    interval,
    searches,
    tables,
)
from perennial.testing.tiny_federation import Toy

FIRST = VARIANTS[0].name


def trial(number: int, worst: float, validation: float, a: float, d: float, **changes: object) -> Trial:
    """Of a search on a scenario where a constant has 0.5 and Local 0.55."""
    held_out = (("one", "a", 100, round(100 * validation), 50.0), ("two", "b", 100, round(50 + 40 * d), 60.0))
    counts = coloured(a, d)
    made = Trial(FIRST, "irm", 30, number, 4, 6, worst, (worst + 1) / 2, validation, held_out, counts, 0.5, 0.55)
    return replace(made, **changes)  # type: ignore[arg-type]


def search(**changes: object) -> list[Trial]:
    """Trial 1 is best on held-out data, 2 by split, 3 in the test."""
    each = [(0.1, 0.8, 0.9, 0.2), (0.0, 0.9, 1.0, 0.0), (0.52, 0.7, 0.72, 0.7), (0.6, 0.6, 0.7, 0.68)]
    return [trial(number, *one, **changes) for number, one in enumerate(each)]


def test_what_each_rule_chooses() -> None:
    found = {name: case(search(), name).worst for name in RULES}
    assert found["split"] == found["split, version 1"] == found["largest min(a, d)"] == 0.52
    assert found["held-out"] == 0.0
    assert found["the defaults"] == 0.1
    assert found["a random trial"] == pytest.approx((0.1 + 0.0 + 0.52 + 0.6) / 4)
    assert found["the best in the worst case (test data)"] == 0.6
    assert found["worst-client"] == found["worst-environment"] == 0.52  # trial 1's second client has half
    assert found.keys() >= {"less-deviation", "risk-variance", "worst-group", "inferred-group"}


def test_what_is_said_of_a_choice() -> None:
    one = case(search(), "split")
    assert one.pair == (FIRST, "irm")
    assert one.average == pytest.approx(0.76)
    assert one.regret == pytest.approx(0.08)
    assert (one.above_constant, one.above_both) == (1, 0)
    assert case(search(), "a random trial").above_constant == 0.5
    assert case(search(), "held-out").correlation == pytest.approx(-1)
    assert case(search(), "a random trial").correlation is None


def test_held_out_data_decide_where_split_does_not_speak_and_where_version_1_knew_no_better() -> None:
    silent = search(counts=None)
    assert {case(silent, name).worst for name in ("split", "split, version 1", "worst-group", "held-out")} == {0.0}
    poor = [trial(n, w, v, a, d) for n, (w, v, a, d) in enumerate([(0.0, 0.9, 1.0, 0.0), (0.4, 0.6, 0.52, 0.48)])]
    assert case(poor, "split, version 1").worst == 0.0
    assert case(poor, "split").worst == 0.4


def test_the_interval_is_over_pairs_of_scenario_and_method() -> None:
    ours, theirs = ([case(search(), name)] * 3 for name in ("split", "held-out"))
    assert interval(ours, theirs) == pytest.approx((0.52, 0.52)), (
        "three seeds of one pair are one piece of evidence"
    )
    spread = [replace(one, pair=(str(n), "irm"), regret=float(n % 2)) for n, one in enumerate(ours * 20)]
    low, high = interval([replace(own, regret=0.0) for own in spread], spread)
    width = 2 * 1.96 * sqrt(0.25 / len(spread))
    assert high - low == pytest.approx(width, rel=0.2)
    assert (low + high) / 2 == pytest.approx(0.5, abs=0.05)


def test_the_tables_are_made_of_all_that_is_kept_in_any_order() -> None:
    every = search() + search(seed=31) + search(method="fedsdr", seed=31)
    every += [replace(own, variant="planted-word-oracle", counts=None) for own in search(method="fedavg")]
    made = tables(reversed(every))
    assert list(made) == ["rules", "rules without trial 0", "scenarios", "methods", "no shortcut"]
    cells = {name: [list(map(str, column.cells)) for column in table.columns] for name, table in made.items()}
    assert cells["rules"][0] == list(RULES)
    assert cells["rules without trial 0"][0] == [name for name in RULES if name != "the defaults"]
    assert [column[0] for column in cells["scenarios"]] == [
        *(FIRST, "3", "3", "10.00", "0.00", "52.00", "52.00", "60.00")
    ]
    assert [column[0] for column in cells["no shortcut"]][:3] == ["planted-word-oracle", "1", "0"]
    assert list(zip(*cells["methods"][:2], strict=True)) == [("fedsdr", "1"), ("irm", "2")]
    assert figure(every).count("<use ") - figure(search()).count("<use ") == 2 * 2
    assert [len(own) for own in searches(every)] == [4, 4, 4, 4]


@pytest.mark.slow
def test_the_study_runs_keeps_its_trials_and_fills_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    monkeypatch.setitem(scenarios.SCENARIOS, "toy-oracle", Toy(oracle=True))
    made = (Variant("toy", "toy"), Variant("toy-oracle", "toy-oracle"))
    monkeypatch.setattr(selection_study, "VARIANTS", made)
    monkeypatch.setattr(selection_study, "QUICK", Size(made, ("irm", "groupdro"), rounds=1, seeds=1, trials=2))
    kept = tmp_path / "results" / selection_study.FILE

    def reproduced(*more: str, code: int = 0) -> str:
        command = ["reproduce", "selection", "--keep", str(kept.parent), "--jobs", "1", "--out"]
        ended = CliRunner().invoke(app, [*command, str(tmp_path / "pool"), *more])
        assert ended.exit_code == code, ended.output
        return ended.stdout if code == 0 else " ".join(ended.stderr.split())

    assert "is not there, or empty" in reproduced("--overview", "page.md", code=2) or not kept.parent.exists()
    reproduced("--quick", "--row", "irm")
    assert len(kept.read_text().splitlines()) == 4
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("pool/*/summary.json")}
    assert len(runs) == 2 * (2 + 1 + 1)  # two trials, their references and Local, with a shortcut and without
    trials = json.loads(reproduced("--quick", "--row", "irm", "--json"))
    assert [Trial(**own).search for own in trials] == 2 * [("toy", "irm", 30, 1)] + 2 * [
        ("toy-oracle", "fedavg", 30, 1)
    ]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("pool/*/summary.json")} == runs
    assert "toy-oracle" in reproduced("--quick")
    assert len(kept.read_text().splitlines()) == 6

    page = tmp_path / "page.md"
    assert "there is no such file" in reproduced("--overview", str(page), code=2)
    page.write_text("# Page\n\n<!-- table: rules -->\n<!-- end -->\n")
    assert "no <!-- table: rules without trial 0 -->" in reproduced("--overview", str(page), code=2)
    names = ("rules", "rules without trial 0", "scenarios", "methods", "no shortcut")
    page.write_text("".join(f"<!-- table: {name} -->\nold\n<!-- end -->\nwords\n" for name in names))
    assert "is not what" in reproduced("--overview", str(page), "--check", code=1)
    reproduced("--overview", str(page))
    assert "| toy | 2 |" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().count("words") == 5
    reproduced("--overview", str(page), "--check")
    monkeypatch.setattr(selection_study, "PAGE", page)
    reproduced("--check")
    kept.write_text(json.dumps({**asdict(Trial(**trials[0])), "seed": "x"}) + "\n")
    assert "line 1: seed" in reproduced("--quick", code=2)
    assert "unknown row 'fedsdrr'" in reproduced("--row", "fedsdrr", code=2)
    assert "--trial-rounds and --select are not possible" in reproduced("--select", "split", code=2)
