"""Our client halves under Flower's own strategies, and our strategies over an ordinary ClientApp."""

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import strategy as flowers
from flwr.serverapp.exception import InconsistentMessageReplies
from plain_app import Net, PlainGrid, first, toy_data
from torch.utils.data import DataLoader, TensorDataset

import perennial
from perennial import strategies
from perennial.common.flower_app import has_fedavgs_server
from perennial.common.methods import METHODS
from perennial.common.utils.errors import UserError
from perennial.common.wire import from_record
from perennial.strategies.base import MethodStrategy
from perennial.strategies.registry import strategy_class

FITTING = ("apfl", "ditto", "fedavg", "fedprox", "fedrod", "per-fedavg")
CLIPPED = flowers.DifferentialPrivacyClientSideFixedClipping
STRATEGIES: dict[str, Callable[[], Any]] = {
    "FedAvg": flowers.FedAvg,
    "FedProx": lambda: flowers.FedProx(proximal_mu=0.1),
    "FedAdam": lambda: flowers.FedAdam(eta=0.05, tau=0.1),
    "FedYogi": lambda: flowers.FedYogi(eta=0.05, tau=0.1),
    "FedTrimmedAvg": lambda: flowers.FedTrimmedAvg(beta=0.2),
    "clipped": lambda: CLIPPED(flowers.FedAvg(), noise_multiplier=0.01, clipping_norm=5.0, num_sampled_clients=4),
}


def grid(method: str, **options: Any) -> PlainGrid:
    app = perennial.client_app(method, toy_data, Net, device="cpu", environments=2, learning_rate=0.3, **options)
    return PlainGrid(app, 4)


def test_the_methods_with_fedavgs_server_are_known_without_it() -> None:
    for name, kind in METHODS.items():
        if name != "perinvfl":  # whose settings need one of its variants
            assert has_fedavgs_server(kind) == (name in FITTING), name
    for name in FITTING:
        assert strategy_class(METHODS[name].model_construct()) is MethodStrategy


@pytest.mark.parametrize("method", FITTING)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_fitting_method_trains_under_flowers_strategies(name: str, method: str) -> None:
    nodes = grid(method, mods=[fixedclipping_mod] if name == "clipped" else [])
    result = STRATEGIES[name]().start(nodes, first(), num_rounds=4)
    assert list(result.arrays) == list(Net().state_dict())
    last = result.evaluate_metrics_clientapp[4]
    for model in METHODS[method].evaluates:
        assert float(last[f"{model}/accuracy"]) > 0.5  # of two classes of one size
        assert float(last[f"{model}/loss"]) < 0.7
    assert all(bool(context.state) == bool(METHODS[method].keeps) for context in nodes.contexts.values())


@pytest.mark.parametrize("method", ["apfl", "ditto"])
def test_flowers_fedavg_gives_what_ours_gives(method: str) -> None:
    """The same clients, mini-batches and weights: only who adds up differs."""
    theirs = flowers.FedAvg().start(grid(method), first(), num_rounds=3)
    kind = getattr(strategies, METHODS[method].__name__)
    ours = kind(model=Net, environments=2, learning_rate=0.3).start(grid(method), first(), num_rounds=3)
    for name, tensor in from_record(ours.arrays).items():
        torch.testing.assert_close(from_record(theirs.arrays)[name], tensor, rtol=0, atol=1e-6)
    headline = f"{METHODS[method].evaluates[-1]}/accuracy"
    mine, other = (run.evaluate_metrics_clientapp[3][headline] for run in (ours, theirs))
    assert float(mine) == pytest.approx(float(other), abs=1e-6)  # all have as many test samples


def test_the_weight_of_fedprox_is_the_servers() -> None:
    ends = [
        from_record(flowers.FedProx(proximal_mu=mu).start(grid("fedprox", proximity=9.0), first(), 2).arrays)
        for mu in (0.0, 2.0)
    ]
    plain = from_record(flowers.FedAvg().start(grid("fedavg"), first(), 2).arrays)
    torch.testing.assert_close(ends[0], plain, rtol=0, atol=1e-6)
    assert not torch.allclose(ends[1]["fc.weight"], plain["fc.weight"], atol=1e-4)


def test_what_the_strategy_says_of_hyper_parameters_counts_and_the_rest_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    told = ConfigRecord({"learning_rate": 0.3, "lr": 0.1})
    app = perennial.client_app("fedavg", toy_data, Net, device="cpu", environments=2, learning_rate=0.001)
    result = flowers.FedAvg().start(PlainGrid(app, 4), first(), 2, train_config=told)
    wanted = flowers.FedAvg().start(grid("fedavg"), first(), 2)
    torch.testing.assert_close(from_record(result.arrays), from_record(wanted.arrays), rtol=0, atol=1e-6)
    lines = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert lines == ["perennial: the ServerApp's setting 'lr' is none of method fedavg, and is not used"]


class Strange(flowers.FedAvg):
    """Sends what no strategy of ours or of Flower's for one model sends."""

    def __init__(self, **content: Any) -> None:
        super().__init__()
        self.content = content

    def _construct_messages(self, record: RecordDict, node_ids: list[int], message_type: str) -> Iterable[Message]:
        changed = {**{name: record[name] for name in ("arrays", "config")}, **self.content}
        content = RecordDict({name: record for name, record in changed.items() if record is not None})
        return [Message(content, node, message_type) for node in node_ids]


