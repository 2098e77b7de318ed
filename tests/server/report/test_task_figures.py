"""Figures and tables of test samples by task: their numbers are those of the clients' samples."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from rich.console import Console
from safetensors.torch import load_file

from perennial.common.config import RunConfig, load_config
from perennial.common.models.network import network
from perennial.common.tasks.numbers import CELLS
from perennial.common.utils.errors import UserError
from perennial.common.wire import CONFIG, METRICS
from perennial.server.cli.tables import target_table
from perennial.server.local import LocalRuntime
from perennial.server.report import panels
from perennial.server.report.load import load, load_runs
from perennial.server.report.page import TASK_FIGURES, report
from perennial.server.report.panels import Figure
from perennial.server.report.results import results
from perennial.server.results.figures import OBSERVED, Line, counts_figure, line_figure, spreads_figure
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import SpoilingGrid, toy_config

TASKS = ("numbers", "labels", "event")


def config(task: str, *settings: str, **options: Any) -> RunConfig:
    scored = ("scores=on",) if task in ("numbers", "event") else ()
    return toy_config(f"fedavg/{task}", *scored, *settings, rounds=2, **options)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A run of each task, with two seeds."""
    folder = tmp_path_factory.mktemp("tasks")
    for task in TASKS:
        for seed in (0, 1):
            wanted = config(task, seed=seed)
            LocalRuntime(wanted).run(RunFolder.create(folder / task / str(seed), wanted))
    return {task: folder / task for task in TASKS}


