"""Runs that end before their last round: by patience, and by who watches."""

from pathlib import Path
from typing import Any

import pytest

import perennial
from perennial.common.utils.errors import Stop, UserError
from perennial.server.cli.tables import cautions
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.runs import unfinished
from perennial.server.selection.summary import Patience
from perennial.server.study.batch import outcome_in
from perennial.testing.methods import assert_same, run
from perennial.testing.tiny_federation import toy_config
from tests.helpers.tiny_runs import broken_off


def evaluation(number: int, right: int) -> dict[str, Any]:
    """A row of the log of one client with `right` of 100 held-out samples right."""
    sums = {"environment": ["validation"], "count": [100], "correct": [right], "loss": [1.0]}
    place = {"kind": "evaluation", "round": number, "client": "client-0", "model": "global", "split": "validation"}
    return {**place, **sums}


def test_patience_counts_evaluations_without_a_better_one() -> None:
    """Equal is not better; another model's rows say nothing; what was before a resume counts."""
    config = toy_config("fedavg", "patience=2")
    waiting = Patience(config, [])
    found = [
        waiting.over(number, [evaluation(number, right)])
        for number, right in [(2, 50), (4, 60), (6, 60), (8, 70), (10, 65), (12, 70)]
    ]
    assert found == [*[""] * 5, "patience=2: no better held-out score (validation) since round 8"]
    rows = [evaluation(number, right) for number, right in [(2, 50), (4, 70), (6, 60)]]
    resumed = Patience(config, [{"kind": "round", "round": 1}, *rows])
    assert (
        resumed.over(8, [evaluation(8, 70)]) == "patience=2: no better held-out score (validation) since round 4"
    )
    assert Patience(toy_config("fedavg"), []).over(2, [evaluation(2, 1)]) == ""


def test_a_run_ends_when_its_patience_is_over(tmp_path: Path) -> None:
    """With a step size at which nothing changes it is after the first and two more evaluations."""
    config = toy_config("fedavg", "learning_rate=1e-12", "patience=2", "checkpoint_every=50", rounds=50)
    summary = run(config, tmp_path / "run")
    reason = "patience=2: no better held-out score (validation) since round 2"
    assert summary["rounds"] == 6
    assert summary["stopped"] == {"round": 6, "reason": reason}
    assert summary["models"]["global"]["validation"]["round"] == 2
    folder = RunFolder(tmp_path / "run")
    assert folder.checkpoints() == [6]
    assert folder.summary() == summary
    assert f"ended after round 6 of 50: {reason}" in list(cautions(config, summary))
    outcome = outcome_in(config, tmp_path / "run")
    assert outcome is not None
    assert outcome.summary is not None


def test_a_run_that_was_broken_off_waits_no_longer(tmp_path: Path) -> None:
    config = toy_config("fedavg", "learning_rate=1e-12", "patience=3", rounds=50)
    run(config, tmp_path / "whole")
    folder, origin = broken_off(config, tmp_path / "broken", after=5)
    LocalRuntime(config).run(folder, origin)
    assert_same(tmp_path / "whole", folder.path)
    assert folder.summary()["rounds"] == 8


@pytest.mark.parametrize("at", [3, 4])
def test_who_watches_ends_a_run_with_a_checkpoint_and_a_summary(at: int, tmp_path: Path) -> None:
    """In a round with an evaluation and a checkpoint of its own, and in one without; it may be taken up again."""

    def watch(progress: perennial.Progress) -> None:
        if progress.round == at:
            raise perennial.Stop("good enough")

    config = toy_config("ditto", rounds=6)
    folder = RunFolder.create(tmp_path / "run", config)
    summary = LocalRuntime(config).run(folder, None, watch)
    assert summary["stopped"] == {"round": at, "reason": "good enough"}
    assert summary["rounds"] == at == folder.checkpoints()[-1]
    assert {own["final"]["round"] for own in summary["models"].values()} == {at}
    assert [row["round"] for row in folder.rows() if row["kind"] == "evaluation-traffic"][-1] == at
    again = unfinished(folder.path)
    finished = LocalRuntime(config).run(again, again.load_checkpoint())
    assert finished["rounds"] == 6
    assert "stopped" not in finished
    run(config, tmp_path / "whole")
    one, other = (RunFolder(tmp_path / name).load_checkpoint().arrays for name in ("whole", "run"))
    assert all((one[name] == other[name]).all() for name in one)


def test_the_last_round_is_an_end_like_any_other(tmp_path: Path) -> None:
    def watch(progress: perennial.Progress) -> None:
        if progress.round == progress.rounds:
            raise Stop

    config = toy_config("fedavg", rounds=2)
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config), None, watch)
    assert summary["rounds"] == 2
    assert "stopped" not in summary
    with pytest.raises(UserError, match="has ended: all 2 rounds are done"):
        unfinished(tmp_path / "run")
