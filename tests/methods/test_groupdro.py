"""Federated GroupDRO: the weights at the server, the weighted steps at the clients, PerInvFL with this loss."""

import math
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from scripted_clients import ScriptedGrid, content, one_round
from tiny_runs import taken_up, toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.groupdro import GroupDROClient
from perennial.client.trainer import Received
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.group_weights import GROUP, MASS
from perennial.common.methods.groupdro import GroupDRO
from perennial.common.utils.errors import UserError
from perennial.common.wire import MODEL, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.registry import strategy_for
from perennial.testing.tiny_federation import toy_config

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
        (note,) = strategy.notes
        assert note.pop("entropy") == pytest.approx(-sum(share * math.log(share) for share in q.values()))
        bounds = {"least": min(strategy.q.values()), "largest": max(strategy.q.values())}
        assert note == {"kind": "groups", "round": number, "q": strategy.q, **bounds}
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
    assert strategy.notes[-1]["q"] == strategy.q  # of who has failed, too


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


def test_sites_for_testing_alone_are_no_groups() -> None:
    """`N q_i` of those who train has the mean 1, in every round."""
    strategy, grid = server("test_sites=['client-1', 'client-3']")
    for number in (1, 2, 3):
        one_round(strategy, grid, to_record(model(9)), number)
        sent = [records[GROUP]["weight"].item() for records in grid.of("train").values()]
        assert sum(sent) == pytest.approx(2)
        q = softmax({client: 0.5 * number * RISKS[client] for client in ("client-0", "client-2")})
        assert strategy.q == pytest.approx(q)


def test_a_cohort_of_hardly_any_weight_has_a_mean_and_comes_back() -> None:
    """Once one client has reported a huge risk, the others are asked without it."""
    risks: dict[str, float | None] = {**RISKS, "client-1": 1e5}
    strategy, grid = server("preset=code", risks=risks)
    for number in (1, 2):
        one_round(strategy, grid, to_record(model(9)), number)
    risks["client-1"] = None  # it fails from now on
    found = one_round(strategy, grid, to_record(model(9)), 3)
    assert found is not None
    assert bool(torch.isfinite(torch.from_numpy(found["w"].numpy())).all())
    assert strategy.q["client-2"] > strategy.q["client-3"] > 0


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


def test_a_row_of_the_log_does_not_grow_with_the_federation(tmp_path: Any) -> None:
    """It has the weights of the cohort."""
    config = toy_config("groupdro", "scenario.clients=100", "participation=0.05", "evaluate_clients=3", rounds=3)
    LocalRuntime(config).run(folder := RunFolder.create(tmp_path / "run", config))
    rows = [row for row in folder.rows() if row["kind"] == "groups"]
    assert [len(row["q"]) for row in rows] == [5, 5, 5]
    q = {client: weight.item() for client, weight in folder.load_checkpoint().strategy["q"].items()}
    assert len(q) == 100
    assert rows[-1]["q"] == {client: q[client] for client in rows[-1]["q"]}
    assert (rows[-1]["least"], rows[-1]["largest"]) == (min(q.values()), max(q.values()))
    assert rows[-1]["entropy"] == pytest.approx(-sum(share * math.log(share) for share in q.values()))


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


# ---------------------------------------------------------------------- where the server may see sums alone

PRIVATE = {
    "secagg": ("privacy.mechanism=secagg",),
    "fixed": ("privacy.mechanism=fixed", "privacy.noise_multiplier=0", "privacy.clipping_norm=1e6"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", PRIVATE)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("groupdro", ()),
        ("groupdro", ("participation=0.75", "literal_weights=true")),
        ("perinvfl", ("invariance=groupdro",)),
    ],
)
def test_clients_that_keep_their_weights_have_those_that_the_server_would_keep(
    method: str, settings: tuple[str, ...], mechanism: str, tmp_path: Any
) -> None:
    """Three rounds, also where one of four clients is absent from each."""
    config = toy_config(method, "group_rate=0.5", *settings, rounds=3)
    LocalRuntime(config).run(plain := RunFolder.create(tmp_path / "plain", config))
    q = {client: weight.item() for client, weight in plain.load_checkpoint().strategy["q"].items()}
    assert max(q.values()) - min(q.values()) > 0.01

    config = toy_config(method, "group_rate=0.5", *settings, *PRIVATE[mechanism], rounds=3)
    here = LocalRuntime(config)
    folder = RunFolder.create(tmp_path / "private", config)
    assert here.run(folder)["left_out"] == {}
    kept = {place.split("/")[-1]: versions[-1].kept[MASS][MASS].item() for place, versions in here.states.items()}
    level = [row["level"] for row in folder.rows() if row["kind"] == "groups"][-1]
    assert {client: math.exp(mass - level) / 4 for client, mass in kept.items()} == pytest.approx(q, abs=1e-5)
    for name, tensor in plain.load_checkpoint().arrays.items():
        assert torch.allclose(tensor, folder.load_checkpoint().arrays[name], atol=1e-5), name


