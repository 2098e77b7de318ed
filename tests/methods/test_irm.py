"""Federated IRM: the penalty, one step, annealing and rescaling, order of the mini-batches, optimizer state."""

import math
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from float64_federations import (
    K1,
    LITERAL,
    Squares,
    close,
    federate,
    logistic_site,
    logistic_sites,
    logits,
    population,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_clients import ScriptedGrid, content, one_round
from tiny_runs import quadratic_site, theta, toy_site
from torch import Tensor

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.irm import IrmClient
from perennial.client.objectives import irm_penalty, squared_norm
from perennial.client.steps import Working
from perennial.client.trainer import Received
from perennial.common.config import load_config
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.irm import InvariantTraining, Irm
from perennial.common.methods.stateful import StatefulTraining
from perennial.common.tasks import Classes
from perennial.common.wire import MODEL, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.methods.uniform import UniformStrategy
from perennial.testing.tiny_federation import toy_config

FLOAT: dict[str, Any] = {"dtype": torch.float64}


def sample(seed: int, count: int = 12, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(count, classes, generator=generator, **FLOAT)
    return z, torch.randint(0, classes, (count,), generator=generator)


# ---------------------------------------------------------------------- the penalty


def slopes(z: Tensor, y: Tensor) -> Tensor:
    return Classes(z.shape[1]).scale_slopes(z, y)


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_the_closed_form_is_the_derivative_by_the_dummy_scale(seed: int) -> None:
    z, y = sample(seed)
    z.requires_grad_()
    scale = torch.ones((), requires_grad=True, **FLOAT)
    (g,) = torch.autograd.grad(F.cross_entropy(scale * z, y), scale, create_graph=True)
    assert close(slopes(z, y).mean(), g)
    (through_the_dummy,) = torch.autograd.grad(g.square(), z)
    (closed,) = torch.autograd.grad(irm_penalty(slopes, z, y), z)
    assert close(closed, through_the_dummy)


def test_no_logits_no_gradient_and_one_logit_is_binary_cross_entropy() -> None:
    assert slopes(torch.zeros(4, 3), torch.tensor([0, 1, 2, 1])).mean() == 0
    z, y = sample(1, classes=1)[0], sample(1, classes=2)[1]
    g = ((z[:, 0].sigmoid() - y) * z[:, 0]).mean()
    assert close(slopes(torch.cat([torch.zeros_like(z), z], dim=1), y).mean(), g)


def test_halves_are_unbiased_over_the_order_of_samples_and_single_is_not() -> None:
    """E over orders of g₁ g₂ is the mean of c_i c_j over pairs i ≠ j, of g² it is g² of all."""
    z, y = sample(3, count=4)
    each = torch.stack([slopes(z[i : i + 1], y[i : i + 1]).mean() for i in range(4)])
    orders = [list(order) for order in permutations(range(4))]
    found = torch.stack([irm_penalty(slopes, z[order], y[order], halves=True) for order in orders]).mean()
    pairs = (each.sum().square() - each.square().sum()) / 12
    assert close(found, pairs)
    single = irm_penalty(slopes, z, y)
    assert close(single, each.mean().square())
    assert close(single - found, each.var() / 4)  # the bias is the variance of g
    assert close(irm_penalty(slopes, z[:1], y[:1], halves=True), irm_penalty(slopes, z[:1], y[:1]))


def test_point_check_of_the_test_bed() -> None:
    """From another program."""
    point = {"theta": torch.tensor([0.3, 0.7, -0.2], requires_grad=True, **FLOAT)}
    part = population(0.95, 1)
    z = logits(point, part.x)
    risk, g = F.cross_entropy(z, part.y), slopes(z, part.y).mean()
    assert risk.item() == pytest.approx(0.43814345, abs=5e-9)
    assert g.item() == pytest.approx(-0.18511019, abs=5e-9)
    of_risk, of_penalty = (
        torch.autograd.grad(value, point["theta"], retain_graph=True)[0].tolist() for value in (risk, g.square())
    )
    assert of_risk == pytest.approx([-0.12142016, -0.27915900, -0.23363579], abs=5e-9)
    assert of_penalty == pytest.approx([0.00418727, 0.04746903, 0.06259738], abs=5e-9)


def test_the_shared_loss_takes_the_clients_environments_as_one() -> None:
    """Pooled, not the sum over contexts."""
    client = IrmClient(logistic_site(0, (0.95, 0.70), 1), Irm(penalty=10, **LITERAL), {})
    point = {"theta": torch.tensor([0.3, 0.7, -0.2], **FLOAT)}
    value, metrics = client.loss(point, client.data.train, Received(1))
    assert value.item() == pytest.approx(0.62456246, abs=5e-9)
    assert value.item() == pytest.approx((metrics["risk"] + 10 * metrics["penalty"]).item())


def test_an_invariant_predictor_has_no_gradient_in_any_environment_and_pooled_erm_has() -> None:
    """θ = (ln 3, 0), and the pooled risk's minimiser."""
    for (p,), expected in zip(K1, (0.01008, 0.00112, 0.00112, 0.01008), strict=True):
        part = population(p, 1)
        assert (
            irm_penalty(slopes, logits({"theta": torch.tensor([math.log(3), 0, 0], **FLOAT)}, part.x), part.y)
            < 1e-25
        )
        erm = {"theta": torch.tensor([1.0986123, 1.9459101, 0], **FLOAT)}
        assert irm_penalty(slopes, logits(erm, part.x), part.y).item() == pytest.approx(expected, abs=5e-6)


# ---------------------------------------------------------------------- steps and rounds


def test_one_full_step_per_round_is_gradient_descent_on_the_mean_loss() -> None:
    """`ν ← ν − α γ ∇ mean_i L^i(ν)`."""
    hparams = Irm(penalty=10, local_steps=1, learning_rate=0.05, **LITERAL)
    start = {"theta": torch.tensor([0.1, 0.1, 0.0], **FLOAT)}
    found, _ = federate(lambda site, kept: IrmClient(site, hparams, kept), logistic_sites(), start, 4, mixing=0.5)

    nu = start["theta"].clone()
    for _ in range(4):
        nu.requires_grad_()
        losses = []
        for site in logistic_sites():
            z = logits({"theta": nu}, site.data.train.x)
            scale = torch.ones((), requires_grad=True, **FLOAT)
            risk = F.cross_entropy(scale * z, site.data.train.y)
            (g,) = torch.autograd.grad(risk, scale, create_graph=True)
            losses.append(risk + 10 * g**2)
        nu = (nu - 0.5 * 0.05 * torch.autograd.grad(torch.stack(losses).mean(), nu)[0]).detach()
    assert torch.allclose(found["theta"], nu, rtol=0, atol=1e-15)


def test_without_penalty_a_client_takes_fedavgs_steps() -> None:
    site = toy_site()
    how: dict[str, Any] = {"local_steps": 7, "batch_size": 16, "momentum": 0.5}
    model = site.network.initial(0)
    ours = IrmClient(site, Irm(penalty=0, **how), {}).train(Received(3, {MODEL: model}))
    theirs = FedAvgClient(site, FedAvg(**how), {}).train(Received(3, {MODEL: model}))
    assert all(torch.equal(ours.arrays[MODEL][name], tensor) for name, tensor in theirs.arrays[MODEL].items())
    assert ours.metrics["risk"] == theirs.metrics["risk"]


def test_the_weight_anneals_and_the_objective_is_divided_by_it() -> None:
    """At most 1 in the first rounds, then λ; above 1 the gradient is `∇g² + (1/λ) ∇(R + decay)`."""
    site = logistic_site(0, (0.9,), 1)
    point = {"theta": torch.tensor([0.3, 0.7, -0.2], **FLOAT)}

    def gradient(round_: int, **how: Any) -> torch.Tensor:
        settings = LITERAL | {"anneal_rounds": 2, "penalty": 50, "weight_decay": 0.3, "rescale": True} | how
        client = IrmClient(site, Irm(**settings), {})
        model = Working(point, ["theta"])
        return model.gradient(client.loss(model.tensors, site.data.train, Received(round_))[0])[0]

    model = Working(point, ["theta"])
    z = logits(model.tensors, site.data.train.x)
    risk = F.cross_entropy(z, site.data.train.y) + 0.15 * squared_norm(model.tensors, ["theta"])
    of_risk, of_penalty = (
        model.gradient(risk, create_graph=True)[0],
        model.gradient(irm_penalty(slopes, logits(model.tensors, site.data.train.x), site.data.train.y))[0],
    )
    for round_, how, expected in (
        (2, {}, of_risk + of_penalty),
        (3, {}, of_penalty + of_risk / 50),
        (3, {"rescale": False}, of_risk + 50 * of_penalty),
        (2, {"penalty": 0.25}, of_risk + 0.25 * of_penalty),
        (3, {"penalty": 0.25}, of_risk + 0.25 * of_penalty),
    ):
        assert close(gradient(round_, **how), expected.detach())


@pytest.mark.parametrize(
    ("penalty", "shape", "colour"),
    [(0, 1.0986, 1.9459), (10, 1.390, 1.698), (100, 1.466, 0.805), (1e4, 1.113, 0.015)],
)
def test_enough_penalty_turns_the_shared_model_from_the_colour_to_the_shape(
    penalty: float, shape: float, colour: float
) -> None:
    """Minimisers of the mean loss without the third feature, to three digits."""
    how = LITERAL | {"rescale": True}
    clients = [IrmClient(logistic_site(i, own, 1), Irm(penalty=penalty, **how), {}) for i, own in enumerate(K1)]

    def gradient(*point: float) -> torch.Tensor:
        model = Working({"theta": torch.tensor([*point, 0.0], **FLOAT)}, ["theta"])
        losses = [client.loss(model.tensors, client.data.train, Received(1))[0] for client in clients]
        return model.gradient(torch.stack(losses).mean())[0][:2]

    assert gradient(shape, colour).norm() < 2e-4
    for x, y in ((0.05, 0.0), (-0.05, 0.0), (0.0, 0.05), (0.0, -0.05)):  # it falls towards the minimiser
        assert gradient(shape + x, colour + y) @ torch.tensor([x, y], **FLOAT) > 0


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_convergence_theorem_on_random_quadratics(seed: int) -> None:
    """PerInvFL, Theorem 2 (A.2): drift of the local copies and descent of L, in every round."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, **FLOAT)

    count, steps = 2 + seed % 4, 1 + seed % 11
    centres, curvatures = 4 * draw(count, 2) - 2, 2 * draw(count, 2) - (0.5 if seed % 2 else 0)
    smooth, alpha = curvatures.abs().max().item(), 0.1 + 0.9 * draw(1).item()
    gamma = 1 / (steps * smooth * math.sqrt(32 * (steps + 3)))
    visited: list[tuple[int, torch.Tensor]] = []

    class Watched(Squares, IrmClient[Irm]):
        def shared_step(self, v: Working, *rest: Any) -> Any:
            visited.append((int(self.client[-1]), v.values[0].clone()))
            return super().shared_step(v, *rest)

    def gradient(i: int, x: torch.Tensor) -> torch.Tensor:
        return curvatures[i] * (x - centres[i])

    def mean_gradient(x: torch.Tensor) -> torch.Tensor:
        return (curvatures * (x - centres)).mean(0)

    def value(x: torch.Tensor) -> float:
        return (curvatures * (x - centres) ** 2).sum(1).mean().item() / 2

    sites = [quadratic_site([centres[i].tolist()], [curvatures[i].tolist()], f"client-{i}") for i in range(count)]
    hparams = Irm(local_steps=steps, learning_rate=gamma, batch_order="sequential", **LITERAL)
    nu = theta(1.5, -1.5)
    for _ in range(3):
        visited.clear()
        after, _ = federate(lambda site, kept: Watched(site, hparams, kept), sites, nu, 1, alpha)
        x, slope = nu["theta"], mean_gradient(nu["theta"]).square().sum().item()
        # δ² bounds the clients' gradient diversity at every point that is met.
        points = [point for _, point in visited]
        delta = max(
            sum((gradient(i, p) - mean_gradient(p)).square().sum().item() for i in range(count)) / count
            for p in points
        )
        drift = sum((gradient(i, p) - gradient(i, x)).square().sum().item() for i, p in visited) / len(visited)
        assert drift <= 16 * (steps * gamma * smooth) ** 2 * (delta + slope) + 1e-12
        whole = alpha * gamma * steps
        bound = 4 * (value(x) - value(after["theta"])) / whole
        bound += (
            32 * (whole * smooth / alpha) ** 2 * delta
            + 32 * (1 + steps) * (whole * smooth) ** 3 * delta / alpha**2
        )
        assert slope <= bound + 1e-12
        nu = after


# ---------------------------------------------------------------------- order and state


def test_sequential_batches_go_on_where_the_last_round_ended() -> None:
    """7 samples in batches of 3, 3, 1; the place is a function of the round."""
    site = quadratic_site([[float(i)] for i in range(7)])
    client = IrmClient(site, Irm(batch_order="sequential", batch_size=3), {})
    found = [[batch.x[:, 0].tolist() for batch in client.batches(2, round_)] for round_ in (1, 2, 3, 4)]
    first, second, third = [0, 1, 2], [3, 4, 5], [6]
    assert found == [[first, second], [third, first], [second, third], [first, second]]
    client = IrmClient(site, Irm(batch_order="sequential", batch_size=3, local_unit="epoch"), {})
    assert [batch.x[:, 0].tolist() for batch in client.batches(1, 5)] == [first, second, third]


def test_adam_goes_on_from_round_to_round_although_the_model_is_replaced() -> None:
    site, model = quadratic_site([[3.0]]), theta(0.0)

    class Client(Squares, IrmClient[Irm]):
        pass

    def rounds(kept: dict[str, Any], numbers: range) -> Any:
        for number in numbers:
            client = Client(site, Irm(optimizer="adam", learning_rate=0.1, local_steps=2, **LITERAL), kept)
            reply, kept = client.train(Received(number, {MODEL: model})), client.kept
        return reply.arrays[MODEL]["theta"].item(), kept

    x = mean = square = 0.0
    for step in range(1, 7):  # Kingma and Ba 2015, Algorithm 1
        x = 0.0 if step % 2 else x
        mean, square = 0.9 * mean + 0.1 * (x - 3), 0.999 * square + 0.001 * (x - 3) ** 2
        x -= 0.1 * mean / (1 - 0.9**step) / (math.sqrt(square / (1 - 0.999**step)) + 1e-8)
    reached, kept = rounds({}, range(1, 4))
    assert reached == pytest.approx(x, abs=1e-12)
    assert rounds({}, range(3, 4))[0] != pytest.approx(reached, abs=1e-6)
    before = {name: tensor.clone() for name, tensor in kept["optimizer-shared"].items()}
    rounds(dict(kept), range(4, 5))
    assert all(torch.equal(kept["optimizer-shared"][name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", ["perinvfl", "irm", "irm-l2", "irm-ft", "groupdro", "ftfa"])
def test_the_preset_sets_defaults_that_a_setting_overrides(name: str, tmp_path: Any) -> None:
    options = {"method": name, "scenario": "rc-mnist"}
    config = load_config(options=options, settings=["preset=code", "batch_size=64"])
    method = config.method
    assert isinstance(method, StatefulTraining)
    assert (method.optimizer, method.batch_order, method.learning_rate) == ("adam", "sequential", 5e-4)
    assert {key: getattr(method, key) for key in method.CODE} == {**method.CODE, "batch_size": 64}
    assert method.batch_size == type(method)().batch_size == 64  # as set, though it is the other preset's default
    if isinstance(method, InvariantTraining):
        assert (method.penalty, method.penalty_estimator, method.weight_decay) == (1e9, "single", 0.0022)
    (tmp_path / "config.toml").write_text(config.toml())
    assert load_config(tmp_path / "config.toml") == config


# ---------------------------------------------------------------------- server


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
def test_the_server_goes_the_way_to_the_uniform_mean_whatever_the_sample_counts(mixing: float) -> None:
    strategy = UniformStrategy(toy_config("irm", f"mixing={mixing}"), "run")
    counts = {client: 10**i for i, client in enumerate(strategy.run.scenario.client_ids)}
    grid = ScriptedGrid(strategy, lambda c, _: content({MODEL: {"w": torch.full((2,), float(c[-1]))}}, counts[c]))
    moved = one_round(strategy, grid, to_record({"w": torch.full((2,), 5.0)}))
    assert moved is not None
    assert moved["w"].numpy().tolist() == [5 + mixing * (1.5 - 5)] * 2


def test_a_round_moves_the_models_numbers_and_no_more(tmp_path: Any) -> None:
    config = toy_config("irm", rounds=1)
    LocalRuntime(config).run(RunFolder.create(tmp_path, config))
    row = next(row for row in RunFolder(tmp_path).rows() if row["kind"] == "round")
    numbers = 2 * 8 + 8 + 8 * 2 + 2
    assert (row["bytes_down"], row["bytes_up"]) == (4 * 4 * numbers, 4 * 4 * numbers)
