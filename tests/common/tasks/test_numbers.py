from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import Tensor

from perennial.common.tasks import Numbers, checked_sums
from perennial.common.tasks.base import LARGEST, Plot, must_be_targets
from perennial.common.tasks.numbers import CELLS, LARGEST_LOG, NumbersLoss
from perennial.common.utils.errors import UserError

KINDS: tuple[NumbersLoss, ...] = get_args(NumbersLoss)
NAMES = ("days", "pressure", "age")


def numbers(kind: NumbersLoss = "squared", targets: int = 3, **settings: Any) -> Numbers:
    return Numbers(NAMES[:targets], kind, **settings)


def drawn(targets: int = 3, n: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs and whole targets (n, K), in float64."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, targets, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(0, 6, (n, targets), generator=generator).double()


def torchs_own(kind: NumbersLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's loss of each number."""
    if kind == "squared":
        return F.mse_loss(outputs, targets, reduction="none") / 2
    if kind == "absolute":
        return F.l1_loss(outputs, targets, reduction="none")
    if kind == "huber":
        return F.smooth_l1_loss(outputs, targets, reduction="none")
    # From the least value that it can have for each target: half the deviance.
    return F.poisson_nll_loss(outputs, targets, reduction="none") - targets + torch.xlogy(targets, targets)


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_pytorch(kind: NumbersLoss, targets: int) -> None:
    outputs, y = drawn(targets)
    task, expected = numbers(kind, targets), torchs_own(kind, outputs, y).mean(dim=1)
    assert torch.allclose(task.loss(outputs, y, reduction="none"), expected)
    assert torch.allclose(task.loss(outputs, y), expected.mean())
    assert torch.allclose(task.loss(outputs, y, reduction="sum"), expected.sum())
    assert torch.equal(task.loss(outputs, y, smoothing=0.3), task.loss(outputs, y))


def test_losses_by_hand() -> None:
    outputs, y = torch.tensor([[3.0], [0.5]]), torch.tensor([[1.0], [1.0]])
    found = {kind: numbers(kind, 1).loss(outputs, y, reduction="none").tolist() for kind in KINDS}
    assert found["squared"] == pytest.approx([2.0, 0.125])
    assert found["absolute"] == pytest.approx([2.0, 0.5])
    assert found["huber"] == pytest.approx([1.5, 0.125])
    assert found["poisson"] == pytest.approx([np.exp(3) - 4, np.exp(0.5) - 1.5])


@pytest.mark.parametrize("units", [{}, {"mean": (2.0, -1.0, 3.0), "scale": (0.5, 4.0, 2.0)}], ids=["", "units"])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_autograd(kind: NumbersLoss, units: dict[str, Any]) -> None:
    task, (outputs, y) = numbers(kind, **units), drawn()
    leaf, scale = outputs.clone().requires_grad_(), torch.ones(len(y), 1, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(task.loss(leaf, y, reduction="sum"), leaf)
    (slopes,) = torch.autograd.grad(task.loss(scale * outputs, y, reduction="sum"), scale)
    assert torch.allclose(task.residuals(outputs, y), expected)
    assert torch.allclose(task.scale_slopes(outputs, y), slopes[:, 0])


def test_a_loss_is_of_standardised_targets_and_predictions_are_in_their_own_unit() -> None:
    task = numbers(targets=2, mean=(10.0, -1.0), scale=(4.0, 0.5))
    outputs, y = torch.tensor([[1.0, -2.0]]), torch.tensor([[10.0, -2.0]])
    assert task.predictions(outputs).tolist() == [[14.0, -2.0]]
    assert task.loss(outputs, y).item() == pytest.approx(0.25)  # of one unit of scale, and of none
    found = task.measures(1, {name: own.tolist() for name, own in task.sums(outputs, y).items()})
    assert found["mean_absolute_error"] == pytest.approx((4 + 0) / 2)
    assert torch.equal(numbers("poisson", 2).predictions(outputs), outputs.exp())


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        ("squared", {}),
        ("huber", {"mean": (1e5, 3.0, -2.0), "scale": (7.0, 1e-3, 100.0)}),
        ("poisson", {}),
        ("absolute", {"mean": (1e-9, 0.0, 0.0), "scale": (1e-7, 1.0, 1e6)}),
    ],
)
def test_measures_are_those_of_scikit_learn_and_parts_add_up(kind: NumbersLoss, units: dict[str, Any]) -> None:
    task, (outputs, noise) = numbers(kind, **units), drawn(seed=3)
    y = noise if kind == "poisson" else task.predictions(outputs + noise - 2.5)
    predicted = task.predictions(outputs).numpy()
    parts = [task.sums(outputs[i::3], y[i::3]) for i in range(3)]
    for own in parts:
        task.must_add_up(67, {name: values.tolist() for name, values in own.items()})
    sums = {name: sum(part[name] for part in parts).tolist() for name in task.columns}  # type: ignore[union-attr]
    assert list(task.measures(len(y), sums).values()) == pytest.approx(
        [
            mean_absolute_error(y, predicted),
            root_mean_squared_error(y, predicted),
            r2_score(y, predicted, multioutput="uniform_average"),
        ],
        rel=1e-6,
    )
    assert task.value(len(y), sums) == task.measures(len(y), sums)["mean_absolute_error"]
    assert task.value(0, {}) is None
    assert [measure.name for measure in (task.headline, *task.others)] == list(task.measures(len(y), sums))


def test_a_stack_has_each_clients_sums() -> None:
    task, (outputs, y) = numbers("huber", mean=(1.0, 2.0, 3.0), scale=(2.0, 3.0, 4.0)), drawn()
    stacked = task.sums(outputs.view(4, 50, 3), y.view(4, 50, 3))
    for place in range(4):
        own = task.sums(outputs[50 * place :][:50], y[50 * place :][:50])
        assert all(torch.allclose(stacked[name][place], own[name]) for name in own)
    assert all(values.shape == (3,) and not values.any() for values in task.sums(outputs[:0], y[:0]).values())


def test_r2_of_a_constant_target_is_none() -> None:
    """Also far from 0, where the sums round; the other measures have a value."""
    task, y = numbers(targets=2), torch.stack([torch.full((9,), 12345.678), torch.arange(9.0)], 1)
    found = task.measures(9, {name: own.tolist() for name, own in task.sums(torch.zeros(9, 2), y).items()})
    assert found["r2"] is None
    assert found["mean_absolute_error"] == pytest.approx((12345.678 + 4) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_no_constant_has_a_smaller_mean_absolute_error(kind: NumbersLoss) -> None:
    units: dict[str, Any] = {} if kind == "poisson" else {"mean": (2.0, 0.0, 1.0), "scale": (3.0, 1.0, 0.5)}
    task, (_, y) = numbers(kind, **units), drawn(n=41)

    def error(outputs: Tensor) -> float:
        found = task.value(41, {name: own.tolist() for name, own in task.sums(outputs.expand(41, 3), y).items()})
        assert found is not None
        return found

    best = task.constant(y)
    assert error(best) == pytest.approx(float((y - y.median(dim=0).values).abs().mean()), abs=1e-6)
    assert all(error(best + own * sign) >= error(best) for own in torch.eye(3) * 0.1 for sign in (1, -1))


def test_a_constant_rate_of_0_is_finite() -> None:
    assert numbers("poisson", 1).constant(torch.zeros(5, 1)).isfinite().all()


@pytest.mark.parametrize(
    ("task", "targets", "said"),
    [
        (numbers(targets=2), [[1.0, float("nan")]], "y has a pressure that is no finite number"),
        (numbers(targets=1), [[float("inf")]], "y has a days that is no finite number"),
        (numbers("poisson", 1), [[3.0], [-1.0]], "y has a days of -1; it must be at least 0"),
        (numbers(targets=1, least=(2.0,)), [[1.5]], "y has a days of 1.5; it must be at least 2"),
        (numbers(targets=1, most=(60.0,)), [[61.5]], "y has a days of 61.5; it must be at most 60"),
        (numbers(targets=1), [[-1e13]], r"y has a days of size 1e\+13, more than 1e\+12; give it in a larger"),
    ],
)
def test_targets_that_cannot_be_are_named(task: Numbers, targets: list[list[float]], said: str) -> None:
    with pytest.raises(UserError, match=f"site-1: {said}"):
        must_be_targets("site-1", task, torch.tensor(targets))


def test_targets_within_bounds_are_taken() -> None:
    task = numbers(targets=2, least=(0.0, -5.0), most=(60.0, 5.0))
    must_be_targets("site-1", task, torch.tensor([[0.0, -5.0], [60.0, 5.0]]))
    must_be_targets("site-1", task, torch.zeros(0, 2))


POSSIBLE = {"absolute": [3.0], "squared": [4.0], "target": [2.0], "target_squared": [3.0], "error": [-2.0]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"absolute": [-3.0]},
        {"absolute": [5.0]},  # 25 > 4 · 4
        {"squared": [9.5]},  # more than 3²
        {"target": [-4.0]},  # 16 > 4 · 3
        {"target_squared": [-1.0]},
        {"squared": [float("nan")]},
        {"absolute": [float("nan")]},
        {"error": [3.5]},  # more than the sum of |e|
        {"error": [float("nan")]},
    ],
)
def test_sums_that_cannot_be_are_refused(wrong: dict[str, list[float]]) -> None:
    task = numbers(targets=1)
    checked_sums(task, POSSIBLE, [4])
    with pytest.raises(ValueError, match="sums of errors and targets that 4 samples cannot have"):
        checked_sums(task, {**POSSIBLE, **wrong}, [4])
    with pytest.raises(TypeError, match="absolute: 'x' is no number"):
        checked_sums(task, {**POSSIBLE, "absolute": ["x"]}, [4])  # type: ignore[list-item]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_diverged_model_says_is_wrong_and_finite(kind: NumbersLoss) -> None:
    units: dict[str, Any] = {} if kind == "poisson" else {"mean": (5.0,), "scale": (1e3,)}
    task, most = numbers(kind, 1, **units), LARGEST_LOG if kind == "poisson" else LARGEST
    outputs = torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [1e30], [-2.5]])
    y = torch.tensor([[1.0], [2.0], [3.0], [0.0], [1.0]])
    kept = task.usable(outputs, y)
    assert kept.flatten().tolist() == [most, most, -most, most, -2.5]
    sums = {name: own.tolist() for name, own in task.sums(kept, y).items()}
    task.must_add_up(5, sums)
    float32 = torch.finfo(torch.float32).max
    assert all(abs(value) * 1e5 < float32 for own in sums.values() for value in own)  # as screening asks
    assert task.loss(kept, y).isfinite()
    assert torch.equal(task.usable(outputs.expand(2, 5, 1), y.expand(2, 5, 1))[1], kept)


