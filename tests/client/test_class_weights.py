"""Weights of classes: closed forms, every method that takes them, and what they are for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

import perennial
from perennial.client.host import Host
from perennial.client.methods.fedilc import FedILCClient
from perennial.client.state import FileStates
from perennial.client.trainer import Received
from perennial.common.config import RunConfig, load_config
from perennial.common.data.scenarios.own_data import OwnData, balanced
from perennial.common.mathematics.gradient_variance import gradient_sums, head_sums, variance
from perennial.common.methods import METHODS
from perennial.common.tasks import Classes
from perennial.common.utils.errors import UserError
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder


@pytest.fixture
def drawn() -> tuple[Tensor, Tensor]:
    """Logits (30, 3) and labels, of which one class is rare."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 20 + [1] * 8 + [2] * 2)
    return torch.randn(30, 3, generator=generator, dtype=torch.float64), labels


def test_balanced_weights_are_scikit_learns() -> None:
    y = np.array(["a"] * 20 + ["b"] * 7 + ["c"])
    expected = compute_class_weight("balanced", classes=np.array(["a", "b", "c"]), y=y)
    assert list(balanced({"a": 20, "b": 7, "c": 1}).values()) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_pytorchs_but_divided_by_the_samples(drawn: tuple[Tensor, Tensor], smoothing: float) -> None:
    logits, labels = drawn
    task, weights = Classes(3, (0.5, 2.0, 5.0)), torch.tensor([0.5, 2.0, 5.0], dtype=torch.float64)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    expected = (weights[labels] * losses).sum() / 30
    torch.testing.assert_close(task.loss(logits, labels, smoothing=smoothing), expected)
    total = task.loss(logits, labels, smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(total, 30 * expected)
    if not smoothing:
        theirs = F.cross_entropy(logits, labels, weight=weights)
        torch.testing.assert_close(expected, theirs * weights[labels].sum() / 30)
    fair = tuple(balanced({"0": 20, "1": 8, "2": 2}).values())
    if not smoothing:  # their mean over samples is 1
        theirs = F.cross_entropy(logits, labels, weight=torch.tensor(fair, dtype=torch.float64))
        torch.testing.assert_close(Classes(3, fair).loss(logits, labels), theirs)


def test_without_weights_it_is_pytorchs_to_the_bit(drawn: tuple[Tensor, Tensor]) -> None:
    logits, labels = drawn
    assert torch.equal(Classes(3).loss(logits, labels), F.cross_entropy(logits, labels))


def test_irms_slope_is_that_of_the_weighted_risk(drawn: tuple[Tensor, Tensor]) -> None:
    logits, labels = drawn
    task, scale = Classes(3, (0.5, 2.0, 5.0)), torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(task.loss(scale * logits, labels), scale)
    torch.testing.assert_close(task.scale_slopes(logits, labels).mean(), slope)


def test_fishrs_sums_are_of_the_weighted_losses_gradients(drawn: tuple[Tensor, Tensor]) -> None:
    logits, labels = drawn
    task, features = Classes(3, (0.5, 2.0, 5.0)), logits[:, :2].detach()
    head = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    found = features @ head.T + bias
    each = [
        torch.cat([part.flatten() for part in torch.autograd.grad(loss, (head, bias), retain_graph=True)])
        for loss in task.loss(found, labels, reduction="none")
    ]
    first, second = gradient_sums(features, task.residuals(found.detach(), labels))
    torch.testing.assert_close(first, torch.stack(each).sum(dim=0))
    torch.testing.assert_close(second, torch.stack(each).square().sum(dim=0))


def test_a_client_of_fishr_takes_the_same_gradients(tmp_path: Path) -> None:
    """In its variances, and in their slope, which is that of `⟨v, c_e⟩` with a fixed v."""
    config = configured("fedcurv", tmp_path, False, WEIGHTS)
    site = Host({}, config.data_folder).site(config.task(), config, 0)
    client, model, train = FedILCClient(site, config.method, {}), site.network.initial(0), site.data.train

    def spread(params: Mapping[str, Tensor]) -> Tensor:
        return variance(*head_sums(site.network, Classes(2, WEIGHTS), dict(params), train), len(train))

    mean, own = client.moments(model)
    torch.testing.assert_close(own, spread(model))
    away = torch.linspace(-1, 1, len(own))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in model.items()}
    slope = torch.autograd.grad((away * spread(leaves)).sum(), list(leaves.values()), materialize_grads=True)
    found = client.pull(model, mean, away, Received(1))
    for name, expected in zip(leaves, slope, strict=True):
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- every method

TIMES = {0: 1, 1: 3}
"""How often a row of each class is there in place of once."""
WEIGHTS = tuple(times * 24 / (16 + 3 * 8) for times in TIMES.values())
"""What comes to the same of 16 and 8 rows: as many times as much in a mean over as many rows."""
OFF: dict[str, Any] = {
    "removal": 0, "discovery": 0, "contrast": 0, "variance": 0, "penalty_estimator": "single",
}  # fmt: skip
"""Terms that are no cross-entropy, in which rows count once."""
DRAWN = {"fedsr", "fedadg"}
"""Which draw a number for each row."""
MEANS = {"fedpac"}
"""Whose server has means over rows."""


