"""Counts by score against scikit-learn on the scores themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import recall_score, roc_auc_score
from torch import Tensor

from perennial.common.measures.scores import BINS, COLUMNS, Scores, added, columns, count_by_score, from_columns


def sample(n: int, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits whose probabilities are somewhat right, and labels."""
    generator = torch.Generator().manual_seed(n)
    labels = (torch.rand(n, generator=generator) < 0.3).long()
    margins = spread * torch.randn(n, generator=generator) + 1.5 * labels - 1
    base = torch.randn(n, generator=generator)
    return torch.stack([base, base + margins], dim=1), labels


@pytest.mark.parametrize(("n", "spread"), [(40, 1.0), (1000, 2.0), (5000, 6.0)])
def test_measures_are_those_of_the_scores_but_for_the_bins(n: int, spread: float) -> None:
    logits, labels = sample(n, spread)
    scores = logits.softmax(dim=1)[:, 1].double().numpy()
    found = count_by_score(logits, labels).measures()
    guess, truth = logits.argmax(dim=1).numpy(), labels.numpy()
    assert (found["samples"], found["positives"]) == (n, truth.sum())
    assert found["sensitivity"] == recall_score(truth, guess)
    assert found["specificity"] == recall_score(truth, guess, pos_label=0)
    assert abs(found["auroc"] - roc_auc_score(truth, scores)) <= found["auroc_error"] + 1e-12
    assert found["auroc_error"] < 0.1
    # The groups are scikit-learn's ten bins, in which a score counts as the middle of its hundredth.
    shares, means = calibration_curve(truth, scores, n_bins=10)
    np.testing.assert_allclose([share for _, _, share in found["reliability"]], shares)
    np.testing.assert_allclose([mean for _, mean, _ in found["reliability"]], means, atol=0.5 / BINS + 1e-9)
    counts = np.histogram(scores, bins=10, range=(0, 1))[0]
    error = float((counts[counts > 0] * abs(shares - means)).sum() / n)
    assert abs(found["calibration_error"] - error) <= 0.5 / BINS + 1e-9


def test_sums_over_clients_are_those_of_all_samples() -> None:
    parts = [sample(n) for n in (30, 1, 400)]
    together = count_by_score(*map(torch.cat, zip(*parts, strict=True)))
    assert added([count_by_score(*part) for part in parts]).measures() == together.measures()


def test_a_class_that_is_missing_and_no_samples() -> None:
    logits, _ = sample(20)
    found = count_by_score(logits, torch.ones(20).long()).measures()
    assert (found["specificity"], found["auroc"], found["auroc_error"]) == (None, None, None)
    assert 0 <= found["sensitivity"] <= 1
    nobody = count_by_score(logits[:0], torch.zeros(0).long()).measures()
    assert (nobody["samples"], nobody["sensitivity"], nobody["calibration_error"]) == (0, None, None)
    assert nobody["reliability"] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, -1e-30, 1e-3, 40.0, -40.0, 1e30, -1e30]), min_size=1, max_size=20))
def test_the_halves_are_what_the_model_says(margins: list[float]) -> None:
    """So that counts of right answers can be compared with them, however small or large a margin is."""
    logits = torch.tensor([[0.0, margin] for margin in margins])
    labels = torch.arange(len(margins)) % 2
    assert count_by_score(logits, labels).right == int((logits.argmax(dim=1) == labels).sum())


def wire(counts: tuple[int, ...] = (12, 0, 7)) -> tuple[list[Scores], dict[str, list[int]], list[int], list[int]]:
    found = [count_by_score(*sample(n)) for n in counts]
    return found, columns(found), list(counts), [own.right for own in found]


def test_there_and_back() -> None:
    found, given, counts, right = wire()
    assert all(type(value) is int for values in given.values() for value in values)
    for own, again in zip(found, from_columns(given, counts, right), strict=True):
        assert (own.negatives == again.negatives).all()
        assert (own.positives == again.positives).all()


@pytest.mark.parametrize("wrong", ["length", "negative", "fraction", "count", "right", "huge", "text"])
def test_columns_that_cannot_be(wrong: str) -> None:
    _, given, counts, right = wire()
    name = COLUMNS[0]
    values: list[object] = list(given[name])
    place = next(place for place, value in enumerate(values) if value)
    if wrong == "length":
        values = values[:-1]
    elif wrong == "negative":
        values[place], values[place + 1] = -1, 2
    elif wrong == "fraction":
        values[place] = 1.0
    elif wrong == "count":
        values[place] = given[name][place] + 1
    elif wrong == "huge":
        values[place] = 2**62
    elif wrong == "text":
        values[place] = "1"
    else:  # all samples are there, on the other side of one half
        values[:BINS] = values[:BINS][::-1]
    with pytest.raises((ValueError, TypeError)):
        from_columns({**given, name: values}, counts, right)