# ---------------------------------------------------------------------- figures


def test_errors_are_those_of_numpy() -> None:
    outputs, y = drawn()
    task = numbers(mean=(1.0, 2.0, 3.0), scale=(2.0, 1.0, 4.0))
    sums = {name: own.tolist() for name, own in task.sums(outputs, y).items()}
    errors = (task.predictions(outputs) - y).numpy()
    expected = zip(NAMES, errors.mean(axis=0), errors.std(axis=0), strict=True)
    assert task.errors(len(y), sums) == {name: pytest.approx((m, s)) for name, m, s in expected}


def test_each_target_has_measures_of_its_own_where_there_are_several() -> None:
    outputs, y = drawn()
    sums = {name: own.tolist() for name, own in numbers().sums(outputs, y).items()}
    found = numbers().by_target(len(y), sums)
    for place, name in enumerate(NAMES):
        assert found[name]["mean_absolute_error"] == pytest.approx(
            mean_absolute_error(y[:, place], outputs[:, place])
        )
        assert found[name]["r2"] == pytest.approx(r2_score(y[:, place], outputs[:, place]))
    alone = numbers(targets=1)
    assert alone.by_target(len(y), {name: own[:1] for name, own in sums.items()}) == {}


def test_cells_by_hand() -> None:
    """Of 100 ± 10, cells are 3 wide and go from 70 to 130; what is farther is in the outermost."""
    task = numbers(targets=2, mean=(100.0, 0.0), scale=(10.0, 1.0))
    outputs = torch.tensor([[0.0, 0.0], [0.05, 0.0], [9.0, 0.0]])  # 100, 100.5, 190
    y = torch.tensor([[71.0, 0.0], [72.0, 0.0], [-40.0, 5.0]])
    found = task.counted([(outputs, y), (outputs[:0], y[:0])])["cells"]
    assert len(found) == 2 * 2 * CELLS**2
    cells = np.array(found).reshape(2, 2, CELLS, CELLS)
    assert {tuple(place): cells[tuple(place)] for place in np.argwhere(cells)} == {
        (0, 0, 0, 10): 2,
        (0, 0, 0, 19): 1,
        (0, 1, 10, 10): 2,
        (0, 1, 19, 10): 1,
    }
    plots = task.plots(3, {"cells": found[: 2 * CELLS**2]})
    assert plots == [
        Plot(
            "days: predicted against true values", ("days, true", "days, predicted"),
            pytest.approx([71.5, 71.5]), pytest.approx([101.5, 128.5]), [2, 1], diagonal=True,
        ),
        Plot(
            "pressure: predicted against true values", ("pressure, true", "pressure, predicted"),
            pytest.approx([0.15, 2.85]), pytest.approx([0.15, 0.15]), [2, 1], diagonal=True,
        ),
    ]  # fmt: skip
    assert task.plots(3, {}) == []


