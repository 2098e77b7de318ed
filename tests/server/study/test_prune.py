"""Median pruning: the same trials stop whatever happens around them, and nothing else of a search changes."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from split_counts import coloured
from typer.testing import CliRunner

from perennial.common.config import RunConfig
from perennial.common.data import scenarios
from perennial.server.cli.main import app
from perennial.server.run.folder import PRUNED, RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.study.batch import Outcome, Standing, Summary, run_all, standing_line
from perennial.server.study.choose import Verdict, choose, search
from perennial.server.study.compare import Plan, compare, comparison_lines, entries_of
from perennial.server.study.prune import below_median, early_round
from perennial.server.study.run_names import run_name
from perennial.server.study.sweep import trials
from perennial.server.study.trial_tables import sweep_rows, sweep_table
from perennial.testing.tiny_federation import Toy, toy_config

FIXED = ("batch_size=20",)
TRIALS = 6


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())


def config() -> RunConfig:
    return toy_config("fedavg", *FIXED)


def find(path: Path, prune: bool = True, jobs: int = 1, **more: Any) -> tuple[list[Outcome], Verdict]:
    return search(config(), TRIALS, ("batch_size",), Select.held_out, path, jobs, prune=prune, **more)


def told(found: tuple[list[Outcome], Verdict]) -> tuple[list[Any], list[dict[str, Any] | None], Verdict]:
    """All that a search says, without the place."""
    outcomes, verdict = found
    return [own.pruned for own in outcomes], [own.summary and own.summary.models for own in outcomes], verdict


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def pruned(pool: Path) -> tuple[list[Outcome], Verdict]:
    """A search that nothing disturbs."""
    return find(pool / "pruned")


@pytest.fixture(scope="module")
def whole(pool: Path) -> tuple[list[Outcome], Verdict]:
    """The same without pruning."""
    return find(pool / "whole", prune=False)


# ---------------------------------------------------------------------- which trials


def started(path: Path, *scores: tuple[float, float, float], stopped: Sequence[int] = ()) -> list[Outcome]:
    """Trials that wait after round 2 of 6, with a held-out accuracy, a and d."""
    outcomes = []
    for number, (held_out, a, d) in enumerate(scores):
        folder = RunFolder.create(path / str(number), config())
        evaluation = {"kind": "evaluation", "model": "global", "split": "validation", "client": "client-0"}
        evaluation |= {"environment": ["held-out"], "count": [1000], "correct": [1000 * held_out]}
        counts = {**coloured(a, d), "model": "global"}
        early = [{**row, "round": 2} for row in (evaluation, counts)]
        # What comes later is not looked at, and neither is another model.
        late = [{**row, "round": 4, "model": "global"} for row in ({**evaluation, "correct": [1]}, coloured(0, 0))]
        other = [{**row, "round": 2, "model": "other"} for row in ({**evaluation, "correct": [1]}, coloured(0, 0))]
        folder.append([*early, *late, *other])
        trouble = "stopped later" if number in stopped else ""
        outcomes.append(Outcome(config(), folder.path, None, trouble))
    return outcomes


COLOUR, SHAPE, BETWEEN = (0.9, 1.0, 0.0), (0.75, 0.75, 0.72), (0.8, 0.9, 0.4)


def test_below_the_median_of_the_selection_s_own_score(tmp_path: Path) -> None:
    outcomes = started(tmp_path, COLOUR, SHAPE, BETWEEN, COLOUR, SHAPE)
    by_split = below_median(outcomes, Select.by_split)
    assert list(by_split) == [3]  # 0 is as bad, but the defaults
    assert (by_split[3].by, by_split[3].score, by_split[3].median) == ("split", 0.0, pytest.approx(0.4))
    assert by_split[3].sentence == "after round 2 of 6, below the trials' median of 40.00 % (split 0.00 %)"
    by_held_out = below_median(outcomes, Select.held_out)
    assert {number: own.score for number, own in by_held_out.items()} == {1: 0.75, 4: 0.75}
    assert {own.median for own in by_held_out.values()} == {0.8}


def test_what_knows_something_does_not_stop_below_coins(tmp_path: Path) -> None:
    coin, learnt = (0.5, 0.5, 0.5), (0.8, 0.9, 0.3)
    few = below_median(started(tmp_path / "few", coin, coin, coin, learnt, learnt, COLOUR), Select.by_split)
    assert list(few) == [5]
    most = below_median(started(tmp_path / "most", coin, coin, SHAPE, learnt, SHAPE), Select.by_split)
    assert list(most) == [3]


def test_where_split_does_not_speak_held_out_accuracy_decides_who_stops(tmp_path: Path) -> None:
    outcomes = started(tmp_path, COLOUR, SHAPE, BETWEEN, COLOUR, SHAPE)
    for outcome in outcomes:
        log = outcome.path / "metrics.jsonl"
        log.write_text(log.read_text().replace('"clients": [4, 4]', '"clients": [4, 0]'))
    found = below_median(outcomes, Select.by_split)
    assert {number: own.by for number, own in found.items()} == {1: "held-out", 4: "held-out"}


def test_a_run_that_stopped_later_still_counts_and_one_without_a_score_does_not(tmp_path: Path) -> None:
    outcomes = started(tmp_path, SHAPE, COLOUR, BETWEEN, COLOUR, SHAPE, SHAPE, stopped=(1,))
    assert list(below_median(outcomes, Select.by_split)) == [1, 2, 3]
    (outcomes[5].path / "metrics.jsonl").write_text("")
    assert list(below_median(outcomes, Select.by_split)) == [1, 3]
    (outcomes[4].path / "metrics.jsonl").write_text("torn")
    assert below_median(outcomes, Select.by_split) == {}  # four scores are too few


def test_equals_go_on(tmp_path: Path) -> None:
    assert below_median(started(tmp_path, *[COLOUR] * 6), Select.by_split) == {}


@pytest.mark.parametrize(
    ("rounds", "every", "round_"),
    [(60, 10, 20), (600, 10, 200), (30, 4, 12), (6, 2, 2), (6, 6, 6), (5, 4, 4), (1, 10, 1)],
)
def test_the_round_is_the_first_evaluation_after_a_third(rounds: int, every: int, round_: int) -> None:
    assert early_round(toy_config("fedavg", f"evaluate_every={every}", rounds=rounds)) == round_


# ---------------------------------------------------------------------- always the same ones


@pytest.mark.slow
def test_a_search_stops_its_hopeless_trials_and_nothing_else_changes(
    pruned: tuple[list[Outcome], Verdict], whole: tuple[list[Outcome], Verdict]
) -> None:
    gone = {number for number, own in enumerate(pruned[0]) if own.pruned}
    assert 1 <= len(gone) <= TRIALS / 2
    assert pruned[1].trial not in gone
    for number, (one, other) in enumerate(zip(pruned[0], whole[0], strict=True)):
        rows, all_rows = RunFolder(one.path).rows(), RunFolder(other.path).rows()
        assert rows == [row for row in all_rows if number not in gone or row["round"] <= 2]
        assert (one.path / PRUNED).exists() == (one.summary is None) == (number in gone)
        assert bool(RunFolder(one.path).checkpoints()) == (number in gone)  # it can be continued
        if number not in gone:
            assert one.summary == other.summary
    scores = [row["held-out"] for row in sweep_rows(*whole)]
    assert pruned[1].trial == max((n for n in range(TRIALS) if n not in gone), key=lambda n: (scores[n], -n))
    early = [held_out(RunFolder(own.path), 2) for own in whole[0]]
    assert gone == {number for number in range(1, TRIALS) if early[number] < median(early)}


def held_out(folder: RunFolder, round_: int) -> float:
    """Mean over clients on held-out data."""
    rows = [row for row in folder.rows() if row["kind"] == "evaluation" and row["round"] == round_]
    each = [sum(row["correct"]) / sum(row["count"]) for row in rows if row["split"] == "validation"]
    return sum(each) / len(each)


@pytest.mark.slow
def test_the_same_trials_stop_with_two_at_a_time(pruned: tuple[list[Outcome], Verdict], tmp_path: Path) -> None:
    assert told(find(tmp_path, jobs=2)) == told(pruned)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 7, 11, 15, 17])
def test_the_same_trials_stop_after_an_interruption(
    moment: int, pruned: tuple[list[Outcome], Verdict], tmp_path: Path
) -> None:
    """Two rounds of six trials, then four of those that go on."""

    def stop(standing: Standing) -> None:
        if standing.rounds_done >= moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(tmp_path, watch=stop)
    assert told(find(tmp_path)) == told(pruned)
    assert told(find(tmp_path)) == told(pruned)  # and once more, with nothing left to do


@pytest.mark.slow
def test_the_same_trials_stop_where_all_have_ended_before(
    pruned: tuple[list[Outcome], Verdict], tmp_path: Path
) -> None:
    find(tmp_path, prune=False)
    assert told(find(tmp_path)) == told(pruned)


@pytest.mark.slow
def test_a_stopped_trial_goes_on_without_pruning(whole: tuple[list[Outcome], Verdict], tmp_path: Path) -> None:
    find(tmp_path)
    assert list(tmp_path.glob(f"*/{PRUNED}"))
    assert told(find(tmp_path, prune=False)) == told(whole)
    for one, other in zip(trials(config(), TRIALS, ("batch_size",)), whole[0], strict=True):
        assert RunFolder(tmp_path / run_name(one)).rows() == RunFolder(other.path).rows()
    assert not list(tmp_path.glob(f"*/{PRUNED}"))


@pytest.mark.slow
def test_few_trials_and_late_evaluations_stop_nothing(tmp_path: Path) -> None:
    few = search(config(), 4, (), Select.held_out, tmp_path / "few", 1, prune=True)
    late = search(
        toy_config("fedavg", "evaluate_every=6", *FIXED), 5, (), Select.held_out, tmp_path / "late", 1, prune=True
    )
    assert not any(outcome.pruned for outcome in (*few[0], *late[0]))


# ---------------------------------------------------------------------- what a person sees of it


@pytest.mark.slow
def test_a_person_is_told_who_waits_and_who_stops(tmp_path: Path) -> None:
    standings: list[Standing] = []
    outcomes, _ = find(tmp_path, watch=standings.append)
    gone = sum(own.pruned is not None for own in outcomes)
    lines = [line for line in map(standing_line, standings) if line]
    assert lines[0].startswith(
        "6 runs: 0 done already, 0 go on where they were interrupted; about 24 rounds to come"
    )
    assert sum("waits for the other trials" in line for line in lines) == TRIALS
    assert f"{gone} of 6 trials stop after round 2, below the median" in lines
    assert lines[-1].startswith("6/6 runs ")
    assert standings[-1].rounds_done == standings[-1].rounds == 2 * TRIALS + 4 * (TRIALS - gone)
    standings.clear()
    find(tmp_path, watch=standings.append)
    assert [line for line in map(standing_line, standings) if line] == [
        "6 runs: 6 done already, 0 go on where they were interrupted; 0 rounds to come. If interrupted, the same "
        "command goes on."
    ]


@pytest.mark.slow
def test_a_stopped_trial_is_named_in_table_json_and_report(tmp_path: Path) -> None:
    command = ["tune", "fedavg", "--scenario", "toy", "--trials", "6", "--rounds", "6", "--select", "held-out"]
    words = ("evaluate_every=2", *FIXED)
    command += ["--jobs", "1", "--out", str(tmp_path / "pool"), *(w for word in words for w in ("--set", word))]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
    assert shown.exit_code == 0, shown.output
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["trials"]
    gone = [row for row in rows if row["pruned"]]
    assert gone
    text = " ".join(shown.stdout.split())
    assert "in brackets: stopped after round 2 of 6, below the trials' median of" in text
    for row in gone:
        assert f"({100 * row['pruned']['score']:.2f})" in text
        assert (row["chosen"], row["held-out"], row["worst"], row["trouble"]) == (False, None, None, "")
        report = CliRunner().invoke(app, ["report", "--format", "csv", row["run"]])
        assert "a search stopped it after round 2 of 6, below" in " ".join(report.output.split())
    (path,) = {Path(gone[0]["run"])}
    resumed = CliRunner().invoke(app, ["resume", str(path)])
    assert resumed.exit_code == 0, resumed.output
    assert RunFolder(path).summary()["rounds"] == 6


@pytest.mark.slow
def test_a_comparison_stops_trials_of_every_method_alike(tmp_path: Path) -> None:
    settings = ("evaluate_every=2", *FIXED)
    plan = Plan(entries_of(["fedavg"]), "toy", seeds=2, trials=6, rounds=6, settings=settings, prune=True)
    standings: list[Standing] = []
    comparison = compare(plan, tmp_path, 1, standings.append)
    assert [choice.label for choice in comparison.choices] == ["FedAvg", "Local"]
    lines = comparison_lines(comparison)
    for choice, line in zip(comparison.choices, lines, strict=False):
        assert 1 <= choice.pruned <= 3
        assert line.endswith(f"; {choice.pruned} stopped early")
        assert len(choice.runs) == 2
    assert comparison.troubles == []
    assert standings[-1].ended == standings[-1].runs == 14
    assert [s.rounds_done for s in standings] == sorted(s.rounds_done for s in standings)
    assert compare(plan, tmp_path, 2) == comparison


@pytest.mark.slow
def test_none_that_was_stopped_is_chosen(tmp_path: Path) -> None:
    outcomes, _ = find(tmp_path)
    gone = [number for number, own in enumerate(outcomes) if own.pruned]
    only = [
        own if number in gone else Outcome(own.config, own.path, None, "x") for number, own in enumerate(outcomes)
    ]
    for select in (Select.held_out, Select.by_split):
        assert choose(only, select).trial is None
        assert sweep_table(only, choose(only, select)).row_count == len(only)
    ended = run_all([outcomes[gone[0]].config], tmp_path, 1)  # by another study
    assert isinstance(ended[0].summary, Summary)
    again, _ = find(tmp_path)
    assert again[gone[0]].summary is None
