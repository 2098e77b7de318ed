import math
from typing import Any

import numpy as np
import pytest
import torch
from sksurv.datasets import load_veterans_lung_cancer
from sksurv.metrics import brier_score, concordance_index_censored, integrated_brier_score
from sksurv.nonparametric import CensoringDistributionEstimator, kaplan_meier_estimator
from sksurv.util import Surv
from torch import Tensor

from perennial.common.tasks import Event, checked_sums
from perennial.common.tasks.base import Sums, must_be_targets
from perennial.common.tasks.classes import WRONG
from perennial.common.tasks.event import censoring_curve
from perennial.common.utils.errors import UserError

TASK = Event((1.0, 3.0, 4.0))
NAN = float("nan")


def summed(task: Event, outputs: Tensor, targets: Tensor) -> Sums:
    found = {name: own.tolist() for name, own in task.sums(task.usable(outputs, targets), targets).items()}
    task.must_add_up(len(targets), found)
    return found


def drawn(n: int = 200, intervals: int = 3, whole: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits in float64 and targets that they say something of; `whole`: all times are 1, 2, …"""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, intervals, generator=generator, dtype=torch.float64) - 1
    time = -torch.rand(n, generator=generator).log() * 3 * (-outputs[:, 0]).exp()
    event = (torch.rand(n, generator=generator) < 0.6).double()
    return outputs, torch.stack([time.ceil().clamp(max=40) if whole else time, event], dim=1).float()


# --- Loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "event", "survived", "in_interval"),
    [
        (0.5, 1, 0, 0),
        (0.0, 1, 0, 0),
        (1.0, 1, 0, 0),  # an interval has its upper end
        (1.01, 1, 1, 1),
        (3.0, 1, 1, 1),
        (3.5, 1, 2, 2),
        (4.5, 1, 3, None),  # after all of them
        (0.0, 0, 0, None),
        (0.49, 0, 0, None),
        (0.5, 0, 1, None),  # the middle of the first interval
        (1.99, 0, 1, None),
        (2.0, 0, 2, None),
        (3.49, 0, 2, None),
        (9.0, 0, 3, None),
    ],
)
def test_the_loss_of_a_sample_is_its_likelihood(
    time: float, event: int, survived: int, in_interval: int | None
) -> None:
    hazards = torch.tensor([0.2, 0.3, 0.4])
    likelihood = math.prod((1 - hazards[:survived]).tolist())
    if in_interval is not None:
        likelihood *= float(hazards[in_interval])
    found = TASK.loss(hazards.logit()[None], torch.tensor([[time, event]]))
    assert found.item() == pytest.approx(-math.log(likelihood), abs=1e-6)


def test_mean_sum_and_smoothing() -> None:
    outputs, targets = drawn()
    each = TASK.loss(outputs, targets, reduction="none")
    assert each.shape == (200,)
    assert torch.equal(TASK.loss(outputs, targets), each.mean())
    assert torch.equal(TASK.loss(outputs, targets, reduction="sum"), each.sum())
    assert torch.equal(TASK.loss(outputs, targets, smoothing=0.5), each.mean())


def test_derivatives_are_those_of_autograd() -> None:
    outputs, targets = drawn()
    leaf, scale = outputs.clone().requires_grad_(), torch.ones(200, 1, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(TASK.loss(leaf, targets, reduction="sum"), leaf)
    (slopes,) = torch.autograd.grad(TASK.loss(scale * outputs, targets, reduction="sum"), scale)
    assert torch.allclose(TASK.residuals(outputs, targets), expected)
    assert torch.allclose(TASK.scale_slopes(outputs, targets), slopes[:, 0])


# --- Predictions and the constant ----------------------------------------------------------------------


def test_predictions_are_survival_probabilities() -> None:
    hazards = torch.tensor([[0.5, 0.2, 0.1], [1.0, 0.0, 0.0]])
    found = TASK.predictions(hazards.logit())
    assert found.tolist() == [pytest.approx([0.5, 0.4, 0.36]), pytest.approx([0.0, 0.0, 0.0])]


def test_the_constant_is_kaplan_and_meiers_curve_where_all_times_are_ends_of_intervals() -> None:
    targets = drawn(300, whole=True)[1]
    task = Event(tuple(float(t) for t in range(1, 13)))
    times, curve = kaplan_meier_estimator(targets[:, 1].numpy() == 1, targets[:, 0].numpy())
    assert task.predictions(task.constant(targets)).tolist() == pytest.approx(
        curve[times <= 12].tolist(), abs=1e-4
    )


def test_the_constant_has_the_least_loss_of_all_constants() -> None:
    targets = drawn(300)[1].double()
    leaf = TASK.constant(targets).requires_grad_()
    (slope,) = torch.autograd.grad(TASK.loss(leaf.expand(300, 3), targets), leaf)
    assert slope.tolist() == pytest.approx([0.0] * 3, abs=1e-9)


def test_a_constant_of_intervals_that_nobody_reached_is_finite() -> None:
    found = TASK.constant(torch.tensor([[0.5, 1.0], [0.7, 1.0]]))
    assert TASK.predictions(found).tolist() == pytest.approx([0.0] * 3, abs=1e-5)
    assert found.isfinite().all()


# --- Measures ------------------------------------------------------------------------------------------


def test_concordance_is_scikit_survivals() -> None:
    """Of the restricted mean survival time, from the ends of intervals along straight lines."""
    outputs, targets = drawn(400)
    survival = np.c_[np.ones(400), TASK.predictions(outputs).numpy()]
    restricted = np.trapezoid(survival, [0, *TASK.times], axis=1)
    expected = concordance_index_censored(targets[:, 1].numpy() == 1, targets[:, 0].numpy(), -restricted)[0]
    found = TASK.measures(400, summed(TASK, outputs, targets))
    assert found["concordance"] == pytest.approx(expected, abs=1e-4)
    assert 0.6 < expected < 0.9
    assert [measure.name for measure in (TASK.headline, *TASK.others)] == list(found)


def test_rounding_decides_no_pair() -> None:
    outputs, targets = drawn(100)
    outputs = outputs[:1].expand(100, 3) + 1e-7 * outputs
    sums = summed(TASK, outputs, targets)
    assert TASK.value(100, sums) == pytest.approx(0.5, abs=0.1)
    assert sums["concordant"][0] == pytest.approx(sums["comparable"][0] / 2, abs=sums["comparable"][0] / 10)
    rare = torch.tensor([[-12.0, -12.0, -12.0], [-12.01, -12.0, -12.0]])  # told apart all the same
    assert TASK.risks(rare)[0] > TASK.risks(rare)[1]


def surv(targets: Tensor) -> Any:
    return Surv.from_arrays(targets[:, 1].numpy() == 1, targets[:, 0].double().numpy())


@pytest.mark.parametrize("seed", range(3))
def test_brier_scores_are_scikit_survivals_with_the_censoring_curve_of_the_same_data(seed: int) -> None:
    outputs, targets = drawn(300, 12, whole=True, seed=seed)
    times = tuple(float(t) for t in range(1, 13))
    curve = censoring_curve(*(own.tolist() for own in Event(times).counts(targets)))
    task, data = Event(times, curve), surv(targets)
    assert curve == pytest.approx(
        CensoringDistributionEstimator().fit(data).predict_proba(np.array(times)).tolist()
    )
    sums, survival = summed(task, outputs, targets), task.predictions(outputs).numpy()
    assert task.brier_scores(300, sums) == pytest.approx(brier_score(data, data, survival, times)[1].tolist())
    integrated = integrated_brier_score(data, data, survival, times)
    assert task.measures(300, sums)["integrated_brier_score"] == pytest.approx(integrated)


def test_concordance_and_brier_of_a_real_table_are_scikit_survivals() -> None:
    """The Veterans' lung cancer trial, 137 patients: times in days, hazards that age and score tell."""
    table, y = load_veterans_lung_cancer()
    targets = torch.tensor(np.c_[y["Survival_in_days"], y["Status"]], dtype=torch.float32)
    score = torch.tensor(table["Karnofsky_score"].to_numpy(), dtype=torch.float64)
    times = tuple(float(day) for day in range(1, 400))
    curve = censoring_curve(*(own.tolist() for own in Event(times).counts(targets)))
    task = Event(times, curve)
    outputs = (-3 - score / 30)[:, None] + torch.linspace(0, 1, len(times), dtype=torch.float64)
    found = task.measures(137, summed(task, outputs, targets))
    concordance = concordance_index_censored(y["Status"], y["Survival_in_days"], -score.numpy())[0]
    assert found["concordance"] == pytest.approx(concordance, abs=1e-4)
    expected = integrated_brier_score(y, y, task.predictions(outputs).numpy(), np.array(times))
    assert found["integrated_brier_score"] == pytest.approx(expected, abs=1e-4)


def test_between_ends_the_censoring_curve_is_a_straight_line() -> None:
    """An event at 2, in the middle of an interval over which the curve falls from 0.8 to 0.4, weighs 1 / 0.6."""
    task = Event((1.0, 3.0), (0.8, 0.4))
    survival = task.predictions(torch.tensor([[0.3, -0.2]], dtype=torch.float64))[0].tolist()
    found = task.brier_scores(1, summed(task, torch.tensor([[0.3, -0.2]]), torch.tensor([[2.0, 1.0]])))
    assert found == pytest.approx([(1 - survival[0]) ** 2 / 0.8, survival[1] ** 2 / 0.6], rel=1e-5)
    early = task.brier_scores(1, summed(task, torch.tensor([[0.3, -0.2]]), torch.tensor([[0.5, 1.0]])))
    assert early == pytest.approx([survival[0] ** 2 / 0.9, survival[1] ** 2 / 0.9], rel=1e-5)
    censored = task.brier_scores(1, summed(task, torch.tensor([[0.3, -0.2]]), torch.tensor([[2.0, 0.0]])))
    assert censored == pytest.approx([(1 - survival[0]) ** 2 / 0.8, 0.0], rel=1e-5)


def test_sums_of_environments_and_of_a_stack() -> None:
    """Pairs are of samples of one environment; Brier scores are of all samples, wherever they lie."""
    task = Event((1.0, 3.0, 4.0), (0.9, 0.8, 0.5))
    outputs, targets = drawn(300)
    stacked = task.sums(outputs.view(3, 100, 3), targets.view(3, 100, 2))
    parts = [task.sums(outputs[100 * i :][:100], targets[100 * i :][:100]) for i in range(3)]
    assert all(torch.allclose(stacked[name][i], parts[i][name]) for name in task.columns for i in range(3))
    whole = task.sums(outputs, targets)
    assert torch.allclose(stacked["brier"].sum(dim=0), whole["brier"])
    assert stacked["comparable"].sum() < whole["comparable"]
    assert {name: own.tolist() for name, own in task.sums(outputs[:0], targets[:0]).items()} == {
        "comparable": [0.0],
        "concordant": [0.0],
        "brier": [0.0] * 3,
    }


def test_without_comparable_pairs_there_is_no_concordance() -> None:
    task, targets = Event((2.0,)), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    found = task.measures(2, summed(task, torch.zeros(2, 1), targets))
    assert found == {"concordance": None, "integrated_brier_score": 0.125}  # of two, one has left


def test_the_censoring_curve_by_hand() -> None:
    """10 samples: events 1, 2, 0 and 1 after; censored 2, 1, 1 and 2 after."""
    found = censoring_curve([1, 2, 0, 1], [2, 1, 1, 2])
    assert found == pytest.approx([7 / 9, 7 / 9 * 4 / 5, 7 / 9 * 4 / 5 * 3 / 4])


def test_what_was_observed_is_kaplan_and_meiers_curve_where_all_times_are_ends_of_intervals() -> None:
    outputs, targets = drawn(300, intervals=12, whole=True)
    task = Event(tuple(float(t) for t in range(1, 13)))
    found = task.counted([(outputs[:100], targets[:100]), (outputs[100:], targets[100:])])
    sums = {name: np.array(own).reshape(2, 12).sum(axis=0).tolist() for name, own in found.items()}
    (plot,) = task.plots(300, sums)
    times, curve = kaplan_meier_estimator(targets[:, 1].numpy() == 1, targets[:, 0].numpy())
    assert plot.x == [0, *range(1, 13)]
    assert plot.observed == pytest.approx([100, *(100 * curve[times <= 12])])
    mean = task.predictions(outputs).mean(dim=0).tolist()
    assert plot.y == pytest.approx([100, *(100 * own for own in mean)])
    assert task.plots(300, {}) == []


def test_what_was_observed_by_hand() -> None:
    """Who is censored before the middle of an interval is at risk up to its start. Later nobody is."""
    targets = torch.tensor([[0.5, 1.0], [1.0, 0.0], [1.9, 0.0], [2.5, 1.0], [3.2, 0.0]])
    found = TASK.counted([(torch.zeros(5, 3), targets)])
    assert found["at_risk"] == [5, 2, 0]
    assert found["happened"] == [1, 1, 0]
    assert found["survival"] == pytest.approx([2.5, 1.25, 0.625])
    (plot,) = TASK.plots(5, found)
    assert plot.observed[:3] == pytest.approx([100, 80, 40])
    assert math.isnan(plot.observed[3])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"at_risk": [5, 2, 1]}, "at_risk: 5 is no whole number from 0 to 4"),
        ({"at_risk": [4, 4, 1]}, "samples at risk and events that 4 samples cannot have"),  # one was gone
        ({"happened": [1, 3, 0]}, "samples at risk and events"),  # of 2
        ({"happened": [1, 1.0, 0]}, "happened: 1.0 is no whole number"),
        ({"survival": [4.5, 2.0, 1.0]}, "survival probabilities that 4 samples cannot have"),
        ({"survival": [2.0, 3.0, 1.0]}, "survival probabilities"),  # it rises
        ({"survival": [2.0, 1.0, -1.0]}, "survival probabilities"),
        ({"survival": [2.0, NAN, 1.0]}, "survival probabilities"),
        ({"survival": [2.0, 1.0]}, "survival has another length"),
    ],
)
def test_observed_sums_that_cannot_be_are_refused(wrong: dict[str, list[float]], said: str) -> None:
    task = Event((1.0, 3.0, 4.0), (0.9, 0.8, 0.5))
    possible = {**POSSIBLE, "at_risk": [4, 2, 1], "happened": [1, 1, 0], "survival": [3.0, 2.0, 1.0]}
    checked_sums(task, possible, [4])
    with pytest.raises(ValueError, match=said):
        checked_sums(task, {**possible, **wrong}, [4])


