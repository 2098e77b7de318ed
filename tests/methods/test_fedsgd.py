"""FedSGD and the two methods that make something else of the clients' gradients: V-REx and AND-mask."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from scripted_clients import ScriptedGrid, content, one_round
from tiny_runs import toy_site
from torch import Tensor

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedsgd import FedSGDClient
from perennial.client.methods.vrex import VRExClient
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData, join
from perennial.common.methods.and_mask import AndMask
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedsgd import FedSGD
from perennial.common.methods.vrex import VREx
from perennial.common.models.network import Network, network
from perennial.common.models.settings import model_settings
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, METRICS, MODEL, NUM_EXAMPLES, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.methods.and_mask import AndMaskStrategy, masked
from perennial.strategies.methods.fedsgd import FedSGDStrategy
from perennial.strategies.methods.vrex import VRExStrategy
from perennial.strategies.registry import strategy_for
from perennial.testing.tiny_federation import Toy, toy_config

STRATEGIES: dict[str, Any] = {"fedsgd": FedSGDStrategy, "vrex": VRExStrategy, "and-mask": AndMaskStrategy}
SITES = [toy_site(number) for number in range(4)]
NET = SITES[0].network


def start() -> Tensors:
    return NET.initial(0)


def risk(params: Tensors, number: int) -> Tensor:
    train = SITES[number].data.train
    return F.cross_entropy(NET.predict(params, train.x), train.y)


def step(method: str, *settings: str, rounds: int = 1, spoil: Any = None) -> tuple[Tensors, Any]:
    """The model after some rounds of the toy scenario's own clients, and the server half."""
    strategy = STRATEGIES[method](toy_config(method, *settings), "run")

    def answer(client: str, message: Message) -> RecordDict:
        half = FedSGDClient(SITES[int(client[-1])], strategy.hparams, {})
        sent = from_record(message.content.array_records[MODEL])
        reply = half.answer("train", Received(int(message.metadata.group_id), {MODEL: sent}))
        assert half.kept == {}
        made = content(reply.arrays, reply.metrics[NUM_EXAMPLES], risk=reply.metrics["risk"])
        return spoil(client, made) if spoil else made

    arrays, grid = to_record(start()), ScriptedGrid(strategy, answer)
    for number in range(1, rounds + 1):
        found = one_round(strategy, grid, arrays, number)
        assert found is not None
        arrays = found
    return from_record(arrays), strategy


def descended(objective: Any, rate: float, rounds: int = 1) -> Tensors:
    """Gradient descent by autograd on a function of the parameters and the round."""
    model = start()
    for number in range(1, rounds + 1):
        params = {name: tensor.clone().requires_grad_() for name, tensor in model.items()}
        slope = torch.autograd.grad(objective(params, number), list(params.values()))
        model = {name: tensor - rate * part for (name, tensor), part in zip(model.items(), slope, strict=True)}
    return model


def assert_close(found: Tensors, expected: Tensors, **how: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **how or {"rtol": 1e-4, "atol": 1e-6})


# ---------------------------------------------------------------------- FedSGD


def test_a_round_is_a_step_on_the_risk_over_all_data() -> None:
    found, _ = step("fedsgd", "learning_rate=0.3", rounds=3)
    everything = join([site.data.train for site in SITES])
    pooled = lambda params, _: F.cross_entropy(NET.predict(params, everything.x), everything.y)  # noqa: E731
    assert_close(found, descended(pooled, 0.3, 3))


def test_it_is_fedavg_with_one_full_step() -> None:
    found, _ = step("fedsgd", "learning_rate=0.3")
    hparams = FedAvg(local_steps=1, batch_size=1000, learning_rate=0.3)
    models = [FedAvgClient(site, hparams, {}).train(Received(1, {MODEL: start()})).arrays[MODEL] for site in SITES]
    assert_close(found, {name: torch.stack([model[name] for model in models]).mean(dim=0) for name in found})


