"""Stacks of clients: which clients make one, what goes in and what comes out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import broken_off

from perennial.client import cohort
from perennial.client.cohort import StackedExamples, evenly
from perennial.client.host import Host
from perennial.client.methods.ditto import DittoClient
from perennial.client.trainer import Received, Reply
from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.models.memory import activation_bytes
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import RunStopped
from perennial.common.utils.tensors import Tensors
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.study.run_names import config_digest
from perennial.testing.tiny_federation import Toy, toy_config

Sizes = list[tuple[str, int]]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """The action and the number of clients of every stack that has answered."""
    found: Sizes = []
    together = Host._together

    def seen(self: Host, works: Any, nodes: Any) -> Any:
        reply = together(self, works, nodes)
        found.append((works[0].action, len(reply or ())))
        return reply

    monkeypatch.setattr(Host, "_together", seen)
    return found


def trained(config: RunConfig, path: Path) -> dict[str, Tensors]:
    """Every tensor file of a run."""
    LocalRuntime(config).run(RunFolder.create(path, config))
    return tensors(path)


def tensors(path: Path) -> dict[str, Tensors]:
    last = RunFolder(path).checkpoints()[-1]
    places = [path / "models", path / "checkpoint" / f"round-{last}"]
    found = [file for place in places for file in place.rglob("*.safetensors")]
    return {f"{file.parent.name}/{file.name.split('.')[0]}": load_file(file) for file in found}


def gap(one: dict[str, Tensors], other: dict[str, Tensors]) -> float:
    """The largest difference of two runs' tensors."""
    assert one.keys() == other.keys()
    return max(float((one[n][k] - other[n][k]).abs().max()) for n in one for k in one[n])


def ditto(engine: str, clients: int = 8, **options: Any) -> RunConfig:
    options = {"rounds": 2, "scenario": {"name": "toy", "clients": clients}, **options}
    return toy_config("ditto", f"cohort_engine={engine}", **options)


@pytest.mark.parametrize(
    ("count", "most", "runs"), [(0, 3, []), (3, 3, [3]), (8, 3, [2, 3, 3]), (4, 3, [2, 2]), (5, 1, [1] * 5)]
)
def test_items_are_cut_evenly_and_in_order(count: int, most: int, runs: list[int]) -> None:
    cut = list(evenly(range(count), most))
    assert [len(run) for run in cut] == runs
    assert [item for run in cut for item in run] == list(range(count))


def test_each_client_of_a_stack_gets_its_own_samples() -> None:
    x, y = torch.arange(24.0).view(2, 4, 3), torch.arange(8).view(2, 4)
    examples = StackedExamples(x, y, -y)
    assert len(examples) == 4
    own, same = examples[torch.tensor([[3, 0], [1, 1]])], examples[torch.tensor([2])]
    assert own.y.tolist() == [[3, 0], [5, 5]]
    assert own.environment.tolist() == [[-3, 0], [-5, -5]]
    assert torch.equal(own.x, torch.stack([x[0][[3, 0]], x[1][[1, 1]]]))
    assert same.y.tolist() == [[2], [6]]
    with pytest.raises(TypeError, match="must choose as many samples each"):
        examples[torch.tensor([[True, False, False, False], [True, True, False, False]])]


def test_each_client_of_a_stack_has_its_own_samples_of_an_environment() -> None:
    x, y, places = (
        torch.arange(24.0).view(2, 4, 3),
        torch.arange(8).view(2, 4),
        torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0]]),
    )
    zero, one = StackedExamples(x, y, places).by_environment()
    assert (zero.y.tolist(), one.y.tolist()) == ([[1, 2, 3], [4, 5, 7]], [[0], [6]])
    for number in (0, 1):
        alone = Examples(x[number], y[number], places[number]).by_environment()
        assert [part.x[number].tolist() for part in (zero, one)] == [part.x.tolist() for part in alone]


def test_fedsdr_removes_from_features_in_a_stack_as_client_by_client(tmp_path: Path, sizes: Sizes) -> None:
    own = ("removed_from=features", "removal=20", "evaluate_every=9")
    stack, loop = (
        trained(toy_config("fedsdr", f"cohort_engine={engine}", *own, rounds=2), tmp_path / engine)
        for engine in ("stack", "loop")
    )
    assert ("train", 1) not in sizes
    assert "train" in dict(sizes)
    assert gap(stack, loop) < 1e-5


@pytest.mark.slow
def test_stacks_of_a_bounded_size_come_out_the_same_each_time(
    tmp_path: Path, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort, "MOST_CLIENTS", 3)
    first = trained(ditto("stack"), tmp_path / "first")
    assert sizes[:3] == [("train", 2), ("train", 3), ("train", 3)]
    seen, sizes[:] = list(sizes), []
    assert gap(first, trained(ditto("stack"), tmp_path / "again")) == 0
    assert sizes == seen
    assert gap(first, trained(ditto("loop"), tmp_path / "loop")) < 1e-5