def answers(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and targets of the runs' test samples by test environment, of all clients and seeds."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for path in sorted(folder.iterdir()):
        run = RunFolder.open(path).config()
        net = network(run.model, run.scenario.input_shape, run.predicts.outputs)
        model = load_file(path / "models" / "global.safetensors")
        for number, _ in enumerate(run.scenario.client_ids):
            for name, part in run.scenario.client_data(number, run.seed, None).test.items():
                found.setdefault(name, []).append((net.predict(model, part.x).detach(), part.y))
    joined = {
        name: (torch.cat([a for a, _ in own]), torch.cat([b for _, b in own])) for name, own in found.items()
    }
    every = [own for parts in found.values() for own in parts]
    return {**joined, "all": (torch.cat([a for a, _ in every]), torch.cat([b for _, b in every]))}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the figures of a task are drawn of."""
    found: list[tuple[Any, ...]] = []
    for name in ("spreads_figure", "counts_figure", "line_figure"):
        monkeypatch.setattr(panels.figures, name, lambda *own, name=name, **_: found.append((name, *own)) or "")
    return found


def drawn(folder: Path) -> list[Figure]:
    runs, skipped = load_runs([*sorted(folder.iterdir())])
    assert not skipped
    return panels.task_figures("f", results(runs))


def test_numbers_have_their_errors_and_a_scatter(made: Mapping[str, Path], seen: list[tuple[Any, ...]]) -> None:
    figures, samples = drawn(made["numbers"]), answers(made["numbers"])
    order = [*config("numbers").scenario.test_environments, "all"]
    assert [figure.caption for figure in figures] == [
        *(f"{name}: errors by test environment, mean ± standard deviation" for name in ("days", "cost")),
        *(f"{name}: predicted against true values, FedAvg, global" for name in ("days", "cost")),
    ]
    assert [figure.curves for figure in figures] == [True, True, False, False]
    task = config("numbers").scenario.task
    for place, (_, _, (line,), names, *_) in enumerate(seen[:2]):
        assert names == order
        errors = [
            (task.predictions(outputs).double() - y)[:, place].numpy()
            for outputs, y in (samples[name] for name in order)
        ]
        assert line.y == pytest.approx([own.mean() for own in errors], rel=1e-5, abs=1e-6)
        assert line.spread == pytest.approx([own.std() for own in errors], rel=1e-5)
    outputs, y = samples["all"]
    for place, (_, _, style, points, *labels) in enumerate(seen[2:]):
        assert style == 0
        assert labels == [f"{('days', 'cost')[place]}, {what}" for what in ("true", "predicted")]
        mean, scale = ((10.0, 5.0), (0.0, 100.0))[place]
        edges = mean + scale * np.linspace(-3, 3, CELLS + 1)
        edges[[0, -1]] = -np.inf, np.inf
        counts, *_ = np.histogram2d(y[:, place].double(), task.predictions(outputs)[:, place].double(), edges)
        assert sum(count for _, _, count in points) == len(y) == counts.sum()
        for true, predicted, count in points:
            cell = tuple(np.searchsorted(edges, own) - 1 for own in (true, predicted))
            assert counts[cell] == count


def test_labels_have_two_curves_each(made: Mapping[str, Path], seen: list[tuple[Any, ...]]) -> None:
    names = ("high", "low", "higher")
    kinds = ("ROC curve", "precision against recall")
    assert [figure.caption for figure in drawn(made["labels"])] == [f"{a}: {b}" for a in names for b in kinds]
    outputs, y = answers(made["labels"])["all"]
    for place, (_, _, (line,), *_) in enumerate(seen[::2]):
        there = ~y[:, place].isnan()
        having = y[there, place] == 1
        said = outputs[there, place].double().sigmoid() > 0.7  # a bin ends there
        point = [100 * said[own].double().mean().item() for own in (~having, having)]
        assert any(point == pytest.approx(found) for found in zip(line.x, line.y, strict=True))


def test_events_have_survival_predicted_and_observed(
    made: Mapping[str, Path], seen: list[tuple[Any, ...]]
) -> None:
    samples = answers(made["event"])
    order = ["all", *config("event").scenario.test_environments]
    captions = [f"Survival: predicted, and Kaplan-Meier (no marks), {name}" for name in order]
    assert [figure.caption for figure in drawn(made["event"])] == captions
    task = config("event").scenario.task
    for name, (_, _, lines, *_) in zip(order, seen, strict=True):
        outputs, y = samples[name]
        predicted, observed = lines
        assert (predicted.style, observed.style) == (0, OBSERVED)
        mean = task.predictions(outputs.double()).mean(dim=0)
        assert predicted.y == pytest.approx([100, *(100 * mean).tolist()], rel=1e-5)
        constant = task.predictions(task.constant(y).double())  # as Kaplan and Meier have it
        assert list(observed.y) == pytest.approx([100, *(100 * constant).tolist()], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_page_has_the_figures_of_its_task(task: str, made: Mapping[str, Path]) -> None:
    page, skipped = report([made[task]])
    assert not skipped
    figures = drawn(made[task])
    for figure in figures:
        assert f"<figcaption>{figure.caption}</figcaption>" in page
        assert f'aria-label="{figure.caption}{"; a curve" if figure.curves else chr(34)}' in page
        assert figure.svg.startswith("<svg")
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert page == report([made[task]])[0]


def test_a_page_takes_so_many_figures_and_says_so(
    made: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = [Figure(f"figure {number}", "<svg></svg>") for number in range(TASK_FIGURES + 1)]
    monkeypatch.setattr("perennial.server.report.page.task_figures", lambda *_: figures)
    page, _ = report([made["labels"]])
    assert f"The last {TASK_FIGURES} figures are the first of {TASK_FIGURES + 1}." in page
    assert page.count("<figcaption>figure") == TASK_FIGURES


def test_classes_have_no_such_figures(tmp_path: Path) -> None:
    wanted = toy_config("fedavg", rounds=2)
    LocalRuntime(wanted).run(RunFolder.create(tmp_path / "run", wanted))
    assert panels.task_figures("f", results([load(tmp_path / "run")])) == []


def test_without_counts_numbers_keep_their_errors_and_events_have_no_curves(tmp_path: Path) -> None:
    for task, captions in (("numbers", 2), ("event", 0)):
        wanted = toy_config(f"fedavg/{task}", rounds=2)
        LocalRuntime(wanted).run(RunFolder.create(tmp_path / task / "run", wanted))
        figures = drawn(tmp_path / task)
        assert len(figures) == captions
        assert all("errors" in figure.caption for figure in figures)


def test_nothing_else_changes_where_they_are_counted(made: Mapping[str, Path], tmp_path: Path) -> None:
    for task in ("numbers", "event"):
        wanted = toy_config(f"fedavg/{task}", rounds=2)
        plain = LocalRuntime(wanted).run(RunFolder.create(tmp_path / task, wanted))
        assert RunFolder.open(made[task] / "0").summary()["models"] == plain["models"]


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize(("task", "of"), [("labels", "label"), ("numbers", "target")])
def test_tables_by_target(task: str, of: str, made: Mapping[str, Path]) -> None:
    own = config(task).scenario.task
    text, _ = report([made[task]], "markdown")
    lines = text.partition(f"**By {of}, all test samples together after the last round**")[2].splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines[2 : 2 + len(own.parts)]] == [*own.parts]
    summaries = [RunFolder.open(made[task] / seed).summary() for seed in "01"]
    targets = [found["models"]["global"]["final"]["measures"]["targets"] for found in summaries]
    mean = np.mean([found[own.parts[0]][own.target_measures[1].name] for found in targets])
    assert own.target_measures[1].text(float(mean)) in lines[2]
    console = Console(width=100, record=True)
    console.print(target_table(summaries[0], own))
    said = console.export_text()
    for name, values in targets[0].items():
        row = next(line for line in said.splitlines() if f" {name} " in line)
        assert all(measure.text(values[measure.name]) in row for measure in own.target_measures)


def test_a_target_of_one_part_has_no_such_table(made: Mapping[str, Path]) -> None:
    summary = RunFolder.open(made["event"] / "0").summary()
    assert target_table(summary, config("event").scenario.task) is None
    assert "**By " not in report([made["event"]], "markdown")[0]


# ---------------------------------------------------------------------- who is asked, and what comes


OWN: dict[str, dict[str, Any]] = {
    "numbers": {"target": "numbers", "labels": ["days"], "target_mean": [5.0], "target_scale": [2.0]},
    "poisson": {"target": "numbers", "labels": ["days"], "loss": "poisson"},
    "labels": {"target": "labels", "labels": ["flu", "cough"]},
    "event": {"target": "event", "labels": ["time", "died"], "times": [1.0, 2.0]},
}


def own_run(kind: str, *settings: str) -> RunConfig:
    return load_config(
        options={"method": "fedavg", "scenario": {"name": "own-data", **OWN[kind]}}, settings=[*settings]
    )


@pytest.mark.parametrize("kind", ["numbers", "event"])
def test_own_data_is_asked_unless_there_is_a_mechanism(kind: str) -> None:
    assert own_run(kind).scored
    assert not own_run(kind, "scores=off").scored
    assert not own_run(kind, "privacy.mechanism=fixed").scored
    assert not toy_config(f"fedavg/{kind}").scored


@pytest.mark.parametrize("kind", ["labels", "poisson"])
def test_where_nothing_more_can_be_counted_nobody_asks(kind: str) -> None:
    assert not own_run(kind).scored
    task = {"poisson": "numbers"}.get(kind, kind)
    with pytest.raises(UserError) as refused:
        own_run(kind, "scores=on")
    assert str(refused.value) == (
        f"scores: 'on' adds nothing to evaluations of own-data (task {task}); leave it out"
    )


@pytest.mark.parametrize("task", ["numbers", "event"])
@pytest.mark.parametrize("scored", [True, False])
def test_what_is_on_the_wire(task: str, scored: bool, tmp_path: Path) -> None:
    wanted = config(task) if scored else toy_config(f"fedavg/{task}", rounds=2)
    names = set(wanted.scenario.task.scored)
    assert names
    here, seen = LocalRuntime(wanted), []

    def look(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            keys = {tuple(key.split("/")) for key in reply.content.metric_records[METRICS]}
            seen.append(("score-bins" in request.content.config_records[CONFIG], keys))
        return reply

    here.grid = SpoilingGrid(here.grid, look)  # type: ignore[assignment]
    here.run(RunFolder.create(tmp_path / "run", wanted))
    assert seen
    for asked, keys in seen:
        assert asked is scored
        assert {key for key in keys if key[-1] in names} == {
            ("global", "test", name) for name in (names if scored else ())
        }


@pytest.mark.parametrize(
    ("task", "column", "said"),
    [
        ("numbers", "cells", "the cells of true and predicted values have other counts than there are samples"),
        ("event", "at_risk", "samples at risk and events that"),
        ("event", "survival", "survival probabilities that"),
    ],
)
def test_hostile_columns_are_left_out_and_named(task: str, column: str, said: str, tmp_path: Path) -> None:
    wanted = config(task)
    here = LocalRuntime(wanted)

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id in (1, 2) and request.metadata.message_type == "evaluate":
            metrics, key = reply.content.metric_records[METRICS], f"global/test/{column}"
            values = list(metrics[key])  # type: ignore[arg-type]
            # One turns it around, or adds one to it; the other leaves something out.
            turned = [values[0] + 1, *values[1:]] if column == "cells" else values[::-1]
            metrics[key] = turned if request.metadata.dst_node_id == 1 else values[1:]
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", wanted))
    left = {client: entry["last"] for client, entry in summary["left_out"].items()}
    assert left.keys() == {"client-0", "client-1"}
    assert said in left["client-0"]
    assert f"{column} has another length than was asked for" in left["client-1"]
    assert not summary["models"]["global"]["final"]["clients"].keys() & left.keys()


@pytest.mark.parametrize("task", ["numbers", "event"])
def test_the_same_in_stacks(task: str, made: Mapping[str, Path], tmp_path: Path) -> None:
    wanted = config(task, "cohort_engine=stack", seed=0)
    LocalRuntime(wanted).run(RunFolder.create(tmp_path / "stack", wanted))
    there, here = (load(path).curves["global"].last for path in (tmp_path / "stack", made[task] / "0"))
    for client, own in here.items():
        for environment, (count, sums) in own.items():
            assert there[client][environment][0] == count
            for name in wanted.scenario.task.scored:
                assert there[client][environment][1][name] == pytest.approx(sums[name], rel=1e-4)


def test_sums_that_somebody_changed_in_the_log_are_not_drawn(made: Mapping[str, Path], tmp_path: Path) -> None:
    file = made["event"] / "0" / "metrics.jsonl"
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.toml", "summary.json"):
        (folder / name).write_bytes((file.parent / name).read_bytes())
    (folder / "metrics.jsonl").write_text(re.sub(r'"at_risk": ?\[\[\d+', '"at_risk": [[0', file.read_text()))
    runs, (said,) = load_runs([folder])
    assert runs == []
    assert "samples at risk and events that" in said


# ---------------------------------------------------------------------- drawing


def test_points_and_spreads_are_drawn_in_the_pages_colours() -> None:
    for svg in (
        counts_figure("a", 1, [(0.0, 1.0, 3), (2.0, 2.0, 1)], "true <b>", "predicted"),
        spreads_figure("b", [Line(1, [0, 1], [0.5, -0.5], [1, 2])], ["north", "<south>"], "site", "error"),
        line_figure("c", [Line(1, [0, 1], [90, 80]), Line(OBSERVED, [0, 1], [90, 70])], "time", "survival (%)"),
    ):
        assert "var(--s1)" in svg
        assert "var(--ink)" in svg
        assert "#f0f0" not in svg
        assert "<b>" not in svg
        assert "<south>" not in svg
    one = counts_figure("a", 0, [(3.0, 3.0, 1)], "true", "predicted")
    assert "nan" not in one
