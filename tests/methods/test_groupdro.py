"""Federated GroupDRO: the weights at the server, the weighted steps at the clients, PerInvFL with this loss."""

import math
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from scripted import ScriptedGrid, content, one_round
from toys import toy_config, toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.groupdro import GroupDROClient
from perennial.client.trainer import Received
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.group import GROUP
from perennial.common.methods.groupdro import GroupDRO
from perennial.common.wire import MODEL, to_record
from perennial.server.folder import RunFolder
from perennial.server.local import LocalRuntime
from perennial.strategies.registry import strategy_for

RISKS = {"client-0": 0.5, "client-1": 2.0, "client-2": 1.0, "client-3": 0.0}


def model(value: float) -> Any:
    return {"w": torch.full((2,), float(value))}


def server(*settings: str, method: str = "groupdro", risks: Any = RISKS) -> tuple[Any, ScriptedGrid]:
    """A server half, and clients of these risks whose models are their numbers; None is a client that fails."""
    strategy = strategy_for(toy_config(method, "group_rate=0.5", *settings), "run")

    def answer(client: str, _: Message) -> RecordDict:
        return content({MODEL: model(float(client[-1])), GROUP: {"risk": torch.tensor(risks[client])}})

    return strategy, ScriptedGrid(strategy, answer)


def softmax(scores: dict[str, float]) -> dict[str, float]:
    total = sum(math.exp(score) for score in scores.values())
    return {client: math.exp(score) / total for client, score in scores.items()}


def test_the_weights_grow_with_the_risk_and_are_sent_n_times() -> None:
    strategy, grid = server()
    sent = []
    for number in (1, 2, 3):
        found = one_round(strategy, grid, to_record(model(9)), number)
        assert found is not None
        assert found["w"].numpy().tolist() == [1.5, 1.5]  # the uniform mean, whatever the weights
        sent.append({client: records[GROUP]["weight"].item() for client, records in grid.of("train").items()})
        q = softmax({client: 0.5 * number * risk for client, risk in RISKS.items()})
        assert strategy.q == pytest.approx(q)
        assert strategy.notes == [{"kind": "groups", "round": number, "q": strategy.q}]
    assert sent[0] == dict.fromkeys(RISKS, 1.0)
    assert sent[1] == pytest.approx({c: 4 * q for c, q in softmax({c: 0.5 * r for c, r in RISKS.items()}).items()})
    assert max(strategy.q, key=strategy.q.get) == "client-1"
    literal, grid = server("literal_weights=true")
    one_round(literal, grid, to_record(model(9)))
    assert {records[GROUP]["weight"].item() for records in grid.of("train").values()} == {0.25}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_client_with_a_bad_risk_keeps_its_weight_but_for_the_normalisation(bad: float) -> None:
    strategy, grid = server(risks={**RISKS, "client-1": bad})
    one_round(strategy, grid, to_record(model(9)))
    assert strategy.q == pytest.approx(softmax({c: 0.5 * r for c, r in ({**RISKS, "client-1": 0.0}).items()}))
    assert strategy.exchanges[-1].left_out.keys() == {"client-1"}


def test_no_risk_stops_the_server() -> None:
    """A client that reports a huge one gets all the weight, and its hostile second word does not take it away."""
    risks = {**RISKS, "client-1": 1e8}
    strategy, grid = server(risks=risks)
    for number in (1, 2):
        one_round(strategy, grid, to_record(model(9)), number)
    assert strategy.q["client-1"] == pytest.approx(1)
    risks["client-1"] = -1e8
    one_round(strategy, grid, to_record(model(9)), 3)
    assert sum(strategy.q.values()) == pytest.approx(1)


