"""Test samples counted by score: what a run's summary, table and report say of them, and who is asked for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from rich.console import Console
from safetensors.torch import load_file
from sklearn.metrics import recall_score, roc_auc_score

from perennial.common.config import RunConfig, load_config
from perennial.common.measures.scores import COLUMNS, SCORE, SCORES
from perennial.common.models.network import network
from perennial.common.tasks import Classes
from perennial.common.utils.errors import UserError
from perennial.common.wire import CONFIG, METRICS
from perennial.server.cli.tables import score_table
from perennial.server.local import LocalRuntime
from perennial.server.report.page import report
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.server.selection.summary import Evaluation
from perennial.testing.tiny_federation import SpoilingGrid, WireGrid, toy_config


def config(*settings: str, method: str = "ditto", **options: Any) -> RunConfig:
    return toy_config(method, "evaluate_every=1", "local_steps=3", *settings, rounds=2, **options)


def run(path: Path, wanted: RunConfig) -> tuple[RunFolder, dict[str, Any]]:
    folder = RunFolder.create(path, wanted)
    return folder, LocalRuntime(wanted).run(folder)


def of_kind(folder: RunFolder, *kinds: str) -> list[dict[str, Any]]:
    return [row for row in folder.rows() if row["kind"] in kinds]


def test_they_are_the_sums_over_all_clients_samples(tmp_path: Path) -> None:
    folder, summary = run(tmp_path / "run", config("scores=on"))
    scores = summary["models"]["global"]["final"]["scores"]
    wanted = folder.config()
    net = network(wanted.model, wanted.scenario.input_shape, 2)
    model = load_file(folder.path / "models" / "global.safetensors")
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for number, client in enumerate(wanted.scenario.client_ids):
        for name, part in wanted.scenario.client_data(number, 0, None).test.items():
            answer = net.predict(model, part.x).detach(), part.y
            for key in ("all", client, name):
                found.setdefault(key, []).append(answer)
    assert found.keys() == {"all", *scores["clients"], *scores["environments"]}
    for key, parts in found.items():
        logits, labels = map(torch.cat, zip(*parts, strict=True))
        own = {**scores["clients"], **scores["environments"], "all": scores["all"]}[key]
        assert own["sensitivity"] == recall_score(labels, logits.argmax(dim=1))
        assert own["specificity"] == recall_score(labels, logits.argmax(dim=1), pos_label=0)
        auroc = roc_auc_score(labels, logits.softmax(dim=1)[:, 1])
        assert abs(own["auroc"] - auroc) <= own["auroc_error"] + 1e-9
        assert sum(count for count, _, _ in own["reliability"]) == own["samples"] == len(labels)
    # The same from the log, in any round and of any model.
    rows = [row for row in of_kind(folder, "evaluation", SCORE) if (row["round"], row["model"]) == (2, "global")]
    assert Evaluation(rows, Classes(2)).summary()["scores"] == scores
    assert {(row["round"], row["model"]) for row in of_kind(folder, SCORE)} == {
        (number, model) for number in (1, 2) for model in ("global", "personal")
    }


def test_nothing_else_changes_where_they_are_counted(tmp_path: Path) -> None:
    with_scores, counted = run(tmp_path / "on", config("scores=on"))
    without, plain = run(tmp_path / "off", config())
    assert of_kind(without, SCORE) == []
    kinds = ("round", "evaluation", "evaluation-traffic")
    assert of_kind(with_scores, *kinds) == of_kind(without, *kinds)
    for model, selections in counted["models"].items():
        for selection, found in selections.items():
            del found["scores"]
            assert found == plain["models"][model][selection]


@pytest.mark.parametrize(
    ("scenario", "settings", "asked"),
    [
        ({"name": "own-data"}, (), True),
        ({"name": "own-data"}, ("scores=off",), False),
        ({"name": "own-data"}, ("privacy.mechanism=fixed",), False),
        ({"name": "own-data", "labels": ["a", "b", "c"]}, (), False),
        ("colored-digits", (), False),
        ("colored-digits", ("scores=on",), True),
    ],
)
def test_who_is_asked(scenario: Any, settings: tuple[str, ...], asked: bool) -> None:
    assert load_config(options={"method": "fedavg", "scenario": scenario}, settings=settings).scored is asked


def test_two_classes_are_needed() -> None:
    with pytest.raises(UserError, match="scores: 'on' is for two classes, and own-data has 3; leave it out"):
        load_config(options={"scenario": {"name": "own-data", "labels": ["a", "b", "c"]}}, settings=["scores=on"])


@pytest.mark.parametrize("scored", [True, False])
def test_what_is_on_the_wire(tmp_path: Path, scored: bool) -> None:
    wanted = config(*(["scores=on"] if scored else []), method="fedavg")
    here, seen = LocalRuntime(wanted), []

    def look(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            names = {key.split("/")[-1] for key in reply.content.metric_records[METRICS]}
            splits = {key.split("/")[1] for key in reply.content.metric_records[METRICS] if key.endswith("score")}
            seen.append((request.content.config_records[CONFIG].get(SCORES), names & {*COLUMNS}, splits))
        return reply

    here.grid = SpoilingGrid(here.grid, look)  # type: ignore[assignment]
    here.run(RunFolder.create(tmp_path / "run", wanted))
    assert len(seen) == 2 * wanted.scenario.clients
    expected = (100, {*COLUMNS}, {"test"}) if scored else (None, set(), set())
    assert all(one == expected for one in seen)


def test_hostile_counts_are_left_out_and_named(tmp_path: Path) -> None:
    wanted = config("scores=on")
    here = LocalRuntime(wanted)

    def spoil(request: Message, reply: Message) -> Message:
        node = request.metadata.dst_node_id
        if node in (1, 2) and request.metadata.message_type == "evaluate":
            metrics = reply.content.metric_records[METRICS]
            for name in COLUMNS:
                key = f"global/test/{name}"
                counts = list(metrics[key])  # type: ignore[arg-type]
                # One claims more samples than it has, the other that the model says the opposite of all.
                metrics[key] = [counts[0] + 1, *counts[1:]] if node == 1 else counts[:100][::-1] + counts[100:]
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", wanted))
    said = {client: entry["last"] for client, entry in summary["left_out"].items()}
    assert said.keys() == {"client-0", "client-1"}
    assert "other counts than there are samples" in said["client-0"]
    assert "other right answers than were counted" in said["client-1"]
    scores = summary["models"]["global"]["final"]["scores"]
    assert not scores["clients"].keys() & {"client-0", "client-1"}
    assert scores["clients"]


def test_the_same_over_bytes_and_in_stacks(tmp_path: Path) -> None:
    wanted = config("scores=on")
    _, here = run(tmp_path / "here", wanted)
    there = run_rounds(
        wanted, RunFolder.create(tmp_path / "wire", wanted), WireGrid(wanted, tmp_path / "states"), start(wanted)
    )
    _, stacked = run(tmp_path / "stack", config("scores=on", "cohort_engine=stack"))
    for other in (there, stacked):
        for model in ("global", "personal"):
            assert other["models"][model]["final"]["scores"] == here["models"][model]["final"]["scores"]


@pytest.mark.slow
def test_tables_and_the_figure(tmp_path: Path) -> None:
    folder, summary = run(tmp_path / "run", config("scores=on"))
    console = Console(width=80, record=True)
    console.print(score_table(summary))
    text = console.export_text()
    scores = summary["models"]["personal"]["final"]["scores"]
    last = next(line for line in reversed(text.splitlines()) if "all" in line and "│" in line)
    assert f"{100 * scores['all']['auroc']:.2f}" in last
    assert f"{scores['all']['positives']} of {scores['all']['samples']}" in last
    scores["environments"] = {"all": scores["environments"]["p=0.1"]}
    names = list(score_table(summary).columns[1].cells)  # type: ignore[union-attr]
    assert names.count("all") == 3  # of the global model, and two of the personal one
    page, skipped = report([folder.path])
    assert not skipped
    assert "Reliability of the scores" in page
    table, _ = report([folder.path], "markdown")
    assert f"| {100 * scores['all']['calibration_error']:.2f} |" in table
    _, summary = run(tmp_path / "plain", config())
    assert score_table(summary) is None
    page, _ = report([tmp_path / "plain"])
    assert "Reliability" not in page
