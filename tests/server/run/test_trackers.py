"""Trackers are told what the log holds, no more and no less, and never end a run."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from perennial.common.config import load_config
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.trackers import _follower, require, scalars, tracking
from perennial.server.selection.summary import summarise
from perennial.testing.tiny_federation import toy_config


def trained(round_: int) -> dict[str, Any]:
    metrics = {"risk": 0.5, "num-examples": 80.0, "global/accuracy": 0.9}
    facts = {"bytes_down": 100, "bytes_up": 60, "left_out": {"client-1": "silent"}}
    return {"kind": "round", "round": round_, "metrics": metrics, **facts}


def evaluated(round_: int, client: str, correct: int) -> dict[str, Any]:
    where = {"kind": "evaluation", "round": round_, "client": client, "model": "global", "split": "test"}
    return {**where, "environment": ["red"], "count": [10], "correct": [correct], "loss": [1.0]}


ROWS = [
    trained(1),
    trained(2),
    evaluated(2, "a", 4),
    evaluated(2, "b", 8),
    {"kind": "evaluation-traffic", "round": 2},
]
TRAINED = {"train/risk": 0.5, "train/num-examples": 80.0, "bytes/down": 100, "bytes/up": 60, "clients/left out": 1}
EVALUATED = {"global/worst": 0.6, "global/average": 0.6, "global/test red": 0.6}


def approximately(found: list[tuple[int, dict[str, float]]]) -> list[tuple[int, Any]]:
    return [(number, pytest.approx(values)) for number, values in found]


def test_scalars_by_hand() -> None:
    assert list(scalars(ROWS, toy_config("fedavg"))) == approximately([(1, TRAINED), (2, TRAINED), (2, EVALUATED)])


def test_of_sites_with_own_data_the_worst_one_is_drawn() -> None:
    own = load_config(options={"method": "fedavg", "scenario": OwnData(sites=("a", "b"))})
    *_, (_, found) = scalars(ROWS, own)
    assert found == pytest.approx({"global/worst site": 0.4, "global/average": 0.6, "global/test red": 0.6})


def test_no_evaluation_is_passed_on_before_it_is_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, toy_config("fedavg"))
    told: list[tuple[int, Any]] = []
    follow = _follower(folder, lambda number, values: told.append((number, values)), toy_config("fedavg"))
    seen = []
    for row in ROWS:  # as another process may write them
        folder.append([row])
        follow()
        seen.append(len(told))
    assert seen == [1, 2, 2, 2, 3]
    assert told == approximately([(1, TRAINED), (2, TRAINED), (2, EVALUATED)])


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path, toy_config("fedavg"))

    def full(number: int, values: object) -> None:
        raise RuntimeError("disk full\nand more")

    follow = _follower(folder, full, toy_config("fedavg"))
    for row in ROWS:
        folder.append([row])
        follow()
    assert capsys.readouterr().err == "tracking has stopped, the run goes on: disk full\n"


def test_without_a_tracker_there_is_only_the_watcher(tmp_path: Path) -> None:
    def watch(progress: object) -> None:
        raise AssertionError

    with tracking(None, tmp_path, toy_config("fedavg"), watch) as found:
        assert found is watch
    assert require(None) is None


@pytest.mark.parametrize(
    ("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_extra_is_one_sentence_and_nothing_is_written(
    kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", "--rounds", "1", "--track", kind, "--out", str(out)])
    assert result.exit_code == 2
    assert f"uv sync --inexact --extra {kind}" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()


def tracked(kind: str, path: Path) -> tuple[dict[str, Any], list[tuple[int, dict[str, float]]]]:
    """A tracked run's summary, and what its tracker must hold."""
    config = toy_config("ditto")
    folder = RunFolder.create(path, config)
    told: list[int] = []
    with tracking(kind, path, config, lambda progress: told.append(progress.round)) as watch:
        LocalRuntime(config).run(folder, watch=watch)
    assert told == [1, 2, 3, 4, 5, 6]
    return summarise(config, folder.rows(), seconds=0), list(scalars(folder.rows(), config))


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_holds_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra perennial[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary, expected = tracked("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {
        (name, event.step): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)
    }
    assert found == pytest.approx({(name, number): v for number, vs in expected for name, v in vs.items()})
    assert found["personal/worst", 6] == pytest.approx(summary["models"]["personal"]["final"]["worst"])
    assert b'name = "ditto"' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra perennial[mlflow]")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    summary, expected = tracked("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("toy")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["method.name"] == "ditto"
    history = {
        (name, point.step): point.value
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    }
    assert history == pytest.approx(
        {(name.replace("=", "_"), number): v for number, vs in expected for name, v in vs.items()}
    )
    assert history["personal/worst", 6] == pytest.approx(summary["models"]["personal"]["final"]["worst"])


@pytest.mark.filterwarnings("ignore")
def test_mlflow_is_told_of_a_run_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra perennial[mlflow]")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = toy_config("fedavg")
    RunFolder.create(tmp_path / "run", config)
    with pytest.raises(RuntimeError), tracking("mlflow", tmp_path / "run", config, lambda _: None):
        raise RuntimeError("stopped")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert run.info.status == "FAILED"


@pytest.mark.filterwarnings("ignore")
def test_a_tracker_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra perennial[tensorboard]")
    (tmp_path / "run").touch()
    with (
        pytest.raises(UserError, match="--track tensorboard cannot start"),
        tracking("tensorboard", tmp_path / "run", toy_config("fedavg"), lambda _: None),
    ):
        pass


def test_wandb_holds_the_run_and_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its documented interface is called with, since its own files are nobody else's to read."""
    found: dict[tuple[str, int], float] = {}
    asked: dict[str, Any] = {}

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            found.update({(name, step): value for name, value in values.items()})

        def finish(self, exit_code: int = 0) -> None:
            asked["exit_code"] = exit_code

    def init(**settings: Any) -> Run:
        asked.update(settings)
        return Run()

    module = ModuleType("wandb")
    module.init, module.Settings = init, lambda **own: own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    _, expected = tracked("wandb", tmp_path / "run")
    assert found == pytest.approx({(name, number): v for number, vs in expected for name, v in vs.items()})
    assert (asked["mode"], asked["dir"], asked["exit_code"]) == ("offline", str(tmp_path / "run"), 0)
    assert asked["config"]["method.name"] == "ditto"
    with (
        pytest.raises(RuntimeError),
        tracking("wandb", tmp_path / "run", toy_config("ditto"), lambda progress: None),
    ):
        raise RuntimeError
    assert asked["exit_code"] == 1
