"""FedAvg of numbers, labels and events: what is known in closed form or from others, on every way to run it."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sksurv.metrics import concordance_index_censored, integrated_brier_score
from sksurv.util import Surv
from tiny_runs import taken_up
from torch import Tensor

from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Scenario
from perennial.common.models.network import network
from perennial.common.models.torch_state import plain_torch
from perennial.common.tasks import Event, Labels, Numbers, PredictionTask
from perennial.common.tasks.event import censoring_curve
from perennial.common.utils.tensors import Tensors
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.tiny_federation import WireGrid

Target = Literal["numbers", "labels", "missing-labels", "event"]
TARGETS: tuple[Target, ...] = ("numbers", "labels", "missing-labels", "event")
SAMPLES, FEATURES = 240, 4
TIMES = tuple(halves / 2 for halves in range(1, 9))


@cache
def samples(target: Target) -> tuple[Tensor, Tensor]:
    """Standardised features and targets that follow from them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator).double()
    x = ((x - x.mean(dim=0)) / x.std(dim=0, correction=0)).float()
    score = x @ torch.randn(FEATURES, 3, generator=generator)
    noise = torch.randn(SAMPLES, 3, generator=generator)
    if target == "numbers":
        return x, (score + noise)[:, :2] * torch.tensor([3.0, 40.0]) + torch.tensor([100.0, -7.0])
    if target == "event":
        time, censored = (noise[:, :2] - score[:, :1]).exp().unbind(dim=1)
        event = (time <= censored).float()
        until = torch.minimum(time, censored).ceil() / 2  # ends of intervals, where the censoring is known exactly
        return x, torch.stack([until.clamp(max=5), event], dim=1)
    y = (score + 2 * noise > 0.5).float()
    missing = torch.rand(y.shape, generator=generator) < 0.2
    return x, y.masked_fill(missing, torch.nan) if target == "missing-labels" else y


class Everybody(Scenario):
    """All samples at every client."""

    title = "all samples at every client"
    source = "tests"
    dataset = "generated"

    name: Literal["everybody"] = "everybody"
    target: Target = "numbers"
    clients: int = Field(1, ge=1, le=10)

    model: ClassVar[dict[str, Any]] = {"name": "logistic"}
    input_shape: ClassVar[tuple[int, ...]] = (FEATURES,)
    train_environments: ClassVar[tuple[str, ...]] = ("all",)
    test_environments: ClassVar[tuple[str, ...]] = ("all",)

    @property
    def task(self) -> PredictionTask:
        if self.target == "numbers":
            y = samples("numbers")[1].double()
            return Numbers(("a", "b"), mean=tuple(y.mean(dim=0).tolist()), scale=(3.0, 40.0))
        if self.target == "event":
            events, censored = Event(TIMES).counts(samples("event")[1])
            return Event(TIMES, censoring_curve(events.tolist(), censored.tolist()))
        return Labels(("a", "b", "c"))

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        x, y = samples(self.target)
        every = Examples(x, y, torch.zeros(len(x), dtype=torch.long))
        return ClientData(every, every[:40], {"all": Examples(x, y, torch.full((len(x),), -1))})


SETTINGS: dict[Target, tuple[str, ...]] = {
    "numbers": ("learning_rate=1", "weight_decay=0.1", "local_steps=20"),
    "labels": ("learning_rate=8", "local_steps=100"),
    "missing-labels": ("learning_rate=5", "weight_decay=0.01", "local_steps=100"),
    "event": ("learning_rate=0.3", "local_steps=20", "momentum=0.5", "weight_decay=0.02"),
}
ROUNDS = 6


def config(target: Target, *settings: str, clients: int = 1) -> RunConfig:
    return load_config(
        options={
            "method": "fedavg",
            "scenario": {"name": "everybody", "target": target, "clients": clients},
            "rounds": ROUNDS,
        },
        settings=["batch_size=1000", "evaluate_every=3", "checkpoint_every=2", *SETTINGS[target], *settings],
    )


def trained(config: RunConfig, path: Path) -> tuple[Tensors, dict[str, Any]]:
    """The final model and the summary of a run."""
    summary = LocalRuntime(config).run(RunFolder.create(path, config))
    return load_file(path / "models" / "global.safetensors"), summary


def weights(model: Tensors) -> Tensor:
    """(outputs, FEATURES + 1), the intercepts last."""
    weight, bias = (next(own for own in model.values() if own.dim() == dim) for dim in (2, 1))
    return torch.cat([weight, bias[:, None]], dim=1)


def hazard_loop(start: Tensors) -> Tensor:
    """A plain loop of full-batch steps with momentum, anew in each round, on the likelihood written out."""
    x, y = samples("event")
    survived, happened = torch.zeros(2, SAMPLES, len(TIMES))
    for sample, (time, event) in enumerate(y.tolist()):
        for place, (begin, end) in enumerate(pairwise((0.0, *TIMES))):
            if event and begin < time <= end:
                happened[sample, place] = 1
            elif time > end or (not event and time >= (begin + end) / 2):
                survived[sample, place] = 1
    theta = weights(start).clone().requires_grad_()
    for _ in range(ROUNDS):
        velocity = torch.zeros_like(theta)
        for _ in range(20):
            hazards = (x @ theta[:, :-1].T + theta[:, -1]).sigmoid()
            likelihood = torch.where(happened == 1, hazards, torch.where(survived == 1, 1 - hazards, 1.0))
            (gradient,) = torch.autograd.grad(-likelihood.log().sum() / SAMPLES, theta)
            velocity = 0.5 * velocity + gradient + 0.02 * theta.detach()
            theta = (theta.detach() - 0.3 * velocity).requires_grad_()
    return theta.detach()


