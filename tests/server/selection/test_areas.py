from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from flwr.app import Message
from rich.console import Console
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score, roc_auc_score

from perennial.common.config import RunConfig, load_config
from perennial.common.data import scenarios
from perennial.common.models.network import network
from perennial.common.tasks import Classes
from perennial.server.cli.tables import headline_table
from perennial.server.local import LocalRuntime
from perennial.server.papers.reproduce import Reproduction, reproduction_table, side_by_side
from perennial.server.run.folder import RunFolder
from perennial.server.selection.summary import AREAS, Evaluation, summarise
from perennial.server.study.batch import Selected
from perennial.server.study.compare import (
    Plan,
    Spread,
    as_shown,
    compare,
    comparison_tables,
    entries_of,
    fairness,
    text,
)
from perennial.testing.tiny_federation import SpoilingGrid, Toy


class RankedToy(Toy):
    """The toy scenario, evaluated with areas."""

    name: Literal["ranked-toy"] = "ranked-toy"  # type: ignore[assignment]

    @property
    def ranking_batch(self) -> int:
        return 8


@pytest.fixture(autouse=True)
def preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "ranked-toy", RankedToy())


def config(**options: Any) -> RunConfig:
    options = {"method": "fedavg", "scenario": "ranked-toy", "rounds": 2, **options}
    return load_config(options=options, settings=["evaluate_every=1", "local_steps=3"])


