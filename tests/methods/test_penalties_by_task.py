"""What methods make of other tasks than classes: IRM's penalty and Fishr's variances against autograd, no negative
risk, the ending of FL Games."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Message, MetricRecord, RecordDict
from sklearn.metrics import mean_poisson_deviance
from torch import Tensor

from perennial.client.methods.fedilc import FedILCClient
from perennial.client.methods.irm import IrmClient
from perennial.client.objectives import irm_penalty
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.mathematics.gradient_variance import head_sums, variance
from perennial.common.methods.fedilc import PULL, VARIANCE, FedCurv
from perennial.common.methods.irm import Irm
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.tasks import Event, Labels, Numbers, PredictionTask
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import METRICS, MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import SpoilingGrid, toy_config

Oracle = Callable[[Tensor, Tensor], Tensor]
"""PyTorch's own loss of outputs and targets, the mean over both."""
UNITS: dict[str, Any] = {"mean": (1.0, -2.0), "scale": (2.0, 0.5)}
NAMES = ("days", "cost")


def in_units(loss: Callable[..., Tensor]) -> Oracle:
    """A loss of standardised targets."""
    mean, scale = (torch.tensor(UNITS[name], dtype=torch.float64) for name in ("mean", "scale"))
    return lambda outputs, targets: loss(outputs, (targets - mean) / scale)


