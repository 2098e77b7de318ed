"""A measure and a loss of one's own, as a plug-in brings them."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.models.torch_state import plain_torch
from perennial.common.tasks import Classes, Numbers
from perennial.common.tasks.own_metric import Metric, of_function, with_own
from perennial.common.utils.errors import UserError
from perennial.server.results.result import Result
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.server.study.run_names import run_name
from perennial.testing.methods import files, run
from perennial.testing.tiny_federation import WireGrid, toy_config

MINE = """
import torch
import torch.nn.functional as F
from torch.func import jacrev

from perennial import Metric


def sure(outputs, targets):
    return outputs.softmax(dim=1).gather(1, targets[:, None])[:, 0]


def counted(outputs, targets):
    found = outputs.argmax(dim=1)
    return torch.stack([((found == a) & (targets == b)).sum() for a, b in ((1, 1), (1, 0), (0, 1))])


f1 = Metric(counted, lambda count, sums: 2 * sums[0] / max(1, 2 * sums[0] + sums[1] + sums[2]), percent=True)
doubt = Metric(lambda outputs, targets: (1 - sure(outputs, targets)).sum()[None], higher_is_better=False)
number = 3


def focal(outputs, targets):
    right = outputs.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    return -((1 - right.exp()) ** 2) * right


def usual(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def mean(outputs, targets):
    return F.cross_entropy(outputs, targets)


def broken(outputs, targets):
    return outputs @ targets
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of functions in it."""
    monkeypatch.setattr(plugins, "_loaded", dict(plugins._loaded))
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def config(*settings: str, method: str = "fedavg", **options: object) -> RunConfig:
    return toy_config(method, *settings, **{"rounds": 6, "evaluate_every": 1, **options})


def evaluations(folder: Path, split: str) -> list[dict[str, Any]]:
    rows = RunFolder(folder).rows()
    return [row for row in rows if row["kind"] == "evaluation" and row["split"] == split]


def test_a_metric_is_what_rows_tables_and_selection_have(folder: Path) -> None:
    run(config("metric=mine:doubt"), folder / "run")
    own = RunFolder(folder / "run").summary()["models"]["global"]
    held_out: dict[int, list[float]] = {}
    for row in evaluations(folder / "run", "validation"):
        held_out.setdefault(row["round"], []).append(row["metric"][0] / row["count"][0])
    means = {number: sum(values) / len(values) for number, values in held_out.items()}
    assert own["validation"]["round"] == min(means, key=means.__getitem__)
    assert own["final"]["metric"].keys() >= set(config().scenario.test_environments)
    assert 0 < own["final"]["worst"] < 1
    assert own["final"]["worst"] == max(own["final"]["metric"].values())  # the most doubt


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_f1_of_sums_over_clients_is_that_of_all_samples(engine: str, folder: Path) -> None:
    plan = config("metric=mine:f1", f"cohort_engine={engine}", "evaluate_every=6")
    run(plan, folder / engine)
    found = Result(folder / engine)
    predict, scenario = found.model("global"), plan.scenario
    datas = [scenario.client_data(number, plan.seed, None) for number in range(scenario.clients)]
    for place, name in enumerate(scenario.test_environments):
        parts = [data.test[name] for data in datas]
        answers = [predict(part.x).argmax(1) for part in parts]
        wanted = f1_score(torch.cat([part.y for part in parts]), torch.cat(answers))
        rows = [
            row
            for row in RunFolder(folder / engine).rows()
            if row["kind"] == "evaluation" and row["split"] == "test"
        ]
        sums = [sum(row["metric"][place][k] for row in rows) for k in range(3)]
        assert 2 * sums[0] / (2 * sums[0] + sums[1] + sums[2]) == pytest.approx(wanted)


def test_a_loss_is_what_clients_minimise_and_the_wire_has_the_same(folder: Path) -> None:
    """One that is the task's own gives its numbers; another one gives others."""
    for name, settings in {"none": (), "usual": ("loss=mine:usual",), "focal": ("loss=mine:focal",)}.items():
        run(config(*settings), folder / name)
    usual, theirs = files(folder / "none"), files(folder / "usual")
    for at, tensors in usual.items():  # a mean of the losses, where the task takes it itself
        torch.testing.assert_close(theirs[at], tensors, rtol=1e-5, atol=1e-6)
    rows = {name: RunFolder(folder / name).rows() for name in ("usual", "focal")}
    assert rows["usual"] != rows["focal"]
    plan = config("loss=mine:focal")
    wire = RunFolder.create(folder / "wire", plan)
    with plain_torch(threads=1):
        run_rounds(plan, wire, WireGrid(plan, folder / "sites"), start(plan))
    assert wire.rows() == rows["focal"]


def test_derivatives_of_a_loss_of_ones_own_are_autograds() -> None:
    task, z = Classes(3), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 2, 1])
    own = with_own(task, None, lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"))
    torch.testing.assert_close(own.residuals(z, y), task.residuals(z, y))
    torch.testing.assert_close(own.scale_slopes(z, y), task.scale_slopes(z, y))
    slope = z.requires_grad_()  # IRM takes the derivative of this one again
    (again,) = torch.autograd.grad(own.scale_slopes(slope, y).square().sum(), slope)
    (wanted,) = torch.autograd.grad(task.scale_slopes(slope, y).square().sum(), slope)
    torch.testing.assert_close(again, wanted)


def test_the_error_of_a_mean_is_the_deviation_over_the_root_of_the_count() -> None:
    task = with_own(Numbers(), of_function(lambda outputs, targets: (outputs - targets)[:, 0]), None)
    z, y = torch.randn(40, 1, generator=torch.Generator().manual_seed(2)), torch.zeros(40, 1)
    sums = {name: own.tolist() for name, own in task.sums(z, y).items()}
    assert task.value(40, sums) == pytest.approx(float(z.mean()))
    error = task.standard_error(40, sums)
    assert error == pytest.approx(float(z.std(correction=0)) / 40**0.5)
    low, high = task.interval(40, sums, 0.95) or (0, 0)
    assert (low + high) / 2 == pytest.approx(float(z.mean()))
    assert high - low == pytest.approx(2 * 1.959964 * error, rel=1e-5)
    assert "mean_absolute_error" in task.measures(40, sums)
    assert (
        with_own(Numbers(), Metric(lambda z, y: z.sum()[None]), None).interval(40, {**sums, "metric": [1]}, 0.95)
        is None
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["metric=mine:f2"], "metric: the plug-in 'mine' has no 'f2'"),
        (["metric=mine:number"], "metric: 'mine:number' is of type int; it must be a function or a Metric"),
        (["metric=mine:F"], "metric: 'mine:F' is of type module; it must be a function or a Metric"),
        (["metric=mine:jacrev"], "metric: 'jacrev' is not of the plug-in 'mine' itself"),
        (
            ["metric=mine:mean"],
            "metric: mean gives the shape [] of 2 samples; it must give a number for each, or",
        ),
        (["metric=nowhere:f1"], "plug-in 'nowhere': there is no nowhere.py in"),
        (["loss=mine:mean"], "loss: mean gives the shape [] of 2 samples; it must give a number for each"),
        (["loss=mine:broken"], "loss: 'mine:broken' cannot take outputs [2, 2] and targets [2]: RuntimeError"),
        (
            ["loss=mine:focal", "label_smoothing=0.1"],
            "label_smoothing: 0.1 is not possible beside loss='mine:focal'",
        ),
        (["loss=mine:focal", "mix=MixUp(1)"], "mix: 'MixUp(1)' is not possible beside loss='mine:focal'"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(settings: list[str], sentence: str, folder: Path) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        config(*settings)


@pytest.mark.parametrize("method", ["fedpin", "fedadg", "fedrod"])
def test_methods_whose_terms_need_the_cross_entropy_refuse_another_loss(method: str, folder: Path) -> None:
    with pytest.raises(UserError, match=f"loss: 'mine:focal' is not possible with method '{method}', whose"):
        config("loss=mine:focal", method=method)


def test_a_change_of_the_function_is_another_run(folder: Path) -> None:
    before = run_name(config("metric=mine:f1"))
    assert len({before, run_name(config()), run_name(config("loss=mine:focal"))}) == 3
    (folder / "mine.py").write_text(MINE.replace("2 * sums[0] /", "3 * sums[0] /"))
    assert run_name(config("metric=mine:f1")) != before
