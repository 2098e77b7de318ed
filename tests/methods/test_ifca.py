import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.torch import load_file
from tiny_runs import toy_site

from perennial.client.methods.ifca import IFCAClient
from perennial.client.trainer import Received
from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.ifca import IFCA
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import CONFIG, METRICS, MODEL, NUM_EXAMPLES, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import start
from perennial.strategies.methods.ifca import IFCAStrategy
from perennial.testing.tiny_federation import SpoilingGrid, Toy, toy_config


class Planted(Toy):
    """The clients with odd numbers call the one class the other."""

    name: Literal["planted"] = "planted"  # type: ignore[assignment]

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        data = super().client_data(client, seed, data_root)

        def turned(examples: Examples) -> Examples:
            return Examples(examples.x, 1 - examples.y, examples.environment) if client % 2 else examples

        return ClientData(
            turned(data.train), turned(data.validation), {name: turned(part) for name, part in data.test.items()}
        )


def client(number: int = 0, **hparams: Any) -> IFCAClient:
    site = replace(toy_site(number), data=Planted().client_data(number, 0, None))
    return IFCAClient(site, IFCA(**hparams), {})


def models(count: int) -> dict[str, Tensors]:
    return {f"cluster-{k}": toy_site().network.initial(k) for k in range(count)}


