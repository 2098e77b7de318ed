from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import Quadratic, quadratic_site, theta, toy_site
from torch import nn

from perennial.client.methods.apfl import MIXING, APFLClient
from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.local import LocalClient
from perennial.client.objectives import interpolate, mixing_slope
from perennial.client.trainer import Received, Site
from perennial.common.methods.apfl import APFL
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.local import Local
from perennial.common.models.architectures import Model, build
from perennial.common.models.network import Network
from perennial.common.models.settings import ModelSettings
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config


class Normed(ModelSettings):
    """A network with buffers."""

    summary = source = "tests"
    name: Literal["normed"] = "normed"


@build.register
def _normed(settings: Normed, input_shape: tuple[int, ...], classes: int) -> Model:
    return Model(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2)), nn.Linear(2, classes))


class QuadraticClient(Quadratic, APFLClient):
    pass


def toy(net: Network | None = None) -> Site:
    site = toy_site()
    return Site(site.client, site.data, net or site.network, site.seed)


NETS = [toy_site().network, Network(Normed(), (2,), 2, "cpu")]
HOW: dict[str, Any] = {"local_steps": 5, "momentum": 0.5, "weight_decay": 0.01, "batch_size": 7}


def model(net: Network, seed: int = 7) -> Tensors:
    return net.initial(seed)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---------------------------------------------------------------------- the objectives


def test_the_interpolation_is_exact_at_its_ends_and_only_of_the_named_tensors() -> None:
    start, end = model(NETS[0]), model(NETS[0], 8)
    names = NETS[0].parameter_names
    assert_equal(interpolate(start, end, 0.0, names), start)
    assert_equal(interpolate(start, end, 1.0, names), end)
    quarter = interpolate(start, end, 0.25, names[:1])
    assert list(quarter) == [names[0]]
    torch.testing.assert_close(quarter[names[0]], 0.75 * start[names[0]] + 0.25 * end[names[0]])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_slope_is_the_risks_derivative_in_alpha(alpha: float) -> None:
    net, train = NETS[0], toy_site().data.train
    w, v = ({name: t.double() for name, t in model(net, seed).items()} for seed in (7, 8))

    def risk(mixture: Tensors) -> torch.Tensor:
        return F.cross_entropy(net.predict(mixture, train.x.double()), train.y)

    def at(alpha: float) -> float:
        return risk({name: alpha * v[name] + (1 - alpha) * w[name] for name in w}).item()

    gradient = torch.func.grad(risk)(interpolate(w, v, alpha, w))
    slope = mixing_slope(*([part[name] for name in w] for part in (w, v, gradient)))
    assert slope.item() == pytest.approx((at(alpha + 1e-5) - at(alpha - 1e-5)) / 2e-5, rel=1e-4)


# ---------------------------------------------------------------------- special cases


@pytest.mark.parametrize("net", NETS, ids=["mlp", "batchnorm"])
def test_all_own_is_local_training(net: Network) -> None:
    found = APFLClient(toy(net), APFL(mixing=1, adaptive=False, **HOW), {PERSONAL: model(net)})
    local = LocalClient(toy(net), Local(**HOW), {PERSONAL: model(net)})
    for round_ in (1, 2, 3):
        found.train(Received(round_, {MODEL: model(net, round_)}))
        local.train(Received(round_))
        assert_equal(found.kept[PERSONAL], local.kept[PERSONAL])
    shared = Received(3, {MODEL: model(net, 9)})
    for x in (found.data.validation.x, found.data.train.x):
        assert torch.equal(found.models(shared)["personal"](x), local.models(shared)["personal"](x))


def test_none_own_is_the_global_model_and_the_own_one_rests() -> None:
    net = NETS[0]
    found = APFLClient(toy(), APFL(mixing=0, adaptive=False, weight_decay=0.1), {PERSONAL: model(net, 8)})
    found.train(Received(1, {MODEL: model(net)}))
    assert_equal(found.kept[PERSONAL], model(net, 8))
    shared = Received(1, {MODEL: model(net, 9)})
    models, x = found.models(shared), found.data.validation.x
    assert torch.equal(models["personal"](x), models["global"](x))


@pytest.mark.parametrize("net", NETS, ids=["mlp", "batchnorm"])
@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
def test_the_shared_model_is_fedavgs_whatever_the_mixture(mixing: float, net: Network) -> None:
    received = Received(2, {MODEL: model(net)})
    found = APFLClient(toy(net), APFL(mixing=mixing, **HOW), {PERSONAL: model(net, 8)}).train(received)
    plain = FedAvgClient(toy(net), FedAvg(**HOW), {}).train(received)
    assert found.arrays.keys() == {MODEL}  # v and α stay
    assert_equal(found.arrays[MODEL], plain.arrays[MODEL])
    assert found.metrics["risk"] == plain.metrics["risk"]


# ---------------------------------------------------------------------- by hand