def test_the_authors_code_uses_the_first_risks_for_ever_and_weighs_the_mean() -> None:
    """`q = softmax(η_q t ℓ^0)`; the mean is by the new q."""
    risks = dict(RISKS)
    strategy, grid = server("preset=code", risks=risks)
    for number in (1, 2, 3):
        found = one_round(strategy, grid, to_record(model(9)), number)
        risks.update(dict.fromkeys(RISKS, 7.0))
        q = softmax({client: 0.5 * number * risk for client, risk in RISKS.items()})
        assert strategy.q == pytest.approx(q)
        assert found is not None
        mean = sum(weight * int(client[-1]) for client, weight in q.items())
        assert found["w"].numpy().tolist() == pytest.approx([mean] * 2)


def test_its_state_goes_on_in_another_process() -> None:
    whole, grid = server("preset=code")
    for number in (1, 2):
        one_round(whole, grid, to_record(model(9)), number)
    first, grid = server("preset=code")
    one_round(first, grid, to_record(model(9)), 1)
    second, grid = server("preset=code", risks=dict.fromkeys(RISKS, 5.0))
    second.load_state_dict(first.state_dict())
    one_round(second, grid, to_record(model(9)), 2)
    assert second.q == whole.q


def test_with_equal_weights_a_client_takes_fedavgs_steps() -> None:
    """η_q = 0 leaves N q_i at 1; another weight scales every step."""
    site = toy_site()
    start = site.network.initial(0)

    def trained(weight: float, rate: float) -> Any:
        request = Received(1, {MODEL: start, GROUP: {"weight": torch.tensor(weight)}})
        return GroupDROClient(site, GroupDRO(learning_rate=rate), {}).train(request).arrays

    plain = FedAvgClient(site, FedAvg(learning_rate=0.1), {}).train(Received(1, {MODEL: start})).arrays[MODEL]
    assert all(torch.equal(trained(1.0, 0.1)[MODEL][name], tensor) for name, tensor in plain.items())
    assert all(torch.equal(trained(2.0, 0.05)[MODEL][name], tensor) for name, tensor in plain.items())
    risk = torch.nn.functional.cross_entropy(site.network.predict(start, site.data.train.x), site.data.train.y)
    assert trained(2.0, 0.1)[GROUP]["risk"].item() == pytest.approx(risk.item())  # of the received model


def test_without_a_rate_a_run_is_fedavgs(tmp_path: Any) -> None:
    rows = []
    for method, settings in (("groupdro", ["group_rate=0"]), ("fedavg", [])):
        config = toy_config(method, *settings, rounds=3)
        LocalRuntime(config).run(RunFolder.create(tmp_path / method, config))
        rows.append([row for row in RunFolder(tmp_path / method).rows() if row["kind"] != "groups"])
    for ours, theirs in zip(*rows, strict=True):
        if ours["kind"] == "round":
            assert ours["metrics"] == pytest.approx(theirs["metrics"], abs=1e-6)
            # One number more each way and client: the weight down, the risk up.
            assert ours["bytes_down"] - theirs["bytes_down"] == ours["bytes_up"] - theirs["bytes_up"] == 4 * 4


def test_perinvfl_has_weights_with_this_loss_only() -> None:
    strategy, grid = server("invariance=groupdro", method="perinvfl")
    one_round(strategy, grid, to_record(model(9)))
    assert strategy.q == pytest.approx(softmax({client: 0.5 * risk for client, risk in RISKS.items()}))
    strategy, _ = server(method="perinvfl")
    grid = ScriptedGrid(strategy, lambda client, _: content({MODEL: model(float(client[-1]))}))
    found = one_round(strategy, grid, to_record(model(9)))
    assert found is not None
    assert found["w"].numpy().tolist() == [1.5, 1.5]
    assert all(records.keys() == {MODEL} for records in grid.of("train").values())
    assert not hasattr(strategy, "q")


def test_perinvfl_trains_with_this_loss(tmp_path: Any) -> None:
    config = toy_config("perinvfl", "invariance=groupdro", rounds=6)
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path, config))
    assert summary["models"]["personal"]["final"]["validation"] > 0.75
    assert summary["left_out"] == {}
    kinds = [row["kind"] for row in RunFolder(tmp_path).rows()]
    assert kinds.count("groups") == 6
