"""With other tasks than classes: what leaves a client, privacy mechanisms, robust rules; and what is refused."""

from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import pytest
import torch
from flwr.app import Message, MetricRecord
from safetensors.torch import load_file

from perennial.common.aggregation import Rule
from perennial.common.config import RunConfig
from perennial.common.utils.errors import UserError
from perennial.common.wire import METRICS, from_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.bad_replies import with_fault
from perennial.testing.tiny_federation import LEARNT, TOYS, SpoilingGrid, ToyNumbers, toy_config

TASKS = [task for task in TOYS if task != "classes"]
each_task = pytest.mark.parametrize("task", TASKS)
each_hidden_task = pytest.mark.parametrize("task", [task for task in TASKS if task != "labels"])
"""Those that a privacy mechanism may have: evaluations of labels count samples by score."""


def run(config: RunConfig, path: Path, spoil: Any = None) -> dict[str, Any]:
    here = LocalRuntime(config)
    if spoil:
        here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    return here.run(RunFolder.create(path, config))


def must_have_learnt(config: RunConfig, summary: dict[str, Any]) -> None:
    task = config.predicts
    reached = summary["models"]["global"]["final"]["validation"]
    assert task.headline.goodness(reached) > task.headline.goodness(LEARNT[task.name])


# ---------------------------------------------------------------------- what leaves a client


@each_task
@pytest.mark.parametrize("mechanism", ["none", "secagg", "fixed"])
def test_targets_never_leave_a_client(task: str, mechanism: str, tmp_path: Path) -> None:
    """Tensors are those of the model; of an evaluation there are the columns that the task announces."""
    shapes = {}
    if mechanism != "none" and task == "labels":
        pytest.skip("refused, see below")
    config = toy_config(f"fedavg/{task}", f"privacy.mechanism={mechanism}", rounds=2)
    replies: list[tuple[str, Message]] = []

    def seen(request: Message, reply: Message) -> Message:
        replies.append((request.metadata.message_type, reply))
        if request.metadata.message_type == "evaluate":
            model = from_record(request.content.array_records["model"])
            shapes.update({name: tensor.shape for name, tensor in model.items()})
        return reply

    run(config, tmp_path / "run", seen)
    samples = [
        target
        for client in range(4)
        for part in own_parts(config, client)
        for target in part.flatten().unique().tolist()
        if target not in (0.0, 1.0) and isfinite(target)
    ]
    columns = {f"global/{split}/{name}" for split in ("validation", "test") for name in announced(config)}
    kinds = set()
    for kind, reply in replies:
        kinds.add(kind)
        metrics = {**reply.content.get(METRICS, MetricRecord())}  # type: ignore[dict-item]
        sent = [number for value in metrics.values() for number in (value if isinstance(value, list) else [value])]
        assert not {*samples}.intersection(sent)
        if kind == "train":
            assert metrics.keys() == {"num-examples", "risk"}
        if kind == "evaluate":
            assert metrics.keys() == columns
        if reply.content.array_records and mechanism != "secagg":
            (record,) = reply.content.array_records.values()
            assert {name: tensor.shape for name, tensor in from_record(record).items()} == shapes
    assert {"train", "evaluate"} <= kinds


def own_parts(config: RunConfig, client: int) -> Iterable[torch.Tensor]:
    data = config.scenario.client_data(client, config.seed, None)
    return (part.y for part in (data.train, data.validation, *data.test.values()))


def announced(config: RunConfig) -> set[str]:
    return {"count", "loss", *config.predicts.columns}


# ---------------------------------------------------------------------- mechanisms and rules


@each_hidden_task
def test_secure_aggregation_comes_to_where_a_run_comes_without_it(task: str, tmp_path: Path) -> None:
    plain, secure = toy_config(f"fedavg/{task}"), toy_config(f"fedavg/{task}", "privacy.mechanism=secagg")
    run(plain, tmp_path / "plain")
    must_have_learnt(secure, run(secure, tmp_path / "secure"))
    one, other = (load_file(tmp_path / name / "models" / "global.safetensors") for name in ("plain", "secure"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4)


@each_hidden_task
@pytest.mark.parametrize("mechanism", ["fixed", "adaptive"])
def test_a_run_learns_under_little_noise(task: str, mechanism: str, tmp_path: Path) -> None:
    """An update is clipped by its norm, whatever the unit of the targets: outputs are standardised."""
    settings = ("privacy.noise_multiplier=0.01", "privacy.clipping_norm=1", f"privacy.mechanism={mechanism}")
    config = toy_config(f"fedavg/{task}", *settings, rounds=8)
    summary = run(config, tmp_path / "run")
    assert summary["privacy"]["epsilon"] > 0
    must_have_learnt(config, summary)


@pytest.mark.slow
@each_task
@pytest.mark.parametrize("rule", [rule for rule in get_args(Rule) if rule != "mean"])
def test_a_robust_rule_learns_beside_a_client_that_sends_ten_times_its_model(
    task: str, rule: str, tmp_path: Path
) -> None:
    config = toy_config(f"fedavg/{task}", f"aggregation={rule}", "scenario.clients=5", rounds=8)

    def tenfold(request: Message, reply: Message) -> Message:
        hostile = request.metadata.dst_node_id == 2 and request.metadata.message_type == "train"
        return with_fault("tenfold", request, reply) if hostile else reply

    must_have_learnt(config, run(config, tmp_path / "run", tenfold))


# ---------------------------------------------------------------------- what is of classes alone


@each_task
def test_what_is_of_classes_alone_is_refused_in_a_sentence(task: str) -> None:
    with pytest.raises(UserError) as refused:
        toy_config(f"fedavg/{task}", "model.one_logit=true")
    assert str(refused.value) == (
        f"model.one_logit: true is for two classes, and not for the task {task}; leave it out"
    )


def test_references_of_numbers_are_refused_in_a_sentence() -> None:
    with pytest.raises(UserError) as refused:
        toy_config("fedavg/numbers", "references=models/references.safetensors")
    assert str(refused.value) == (
        "references: 'models/references.safetensors' is not possible with the task 'numbers', which has no "
        "right and wrong answers; leave it out"
    )


class Ranked(ToyNumbers):
    """As many targets as there are logits of two classes, and a scenario that asks for areas."""

    name: Literal["toy-ranked"] = "toy-ranked"  # type: ignore[assignment]
    ranking_batch: ClassVar[int] = 10


def test_areas_and_scores_are_of_two_classes_alone(tmp_path: Path) -> None:
    config = toy_config("fedavg/numbers").model_copy(update={"scenario": Ranked()})
    assert (config.ranking_batch, config.scored) == (0, False)
    run(config, tmp_path / "run")
    kinds = {row["kind"] for row in RunFolder(tmp_path / "run").rows()}
    assert "ranking" not in kinds
    assert "score" not in kinds


@pytest.mark.parametrize("mechanism", ["secagg", "fixed", "adaptive"])
def test_a_task_whose_evaluations_tell_scores_has_no_mechanism(mechanism: str) -> None:
    with pytest.raises(UserError) as refused:
        toy_config("fedavg/labels", f"privacy.mechanism={mechanism}")
    assert str(refused.value) == (
        f"privacy.mechanism: {mechanism!r} is not possible with the task labels, whose evaluations tell how many "
        "samples have which score; take 'none'"
    )