def test_two_clients_two_rounds_by_hand() -> None:
    """R_i = ½ (θ − c_i)², c = 2 and 6, η = ¼, α = ½, w = v = 0, one step a round.

    Round 1: w_i = ½, 3/2; v_i = ¼, ¾; v − w was 0, so α stays. Mean: w = 1.
    Round 2: v̄ = 5/8, 7/8; ∇R(v̄) = −11/8, −41/8; slopes (−¾)(−11/8), (−¼)(−41/8).
    """
    how: dict[str, Any] = {"learning_rate": 0.25, "local_steps": 1}
    clients = [QuadraticClient(quadratic_site([[c]]), APFL(**how), {}) for c in (2.0, 6.0)]

    def train(round_: int, w: float) -> list[float]:
        return [c.train(Received(round_, {MODEL: theta(w)})).arrays[MODEL]["theta"].item() for c in clients]

    def own() -> list[float]:
        return [c.kept[PERSONAL]["theta"].item() for c in clients]

    def alpha() -> list[float]:
        return [c.kept[MIXING]["alpha"].item() for c in clients]

    assert train(1, 0.0) == [0.5, 1.5]
    assert own() == [0.25, 0.75]
    assert alpha() == [0.5, 0.5]
    assert train(2, 1.0) == [1.25, 2.25]
    assert own() == [0.25 + 0.25 * 0.5 * 11 / 8, 0.75 + 0.25 * 0.5 * 41 / 8]
    assert alpha() == [0.5 - 0.25 * (3 / 4) * (11 / 8), 0.5 - 0.25 * (1 / 4) * (41 / 8)]
    # What is evaluated is mixed from the new mean, w = 7/4.
    for found, v, share in zip(clients, own(), alpha(), strict=True):
        mixture = found.mixture(theta(1.75), found.kept[PERSONAL], found.mixing())
        assert mixture["theta"].item() == pytest.approx(share * v + (1 - share) * 1.75, rel=1e-12)


def test_steps_of_a_network_are_the_papers() -> None:
    net, eta = NETS[0], 0.1
    found = APFLClient(toy(), APFL(mixing=0.3, learning_rate=eta, local_steps=4, batch_size=8), {})
    w, v, alpha = model(net), model(net, 8), 0.3
    found.kept[PERSONAL] = model(net, 8)
    found.train(Received(2, {MODEL: model(net)}))
    for number, batch in enumerate(found.batches(4, 2)):
        gradient = torch.func.grad(lambda p, b=batch: F.cross_entropy(net.predict(p, b.x), b.y))
        at_w, at_mix = gradient(w), gradient({n: alpha * v[n] + (1 - alpha) * w[n] for n in w})
        slope = sum(float(((v[n] - w[n]) * at_mix[n]).sum()) for n in w)
        w = {n: w[n] - eta * at_w[n] for n in w}
        v = {n: v[n] - eta * alpha * at_mix[n] for n in v}
        alpha -= eta * slope if number == 0 else 0
    for name in v:
        torch.testing.assert_close(found.kept[PERSONAL][name], v[name])
    assert found.mixing() == pytest.approx(alpha, rel=1e-5)
    assert alpha != 0.3


@pytest.mark.parametrize(("own", "bound"), [(-3.0, 0.0), (1.5, 1.0)])
def test_alpha_stays_between_0_and_1(own: float, bound: float) -> None:
    """The optimum is 2. From w = 0, v = −3 leads away from it and v = 1.5 towards it."""
    found = QuadraticClient(quadratic_site([[2.0]]), APFL(learning_rate=1.0), {PERSONAL: theta(own)})
    reply = found.train(Received(1, {MODEL: theta(0.0)}))
    assert found.kept[MIXING]["alpha"].item() == reply.metrics["mixing"] == bound


def test_alpha_is_kept_and_moves_only_where_it_is_adaptive() -> None:
    fixed = QuadraticClient(quadratic_site([[2.0]]), APFL(adaptive=False, mixing=0.75), {PERSONAL: theta(-3.0)})
    fixed.train(Received(1, {MODEL: theta(0.0)}))
    assert fixed.mixing() == 0.75
    kept = {PERSONAL: theta(-3.0), MIXING: {"alpha": torch.tensor(0.125, dtype=torch.float64)}}
    later = QuadraticClient(quadratic_site([[2.0]]), APFL(adaptive=False, mixing=0.75), kept)
    assert later.train(Received(2, {MODEL: theta(0.0)})).metrics["mixing"] == 0.125


def test_what_was_received_and_kept_is_left_as_it_was() -> None:
    net = NETS[1]
    kept, shared = model(net, 8), model(net)
    found = APFLClient(toy(net), APFL(**HOW), {PERSONAL: kept})
    reply = found.train(Received(1, {MODEL: shared}))
    found.evaluate(Received(1, {MODEL: shared}))
    assert_equal(kept, model(net, 8))
    assert_equal(shared, model(net))
    for tensors in (reply.arrays[MODEL], found.kept[PERSONAL]):
        assert not any(tensor.requires_grad or tensor.grad_fn for tensor in tensors.values())


def test_a_model_goes_down_and_up(tmp_path: Path) -> None:
    config = toy_config("apfl", rounds=2)
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    size = 4 * sum(tensor.numel() for tensor in model(NETS[0]).values())
    assert summary["bytes_per_client_and_round"] == {"down": size, "up": size}
