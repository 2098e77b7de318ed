"""A method in somebody's own ServerApp and ClientApp, without our configuration."""

import gc
import importlib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from flwr.app import ArrayRecord, Message
from plain_app import Net, PlainGrid, first, toy_data
from torch import nn

import perennial
from perennial import strategies
from perennial.client.app import OneHandlerApp
from perennial.common import flower_app
from perennial.common.methods import METHODS
from perennial.common.models import network
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.wire import from_record
from perennial.server.run.grid import LocalGrid
from perennial.strategies import FedAvg, FedIIR


class Elsewhere(PlainGrid):
    """The ClientApp in another process, to which Flower's simulation has carried it."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:  # type: ignore[override]
        network._resident.cache_clear()
        with patch.dict(flower_app._modules, clear=True):
            return super().send_and_receive(messages, timeout=timeout)


def test_a_client_app_knows_its_model_in_another_process() -> None:
    app = perennial.client_app(method="fedavg", data=toy_data, model=Net, device="cpu")
    assert FedAvg(model=Net).start(Elsewhere(app, 4), first(), 1).arrays


def apps(method: str, **options: Any) -> tuple[OneHandlerApp, PlainGrid]:
    app = perennial.client_app(method=method, data=toy_data, model=Net, device="cpu")
    return app, PlainGrid(app, 4)


def test_every_method_is_a_strategy_by_the_name_of_its_class() -> None:
    for name, kind in METHODS.items():
        assert getattr(strategies, kind.__name__).method == name
    assert importlib.import_module("perennial.strategies.mean")
    with pytest.raises(ImportError, match="FedNothing"):
        from perennial.strategies import FedNothing  # noqa: F401


SMALL = {"FedADG": {"noise_size": 16, "projection_size": 16}}


@pytest.mark.parametrize(
    "method",
    [
        *("FedIIR", "FedAvg", "Ditto"),
        *(pytest.param(own, marks=pytest.mark.slow) for own in ("FedSDR", "FedRep", "FedADG", "FedSR", "FedPAC")),
    ],
)
def test_a_method_trains_in_a_plain_app(method: str) -> None:
    name = getattr(strategies, method).method
    _, grid = apps(name)
    options = {"model": Net, "environments": 2, "learning_rate": 0.05, **SMALL.get(method, {})}
    strategy = getattr(strategies, method)(**options)
    result = strategy.start(grid, first(), num_rounds=3)
    kept = METHODS[name].keeps
    wanted = [
        key for key in Net().state_dict() if method != "FedRep" or not key.startswith("fc")
    ]  # its head stays
    assert list(result.arrays) == wanted
    Net().load_state_dict(from_record(result.arrays), strict=method != "FedRep")
    last = result.evaluate_metrics_clientapp[3]
    headline = METHODS[name].evaluates[-1]
    assert float(last[f"{headline}/accuracy"]) > 0.6  # type: ignore[arg-type]
    assert any(context.state for context in grid.contexts.values()) == bool(kept)


def test_what_depends_on_the_number_of_clients_is_checked_once_they_are_known() -> None:
    _, grid = apps("cgpfl")
    assert strategies.CGPFL(model=Net, contexts=4, local_steps=1).start(grid, first(), 1).arrays
    with pytest.raises(UserError, match=r"method\.contexts: 5 is more than the scenario's 4 clients"):
        strategies.CGPFL(model=Net, contexts=5).start(grid, first(), 1)


def test_it_does_what_the_hyper_parameters_say_and_evaluates_under_the_modules_names() -> None:
    seen: list[list[str]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        seen.append(list(arrays))

    _, grid = apps("fediir")
    ends = [
        from_record(FedIIR(model=Net(), penalty=penalty).start(grid, first(), 2, evaluate_fn=evaluate).arrays)
        for penalty in (0.0, 0.0, 10.0)
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not torch.equal(ends[0]["fc.weight"], ends[2]["fc.weight"])
    assert seen == [list(Net().state_dict())] * 9


def test_without_a_penalty_fediir_is_fedavg_where_clients_count_alike() -> None:
    ends = []
    for strategy in (FedIIR(model=Net, penalty=0.0), FedAvg(model=Net)):
        _, grid = apps(strategy.method)
        ends.append(from_record(strategy.start(grid, first(), 3).arrays))
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_rounds() -> None:
    """As many tensors and records after 1,000 rounds as after 50, but for the metrics in Flower's result."""
    few = torch.randn(8, 2), torch.arange(8) % 2
    app = perennial.client_app(method="fediir", data=lambda _: (few, few), model=Net, device="cpu")
    counts: dict[int, Counter[str]] = {}

    def look(number: int, arrays: ArrayRecord) -> None:
        if number in (50, 1000):
            gc.collect()
            counts[number] = Counter(type(found).__name__ for found in gc.get_objects())

    logging.getLogger("flwr").setLevel(logging.ERROR)  # pytest would keep every line
    try:
        strategy = FedIIR(model=Net, local_steps=1, batch_size=8)
        result = strategy.start(LocalGrid(app, 2), first(), num_rounds=1000, evaluate_fn=look)
    finally:
        logging.getLogger("flwr").setLevel(logging.INFO)
    assert len(result.train_metrics_clientapp) == 1000
    before, after = counts[50], counts[1000]
    for kind in ("Tensor", "TensorArray", "ArrayRecord", "ConfigRecord", "RecordDict", "Message", "Exchange"):
        assert after[kind] == before[kind], kind
    assert after["MetricRecord"] - before["MetricRecord"] == 2 * 950
    assert after.total() - before.total() < 950 * 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"penalty": -1}, "method.penalty: -1 is not possible"),
        ({"penalti": 1}, "method.penalti: there is no such setting; did you mean 'penalty'?"),
        ({"model": 3}, "model: 3 is not possible; give a torch.nn.Module, or its class"),
        ({"model": nn.Sequential(nn.Linear(2, 2), nn.ReLU())}, "Sequential has no classifier"),
        ({"fraction_train": 2.0}, "participation: 2.0 is not possible"),
    ],
)
def test_a_wrong_setting_is_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        FedIIR(**{"model": Net, **options})
    assert words in str(raised.value)