def test_a_diverged_model_has_cells_too() -> None:
    task = numbers(targets=1, mean=(3.0,), scale=(2.0,))
    y = torch.tensor([[1.0], [2.0], [3.0]])
    outputs = task.usable(torch.tensor([[float("nan")], [float("inf")], [-float("inf")]]), y)
    assert sum(task.counted([(outputs, y)])["cells"]) == 3


def test_counts_have_no_cells_since_nobody_announces_their_range() -> None:
    outputs, y = drawn(1)
    assert numbers("poisson", 1).scored == {}
    assert numbers("poisson", 1).counted([(outputs, y)]) == {}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([4] + [0] * (CELLS**2 - 2), "cells has another length"),
        ([3] + [0] * (CELLS**2 - 1), "the cells .* have other counts than there are samples"),
        ([4, 1] + [0] * (CELLS**2 - 2), "the cells .* have other counts than there are samples"),
        ([5, -1] + [0] * (CELLS**2 - 2), "cells: 5 is no whole number from 0 to 4"),
        ([2.0, 2.0] + [0] * (CELLS**2 - 2), "cells: 2.0 is no whole number"),
    ],
)
def test_cells_that_cannot_be_are_refused(wrong: list[float], said: str) -> None:
    task = numbers(targets=1)
    assert len(checked_sums(task, {**POSSIBLE, "cells": [4] + [0] * (CELLS**2 - 1)}, [4])["cells"][0]) == CELLS**2
    with pytest.raises(ValueError, match=said):
        checked_sums(task, {**POSSIBLE, "cells": wrong}, [4])