def test_clients_count_by_their_samples() -> None:
    strategy = FedSGDStrategy(toy_config("fedsgd", "scenario.clients=2", "learning_rate=1"), "run")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in start().items()}

    def answer(client: str, _: Message) -> RecordDict:
        ones = {
            name: torch.full_like(tensor, 1.0 if client == "client-0" else 5.0) for name, tensor in zeros.items()
        }
        return content({GRADIENT: ones}, 30 if client == "client-0" else 10)

    found = one_round(strategy, ScriptedGrid(strategy, answer), to_record(zeros))
    assert found is not None
    assert all(torch.equal(tensor, torch.full_like(tensor, -2.0)) for tensor in from_record(found).values())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_servers_steps_are_torchs(optimizer: str) -> None:
    """Weight decay is part of the gradient, and Adam's moments last."""
    settings = [f"optimizer={optimizer}", "weight_decay=0.1", "learning_rate=0.02"]
    found, _ = step("fedsgd", *settings, rounds=4)
    params = {name: tensor.clone().requires_grad_() for name, tensor in start().items()}
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    theirs = kind(params.values(), lr=0.02, weight_decay=0.1)
    for _ in range(4):
        theirs.zero_grad()
        torch.stack([risk(params, number) for number in range(4)]).mean().backward()
        theirs.step()
    assert_close(found, {name: tensor.detach() for name, tensor in params.items()})


def test_adam_goes_on_in_another_process() -> None:
    whole, _ = step("fedsgd", "optimizer=adam", rounds=1)
    _, first = step("fedsgd", "optimizer=adam", rounds=1)
    second = FedSGDStrategy(first.run, "run")
    second.load_state_dict(first.state_dict())
    ones = {name: torch.ones_like(tensor) for name, tensor in whole.items()}
    stepped = [strategy.update(whole, {GRADIENT: ones}) for strategy in (first, second)]
    assert_close(*stepped, rtol=0, atol=0)
    fresh = FedSGDStrategy(first.run, "run")
    fresh.load_state_dict({})  # an Adam without steps has no tensors to be kept
    assert fresh.state_dict() == {"adam": {}}


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Received(1, {MODEL: start()})
    whole = FedSGDClient(SITES[0], FedSGD(), {}).train(request)
    monkeypatch.setattr("perennial.client.trainer.PIECE", 7)
    pieces = FedSGDClient(SITES[0], FedSGD(), {}).train(request)
    assert_close(pieces.arrays[GRADIENT], whole.arrays[GRADIENT])
    assert pieces.metrics == pytest.approx(dict(whole.metrics))


def test_batch_norms_statistics_are_the_clients_mean(tmp_path: Path) -> None:
    """A gradient has none; without it an evaluation would use those of the start."""
    net = network(model_settings({"name": "mlp", "hidden": (8,), "norm": "batch"}), (2,), 2)
    sent = net.initial(0)
    reply = FedSGDClient(Site("client-0", SITES[0].data, net, 0), FedSGD(), {}).train(Received(1, {MODEL: sent}))
    hidden = F.linear(SITES[0].data.train.x, sent["featurizer.1.weight"], sent["featurizer.1.bias"])
    answer = reply.arrays[MODEL]
    assert answer.keys() == set(net.buffer_names)
    torch.testing.assert_close(answer["featurizer.2.running_mean"], 0.1 * hidden.mean(dim=0))
    assert answer["featurizer.2.num_batches_tracked"].item() == 1
    assert all(torch.equal(tensor, net.initial(0)[name]) for name, tensor in sent.items())
    for method in STRATEGIES:
        config = toy_config(method, "model.norm=batch", "learning_rate=0.5", rounds=5)
        summary = LocalRuntime(config).run(RunFolder.create(tmp_path / method, config))
        assert summary["left_out"] == {}


