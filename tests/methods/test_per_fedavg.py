from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import Quadratic, quadratic_site, theta, toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.per_fedavg import PerFedAvgClient
from perennial.client.steps import Working
from perennial.client.trainer import Received
from perennial.common.data.examples import Examples
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.per_fedavg import PerFedAvg
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config


class QuadraticClient(Quadratic, PerFedAvgClient):
    pass


CENTRES = [[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0], [2.0, 2.0]]
CURVATURES = [[1.0, 2.0], [0.5, 3.0], [2.0, 1.0], [4.0, 0.25]]


def client(**hparams: Any) -> PerFedAvgClient:
    return PerFedAvgClient(toy_site(), PerFedAvg(**hparams), {})


def start() -> Tensors:
    return toy_site().network.initial(7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_on_a_quadratic_a_step_is_the_closed_form(weight_decay: float) -> None:
    """∇F(w) = (I − aH) H ((I − aH) w + aHc − c) for R(w) = ½ (w − c)ᵀ H (w − c); here with decay μ in R."""
    a, b, c, h = 0.1, 0.3, torch.tensor([1.0, -2.0]).double(), torch.tensor([1.5, 4.0]).double()
    how = {"adaptation_rate": a, "learning_rate": b, "local_steps": 3, "weight_decay": weight_decay}
    found = QuadraticClient(quadratic_site([c.tolist()], [h.tolist()]), PerFedAvg(**how), {})
    reply = found.train(Received(1, {MODEL: theta(5.0, 5.0)}))
    w = torch.tensor([5.0, 5.0]).double()
    for _ in range(3):
        adapted = w - a * (h * (w - c) + weight_decay * w)
        w = w - b * (1 - a * (h + weight_decay)) * (h * (adapted - c) + weight_decay * adapted)
    torch.testing.assert_close(reply.arrays[MODEL]["theta"], w, rtol=1e-9, atol=0)


@pytest.mark.parametrize("variant", ["hf", "fo"])
def test_each_part_of_a_step_has_a_mini_batch_of_its_own(variant: str) -> None:
    """B adapts, B′ gives the gradient and B″ the Hessian, which first-order leaves out."""
    how: dict[str, Any] = {"adaptation_rate": 0.1, "learning_rate": 0.3, "local_steps": 6, "batch_size": 1}
    found = QuadraticClient(quadratic_site(CENTRES, CURVATURES), PerFedAvg(variant=variant, **how), {})
    reply = found.train(Received(2, {MODEL: theta(5.0, 5.0)}))
    draws = [[b.x[0].chunk(2) for b in found.batches(6, 2, use)] for use in ("adaptation", "batches", "curvature")]
    assert len({tuple(tuple(c.tolist()) for c, _ in draw) for draw in draws}) == 3
    w = theta(5.0, 5.0)["theta"]
    for (c, h), (c1, h1), (_, h2) in zip(*draws, strict=True):
        u = h1 * (w - 0.1 * h * (w - c) - c1)
        w = w - 0.3 * (u - 0.1 * h2 * u if variant == "hf" else u)
    torch.testing.assert_close(reply.arrays[MODEL]["theta"], w, rtol=1e-9, atol=0)


def test_the_finite_difference_is_the_hessian_of_a_network_times_the_gradient() -> None:
    found, a = client(adaptation_rate=0.5), 0.5
    w = {name: tensor.double() for name, tensor in start().items()}
    train = found.data.train
    batch = Examples(train.x.double(), train.y, train.environment)
    names = found.network.parameter_names
    direction, metrics = found.meta_gradient(Working(w, names), batch, batch, batch, Received(1))

    def meta_risk(w: Tensors) -> torch.Tensor:
        gradient = torch.func.grad(risk)(w)
        return risk({name: w[name] - a * gradient[name] for name in w})

    def risk(w: Tensors) -> torch.Tensor:
        return F.cross_entropy(found.network.predict(w, batch.x), batch.y)

    for part, name in zip(direction, names, strict=True):
        torch.testing.assert_close(part, torch.func.grad(meta_risk)(w)[name], rtol=1e-4, atol=1e-8)
    assert metrics["risk"].item() == pytest.approx(meta_risk(w).item())


@pytest.mark.parametrize("variant", ["hf", "fo"])
def test_without_adaptation_it_is_fedavg(variant: Any) -> None:
    how: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "batch_size": 7}
    for round_ in (1, 2):
        received = Received(round_, {MODEL: start()})
        found = client(adaptation_rate=0, variant=variant, **how).train(received)
        plain = FedAvgClient(toy_site(), FedAvg(**how), {}).train(received)
        assert found.metrics == plain.metrics
        assert all(torch.equal(found.arrays[MODEL][name], plain.arrays[MODEL][name]) for name in start())


@pytest.mark.parametrize("batch_size", [7, 64])
def test_the_personal_model_is_one_full_gradient_step_from_the_global_one(batch_size: int) -> None:
    found, received = client(adaptation_rate=0.4, batch_size=batch_size), Received(3, {MODEL: start()})
    train = found.data.train
    gradient = torch.func.grad(lambda w: F.cross_entropy(found.network.predict(w, train.x), train.y))(start())
    adapted = found.adapted(received)
    for name, tensor in start().items():
        torch.testing.assert_close(adapted[name], tensor - 0.4 * gradient[name])
        assert not adapted[name].requires_grad
        assert torch.equal(received[MODEL][name], tensor)


def test_evaluation_adapts_anew_and_leaves_nothing_behind() -> None:
    found, received = client(adaptation_rate=0.4), Received(3, {MODEL: start()})
    once, twice = found.evaluate(received), found.evaluate(received)
    assert once == twice
    assert once.metrics["personal/validation/loss"] < once.metrics["global/validation/loss"]  # type: ignore[operator]
    assert found.kept == {}
    assert all(torch.equal(received[MODEL][name], tensor) for name, tensor in start().items())


def test_a_model_goes_down_and_up(tmp_path: Path) -> None:
    config = toy_config("per-fedavg", rounds=2)
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    size = 4 * sum(tensor.numel() for tensor in start().values())
    assert summary["bytes_per_client_and_round"] == {"down": size, "up": size}
