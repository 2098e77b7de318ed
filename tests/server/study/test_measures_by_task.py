"""Where less is better: rounds, trials, sites and pages go by the mean absolute error, in its own unit."""

import re
from pathlib import Path

import pytest

from perennial.common.tasks import Numbers
from perennial.common.tasks.classes import ACCURACY
from perennial.common.tasks.numbers import MAE
from perennial.server.local import LocalRuntime
from perennial.server.report.page import write_page
from perennial.server.results.result import Result
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select, best_of, better
from perennial.server.study.batch import Outcome, Pruned, run_all, standing_line
from perennial.server.study.choose import choose, why_lines
from perennial.server.study.compare import Plan, compare, comparison_tables, entries_of
from perennial.server.study.leave_one_out import LeftOut, leave_one_out
from perennial.server.study.prune import below_median
from perennial.server.study.sweep import best, held_out
from perennial.server.study.trial_tables import sweep_rows, sweep_table
from perennial.server.study.unseen_sites import CONSTANT, leave_one_site_out, sites_table
from perennial.testing.tiny_federation import ToyNumbers, toy_config

RATES = (0.0001, 0.3, 0.001, 0.01, 0.0005, 0.003)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Trials of which the second is best."""
    configs = [toy_config("fedavg/numbers", f"learning_rate={rate}", "evaluate_every=1") for rate in RATES]
    return run_all(configs, tmp_path_factory.mktemp("pool"), 1)


def test_the_worst_is_the_largest_error(outcomes: list[Outcome]) -> None:
    found = outcomes[0].selected("final")
    assert found
    assert found.worst == max(found.values.values())
    assert found.measures
    assert found.measures.all["mean_absolute_error"] == pytest.approx(found.pooled)
    errors = [own["mean_absolute_error"] for own in found.measures.clients.values()]
    assert min(filter(None, errors)) < found.pooled < max(filter(None, errors))  # type: ignore[operator]


def test_the_round_by_held_out_data_has_the_least_error(tmp_path: Path) -> None:
    folder = RunFolder.create(
        tmp_path / "run", toy_config("fedavg/numbers", "learning_rate=0.6", "evaluate_every=1")
    )
    LocalRuntime(folder.config()).run(folder)
    history = Result(folder.path).history
    by_round = {row["round"]: row["mean_absolute_error"] for row in history if row["split"] == "validation"}
    (chosen,) = (row for row in Result(folder.path).overall if row["selection"] == "validation")
    assert chosen["round"] == min(by_round, key=lambda number: (by_round[number], number))
    assert chosen["held_out"] == min(by_round.values())


def test_the_trial_with_the_least_error_is_chosen(outcomes: list[Outcome]) -> None:
    scores = held_out(outcomes)
    assert best(outcomes) == 1 == min(scores, key=lambda number: scores[number])
    verdict = choose(outcomes, Select.held_out)
    assert verdict.trial == 1
    said = why_lines(outcomes, verdict)
    assert said[-1] == f"{MAE.text(scores[1])} on held-out training data"
    table = sweep_table(outcomes, verdict)
    assert str(table.caption).startswith("mean absolute error after the last round")
    assert sweep_rows(outcomes, verdict)[1]["held-out"] == scores[1]


def test_trials_above_the_median_error_stop(outcomes: list[Outcome]) -> None:
    stopped = below_median(outcomes, Select.held_out)
    assert stopped.keys() == {4, 2}  # trial 0 is the defaults', which never stop
    pruned = stopped[4]
    assert pruned.score > pruned.median
    assert pruned.sentence == (
        f"after round 2 of 6, above the trials' median of {MAE.text(pruned.median)} "
        f"(held-out {MAE.text(pruned.score)})"
    )
    assert Pruned(2, 6, Select.held_out, 0.5, 0.75).where.endswith("below the trials' median of 75.00 %")
    assert ACCURACY.goodness(0.5) < ACCURACY.goodness(0.75)


def test_of_environments_left_out_the_least_error_is_best() -> None:
    own = {n: LeftOut(score, 1.0, {"a": score}, 9, MAE) for n, score in enumerate((50.0, 40.0, 40.0))}
    assert best_of(own) == 1
    assert better(own[1], own[0])
    assert not better(own[0], own[1])
    assert "measure" not in own[0].json()


def test_an_environment_that_is_left_out_has_a_standard_error(tmp_path: Path) -> None:
    """Of |e|, by hand from the samples' errors, and the sentence why two environments are too few."""
    config = toy_config("fedavg/numbers")
    assert leave_one_out([config], tmp_path, 1) == (
        [None], "leaving out one of 2 training environments leaves too few; three are needed"
    )  # fmt: skip
    task = config.predicts
    assert isinstance(task, Numbers)
    sums = {"absolute": [6.0, 9.0], "squared": [14.0, 29.0], "target": [0.0, 0.0], "target_squared": [9.0, 9.0]}
    # |e| is 1, 2, 3 and 2, 3, 4: each with the variance 2/3.
    assert task.standard_error(3, sums) == pytest.approx((2 / 3 / 3) ** 0.5)
    low, high = task.interval(3, sums, 0.95) or (0, 0)
    assert (low + high) / 2 == pytest.approx(task.value(3, sums))
    assert (high - low) / 2 == pytest.approx(1.959964 * (2 / 9) ** 0.5)