def test_arrays_of_another_model_are_refused() -> None:
    _, grid = apps("fediir")
    with pytest.raises(UserError, match=r"initial_arrays: 'fc\.bias' is in the arrays or in the model"):
        FedIIR(model=Net).start(grid, ArrayRecord({"other": torch.zeros(1)}), 1)


class Wider(Net):
    """Another architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.fc = nn.Linear(2, 9), nn.Linear(9, 2)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"method": "ditto"}, "method: the ServerApp has 'fediir', and this ClientApp 'ditto'"),
        ({"model": Wider}, "the ServerApp's has other tensors than this ClientApp's"),
        ({"data": lambda _: 1}, "data: the function must give"),
        ({"data": lambda _: ((torch.zeros(2, 2), torch.zeros(3)), None)}, "data: train has x of shape"),
    ],
)
def test_a_client_that_does_not_fit_is_left_out_by_a_sentence(theirs: dict[str, Any], words: str) -> None:
    own = {"method": "fediir", "data": toy_data, "model": Net, **theirs}
    grid = PlainGrid(perennial.client_app(device="cpu", **own), 4)
    with pytest.raises(RunStopped) as raised:
        FedIIR(model=Net).start(grid, first(), 1)
    assert words in str(raised.value)


def test_a_node_without_a_partition_id_is_told() -> None:
    _, grid = apps("fediir")
    for context in grid.contexts.values():
        context.node_config = {}
    with pytest.raises(RunStopped, match="no partition-id"):
        FedIIR(model=Net).start(grid, first(), 1)


def test_too_few_nodes_end_the_wait() -> None:
    _, grid = apps("fediir")
    with pytest.raises(RunStopped, match="only 4 of 5 nodes were there"):
        FedIIR(model=Net, clients=5, wait=0.01).start(grid, first(), 1)