def test_counts_add_up_over_clients() -> None:
    targets = drawn(90)[1]
    parts, whole = [TASK.counts(targets[i::3]) for i in range(3)], TASK.counts(targets)
    for kind in range(2):
        assert torch.equal(sum(part[kind] for part in parts), whole[kind])  # type: ignore[arg-type]
    assert int(whole[0].sum() + whole[1].sum()) == 90


# --- What cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ([-1.0, 1.0], "y has a time of -1; it must be at least 0"),
        ([NAN, 1.0], "y has a time that is no finite number"),
        ([float("inf"), 0.0], "y has a time that is no finite number"),
        ([1.0, 2.0], "y has an event of 2; it must be 1 where it happened, and 0 where not yet"),
        ([1.0, NAN], "y has an event of nan; it must be 1"),
    ],
)
def test_targets_that_cannot_be_are_named(target: list[float], said: str) -> None:
    must_be_targets("site-1", TASK, torch.tensor([[0.0, 1.0], [7.0, 0.0]]))
    with pytest.raises(UserError, match=f"site-1: {said}"):
        must_be_targets("site-1", TASK, torch.tensor([[0.0, 1.0], target]))


@pytest.mark.parametrize(
    ("times", "censoring", "said"),
    [
        ((), (), "times"),
        ((0.0, 1.0), (), "times"),
        ((2.0, 1.0), (), "times"),
        ((1.0, NAN), (), "times"),
        ((1.0, 2.0), (0.9,), "censoring"),
        ((1.0, 2.0), (0.8, 0.9), "censoring"),
        ((1.0, 2.0), (0.8, 0.0), "censoring"),
        ((1.0, 2.0), (1.2, 0.9), "censoring"),
        ((1.0, 2.0), (NAN, 0.9), "censoring"),
    ],
)
def test_times_and_curves_that_cannot_be_are_refused(
    times: tuple[float, ...], censoring: tuple[float, ...], said: str
) -> None:
    with pytest.raises(UserError, match=f"^{said}: .* is not possible; give"):
        Event(times, censoring)