@cache
def expected(target: Target) -> Tensor:
    """The same from scikit-learn, or a loop of PyTorch's; of a convex risk where FedAvg has to arrive."""
    x, y = (own.double().numpy() for own in samples(target))
    if target == "numbers":
        t = (y - y.mean(axis=0)) / [3.0, 40.0]
        ridge = Ridge(alpha=SAMPLES * 0.1 * 2).fit(x, t)  # a sample's loss is the mean of two
        return torch.tensor(np.c_[ridge.coef_, ridge.intercept_])
    if target == "labels":
        every = OneVsRestClassifier(LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000)).fit(x, y)
        return torch.tensor(np.stack([np.r_[own.coef_[0], own.intercept_] for own in every.estimators_]))
    if target == "missing-labels":
        found = []
        for place in range(3):
            known = ~np.isnan(y[:, place])
            # Its penalty is on the intercept, too. The mean over samples counts those without the label.
            model = LogisticRegression(C=1 / (SAMPLES * 3 * 0.01), solver="liblinear", tol=1e-10, max_iter=10_000)
            model.fit(x[known], y[known, place])
            found.append(np.r_[model.coef_[0], model.intercept_])
        return torch.tensor(np.stack(found))
    one = config("event")
    net = network(one.model, one.scenario.input_shape, one.scenario.task.outputs)
    return hazard_loop(net.initial(one.seed))


def agrees(target: Target, model: Tensors) -> bool:
    return torch.allclose(weights(model).double(), expected(target).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_one_client_with_all_data_has_the_model_of_others_code(target: Target, tmp_path: Path) -> None:
    model, summary = trained(config(target), tmp_path / "run")
    assert agrees(target, model)
    assert summary["left_out"] == {}
    if target == "numbers":  # in the targets' own unit
        x, y = samples("numbers")
        own = Ridge(alpha=SAMPLES * 0.1 * 2).fit(x.double().numpy(), y.double().numpy())
        error = np.abs(own.predict(x.double().numpy()) - y.numpy()).mean()
        assert summary["models"]["global"]["final"]["average"] == pytest.approx(error, rel=1e-4)


def test_concordance_and_brier_score_of_a_run_are_scikit_survivals(tmp_path: Path) -> None:
    """With the censoring of the same data."""
    model, summary = trained(config("event"), tmp_path / "run")
    x, y = samples("event")
    theta = weights(model).double()
    hazards = (x.double() @ theta[:, :-1].T + theta[:, -1]).sigmoid()
    survival = np.cumprod(1 - hazards.numpy(), axis=1)
    data = Surv.from_arrays(y[:, 1].numpy() == 1, y[:, 0].double().numpy())
    restricted = np.trapezoid(np.c_[np.ones(SAMPLES), survival], [0, *TIMES], axis=1)
    expected = {
        "concordance": concordance_index_censored(data["event"], data["time"], -restricted)[0],
        "integrated_brier_score": integrated_brier_score(data, data, survival, TIMES),
    }
    assert summary["models"]["global"]["final"]["measures"]["all"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_stack_of_two_such_clients_has_it_too(target: Target, tmp_path: Path, caplog: Any) -> None:
    loop, summary = trained(config(target, clients=2), tmp_path / "loop")
    stacked, of_stack = trained(config(target, "cohort_engine=stack", clients=2), tmp_path / "stack")
    assert agrees(target, loop)
    assert agrees(target, stacked)
    assert "one by one" not in caplog.text  # as after an exception in a stack
    one, other = (found["models"]["global"]["final"]["measures"]["all"] for found in (summary, of_stack))
    assert one == pytest.approx(other, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_resumed_run_has_it_to_the_bit(target: Target, tmp_path: Path) -> None:
    folder = taken_up(config(target), tmp_path, 4)
    assert agrees(target, load_file(folder.path / "models" / "global.safetensors"))


# --- The scenarios -------------------------------------------------------------------------------------

SCENARIOS = ("diabetes-sites", "linear-scm", "labels-and-shortcut", "event-and-shortcut")


def small(scenario: str, *settings: str) -> RunConfig:
    return load_config(
        options={"method": "fedavg", "scenario": scenario, "rounds": 4},
        settings=["local_steps=3", "evaluate_every=2", "checkpoint_every=2", *settings],
    )


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_over_bytes_and_a_resumed_one_have_the_same_rows(scenario: str, tmp_path: Path) -> None:
    config = small(scenario)
    whole = taken_up(config, tmp_path, 3)
    folder, grid = RunFolder.create(tmp_path / "wire", config), WireGrid(config, tmp_path / "sites")
    with plain_torch(threads=1):
        run_rounds(config, folder, grid, start(config))
    assert folder.rows() == whole.rows()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_stacks_have_the_same_model_and_measures(scenario: str, tmp_path: Path) -> None:
    (loop, one), (stacked, other) = (
        trained(small(scenario, f"cohort_engine={engine}"), tmp_path / engine) for engine in ("loop", "stack")
    )
    assert all(torch.allclose(loop[name], stacked[name], atol=1e-5) for name in loop)
    measures = [found["models"]["global"]["final"]["measures"] for found in (one, other)]
    for place in ("environments", "clients"):
        assert measures[0][place].keys() == measures[1][place].keys()
        for name, own in measures[0][place].items():
            assert own == pytest.approx(measures[1][place][name], rel=1e-3, abs=2e-3)