def test_behind_a_mechanism_every_client_is_sent_the_same_and_its_weight_is_no_part_of_it() -> None:
    strategy = strategy_for(toy_config("groupdro", *PRIVATE["fixed"]), "run")

    def answer(client: str, _: Message) -> RecordDict:
        own = torch.tensor(0.1 * int(client[-1]), dtype=torch.float64)
        return content({MODEL: model(1), GROUP: {"before": own, "after": 2 * own}})

    grid = ScriptedGrid(strategy, answer)
    for number in (1, 2):
        one_round(strategy, grid, to_record(model(9)), number)
        found = [records[GROUP] for records in grid.of("train").values()]
        assert all(each == found[0] for each in found)
        assert found[0].keys() == {"level", "most", "top", "scale"}
    # Twice the mean of 2 most (0 + 0.1 + 0.2 + 0.3) / 4, with most = 4.
    assert strategy.level == pytest.approx(2 * math.log(1.2))  # type: ignore[attr-defined]


@pytest.mark.parametrize("after", [1e8, -1e8])
def test_behind_clipping_no_client_moves_the_weights_by_more_than_its_share(after: float) -> None:
    strategy: Any = strategy_for(toy_config("groupdro", *PRIVATE["fixed"]), "run")

    def answer(client: str, _: Message) -> RecordDict:
        own = torch.tensor(after if client == "client-0" else 0.25, dtype=torch.float64)
        return content({MODEL: model(1), GROUP: {"before": own, "after": own}})

    one_round(strategy, ScriptedGrid(strategy, answer), to_record(model(9)))
    change = (1 if after > 0 else -1) - 0.25
    assert strategy.level == pytest.approx(math.log(max(1 + change, 0.5)))


def test_no_client_weighs_more_than_most_and_it_comes_down_again() -> None:
    site = toy_site()
    start = site.network.initial(0)
    client = GroupDROClient(site, GroupDRO(group_rate=50.0), {})

    def received(level: float) -> Received:
        found = {"level": level, "most": 4.0, "top": 4.0, "scale": 1.0}
        return Received(1, {MODEL: start, GROUP: {k: torch.tensor(v).double() for k, v in found.items()}})

    sent = client.train(received(0.0)).arrays[GROUP]
    assert (sent["before"].item(), sent["after"].item()) == (0.25, 1.0)
    assert client.train(received(0.0)).arrays[GROUP]["before"].item() == pytest.approx(1.0)
    assert client.train(received(1000.0)).arrays[GROUP]["before"].item() < 1e-9


def test_the_authors_code_is_refused_behind_a_mechanism() -> None:
    """It weighs the models by q, which nobody but the client may know."""
    with pytest.raises(UserError, match="'secagg' is not possible with method 'groupdro' as set here"):
        toy_config("groupdro", "preset=code", *PRIVATE["secagg"])


def test_a_stack_of_clients_keeps_the_weights_that_its_clients_keep_one_by_one(tmp_path: Any) -> None:
    rows = []
    for engine in ("loop", "stack"):
        settings = ("group_rate=0.5", f"cohort_engine={engine}", *PRIVATE["fixed"])
        config = toy_config("groupdro", *settings, rounds=3)
        LocalRuntime(config).run(folder := RunFolder.create(tmp_path / engine, config))
        rows.append([row["level"] for row in folder.rows() if row["kind"] == "groups"])
    assert rows[0] == pytest.approx(rows[1], abs=1e-6)
    assert rows[0][-1] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", PRIVATE)
def test_a_resumed_run_goes_on_with_the_weights_that_clients_keep(mechanism: str, tmp_path: Any) -> None:
    config = toy_config("groupdro", "group_rate=0.5", *PRIVATE[mechanism], rounds=4)
    folder = taken_up(config, tmp_path, 3)
    assert [row["round"] for row in folder.rows() if row["kind"] == "groups"] == [1, 2, 3, 4]