@pytest.mark.parametrize(
    ("method", "strategy", "words"),
    [
        ("fediir", flowers.FedAvg, "method 'fediir' needs its own server half .* import FedIIR"),
        ("fedavg", STRATEGIES["clipped"], r"leaves clipping to the clients: .*mods=\[fixedclipping_mod\]"),
        ("fedavg", lambda: Strange(more=ArrayRecord()), "one record of arrays and one of settings; .*'more'"),
        (
            "fedavg",
            lambda: Strange(arrays=ArrayRecord({"w": torch.ones(2)})),
            "other arrays than this ClientApp's",
        ),
        ("fedavg", lambda: Strange(config=ConfigRecord({"x": 1})), "does not send 'server-round'"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_ends_the_run(
    method: str,
    strategy: Callable[[], Any],
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    nodes = PlainGrid(perennial.client_app(method, toy_data, Net, device="cpu", environments=2), 4)
    with pytest.raises(InconsistentMessageReplies):
        strategy().start(nodes, first(), num_rounds=2)
    assert any(record.levelno == logging.ERROR for record in caplog.records)  # the clients', who say it, too
    servers = [
        record.getMessage() for record in caplog.records if "error in reply from node" in record.getMessage()
    ]
    assert len(servers) == 4
    assert all(re.search(words, line) for line in servers)


def test_hyper_parameters_of_a_method_with_its_own_server_are_the_servers() -> None:
    with pytest.raises(UserError, match=r"method\.penalty: give it to .*perennial\.strategies\.FedIIR"):
        perennial.client_app("fediir", toy_data, Net, penalty=1.0)
    with pytest.raises(UserError, match=r"method\.penalty: there is no such setting"):
        perennial.client_app("fedavg", toy_data, Net, penalty=1.0)


def test_data_may_come_as_flowers_templates_have_it() -> None:
    """A function of the client's number, with loaders of samples that are tuples or dicts: the same numbers."""

    def load_data(partition_id: int, num_partitions: int) -> Any:
        assert num_partitions == 4
        (x, y, environment), (test_x, test_y) = toy_data(nodes.contexts[partition_id + 1])
        rows = [{"img": x[i], "label": y[i], "from": environment[i]} for i in range(len(y))]
        test = TensorDataset(torch.as_tensor(test_x), torch.as_tensor(test_y))
        return DataLoader(rows, batch_size=8), test  # type: ignore[arg-type, var-annotated]

    nodes = grid("fedavg")
    wanted = flowers.FedAvg().start(nodes, first(), 2)
    app = perennial.client_app("fedavg", load_data, Net, device="cpu", environments=2, learning_rate=0.3)
    found = flowers.FedAvg().start(PlainGrid(app, 4), first(), 2)
    torch.testing.assert_close(from_record(found.arrays), from_record(wanted.arrays), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- an ordinary ClientApp


def ordinary(seen: list[dict[str, Any]], fails: int = -1) -> ClientApp:
    """As Flower's PyTorch template has it: one pass of SGD at the rate that the server says."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(dict(message.content["config"]))
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        number = int(context.node_config["partition-id"])
        if number == fails:
            raise RuntimeError("its disk is full")
        (x, y, _), _ = toy_data(context)
        optimizer = torch.optim.SGD(model.parameters(), lr=float(message.content["config"]["lr"]))
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y) + number})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        _, (x, y) = toy_data(context)
        right = (model(torch.as_tensor(x)).argmax(1) == torch.as_tensor(y)).float().mean().item()
        return Message(
            RecordDict({"metrics": MetricRecord({"eval_acc": right, "num-examples": len(y)})}), reply_to=message
        )

    return app


@pytest.mark.parametrize("method", ["ditto", "fedprox"])
def test_our_strategies_train_an_ordinary_client_app_as_flowers_fedavg_does(method: str) -> None:
    seen: list[dict[str, Any]] = []
    config = ConfigRecord({"lr": 0.3})
    kind = getattr(strategies, METHODS[method].__name__)
    ours = kind(model=Net).start(PlainGrid(ordinary(seen), 4), first(), 3, train_config=config)
    assert [one["server-round"] for one in seen] == [1] * 4 + [2] * 4 + [3] * 4
    assert all(one["lr"] == 0.3 for one in seen)
    assert {one.get("proximal-mu") for one in seen} == ({0.01} if method == "fedprox" else {None})
    theirs = flowers.FedAvg().start(PlainGrid(ordinary([]), 4), first(), 3, train_config=config)
    torch.testing.assert_close(from_record(ours.arrays), from_record(theirs.arrays), rtol=0, atol=1e-6)
    for found in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        mine, other = getattr(ours, found)[3], getattr(theirs, found)[3]
        for name in other:
            if name != "num-examples":
                assert float(mine[name]) == pytest.approx(float(other[name]), abs=1e-6)
    assert float(ours.evaluate_metrics_clientapp[3]["eval_acc"]) > 0.6


def test_an_ordinary_client_that_fails_is_left_out() -> None:
    strategy = strategies.FedAvg(model=Net)
    config = ConfigRecord({"lr": 0.3})
    result = strategy.start(PlainGrid(ordinary([], fails=2), 4), first(), 2, train_config=config)
    assert list(result.arrays) == list(Net().state_dict())
    (failed,) = strategy.inner.exchanges[0].left_out.values()
    assert "its disk is full" in failed


def test_a_method_with_its_own_server_says_what_it_needs_of_an_ordinary_client_app() -> None:
    with pytest.raises(UserError, match=r"ordinary ClientApp, and method 'fediir' needs its own client half"):
        strategies.FedIIR(model=Net).start(PlainGrid(ordinary([]), 4), first(), 2)