def hazards(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log of the probability that each sample's event happens when it does, or not before it was censored."""
    losses = []
    for logits, (time, happened) in zip(outputs, targets.tolist(), strict=True):
        chance = logits.sigmoid()
        survived = 0 if time <= 1 else 1 if time <= 3 else 2
        if not happened:  # an interval counts once its middle is reached
            survived = (time >= 0.5) + (time >= 2)
        likelihood = (1 - chance[:survived]).prod()
        losses.append(-(likelihood * chance[survived] if happened and survived < 2 else likelihood).log())
    return torch.stack(losses).mean()


def known(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of the labels that are there, over all that could be."""
    there = ~targets.isnan()
    losses = F.binary_cross_entropy_with_logits(outputs[there], targets[there], reduction="sum")
    return losses / targets.numel()


TASKS: dict[str, tuple[PredictionTask, Oracle]] = {
    "squared": (Numbers(NAMES, **UNITS), in_units(lambda z, t: F.mse_loss(z, t) / 2)),
    "absolute": (Numbers(NAMES, "absolute", **UNITS), in_units(F.l1_loss)),
    "huber": (Numbers(NAMES, "huber", **UNITS), in_units(F.huber_loss)),
    "poisson": (Numbers(NAMES, "poisson"), F.poisson_nll_loss),  # which is less by what no output changes
    "labels": (Labels(NAMES), known),
    "event": (Event((1.0, 3.0)), hazards),
}
each_task = pytest.mark.parametrize("kind", TASKS)


def targets(kind: str, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "poisson":
        return torch.poisson(torch.full((count, 2), 1.5, dtype=torch.float64), generator=generator)
    if kind == "labels":
        y = torch.randint(0, 2, (count, 2), generator=generator).double()
        return y.masked_fill(torch.rand(count, 2, generator=generator) < 0.2, torch.nan)
    if kind == "event":
        happened = torch.randint(0, 2, (count,), generator=generator)
        return torch.stack([4 * torch.rand(count, generator=generator), happened], dim=1).double()
    return 2 * torch.randn(count, 2, generator=generator, dtype=torch.float64)


def outputs(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------------- IRM


@each_task
def test_irms_penalty_is_the_squared_derivative_by_a_scale_of_the_outputs(kind: str) -> None:
    """And its own gradient, which autograd takes through the derivative."""
    (task, loss), y = TASKS[kind], targets(kind, 12)
    z, scale = outputs(12).requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(scale * z, y), scale, create_graph=True)
    found = irm_penalty(task.scale_slopes, z, y)
    exact(found, slope.square())
    exact(torch.autograd.grad(found, z)[0], torch.autograd.grad(slope.square(), z)[0])
    halves = [torch.autograd.grad(loss(scale * z[own::2], y[own::2]), scale)[0] for own in (0, 1)]
    exact(irm_penalty(task.scale_slopes, z, y, halves=True), halves[0] * halves[1])


@each_task
def test_irms_client_descends_on_the_risk_and_the_penalty_of_its_task(kind: str) -> None:
    (task, loss), (net, start, part) = TASKS[kind], samples(kind)
    hparams = Irm(penalty=3.0, anneal_rounds=0, rescale=False, penalty_estimator="single", weight_decay=0.0)
    client = IrmClient(site(part, net, task), hparams, {})
    value, metrics = client.loss(start, part, Received(1))
    z, scale = net.predict(start, part.x), torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(scale * z, part.y), scale)
    exact(metrics["penalty"], slope.square())
    exact(value, task.loss(z, part.y) + 3 * slope.square())


# ---------------------------------------------------------------------- Fishr


@each_task
def test_fishrs_variance_is_that_of_per_sample_gradients(kind: str) -> None:
    (task, loss), (net, start, part) = TASKS[kind], samples(kind)
    found = variance(*head_sums(net, task, start, part), len(part))
    torch.testing.assert_close(found, by_autograd(net, loss, start, part).detach(), rtol=1e-7, atol=1e-9)
    assert found.max() > 1e-3


@each_task
def test_fishrs_pull_is_the_gradient_of_half_the_distance_of_the_variances(kind: str) -> None:
    """`J_eᵀ (c_e − c̄)` in all parameters, those of the featurizer with them."""
    (task, loss), (net, start, part) = TASKS[kind], samples(kind)
    client = FedILCClient(site(part, net, task), FedCurv(weight_decay=0.0), {})
    first = client.train(Received(1, {MODEL: start}))
    mean = first.arrays[VARIANCE][VARIANCE] / 3
    pull = client.train_fishr(Received(1, {VARIANCE: {VARIANCE: mean}})).arrays[PULL]
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    half = (by_autograd(net, loss, leaves, part) - mean).square().sum() / 2
    expected = torch.autograd.grad(half, list(leaves.values()), materialize_grads=True)
    for name, want in zip(leaves, expected, strict=True):
        torch.testing.assert_close(pull[name], want, rtol=1e-6, atol=1e-9)


def samples(kind: str, count: int = 20) -> tuple[Any, Tensors, Examples]:
    """A small network with a linear head, its parameters, and samples of a task."""
    net = network(model_settings({"name": "mlp", "hidden": (4,), "activation": "elu"}), (3,), 2)
    start = {name: tensor.double() for name, tensor in net.initial(5).items()}
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return net, start, Examples(x, targets(kind, count), torch.zeros(count, dtype=torch.long))


def site(part: Examples, net: Any, task: PredictionTask) -> Site:
    return Site("client-0", ClientData(part, part, {}), net, seed=0, task=task)


def by_autograd(net: Any, loss: Oracle, params: Tensors, part: Examples) -> Tensor:
    """The variances of every sample's own gradient in the head."""
    params = {name: t if t.requires_grad else t.clone().requires_grad_() for name, t in params.items()}
    head, gradients = [params["classifier.weight"], params["classifier.bias"]], []
    for h, y in zip(net.features(params, part.x), part.y, strict=True):
        own = torch.autograd.grad(loss(F.linear(h, *head)[None], y[None]), head, create_graph=True)
        gradients.append(torch.cat([part.flatten() for part in own]))
    return torch.stack(gradients).var(dim=0, correction=0)


# ---------------------------------------------------------------------- risks


def test_no_risk_is_negative_and_poissons_is_half_the_deviance() -> None:
    """As GroupDRO takes it: a negative one would count as 0."""
    task, y = Numbers(("visits",), "poisson"), targets("poisson", 30)[:, :1]
    z = outputs(30)[:, :1]
    expected = mean_poisson_deviance(y[:, 0].numpy(), z[:, 0].exp().numpy()) / 2
    assert task.loss(z, y).item() == pytest.approx(expected, rel=1e-9)
    least = task.loss(y.clamp(min=1e-30).log(), y, reduction="none")
    assert least.abs().max() < 1e-12
    assert (task.loss(z, y, reduction="none") >= 0).all()


# ---------------------------------------------------------------------- FL Games


@pytest.mark.parametrize("method", ["f-fl-games", "v-fl-games"])
@pytest.mark.parametrize("order", ["parallel", "sequential"])
@pytest.mark.parametrize("task", ["numbers", "labels", "event"])
def test_a_game_without_an_accuracy_goes_on_to_the_last_round(
    method: str, order: str, task: str, tmp_path: Path
) -> None:
    """Also where a client says that it has one, and a low one; `termination` is 0.6."""
    config = toy_config(f"{method}/{task}", f"order={order}", "warm_start=2", rounds=6)
    assert config.method.caution(config.scenario) == (
        f"Termination is an accuracy, which the task {task} has not: the game never ends."
    )
    here = LocalRuntime(config)

    def say(request: Message, reply: Message) -> Message:
        if not request.metadata.message_type.startswith("train"):
            return reply
        told = MetricRecord({**reply.content.metric_records[METRICS], "accuracy": 0.1})
        return Message(RecordDict({**reply.content, METRICS: told}), reply_to=request)

    here.grid = SpoilingGrid(here.grid, say)  # type: ignore[assignment]
    folder = RunFolder.create(tmp_path / "run", config)
    summary = here.run(folder)
    assert summary["left_out"] == {}
    asked = [row["asked"] for row in folder.rows() if row["kind"] == "round"]
    assert len(asked) == 6
    assert all(asked)
    assert not {"equilibrium", "oscillation"} & {row["kind"] for row in folder.rows()}


def test_a_game_of_classes_ends_by_its_accuracy(tmp_path: Path) -> None:
    config = toy_config("f-fl-games", "warm_start=2", "termination=1", rounds=4)
    assert "never ends" not in config.method.caution(config.scenario)
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder)
    assert [row["round"] for row in folder.rows() if row["kind"] == "equilibrium"] == [2]
    assert [bool(row["asked"]) for row in folder.rows() if row["kind"] == "round"] == [True, True, False, False]