def test_the_data_of_a_stack_are_bounded(tmp_path: Path, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    own = 40 * 2 * 4
    monkeypatch.setattr(cohort, "DATA_BYTES", 4 * own)
    found = trained(ditto("stack"), tmp_path / "stack")
    assert {size for action, size in sizes if action == "train"} == {4}
    assert "evaluate" not in dict(sizes)  # four times as much: less than two clients
    assert gap(found, trained(ditto("loop"), tmp_path / "loop")) < 1e-5


def test_clients_with_other_numbers_of_samples_are_other_stacks(
    tmp_path: Path, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_data = Toy.client_data

    def cut(self: Toy, client: int, seed: int, root: Path | None) -> ClientData:
        data = client_data(self, client, seed, root)
        count = (40, 30, 40, 30, 40, 30, 40, 20)[client]
        train = Examples(data.train.x[:count], data.train.y[:count], data.train.environment[:count])
        return ClientData(train, data.validation, data.test)

    monkeypatch.setattr(Toy, "client_data", cut)
    found = trained(ditto("stack"), tmp_path / "stack")
    assert sizes[:2] == [("train", 4), ("train", 3)]  # and one alone
    assert gap(found, trained(ditto("loop"), tmp_path / "loop")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "fedpin"])
def test_a_resumed_run_of_stacks_equals_an_unbroken_one(method: str, tmp_path: Path) -> None:
    config = toy_config(method, "cohort_engine=stack", participation=0.75, rounds=5)
    unbroken = trained(config, tmp_path / "unbroken")
    broken, origin = broken_off(config, tmp_path / "broken", 3)
    LocalRuntime(config).run(broken, origin)
    assert gap(unbroken, tensors(broken.path)) == 0
    assert RunFolder(tmp_path / "unbroken").rows() == broken.rows()


def test_who_keeps_something_is_no_stack_with_who_does_not_yet(tmp_path: Path, sizes: Sizes) -> None:
    """And with Adam, clients that have taken other numbers of steps are other stacks."""
    settings = ("preset=code", "batch_size=10", "checkpoint_every=9")
    runs = []
    for engine in ("stack", "loop"):
        config = toy_config(
            "irm", *settings, f"cohort_engine={engine}", participation=0.5, rounds=4,
            scenario={"name": "toy", "clients": 8},
        )  # fmt: skip
        runs.append(trained(config, tmp_path / engine))
    assert len([action for action, _ in sizes if action == "train"]) > config.rounds
    assert gap(*runs) < 1e-5


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_an_exit_in_a_client_half_is_that_clients_failure_and_ctrl_c_is_not(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = [SystemExit(3)]
    answer = DittoClient.answer

    def ends(self: DittoClient, action: str, received: Received) -> Reply:
        if action == "train" and "client-1" in (self.client, *self.stack):
            raise raised[0]
        return answer(self, action, received)

    monkeypatch.setattr(DittoClient, "answer", ends)
    config = ditto(engine, 4)
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    assert {client: facts["last"] for client, facts in summary["left_out"].items()} == {
        "client-1": "round 2: failed: the client half called sys.exit(3) (RuntimeError)"
    }
    raised[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        LocalRuntime(config).run(RunFolder.create(tmp_path / "broken", config))


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_a_metric_that_is_no_number_is_named(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = DittoClient.answer

    def odd(self: DittoClient, action: str, received: Received) -> Reply:
        reply = answer(self, action, received)
        if action != "train":
            return reply
        return replace(reply, metrics={**reply.metrics, "odd": torch.ones(len(self.stack) or 1, 2, 3)})

    monkeypatch.setattr(DittoClient, "answer", odd)
    config = ditto(engine, 4)
    words = r"\(client-0: failed: metric 'odd': a tensor of shape \[1, 2, 3\] is not possible; it must be a number"
    with pytest.raises(RunStopped, match=words):
        LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))


@pytest.mark.slow
def test_auto_stacks_many_small_clients_alone(tmp_path: Path, sizes: Sizes) -> None:
    found = [trained(ditto(engine, 4), tmp_path / f"4-{engine}") for engine in ("auto", "loop")]
    assert gap(*found) == 0
    assert not sizes
    trained(ditto("auto", 8), tmp_path / "8")
    assert sizes[0] == ("train", 8)
    sizes.clear()
    trained(ditto("auto", 8, model={"name": "mlp", "hidden": (600, 600)}, rounds=1), tmp_path / "large")
    assert not sizes


def test_a_convolution_is_noticed_and_its_outputs_are_counted() -> None:
    mlp = activation_bytes(model_settings({"name": "mlp", "hidden": (8,)}), (2,), 3)
    assert mlp == (4 * (2 + 2 + 8 + 8 + 3), False)  # sample, flattened, linear, ReLU, logits
    assert activation_bytes(model_settings({"name": "cnn-small"}), (1, 28, 28), 10)[1]


def test_only_another_engine_than_the_loop_changes_a_runs_name() -> None:
    names = {engine: config_digest(ditto(engine)) for engine in ("loop", "stack", "auto")}
    assert len(set(names.values())) == 3
    silent = load_config(options={"method": "ditto", "scenario": "colored-digits"})
    assert silent.cohort_engine == "loop"


@pytest.mark.slow
def test_rankings_and_splits_of_a_stack_are_each_clients_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "ranking_batch", property(lambda _: 10))
    references = toy_config("references", rounds=1)
    LocalRuntime(references).run(folder := RunFolder.create(tmp_path / "references", references))
    file = folder.path / "models" / "references.safetensors"
    rows = []
    for engine in ("loop", "stack"):
        config = toy_config("fedavg", f"cohort_engine={engine}", f'references="{file}"', rounds=2)
        trained(config, tmp_path / engine)
        kinds = ("ranking", "split")
        rows.append([row for row in RunFolder(tmp_path / engine).rows() if row["kind"] in kinds])
    assert rows[0] == rows[1]
    assert {row["kind"] for row in rows[0]} == set(kinds)
