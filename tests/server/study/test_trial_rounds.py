"""Trials of fewer rounds than what they choose, and one search that two rules choose from."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TWO_ROWS
from typer.testing import CliRunner

from perennial.common.data import scenarios
from perennial.common.utils.errors import UserError
from perennial.server import studies
from perennial.server.cli.main import app
from perennial.server.papers.kept import keep, known
from perennial.server.papers.overview import overview
from perennial.server.papers.reproduce import Reproduction, load_reproduction, reproduction_table
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.study.batch import Standing
from perennial.server.study.choose import search
from perennial.server.study.compare import (
    Plan,
    base_config,
    compare,
    comparison_lines,
    comparison_tables,
    entries_of,
)
from perennial.testing.tiny_federation import Toy

TABLE = """
title = "T"
source = "S"
scenario = "toy"
rounds = 3
seeds = 2
trials = 3
trial_rounds = 1
select = "split"
columns = ["worst", "average"]
claims = [{ row = "FedAvg", than = "Ditto", column = "worst" }]

[settings]
"scenario.clients" = 6
"scenario.samples" = 300
batch_size = 64
local_steps = 5

[quick]
rounds = 2
"""


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())


@pytest.fixture
def table(tmp_path: Path) -> Reproduction:
    (tmp_path / "t.toml").write_text(TABLE + TWO_ROWS)
    return load_reproduction("t", tmp_path)


def lengths(pool: Path, method: str) -> Counter[tuple[int, int]]:
    """How many runs of a method have so many rounds with a seed."""
    configs = [RunFolder(path).config() for path in pool.iterdir() if path.name.startswith(f"{method}-")]
    return Counter((config.rounds, config.seed) for config in configs)


@pytest.mark.slow
def test_the_search_is_that_of_short_runs_and_the_chosen_settings_run_all_rounds(tmp_path: Path) -> None:
    settings = ("batch_size=20", "local_steps=5")
    plan = Plan(entries_of(["ditto"]), "toy", 2, 3, rounds=3, trial_rounds=1, settings=settings)
    standings: list[Standing] = []
    comparison = compare(plan, tmp_path / "pool", 1, standings.append)
    for entry, choice in zip(entries_of(["ditto", "fedavg", "local"]), comparison.choices, strict=True):
        short = base_config(plan, entry, plan.entries).model_copy(update={"rounds": 1})
        _, verdict = search(short, 3, ("batch_size", "local_steps"), Select.held_out, tmp_path / "other", 1)
        assert choice.trial == verdict.trial
        ran = [RunFolder(Path(path)).config() for path in choice.runs]
        assert [(config.rounds, config.seed) for config in ran] == [(3, 0), (3, 1)]
        for config in ran:
            assert choice.settings.items() <= config.method.model_dump().items()
        assert lengths(tmp_path / "pool", entry.method) == {(1, 0): 3, (3, 0): 1, (3, 1): 1}
    assert standings[-1].ended == standings[-1].runs == 15
    assert (comparison.rounds, comparison.trials, comparison.trial_rounds) == (3, 3, 1)
    assert "3 trials of 1 rounds per method" in str(comparison_tables(comparison)[0].title)
    assert f"Ditto: trial {comparison.choices[0].trial} of 3" in comparison_lines(comparison)[0]


@pytest.mark.slow
def test_one_search_serves_two_rules(table: Reproduction, tmp_path: Path) -> None:
    """By the table's rule first; then held-out data choose from the same runs, and only a new choice runs."""
    pool = tmp_path / "pool"
    plans = [table.plan(quick=False), table.plan(quick=False, select=Select.held_out)]
    assert [(plan.select, plan.trials, plan.trial_rounds) for plan in plans] == [
        (Select.by_split, 3, 1), (Select.held_out, 3, 1)
    ]  # fmt: skip
    by_split, held_out = compare(plans[0], pool, 1), compare(plans[1], pool, 1)
    for one, other in zip(by_split.choices, held_out.choices, strict=True):
        assert other.by == "held-out"
        different = 1 + (one.trial != other.trial)
        assert lengths(pool, one.method) == {(1, 0): 3, (3, 0): different, (3, 1): different}
    assert all(RunFolder(Path(run)).config().references for choice in held_out.choices for run in choice.runs)