def run(config: RunConfig, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = RunFolder.create(path, config)
    return LocalRuntime(config).run(folder), folder.rows()


# ---------------------------------------------------------------------- the client


def test_a_client_trains_the_model_with_the_least_risk_on_its_training_data() -> None:
    chosen = set()
    for number in range(4):
        found, received = client(number, clusters=4), Received(1, models(4))
        train = found.data.train
        risks = [F.cross_entropy(found.network.predict(w, train.x), train.y).item() for w in models(4).values()]
        best = min(range(4), key=risks.__getitem__)
        reply = found.train(received)
        assert reply.settings == {"cluster": best}
        trained, metrics = found.descend(models(4)[f"cluster-{best}"], found.loss, received)
        assert all(torch.equal(reply.arrays[MODEL][name], trained[name]) for name in trained)
        assert reply.metrics == {NUM_EXAMPLES: len(train), **metrics}
        assert found.kept == {}
        chosen.add(best)
    assert len(chosen) > 1


def test_a_model_whose_risk_is_no_number_is_not_chosen() -> None:
    sent = models(3)
    sent["cluster-0"] = {name: torch.full_like(tensor, 3e38) for name, tensor in sent["cluster-0"].items()}
    found = client(clusters=3)
    assert math.isnan(found.mean_loss(found.predictor(sent["cluster-0"]), found.data.train))
    without = client(clusters=2).cluster(Received(1, {f"cluster-{k}": sent[f"cluster-{k + 1}"] for k in range(2)}))
    assert found.cluster(Received(1, sent)) == 1 + without


def test_of_equal_models_the_first_is_chosen() -> None:
    same = toy_site().network.initial(7)
    assert client(clusters=3).cluster(Received(1, {f"cluster-{k}": same for k in range(3)})) == 0


def test_a_client_that_never_trained_evaluates_the_model_that_fits_it() -> None:
    found, received = client(2, clusters=4), Received(9, models(4))
    first, second = found.evaluate(received), found.evaluate(received)
    assert first == second
    tensors, x = models(4)[f"cluster-{found.cluster(received)}"], found.data.test["p=0.1"].x
    assert torch.equal(found.models(received)["personal"](x), found.network.predict(tensors, x))
    for name, w in models(4).items():
        assert all(torch.equal(received[name][key], w[key]) for key in w)


# ---------------------------------------------------------------------- the server


def server(*settings: str) -> IFCAStrategy:
    return IFCAStrategy(toy_config("ifca", *settings), "run")


def filled(value: float) -> Tensors:
    return {name: torch.full_like(tensor, value) for name, tensor in toy_site().network.initial(0).items()}


def aggregate(strategy: IFCAStrategy, answers: list[tuple[float, int, Any]]) -> Tensors:
    """A round in which client i sends a model filled with a value, a number of samples and a cluster."""
    here = LocalRuntime(strategy.run)

    def answer(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "query":
            return reply
        value, samples, cluster = answers[request.metadata.dst_node_id - 1]
        content = RecordDict({MODEL: to_record(filled(value)), METRICS: MetricRecord({NUM_EXAMPLES: samples})})
        if cluster is not None:
            content[CONFIG] = ConfigRecord({"cluster": cluster})
        return Message(content, reply_to=request)

    grid = SpoilingGrid(here.grid, answer)  # type: ignore[arg-type]
    requests = strategy.configure_train(3, to_record(start(strategy.run).arrays), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(3, grid.send_and_receive(requests))
    assert arrays is not None
    return from_record(arrays)


def test_the_models_start_differently_and_the_first_as_every_methods() -> None:
    drawn = [server("clusters=3", f"start={number}").models for number in (0, 0, 1)]
    weights = [[w["classifier.weight"] for w in draw.values()] for draw in drawn]
    assert all(torch.equal(one, other) for one, other in zip(weights[0], weights[1], strict=True))
    distinct = [*weights[0], *weights[2]]
    assert not any(torch.equal(one, other) for i, one in enumerate(distinct) for other in distinct[:i])
    common = start(toy_config("fedavg")).arrays
    assert all(torch.equal(tensor, common[name]) for name, tensor in drawn[0]["cluster-0"].items())


def test_each_model_becomes_the_mean_of_those_who_chose_it_by_hand() -> None:
    strategy = server("clusters=3")
    unchosen = strategy.models["cluster-1"]
    arrays = aggregate(strategy, [(1.0, 10, 2), (2.0, 10, 0), (5.0, 30, 2), (6.0, 10, 2)])
    for found, value in (
        (strategy.models["cluster-0"], 2.0),
        (strategy.models["cluster-2"], (1 * 10 + 5 * 30 + 6 * 10) / 50),
        (arrays, (1 * 10 + 2 * 10 + 5 * 30 + 6 * 10) / 60),
    ):
        assert all(torch.equal(found[name], tensor) for name, tensor in filled(value).items())
    assert strategy.models["cluster-1"] is unchosen
    labels = {"client-0": 2, "client-1": 0, "client-2": 2, "client-3": 2}
    assert strategy.notes == [{"kind": "clusters", "round": 3, "labels": labels}]


@pytest.mark.parametrize("cluster", [3, -1, 10**12, True, 1.0, "1", [1], None])
def test_a_client_that_names_no_cluster_is_left_out_and_named(cluster: Any) -> None:
    strategy = server("clusters=3")
    arrays = aggregate(strategy, [(1.0, 10, 1), (100.0, 10, cluster), (1.0, 10, 1), (1.0, 10, 1)])
    assert strategy.exchanges[-1].left_out == {"client-1": f"its cluster is {cluster!r}, not one of 0 to 2"}
    assert strategy.notes[0]["labels"].keys() == {"client-0", "client-2", "client-3"}
    for found in (arrays, strategy.models["cluster-1"]):
        assert all(torch.equal(found[name], tensor) for name, tensor in filled(1.0).items())


def test_more_models_than_clients_cannot_be_configured() -> None:
    with pytest.raises(UserError, match=r"method\.clusters: 5 is more than the scenario's 4 clients"):
        load_config(options={"method": "ifca", "scenario": {"name": "toy"}}, settings=["clusters=5"])


# ---------------------------------------------------------------------- whole runs


def test_one_model_is_fedavg(tmp_path: Path) -> None:
    _, found = run(toy_config("ifca", "clusters=1", participation=0.5), tmp_path / "ifca")
    _, plain = run(toy_config("fedavg", participation=0.5), tmp_path / "fedavg")
    paths = [tmp_path / name / "models" / "global.safetensors" for name in ("ifca", "fedavg")]
    one, other = map(load_file, paths)
    assert all(torch.equal(one[name], other[name]) for name in other)
    # The model is a personal one, and who has it is logged; the rest of the log is the same.
    text = json.dumps([row for row in found if row["kind"] != "clusters"])
    assert json.loads(text.replace("personal", "global")) == plain


@pytest.mark.slow
def test_planted_clusters_are_found_and_each_gets_a_model_that_fits(tmp_path: Path) -> None:
    def planted(method: str, *settings: str) -> tuple[float, list[dict[str, Any]]]:
        scenario = {"name": "planted", "clients": 6}
        config = toy_config(method, *settings, scenario=scenario, rounds=8)
        summary, rows = run(config, tmp_path / method)
        return summary["models"][config.method.evaluates[-1]]["final"]["validation"], rows

    accuracy, rows = planted("ifca", "clusters=2")
    labels = [row["labels"] for row in rows if row["kind"] == "clusters"]
    assert len(labels) == 8
    for found in labels[1:]:
        even, odd = ({found[f"client-{number}"] for number in range(first, 6, 2)} for first in (0, 1))
        assert len(even) == len(odd) == 1
        assert even != odd
    assert accuracy > 0.75
    assert planted("fedavg")[0] < 0.6


def test_all_models_go_down_and_one_comes_up(tmp_path: Path) -> None:
    summary, rows = run(toy_config("ifca", "clusters=3", rounds=2), tmp_path / "run")
    size = 4 * sum(tensor.numel() for tensor in filled(0).values())
    assert summary["bytes_per_client_and_round"] == {"down": 3 * size, "up": size}
    evaluation = next(row for row in rows if row["kind"] == "evaluation-traffic")
    assert (evaluation["bytes_down"], evaluation["bytes_up"]) == (4 * 3 * size, 0)