def test_a_comparison_and_its_page_are_of_errors(tmp_path: Path) -> None:
    settings = ("evaluate_every=2", "checkpoint_every=2", "learning_rate=0.2")
    plan = Plan(entries_of(["fedavg"]), ToyNumbers(), 2, rounds=4, settings=settings)
    found = compare(plan, tmp_path / "pool", 1)
    assert (found.measure, [own.title for own in found.others]) == (MAE, ["root mean squared error", "R²"])
    ours, constant = found.row("FedAvg", "final"), found.row("Constant", "final")
    assert ours
    assert constant
    assert ours.measures["average"].mean < constant.measures["average"].mean < 60
    assert ours.measures["worst"].mean == max(own.mean for own in ours.environments.values())
    assert ours.measures["worst client"].mean >= ours.measures["pooled"].mean
    assert ours.measures["R²"].mean > constant.measures["R²"].mean
    assert "entropy" not in ours.measures
    titles = [str(table.title) for table in comparison_tables(found)]
    assert titles[1:] == ["per test environment", "other measures"]
    assert all("accuracy" not in str(table.caption) for table in comparison_tables(found))
    assert found.json()["measure"] == "mean_absolute_error"

    page = tmp_path / "page.html"
    write_page([Path(run) for choice in found.choices for run in choice.runs], page, False)
    text = page.read_text()
    for words in (
        "Summary: test mean absolute error",
        "Mean absolute error against test environment, final",
        "Other measures, all test samples together",
        "root mean squared error",
    ):
        assert words in text
    assert "accuracy (%)" not in text
    assert f">{MAE.text(ours.measures['average'].mean)} " in text


def test_sites_that_did_not_train_are_told_with_intervals_of_the_error(tmp_path: Path) -> None:
    config = toy_config("fedavg/numbers", "learning_rate=0.2", rounds=4)
    cells, troubles = leave_one_site_out({"FedAvg": config}, 1, tmp_path, 1)
    assert not troubles
    for cell in cells:
        assert cell.unseen is not None
        assert cell.low is not None
        assert cell.high is not None
        assert cell.low < cell.unseen < cell.high
    mean = {name: sum(own.unseen or 0 for own in cells if own.method == name) for name in ("FedAvg", CONSTANT)}
    assert mean["FedAvg"] < mean[CONSTANT]
    assert str(sites_table(cells).caption).startswith("mean absolute error of the common model")


def test_what_a_program_and_a_watcher_see(outcomes: list[Outcome]) -> None:
    result = Result(outcomes[1].path)
    shown = re.search(r"worst ([\d.]+), average ([\d.]+) \(", repr(result))
    assert shown
    assert "%" not in repr(result)
    found = outcomes[1].selected("final")
    assert found
    assert shown.groups() == (MAE.text(found.worst), MAE.text(found.average))
    assert {row["mean_absolute_error"] for row in result.environments if row["selection"] == "final"} == {
        *found.values.values()
    }
    from perennial.common.utils.errors import UserError

    with pytest.raises(UserError, match=r"this run has no accuracy, but mean absolute error: see result\.env"):
        _ = result.accuracy
    assert result.plot().get_ylabel() == "test mean absolute error"
    from perennial.server.study.batch import Standing

    line = standing_line(Standing(1, 1, 6, 6, latest=outcomes[1]))
    assert f"average {MAE.text(found.average, 1)}" in line
    assert "%" not in line