@pytest.mark.slow
def test_a_table_s_search_on_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.toml").write_text((TABLE + TWO_ROWS).replace("FedAvg", "FedSDR").replace("fedavg", "fedsdr"))
    table = load_reproduction("t", tmp_path)
    monkeypatch.setattr("perennial.server.papers.claims.reproductions", lambda: {"t": tmp_path / "t.toml"})
    monkeypatch.setattr("perennial.server.papers.claims.load_reproduction", lambda name: table)
    for plan in (table.plan(quick=False), table.plan(quick=False, select=Select.held_out)):
        keep("t", table, compare(plan, tmp_path / "pool", 1), False, plan.select, tmp_path / "results")
    said = "".join(overview(tmp_path / "results", "page.md").values())
    first = "Settings: 3 trials of 1 rounds by split. Command: `perennial reproduce t`"
    other = "3 trials of 1 rounds by held-out. Command: `perennial reproduce t --select held-out`"
    assert 0 < said.index(first) < said.index(other)
    whole = reproduction_table(table, compare(table.plan(quick=False), tmp_path / "pool", 1))
    assert str(whole.title) == "T\n3 rounds, 2 seeds, 3 trials of 1 rounds"
    less = compare(table.plan(quick=False, trials=2, trial_rounds=2), tmp_path / "pool", 1)
    assert "QUICK VERSION" in str(reproduction_table(table, less).title)
    keep("t", table, less, False, Select.by_split, tmp_path / "less")
    said = "".join(overview(tmp_path / "less", "page.md").values())
    assert "`perennial reproduce t --trials 2 --trial-rounds 2`" in said


@pytest.mark.slow
def test_what_a_search_chose_runs_more_rounds_without_it(table: Reproduction, tmp_path: Path) -> None:
    fewer = table.plan(quick=False, rounds=2, trial_rounds=1)
    file = keep("t", table, compare(fewer, tmp_path / "pool", 1), False, fewer.select, tmp_path / "results")
    assert file.name == "t-split-2-rounds.jsonl"
    plan = table.plan(quick=False)
    going_on = known("t", table, plan, False, (), tmp_path / "results")
    assert (going_on.kept, going_on.choices.keys()) == (frozenset(), {"FedAvg", "Ditto", "Local"})
    there, anew = compare(going_on, tmp_path / "other", 1), compare(plan, tmp_path / "pool", 1)
    assert there.rows == anew.rows
    assert [choice.trial for choice in there.choices] == [choice.trial for choice in anew.choices]
    assert lengths(tmp_path / "other", "ditto") == {(3, 0): 1, (3, 1): 1}
    others: list[dict[str, Any]] = [{"trials": 2}, {"select": Select.held_out}, {"trial_rounds": 2}]
    for changes in others:
        other = replace(plan, **changes)
        assert not known("t", table, other, False, (), tmp_path / "results").choices
    drawn_otherwise = {label: {"batch_size": 7} for label in going_on.choices}
    assert compare(replace(plan, choices=drawn_otherwise), tmp_path / "pool", 1).rows == anew.rows


def test_a_table_s_trials_are_never_longer_than_its_runs(table: Reproduction) -> None:
    assert table.plan(quick=False, rounds=1).trial_rounds is None
    assert table.plan(quick=False, rounds=2).trial_rounds == 1
    assert table.plan(quick=False, trials=1).trial_rounds is None
    assert not table.plan(quick=False, trials=1).counted
    assert table.plan(quick=True, trials=2).trial_rounds is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--trials", "2", "--trial-rounds", "3"),
            "trial_rounds: 3 is not possible; a run has 3, and a trial fewer",
        ),
        (
            ("--trial-rounds", "2"),
            "trial_rounds: 2 is not possible with trials=1, which is no search; say how many",
        ),
        (("--trials", "2", "--trial-rounds", "0"), "0 is not in the range x>=1"),
    ],
)
def test_other_lengths_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [
        "compare",
        "--methods",
        "ditto",
        "--scenario",
        "toy",
        "--rounds",
        "3",
        "--out",
        str(tmp_path),
        *words,
    ]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 2
    assert said in " ".join(ended.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_from_python() -> None:
    with pytest.raises(UserError, match="trial_rounds: 0 is not possible; it must be a whole number, at least 1"):
        studies.compare(["ditto"], "toy", trials=2, trial_rounds=0)