POSSIBLE = {"comparable": [5.0], "concordant": [3.5], "brier": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"comparable": [7.0]}, "pairs that 4 samples cannot have"),  # of 6
        ({"concordant": [5.5]}, "pairs"),
        ({"concordant": [-0.5]}, "pairs"),
        ({"concordant": [3.25]}, "pairs"),
        ({"comparable": [4.5]}, "pairs"),
        ({"comparable": [NAN]}, "pairs"),
        ({"concordant": [NAN]}, "pairs"),
        ({"brier": [1.0, 2.0, 8.5]}, "Brier scores that 4 samples cannot have"),  # of 4 / 0.5
        ({"brier": [1.0, -2.0, 3.0]}, "Brier scores"),
        ({"brier": [1.0, NAN, 3.0]}, "Brier scores"),
    ],
)
def test_sums_that_cannot_be_are_refused(wrong: dict[str, list[float]], said: str) -> None:
    task = Event((1.0, 3.0, 4.0), (0.9, 0.8, 0.5))
    checked_sums(task, POSSIBLE, [4])
    with pytest.raises(ValueError, match=said):
        checked_sums(task, {**POSSIBLE, **wrong}, [4])


def test_what_a_diverged_model_says_is_wrong_and_finite() -> None:
    outputs = torch.tensor([[NAN, NAN, NAN], [float("inf"), -float("inf"), 0.5], [1e38, -1e38, 1e38]])
    targets = torch.tensor([[2.0, 1.0], [3.5, 1.0], [9.0, 0.0]])
    kept = TASK.usable(outputs, targets)
    assert kept[0].tolist() == [WRONG, -WRONG, WRONG]
    assert kept[1].tolist() == [WRONG, WRONG, 0.5]
    assert TASK.loss(kept, targets).isfinite()
    assert all(math.isfinite(value) for own in summed(TASK, outputs, targets).values() for value in own)
    assert torch.equal(TASK.usable(outputs.expand(2, 3, 3), targets.expand(2, 3, 2))[1], kept)