CLIPPED = ("privacy.mechanism=fixed", "privacy.noise_multiplier=0", "privacy.clipping_norm=0.1")
MASKED = ("privacy.mechanism=secagg", "privacy.range=2.9")
CENTRED = ("aggregation=centred-clipping", "aggregation.radius=0.05")


def trained(tmp_path: Path, method: str, *settings: str) -> tuple[Tensors, Tensors, Network]:
    """A model before and after two rounds in which nobody is left out, and its network."""
    voting = ["agreement=0.5"] if method == "and-mask" else []
    config = toy_config(method, *settings, *voting, rounds=2)
    summary = LocalRuntime(config).run(folder := RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"] == {}
    net = network(config.model, config.scenario.input_shape, config.scenario.classes)
    return net.initial(config.seed), folder.load_checkpoint().arrays, net


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, how) for method in STRATEGIES for how in ((), CLIPPED, MASKED, CENTRED)),
        *((method, how) for method in ("fedcurv", "fishr") for how in ((), CENTRED)),
        ("geometric", ()),
    ],
)
def test_what_is_frozen_stays_to_the_bit(method: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    """It is no part of a gradient, so nothing clips it towards 0 and it uses up no range."""
    own, frozen = "model.name=user_models:Plain", "model.freeze=featurizer"
    drawn = network(toy_config("fedsgd", own).model, (2,), 2).initial(0)
    torch.save({name: 3 * tensor for name, tensor in drawn.items()}, tmp_path / "own.pt")
    before, after, net = trained(tmp_path, method, own, frozen, f"model.weights={tmp_path / 'own.pt'}", *settings)
    assert after.keys() == before.keys()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved
    assert moved <= set(net.classifier_names)


@pytest.mark.parametrize("settings", [(), CLIPPED, MASKED, CENTRED])
@pytest.mark.parametrize("method", STRATEGIES)
def test_a_buffer_that_no_client_changes_stays(method: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    """A robust rule, clipping and the range see it from where it was sent."""
    before, after, net = trained(tmp_path, method, "model.name=user_models:Scaled", *settings)
    assert net.buffer_names == ("featurizer.scale",)
    assert torch.equal(after["featurizer.scale"], before["featurizer.scale"])
    assert not torch.equal(after["featurizer.inner.weight"], before["featurizer.inner.weight"])


@pytest.mark.parametrize("method", ["fedsgd", "vrex", "and-mask", "fedcurv"])
def test_clipping_leaves_batch_norms_statistics_where_the_clients_do(method: str, tmp_path: Path) -> None:
    _, plain, _ = trained(tmp_path / "mean", method, "model.norm=batch")
    before, after, net = trained(tmp_path / "rule", method, "model.norm=batch", *CENTRED)
    for name in net.buffer_names:
        if name.endswith("running_var"):
            assert float((after[name] - before[name]).norm()) <= 2 * 10 * 0.05 + 1e-6
            assert float((after[name] - plain[name]).norm()) <= float((before[name] - plain[name]).norm())


# ---------------------------------------------------------------------- AND-mask


def test_masked_signs_that_agree_are_told_to(tmp_path: Path) -> None:
    """In steps of a range that is no power of two, the mean of ones is a little less than one."""
    arrays = []
    for mechanism in ((), MASKED):
        config = toy_config("and-mask", "agreement=1", *mechanism, rounds=2)
        LocalRuntime(config).run(folder := RunFolder.create(tmp_path / f"run-{len(mechanism)}", config))
        arrays.append(folder.load_checkpoint().arrays)
    for name, tensor in arrays[0].items():
        assert torch.allclose(arrays[1][name], tensor, atol=1e-5)
        assert not torch.equal(tensor, network(config.model, (2,), 2).initial(0)[name])


# ---------------------------------------------------------------------- V-REx


def variance_penalised(params: Tensors, weight: float) -> Tensor:
    risks = torch.stack([risk(params, number) for number in range(4)])
    return risks.mean() + weight * risks.var(correction=0)


def test_vrex_descends_on_the_mean_and_the_variance_of_the_risks() -> None:
    """With no more than 1 for the first rounds, and 20 from then on."""
    found, _ = step("vrex", "learning_rate=0.05", "penalty=20", "anneal_rounds=2", rounds=4)
    annealed = lambda params, number: variance_penalised(params, 1 if number <= 2 else 20)  # noqa: E731
    assert_close(found, descended(annealed, 0.05, 4))
    small, _ = step("vrex", "learning_rate=0.05", "penalty=0.3", "anneal_rounds=2", rounds=2)
    assert_close(small, descended(lambda params, _: variance_penalised(params, 0.3), 0.05, 2))


@pytest.mark.parametrize(("method", "settings"), [("vrex", ["penalty=0"]), ("and-mask", ["agreement=0"])])
def test_without_their_term_both_are_fedsgd(method: str, settings: list[str]) -> None:
    """Of clients with equally many samples."""
    plain, _ = step("fedsgd", "learning_rate=0.3", rounds=2)
    found, _ = step(method, "learning_rate=0.3", *settings, rounds=2)
    assert_close(found, plain, rtol=0, atol=1e-7)


@pytest.mark.parametrize("mechanism", ["none", "secagg"])
@pytest.mark.parametrize("method", ["vrex", "and-mask"])
def test_environments_count_alike_however_many_samples_they_have(method: str, mechanism: str) -> None:
    half = strategy_for(toy_config(method, f"privacy.mechanism={mechanism}"), "run")
    weights = [
        half.weight(AcceptedReply("client-0", {}, MetricRecord({NUM_EXAMPLES: n}), ConfigRecord())) for n in (1, 9)
    ]
    assert weights == [1, 1]


@pytest.mark.parametrize("method", ["vrex", "and-mask"])
def test_alone_a_client_has_plain_gradient_descent(method: str) -> None:
    found, _ = step(
        method, "scenario.clients=1", "learning_rate=0.3", "penalty=50" if method == "vrex" else "agreement=1"
    )
    assert_close(found, descended(lambda params, _: risk(params, 0), 0.3))


def test_a_client_whose_risk_is_absurd_is_left_out() -> None:
    """In float32, its product with a gradient would be infinite."""

    def spoil(client: str, made: RecordDict) -> RecordDict:
        if client == "client-2":
            made.metric_records[METRICS]["risk"] = 1e38
        return made

    found, strategy = step("vrex", spoil=spoil)
    assert "'risk' is 1e+38, and largest=1e+09" in strategy.exchanges[-1].left_out["client-2"]
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


def test_a_client_that_does_not_say_its_risk_is_left_out() -> None:
    def without(client: str, made: RecordDict) -> RecordDict:
        if client == "client-2":
            del made.metric_records[METRICS]["risk"]
        return made

    found, strategy = step("vrex", "learning_rate=0.05", "penalty=3", "anneal_rounds=0", spoil=without)
    assert strategy.exchanges[-1].left_out == {"client-2": "the metric 'risk' is missing"}

    def three(params: Tensors, _: int) -> Tensor:
        risks = torch.stack([risk(params, number) for number in (0, 1, 3)])
        return risks.mean() + 3 * risks.var(correction=0)

    assert_close(found, descended(three, 0.05))


def test_vrexs_clients_send_what_fedsgds_do() -> None:
    request = Received(1, {MODEL: start()})
    ours, theirs = (
        VRExClient(SITES[1], VREx(), {}).train(request),
        FedSGDClient(SITES[1], FedSGD(), {}).train(request),
    )
    assert_close(ours.arrays[GRADIENT], theirs.arrays[GRADIENT], rtol=0, atol=0)


# ---------------------------------------------------------------------- AND-mask


def gradients(*rows: list[float]) -> Any:
    """Replies of clients 0, 1, ... with these values for the classifier's bias, and zeros elsewhere."""

    def spoil(client: str, made: RecordDict) -> RecordDict:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in start().items()}
        tensors["classifier.bias"] = torch.tensor(rows[int(client[-1])])
        made[GRADIENT] = to_record(tensors)
        return made

    return spoil


@pytest.mark.parametrize(
    ("agreement", "rescale", "step_of_bias"),
    [
        (1.0, False, [2.5, 0.0]),
        (1.0, True, [5.0, 0.0]),
        (0.5, False, [2.5, 1.0]),
        (0.51, True, [5.0, 0.0]),
        (0.0, True, [2.5, 1.0]),
    ],
)
def test_a_parameter_moves_where_enough_clients_agree(
    agreement: float, rescale: bool, step_of_bias: list[float]
) -> None:
    """Signs (+ + + +) and (+ + + −): mean signs 1 and 0.5; means 2.5 and 1."""
    settings = [f"agreement={agreement}", f"rescale={str(rescale).lower()}", "learning_rate=1"]
    found, _ = step("and-mask", *settings, spoil=gradients([1.0, 3.0], [2.0, 3.0], [3.0, 3.0], [4.0, -5.0]))
    moved = start()["classifier.bias"] - found["classifier.bias"]
    assert moved.tolist() == pytest.approx(step_of_bias)
    rest = start().keys() - {"classifier.bias"}
    assert all(torch.equal(found[name], start()[name]) for name in rest)


def test_a_gradient_of_zero_has_no_sign() -> None:
    """A dead parameter of one client is no veto below τ = 1, and one at τ = 1."""
    rows = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
    strict, _ = step("and-mask", "agreement=1", "learning_rate=1", spoil=gradients(*rows))
    mild, _ = step("and-mask", "agreement=0.75", "learning_rate=1", spoil=gradients(*rows))
    before = start()["classifier.bias"]
    assert (before - strict["classifier.bias"]).tolist() == pytest.approx([0, 1])
    assert (before - mild["classifier.bias"]).tolist() == pytest.approx([0.75, 1])


def test_where_all_gradients_are_zero_nothing_moves() -> None:
    found, _ = step("and-mask", "rescale=true", spoil=gradients(*[[0.0, 0.0]] * 4))
    assert_close(found, start(), rtol=0, atol=0)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_rescaling_keeps_the_mean_step_of_a_constant_gradient(kept: list[bool]) -> None:
    mask = torch.tensor(kept)
    found = masked(torch.full((len(kept),), 2.0), mask, rescale=True)
    assert found.mean().item() == pytest.approx(2.0 if any(kept) else 0.0)
    assert not found[~mask].any()


def test_one_client_is_a_caution() -> None:
    for method in (VREx(), AndMask()):
        assert "this is FedSGD" in method.caution(Toy(clients=1))
        assert method.caution(Toy()) == ""


def test_a_round_costs_what_fedavg_costs(tmp_path: Path) -> None:
    """n floats down, n floats up."""
    floats = sum(tensor.numel() for tensor in start().values())
    for method in STRATEGIES:
        config = toy_config(method, rounds=2)
        LocalRuntime(config).run(RunFolder.create(tmp_path / method, config))
        rows = [row for row in RunFolder(tmp_path / method).rows() if row["kind"] == "round"]
        assert all(row["bytes_down"] == row["bytes_up"] == 4 * 4 * floats for row in rows)


def test_clients_without_data_of_a_class_have_a_gradient_all_the_same() -> None:
    ones = SITES[0].data.train[SITES[0].data.train.y == 1]
    site = Site("client-0", ClientData(ones, ones, {}), NET, 0)
    gradient = FedSGDClient(site, FedSGD(), {}).train(Received(1, {MODEL: start()})).arrays[GRADIENT]
    assert gradient["classifier.bias"][0] > 0 > gradient["classifier.bias"][1]
