import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve, roc_auc_score, roc_curve
from torch import Tensor

from perennial.common.measures.scores import BINS
from perennial.common.tasks import Labels, checked_sums
from perennial.common.tasks.base import Sums, must_be_targets
from perennial.common.tasks.classes import WRONG
from perennial.common.utils.errors import UserError

NAMES = ("effusion", "mass", "hernia")
TASK = Labels(NAMES)
WEIGHTED = Labels(NAMES, ((1.0, 3.0), (0.5, 2.0), (0.0, 1.0)))
NAN = float("nan")


def drawn(n: int = 300, missing: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (n, 3) in float64 that say something of the labels, of which some are missing."""
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, 3, generator=generator) < torch.tensor([0.5, 0.2, 0.05])).double()
    logits = 2 * y - 1.5 + 1.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return logits, y.masked_fill(torch.rand(n, 3, generator=generator) < missing, NAN)


def summed(task: Labels, logits: Tensor, targets: Tensor) -> Sums:
    found = {name: own.tolist() for name, own in task.sums(task.usable(logits, targets), targets).items()}
    task.must_add_up(len(targets), found)
    return found


@pytest.mark.parametrize("task", [TASK, WEIGHTED], ids=["plain", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_pytorchs_of_the_labels_that_are_known(task: Labels, smoothing: float) -> None:
    logits, y = drawn()
    expected = torch.zeros(len(y), dtype=torch.float64)
    for sample, label in (~y.isnan()).nonzero().tolist():
        target = y[sample, label]
        weight = task.weights[label][int(target)] if task.weights else 1.0
        smooth = target + smoothing * (0.5 - target)
        expected[sample] += weight * F.binary_cross_entropy_with_logits(logits[sample, label], smooth) / 3
    assert torch.allclose(task.loss(logits, y, smoothing=smoothing, reduction="none"), expected)
    assert torch.allclose(task.loss(logits, y, smoothing=smoothing), expected.mean())
    assert torch.allclose(task.loss(logits, y, smoothing=smoothing, reduction="sum"), expected.sum())


def test_loss_by_hand() -> None:
    """BCE(2, 1) = log(1 + e^-2), BCE(2, 0) = log(1 + e^2); a sample without any known label adds 0."""
    logits, y = torch.full((2, 3), 2.0), torch.tensor([[1.0, 0.0, NAN], [NAN, NAN, NAN]])
    found = TASK.loss(logits, y, reduction="none").tolist()
    assert found == pytest.approx([(np.log1p(np.exp(-2)) + np.log1p(np.exp(2))) / 3, 0.0])
    weighted = WEIGHTED.loss(logits, y, reduction="none").tolist()
    assert weighted == pytest.approx([(3 * np.log1p(np.exp(-2)) + 0.5 * np.log1p(np.exp(2))) / 3, 0.0])


@pytest.mark.parametrize("task", [TASK, WEIGHTED], ids=["plain", "weighted"])
def test_derivatives_are_those_of_autograd(task: Labels) -> None:
    logits, y = drawn()
    leaf, scale = logits.clone().requires_grad_(), torch.ones(len(y), 1, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(task.loss(leaf, y, reduction="sum"), leaf)
    (slopes,) = torch.autograd.grad(task.loss(scale * logits, y, reduction="sum"), scale)
    assert torch.allclose(task.residuals(logits, y), expected)
    assert torch.allclose(task.scale_slopes(logits, y), slopes[:, 0])
    assert not expected[y.isnan()].any()


def test_measures_are_those_of_scikit_learn_within_what_the_bins_hide() -> None:
    logits, y = drawn(2000)
    by_label, each = TASK.by_label(summed(TASK, logits, y)), []
    for place, name in enumerate(NAMES):
        known = ~y[:, place].isnan()
        truth, score = y[known, place].numpy(), logits[known, place].sigmoid().numpy()
        binned, own = np.ceil(score * BINS), by_label[name]
        assert own["positives"] == truth.sum()
        assert own["negatives"] == (1 - truth).sum()
        assert own["auroc"] == pytest.approx(roc_auc_score(truth, binned))
        assert own["average_precision"] == pytest.approx(average_precision_score(truth, binned))
        # Of the scores themselves.
        for measure, function in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
            error = own[f"{measure}_error"]
            assert error is not None
            assert abs(own[measure] - function(truth, score)) <= error < 0.06  # type: ignore[operator]
        assert own["f1"] == pytest.approx(f1_score(truth, score > 0.5))
        each.append([own[measure] for measure in ("auroc", "average_precision", "f1")])
    found = TASK.measures(len(y), summed(TASK, logits, y))
    means = np.mean(each, axis=0)
    known = ~y.isnan()
    micro = f1_score(y[known], logits[known] > 0)
    assert list(found.values()) == pytest.approx([*means, micro])
    assert [measure.name for measure in (TASK.headline, *TASK.others)] == list(found)


@pytest.mark.parametrize("seed", range(5))
def test_the_bins_hide_no_more_of_an_average_precision_than_they_say(seed: int) -> None:
    """Scores that crowd in few bins, also tied ones, with the positives of a bin first, last, and mixed."""
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(80, 1, generator=generator) < 0.3).double()
    bins = torch.randint(40, 44, (80, 1), generator=generator).double() + y.long()
    task = Labels(("mass",))
    within = torch.rand(80, 1, generator=generator).double()
    for inside in (within, (1 + y) / 4, (2 - y) / 4, within * 0 + 0.5, within.round() / 3 + 0.1):
        score = (bins + 0.99 * inside.clamp(0.01, 0.99)) / BINS
        own = task.by_label(summed(task, score.logit(), y))["mass"]
        true = average_precision_score(y[:, 0], score[:, 0])
        assert own["average_precision"] is not None
        assert own["average_precision_error"] is not None
        assert abs(own["average_precision"] - true) <= own["average_precision_error"] + 1e-12


def test_curves_are_those_of_scikit_learn_on_scores_in_bins() -> None:
    logits, y = drawn(400)
    plots = {plot.title: plot for plot in TASK.plots(400, summed(TASK, logits, y))}
    assert len(plots) == 2 * len(NAMES)
    for place, name in enumerate(NAMES):
        there = ~y[:, place].isnan()
        binned = (logits[there, place].sigmoid() * BINS).ceil().clamp(1)
        wrong, right, _ = roc_curve(y[there, place], binned, drop_intermediate=False)
        roc = plots[f"{name}: ROC curve"]
        assert {(round(a, 9), round(b, 9)) for a, b in zip(roc.x, roc.y, strict=True)} == {
            (round(100 * a, 9), round(100 * b, 9)) for a, b in zip(wrong.tolist(), right.tolist(), strict=True)
        }
        precision, recall, _ = precision_recall_curve(y[there, place], binned)
        found = plots[f"{name}: precision against recall"]
        assert {(round(a, 9), round(b, 9)) for a, b in zip(found.x, found.y, strict=True)} == {
            (round(100 * a, 9), round(100 * b, 9))
            for a, b in zip(recall[:-1].tolist(), precision[:-1].tolist(), strict=True)
        }


def test_each_label_has_measures_of_its_own() -> None:
    logits, y = drawn(400)
    y[:, 2] = 0
    sums = summed(TASK, logits, y)
    found, own = TASK.by_target(400, sums), TASK.by_label(sums)
    for place, name in enumerate(NAMES):
        known = y[:, place][~y[:, place].isnan()]
        assert found[name] == {
            "frequency": pytest.approx(known.mean().item()),
            **{measure: own[name][measure] for measure in ("auroc", "average_precision", "f1")},
        }
    assert found[NAMES[2]]["auroc"] is None
    assert {plot.title.partition(":")[0] for plot in TASK.plots(400, sums)} == {*NAMES[:2]}  # both kinds
    nowhere = TASK.by_target(3, summed(TASK, logits[:3], y[:3] * NAN))
    assert nowhere[NAMES[0]]["frequency"] is None


def test_the_standard_error_is_the_bootstraps() -> None:
    logits, y = drawn(400, missing=0.0)
    sums, generator = summed(TASK, logits, y), torch.Generator().manual_seed(1)
    drawings = [torch.randint(400, (400,), generator=generator) for _ in range(400)]
    areas = [[own["auroc"] for own in TASK.by_label(summed(TASK, logits[i], y[i])).values()] for i in drawings]
    assert TASK.standard_error(400, sums) == pytest.approx(np.std(areas, axis=0).mean(), rel=0.1)
    low, high = TASK.interval(400, sums, 0.95)  # type: ignore[misc]
    assert low < TASK.value(400, sums) < high  # type: ignore[operator]
    assert TASK.standard_error(1, summed(TASK, logits[:1], y[:1])) is None


def test_counts_of_parts_and_of_a_stack_are_those_of_all() -> None:
    logits, y = drawn(300)
    whole = TASK.sums(logits, y)
    stacked = TASK.sums(logits.view(3, 100, 3), y.view(3, 100, 3))
    assert all(torch.equal(stacked[name].sum(dim=0), whole[name]) for name in TASK.columns)
    own = TASK.sums(logits[100:200], y[100:200])
    assert all(torch.equal(stacked[name][1], own[name]) for name in TASK.columns)
    assert all(
        not values.any() and values.shape == (3 * BINS,) for values in TASK.sums(logits[:0], y[:0]).values()
    )


def test_labels_without_both_kinds_of_samples_are_left_out_of_the_means() -> None:
    y = torch.tensor([[1.0, 0.0, NAN], [0.0, 0.0, NAN]])
    logits = torch.tensor([[2.0, -2.0, 5.0], [1.0, -3.0, 5.0]])
    found, labels = TASK.measures(2, summed(TASK, logits, y)), TASK.by_label(summed(TASK, logits, y))
    assert labels["mass"]["auroc"] is labels["hernia"]["auroc"] is labels["mass"]["f1"] is None
    assert labels["hernia"]["positives"] == 0
    assert found == pytest.approx(
        {"auroc_of_labels": 1.0, "average_precision": 1.0, "macro_f1": 2 / 3, "micro_f1": 2 / 3}
    )
    nothing = torch.tensor([[NAN, 0.0, NAN]])
    empty = summed(TASK, torch.full((1, 3), -1.0), nothing)
    assert set(TASK.measures(1, empty).values()) == {None}
    assert TASK.value(1, empty) is None


def test_a_logit_too_small_for_the_bins_still_decides() -> None:
    task, y = Labels(("mass",)), torch.ones(2, 1)
    found = task.by_label(summed(task, torch.tensor([[1e-30], [-1e-30]]), y))["mass"]
    assert found["f1"] == pytest.approx(2 / 3)


def test_the_constant_says_each_labels_frequency() -> None:
    y = torch.tensor([[1.0, 0.0, NAN], [0.0, 0.0, NAN], [NAN, 0.0, NAN], [0.0, 0.0, NAN]])
    said = TASK.predictions(TASK.constant(y))
    assert said.tolist() == pytest.approx([1 / 3, 1e-6, 0.5], rel=1e-3)
    known = drawn()[1][:, :1]
    task, leaf = Labels(("effusion",)), Labels(("effusion",)).constant(known).requires_grad_()
    assert task.loss(leaf.expand(len(known), 1), known).isfinite()
    (slope,) = torch.autograd.grad(task.loss(leaf.expand(len(known), 1), known), leaf)
    assert slope.item() == pytest.approx(0.0, abs=1e-9)  # the least loss of all constants


def test_targets_that_cannot_be_are_named() -> None:
    must_be_targets("site-1", TASK, torch.tensor([[0.0, 1.0, NAN]]))
    for wrong in (2.0, 0.5, float("inf"), -1.0):
        with pytest.raises(UserError, match=f"site-1: y has a mass of {wrong:g}; a label is 0 or 1, or missing"):
            must_be_targets("site-1", TASK, torch.tensor([[0.0, 1.0, NAN], [0.0, wrong, 1.0]]))


def test_counts_that_cannot_be_are_refused() -> None:
    logits, y = drawn(10, missing=0.0)
    given = summed(TASK, logits, y)
    checked_sums(TASK, given, [10])
    with pytest.raises(ValueError, match="more samples with and without effusion than there are"):
        TASK.must_add_up(9, given)
    with pytest.raises(ValueError, match="positives: 11 is no whole number from 0 to 10"):
        checked_sums(TASK, {**given, "positives": [11, *given["positives"][1:]]}, [10])
    with pytest.raises(ValueError, match="negatives has another length"):
        checked_sums(TASK, {**given, "negatives": given["negatives"][1:]}, [10])


def test_what_a_diverged_model_says_is_wrong_and_finite() -> None:
    logits = torch.tensor([[NAN, float("inf"), NAN], [float("inf"), -float("inf"), 2.0], [1e38, -1e38, 1e38]])
    y = torch.tensor([[1.0, 0.0, NAN], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    kept = TASK.usable(logits, y)
    assert kept[:2].tolist() == [[-WRONG, WRONG, WRONG], [-WRONG, -WRONG, 2.0]]
    assert TASK.loss(kept, y).isfinite()
    assert TASK.loss(kept, y, reduction="none")[0] == pytest.approx(2 * WRONG / 3)
    assert torch.equal(TASK.usable(logits.expand(2, 3, 3), y.expand(2, 3, 3))[1], kept)