def rows(repeated: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """16 rows of class 0 and 8 of class 1 at each of three sites."""
    generator, found = torch.Generator().manual_seed(0), {}
    y = torch.tensor([0] * 16 + [1] * 8)
    times = torch.tensor([TIMES[int(label)] if repeated else 1 for label in y])
    for site in "abc":
        x = torch.randn(24, 4, generator=generator) + 0.7 * y[:, None]
        found[site] = (x.repeat_interleave(times, dim=0), y.repeat_interleave(times))
    return found


def configured(method: str, root: Path, repeated: bool, weights: Any, **options: Any) -> RunConfig:
    test = {"new": rows(False)["a"]}
    data = perennial.from_arrays(rows(repeated), test, class_weights=weights, validation_fraction=0.0)
    own = {"batch_size": 1000, "local_steps": 2, "contexts": 2, "clusters": 2, **OFF}
    own |= {"penalty": 0, "smoothing": 0} if METHODS[method].family == "fedilc" else {}
    fields = METHODS[method].model_fields
    settings = [f"{name}={value}" for name, value in own.items() if name in fields]
    options = {"rounds": 3, "device": "cpu", "data_root": data.save(root), **options}
    options |= {"model": {"name": "mlp", "hidden": [8]}}
    return load_config(options={"method": method, "scenario": data.scenario, **options}, settings=settings)


def trained(config: RunConfig, path: Path) -> dict[str, Mapping[str, Tensor]]:
    """All that a run leaves: models, and what clients keep."""
    summary = LocalRuntime(config).run(RunFolder.create(path, config))
    assert summary["left_out"] == {}
    models = {file.stem: load_file(file) for file in sorted((path / "models").glob("*.safetensors"))}
    kept = FileStates(RunFolder(path).clients)
    for place, versions in kept.items():
        models |= {f"{place.rpartition('/')[2]}/{name}": own for name, own in versions[-1].kept.items()}
    return models


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"fedrod"}))
def test_a_row_of_weight_3_is_three_rows(method: str, tmp_path: Path) -> None:
    weighted = trained(configured(method, tmp_path, False, WEIGHTS), tmp_path / "weighted")
    plain = trained(configured(method, tmp_path, False, ()), tmp_path / "plain")
    assert any(not torch.equal(weighted[name][key], plain[name][key]) for name in plain for key in plain[name])
    if method not in DRAWN | MEANS:
        repeated = trained(configured(method, tmp_path, True, ()), tmp_path / "repeated")
        assert weighted.keys() == repeated.keys()
        for name, tensors in repeated.items():
            for key, tensor in tensors.items():
                torch.testing.assert_close(weighted[name][key], tensor, rtol=1e-3, atol=1e-5)
    stacked = trained(configured(method, tmp_path, False, WEIGHTS, cohort_engine="stack"), tmp_path / "stacked")
    for name, tensors in weighted.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(stacked[name][key], tensor, rtol=1e-4, atol=1e-5)


def test_methods_that_take_none_say_so(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^method\.name: 'fedrod' balances classes itself; leave out scenario\.cl"
    ):
        configured("fedrod", tmp_path, False, WEIGHTS)
    with pytest.raises(UserError, match=r"fishr_mode: 'central' has no class weights; take 'exact'"):
        load_config(
            options={"method": "fedcurv", "scenario": OwnData(class_weights=(1, 2))},
            settings=["fishr_mode=central"],
        )


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([1, 2, 3], "there must be one for each of 2 classes, or none"),
        ([1, 0], "greater than or equal to 0.000001"),
        ("balanced", "perennial describe --class-weights balanced writes them"),
    ],
)
def test_wrong_weights_are_one_sentence(weights: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_config(options={"method": "fedavg", "scenario": {"name": "own-data", "class_weights": weights}})


# ---------------------------------------------------------------------- what they are for


def test_a_rare_class_gains_sensitivity(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def drawn_rows(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        y = (random.random(count) < 0.1).astype(int)
        return random.normal(size=(count, 3)) + 1.2 * y[:, None], y

    clients, (x, y) = {site: drawn_rows(150) for site in "ab"}, drawn_rows(2000)
    found = {}
    for weights in ((), "balanced"):
        data = perennial.from_arrays(clients, {"new": (x, y)}, class_weights=weights)
        result = perennial.run(
            "fedavg", data, rounds=20, device="cpu", settings={"local_steps": 5}, out=tmp_path / str(len(weights))
        )
        right = result.model("global")(torch.tensor(x, dtype=torch.float32)).argmax(dim=1).numpy() == y
        found[weights] = right[y == 1].mean(), right[y == 0].mean()
    assert found["balanced"][0] > found[()][0] + 0.2
    assert found["balanced"][1] > 0.7