def rows_of(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [row for row in folder.rows() if row["kind"] == kind]


def outputs(folder: RunFolder) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Environment, margins and labels of every client's test samples, by the final model."""
    run = folder.config()
    net = network(run.model, (2,), 2)
    model = load_file(folder.path / "models" / "global.safetensors")
    for number in range(run.scenario.clients):
        for name, part in run.scenario.client_data(number, 0, None).test.items():
            logits = net.predict(model, part.x)
            yield name, logits[:, 1] - logits[:, 0], part.y


def test_no_samples_are_ranked_behind_a_mechanism(tmp_path: Path) -> None:
    """The positives and negatives by rank are counts of a client's single samples, and nothing hides them."""
    run = load_config(
        options={"method": "fedavg", "scenario": "ranked-toy", "rounds": 1}, settings=["privacy.mechanism=secagg"]
    )
    summary = LocalRuntime(run).run(RunFolder.create(tmp_path / "run", run))
    assert summary["models"]["global"]["final"]["areas"] == {}
    assert summary["models"]["global"]["final"]["worst"] is not None


def test_areas_of_a_run_are_those_of_all_clients_samples(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config())
    summary = LocalRuntime(config()).run(folder)
    final = summary["models"]["global"]["final"]
    found = list(outputs(folder))
    for name in ("p=0.1", "p=0.9"):
        margins = torch.cat([margin for own, margin, _ in found if own == name])
        labels = torch.cat([label for own, _, label in found if own == name])
        areas = final["areas"][name]
        assert areas["auroc"] == pytest.approx(roc_auc_score(labels, margins), abs=2e-3)
        assert areas["auprc"] == pytest.approx(average_precision_score(labels, margins), abs=5e-3)
        # 40 samples of a client are five batches; the balanced accuracy of each, where it has both classes.
        batches = [
            (right[labels == 0].float().mean() + right[labels == 1].float().mean()) / 2
            for own, margin, truth in found
            if own == name
            for guess, labels in zip((margin > 0).long().split(8), truth.split(8), strict=True)
            for right in [guess == labels]
            if 0 < labels.sum() < 8
        ]
        assert areas["auroc_hard_batch"] == pytest.approx(float(torch.stack(batches).mean()))
    rows = rows_of(folder, "ranking")
    assert {(row["round"], row["split"], row["environment"]) for row in rows} == {
        (number, split, name)
        for number in (1, 2)
        for split, name in (("validation", "validation"), ("test", "p=0.1"), ("test", "p=0.9"))
    }
    assert all(0 <= row["auroc_error"] < 0.01 for row in rows)
    # The other rows are as ever.
    assert rows_of(folder, "evaluation")[0].keys() == {
        "kind", "round", "client", "model", "split", "environment", "count", "correct", "loss",
    }  # fmt: skip


def test_losses_by_hand() -> None:
    facts = {
        "kind": "evaluation",
        "model": "global",
        "split": "test",
        "environment": ["a", "b"],
        "correct": [1, 1],
    }
    rows = [
        {**facts, "client": "one", "count": [2, 4], "loss": [1.0, 2.0]},
        {**facts, "client": "two", "count": [4, 0], "loss": [6.0, 0.0]},
    ]
    summary = Evaluation(rows, Classes(2)).summary()
    assert summary["losses"] == {"a": pytest.approx(1.0), "b": pytest.approx(0.5)}
    assert summary["loss"] == pytest.approx(0.75)
    assert summary["areas"] == {}


def test_scenarios_without_areas_are_not_asked_for_any(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config(scenario={"name": "toy"}))
    summary = LocalRuntime(config(scenario={"name": "toy"})).run(folder)
    assert rows_of(folder, "ranking") == []
    assert summary["models"]["global"]["final"]["areas"] == {}
    assert summary["models"]["global"]["final"]["loss"] > 0


def test_a_client_whose_bins_do_not_fit_is_left_out_of_the_evaluation(tmp_path: Path) -> None:
    here = LocalRuntime(config())

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "evaluate":
            metrics = reply.content.metric_records["metrics"]
            counts = list(metrics["global/test/positives"])  # type: ignore[arg-type]
            metrics["global/test/positives"] = [counts[0] + 1, *counts[1:]]
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", config()))
    assert "other counts than there are samples" in summary["left_out"]["client-1"]["last"]
    assert "client-1" not in summary["models"]["global"]["final"]["clients"]


def test_summaries_of_before_can_still_be_read(tmp_path: Path) -> None:
    old = {"round": 1, "accuracy": {"a": 0.5}, "worst": 0.5, "average": 0.5, "pooled": 0.5, "validation": None}
    found = Selected.model_validate({**old, "clients": {}})
    assert (found.loss, found.areas) == (None, {})
    folder = RunFolder.create(tmp_path / "run", config())
    LocalRuntime(config()).run(folder)
    rows = [row for row in folder.rows() if row["kind"] != "ranking"]
    assert summarise(config(), rows, seconds=0)["models"]["global"]["final"]["areas"] == {}


def printed(table: Any) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


# ---------------------------------------------------------------------- fairness


def test_fairness_of_the_papers_table() -> None:
    """FedILC Table 5's means; uniform accuracies have the entropy 10 ln 9."""
    columns = [
        [0.443, 0.434, 0.428, 0.420, 0.440, 0.411, 0.413, 0.367, 0.371],
        [0.435, 0.448, 0.424, 0.425, 0.437, 0.409, 0.431, 0.379, 0.380],
        [0.446, 0.438, 0.442, 0.435, 0.443, 0.404, 0.427, 0.392, 0.381],
        [0.456, 0.451, 0.444, 0.441, 0.438, 0.419, 0.443, 0.388, 0.396],
    ]
    found = [fairness(column) for column in columns]
    assert [own["entropy"] for own in found] == pytest.approx([21.952, 21.957, 21.957, 21.958], abs=6e-4)
    uniform = fairness([0.4] * 9)
    assert uniform["entropy"] == pytest.approx(21.972, abs=1e-3)
    assert uniform["variance"] == pytest.approx(0)
    assert fairness([0.2, 0.4])["variance"] == pytest.approx(10)
    assert fairness([0.5]) == fairness([0.0, 0.0]) == {}
    assert fairness([0.0, 0.5])["entropy"] == 0


# ---------------------------------------------------------------------- tables

TABLE: dict[str, Any] = {
    "title": "A table", "source": "tests", "scenario": "ranked-toy", "rounds": 2, "seeds": 1, "trials": 1,
    "columns": ["loss", "average", "auroc", "auroc_hard_batch"], "quick": {"rounds": 2},
    "settings": {"local_steps": 3}, "beside": ["auprc"],
    "rows": [
        {
            "title": "FedAvg", "method": "fedavg",
            "paper": {"loss": 0.566, "average": 78.1, "auroc": 78.0, "auroc_hard_batch": 78.0},
        }
    ],
}  # fmt: skip


def test_what_people_see(tmp_path: Path) -> None:
    summary = LocalRuntime(config()).run(RunFolder.create(tmp_path / "run", config()))
    final = summary["models"]["global"]["final"]
    auroc = sum(own["auroc"] for own in final["areas"].values()) / 2
    shown = printed(headline_table(summary, Classes(2)))
    assert f"{100 * auroc:.2f}" in shown
    assert f"{final['loss']:.4f}" in shown
    nobody = {"accuracy": {}, "worst": None, "average": None, "pooled": None, "loss": None, "areas": {}}
    models = {"global": {"final": final | nobody, "validation": final}}
    assert f"loss│–│{final['loss']:.4f}" in "".join(
        printed(headline_table(summary | {"models": models}, Classes(2))).split()
    )
    table = Reproduction.model_validate(TABLE)
    comparison = compare(table.plan(quick=True), tmp_path / "pool", jobs=1)
    row = comparison.row("FedAvg", "final")
    assert row
    assert row.measures["auroc"].mean == pytest.approx(auroc)
    assert row.measures["loss"].mean == pytest.approx(final["loss"])
    assert "auroc" not in comparison.row("Constant", "final").measures  # type: ignore[union-attr]
    *_, areas = comparison_tables(comparison)
    assert text("auroc", row.measures["auroc"]) in printed(areas)
    assert text("loss", row.measures["loss"]) in printed(areas)
    lines = {line.column: line for line in side_by_side(table, comparison) if line.title == "FedAvg"}
    assert lines["loss"].difference("final") == pytest.approx(final["loss"] - 0.566)
    assert list(lines) == ["loss", "average", "auroc", "auroc_hard_batch", "auprc"]
    assert lines["auprc"].paper is None
    assert lines["auprc"].ours["final"]
    assert lines["auroc"].difference("final") == pytest.approx(100 * auroc - 78)
    reproduced = printed(reproduction_table(table, comparison))
    assert "0.5660" in reproduced
    assert f"{final['loss'] - 0.566:+.4f}" in reproduced
    assert "of 0/1 predictions" in " ".join(reproduced.split())


def test_comparisons_without_areas_have_no_table_of_them(tmp_path: Path) -> None:
    plan = Plan(entries_of(["fedavg"]), "toy", seeds=1, rounds=1, settings=("local_steps=1",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scenarios.SCENARIOS, "toy", Toy())
        assert len(comparison_tables(compare(plan, tmp_path, jobs=1))) == 2


def test_units() -> None:
    assert as_shown("loss", Spread(0.5, 0.1)) == Spread(0.5, 0.1)
    assert as_shown("auroc", Spread(0.5, 0.1)) == Spread(50, 10)
    assert text("loss", Spread(0.56, 0.01)) == "0.5600 ±0.0100"
    assert text("variance", None) == "–"


def test_a_table_asks_for_areas_only_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    with pytest.raises(ValueError, match="unknown column 'auroc'"):
        Reproduction.model_validate({**TABLE, "scenario": "toy"})
    with pytest.raises(ValueError, match="unknown column 'auprc'"):
        Reproduction.model_validate({**TABLE, "columns": ["loss"], "scenario": "toy"})
    assert set(AREAS) == {"auroc", "auprc", "auroc_hard_batch", "auprc_hard_batch"}
