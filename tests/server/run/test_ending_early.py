"""Runs that end before their last round: by patience, and by who watches."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import perennial
from perennial.common.utils.errors import Stop, UserError
from perennial.common.utils.files import load_tensors
from perennial.server.cli.tables import cautions
from perennial.server.deployment.submission import PLACE
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.runs import _follow, unfinished
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
    assert folder.checkpoints() == [2, 6]
    assert summary["best"] == {"round": 2, "selection": "validation"}
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


def test_the_best_round_s_models_are_kept(tmp_path: Path) -> None:
    """They are those of a run that ends with that round."""
    settings = "patience=2", "checkpoint_every=50"
    summary = run(toy_config("ditto", *settings, rounds=40), tmp_path / "run")
    best = summary["best"]["round"]
    assert best < summary["rounds"] < 40
    run(toy_config("ditto", *settings, rounds=best), tmp_path / "short")
    long, short = perennial.load(tmp_path / "run"), perennial.load(tmp_path / "short")
    for name, client in (("global", None), ("personal", "client-1")):
        wanted, last = short.model(name, client).state_dict(), long.model(name, client).state_dict()
        found = long.model(name, client, best=True).state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert not all(torch.equal(found[key], last[key]) for key in wanted)
    run(toy_config("fedavg"), tmp_path / "plain")
    with pytest.raises(UserError, match=r"best: .* has kept no best round; a run with patience=N keeps one"):
        perennial.load(tmp_path / "plain").model(best=True)


def test_who_watches_has_the_rows_and_the_models(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    last: dict[str, Any] = {}

    def watch(progress: perennial.Progress) -> None:
        rows.extend(progress.rows)
        last.update(progress.models())

    config = toy_config("fedavg", rounds=4)
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder, None, watch)
    assert rows == folder.rows()
    saved = load_tensors(folder.path / "models" / "global.safetensors")
    assert all(torch.equal(last["global"][name], saved[name]) for name in saved)


def test_a_run_elsewhere_is_asked_to_stop_by_a_file(tmp_path: Path) -> None:
    config = toy_config("fedavg", rounds=6)
    folder = RunFolder.create(tmp_path / "run", config)

    def watch(progress: perennial.Progress) -> None:
        if progress.round == 3:
            RunFolder(folder.path).ask_to_stop("good enough")

    summary = LocalRuntime(config).run(folder, None, watch)
    assert summary["stopped"] == {"round": 3, "reason": "good enough"}
    assert folder.asked_to_stop() == ""
    again = unfinished(folder.path)
    assert LocalRuntime(config).run(again, again.load_checkpoint())["rounds"] == 6


@pytest.mark.parametrize("here", [True, False])
def test_who_follows_a_run_of_flower_may_raise_stop(here: bool, tmp_path: Path) -> None:
    config, folder = toy_config("fedavg"), RunFolder.create(tmp_path / "run", toy_config("fedavg"))
    if not here:
        (folder.path / PLACE).write_text("/somewhere/else")
    told: list[tuple[int, list[int]]] = []

    class Flower:
        def execute(self, config: object, out: Path, resume: bool) -> Iterator[dict[str, Any]]:
            for number in (1, 2):
                yield {"kind": "round", "round": number, "metrics": {}, "left_out": {}}
                yield evaluation(number, 3)

    def watch(progress: perennial.Progress) -> None:
        told.append((progress.round, [row["round"] for row in progress.rows]))
        raise perennial.Stop("good enough")

    def follow() -> None:
        _follow(config, folder.path, nullcontext(Flower()), watch)  # type: ignore[arg-type]

    if here:
        follow()
        assert told == [(1, [1]), (2, [1, 2])]
        assert folder.asked_to_stop() == "good enough"
    else:
        with pytest.raises(UserError, match="watch: this run is on another machine, where Stop cannot end it"):
            follow()


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
