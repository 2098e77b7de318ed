from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import auc, average_precision_score, precision_recall_curve, roc_auc_score
from torch import Tensor

from perennial.common.measures.ranking import BINS, Ranking, columns, from_columns, hard_areas, rank


def drawn(count: int, seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits that know something of the labels, of which a third are positive."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < 1 / 3).long()
    logits = torch.randn(count, 2, generator=generator)
    logits[:, 1] += labels
    return spread * logits, labels


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_areas_are_those_of_all_scores(spread: float) -> None:
    logits, labels = drawn(2000, 0, spread)
    scores = (logits[:, 1] - logits[:, 0]).numpy()
    found = rank(logits, labels, 32).measures()
    exact = roc_auc_score(labels.numpy(), scores)
    assert abs(found["auroc"] - exact) <= found["auroc_error"] < 0.02
    assert found["auprc"] == pytest.approx(average_precision_score(labels.numpy(), scores), abs=0.01)
    if spread == 1.0:
        assert found["auroc_error"] < 1e-3
        assert found["auprc"] == pytest.approx(average_precision_score(labels.numpy(), scores), abs=1e-3)


def test_areas_by_hand() -> None:
    """Margins 3, 2, 1, 0 with labels 1, 0, 1, 0: three of four pairs are right; precisions 1 and 2/3."""
    logits = torch.tensor([[0.0, 3], [0, 2], [0, 1], [0, 0]])
    found = rank(logits, torch.tensor([1, 0, 1, 0]), 4).measures()
    assert found["auroc"] == pytest.approx(0.75)
    assert found["auprc"] == pytest.approx((1 + 2 / 3) / 2)
    assert found["auroc_error"] == 0
    # Predictions 1, 1, 1, 0: recall 1, specificity 1/2, precision 2/3.
    assert found["auroc_hard_batch"] == pytest.approx(0.75)
    assert found["auprc_hard_batch"] == pytest.approx(5 / 6)


def test_equal_scores_count_one_half() -> None:
    found = rank(torch.zeros(10, 2), torch.tensor([1] * 3 + [0] * 7), 5).measures()
    assert found["auroc"] == 0.5
    assert found["auroc_error"] == 0.5
    assert found["auprc"] == pytest.approx(0.3)


def test_parts_add_up() -> None:
    logits, labels = drawn(300, 1)
    whole = rank(logits, labels, 10)
    parts = rank(logits[:100], labels[:100], 10) + rank(logits[100:], labels[100:], 10)
    assert parts.measures() == pytest.approx(whole.measures())


def test_without_one_of_the_classes_there_is_no_area() -> None:
    logits = drawn(20, 2)[0]
    assert rank(logits, torch.zeros(20, dtype=torch.long), 5).measures() == {}
    assert rank(logits[:0], torch.zeros(0, dtype=torch.long), 5).measures() == {}
    mixed = torch.tensor([1] + [0] * 19)
    assert rank(logits, mixed, 32).measures().keys() == {"auroc", "auroc_error", "auprc"}  # no full batch


def test_a_model_that_has_diverged_ranks_nothing() -> None:
    """Its logits are not numbers, or infinite: no error, which would take the client's other results with it."""
    labels = torch.tensor([0, 1, 0, 1])
    assert rank(torch.full((4, 2), torch.nan), labels, 4).measures()["auroc"] == 0.5
    endless = torch.tensor([[torch.inf, -torch.inf], [-torch.inf, torch.inf], [0.0, 0.0], [0.0, 1.0]])
    assert rank(endless, labels, 4).measures()["auroc"] == 1.0


def test_extreme_margins_have_a_bin() -> None:
    found = rank(torch.tensor([[0.0, 1e30], [1e30, 0.0]]), torch.tensor([1, 0]), 2)
    assert found.positives[BINS - 1] == 1
    assert found.negatives[0] == 1
    assert found.measures()["auroc"] == 1


BITS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=12)


@given(BITS)
def test_hard_areas_are_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    predicted, labels = (torch.tensor(column) for column in zip(*pairs, strict=True))
    aurocs, auprcs = hard_areas(predicted, labels, len(pairs))
    if len(set(labels.tolist())) < 2:
        assert len(aurocs) == 0
        return
    precision, recall, _ = precision_recall_curve(labels.numpy(), predicted.numpy())
    assert float(aurocs) == pytest.approx(roc_auc_score(labels.numpy(), predicted.numpy()))
    assert float(auprcs) == pytest.approx(auc(recall, precision))


def test_hard_areas_are_of_full_batches_with_both_classes() -> None:
    labels = torch.tensor([1, 0, 0, 0, 1, 0, 1])
    assert [len(areas) for areas in hard_areas(labels, labels, 2)] == [2, 2]
    assert hard_areas(labels, labels, 2)[0].tolist() == [1, 1]


def test_columns_and_back() -> None:
    rankings = [rank(*drawn(count, count), 4) for count in (40, 0, 7)]
    back = from_columns(columns(rankings), [40, 0, 7], 4)
    for one, other in zip(rankings, back, strict=True):
        assert np.array_equal(one.negatives, other.negatives)
        assert np.array_equal(one.positives, other.positives)
        assert one.measures() == other.measures()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"negatives": [1] * BINS}, "other counts"),
        ({"negatives": [-1] + [0] * (BINS - 1)}, "-1 is no whole number from 0 to 8"),
        # In 64 bits their sum is 0.
        ({"negatives": [2**62] * 4 + [0] * (BINS - 4)}, "no whole number from 0 to 8"),
        ({"negatives": [1e30] + [0.0] * (BINS - 1)}, r"1e\+30 is no whole number"),
        ({"negatives": [0] * 5}, "negatives has another length"),
        ({"batches": [3]}, "3 is no whole number from 0 to 2"),
        ({"batches": [10**9], "hard_auroc": [1e9]}, "no whole number from 0 to 2"),
        ({"batches": [1.0]}, "1.0 is no whole number"),
        ({"hard_auroc": [3.0]}, "above 1"),
        ({"hard_auprc": [-0.5]}, "above 1"),
        ({"batches": [1, 1]}, "batches has another length"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any], word: str) -> None:
    good = columns([rank(*drawn(8, 3), 4)])
    with pytest.raises(ValueError, match=word):
        from_columns({**good, **change}, [8], 4)


def test_the_counts_of_many_large_clients_do_not_run_over() -> None:
    """10^10 of each class in one bin: the product has 67 bits."""
    negatives = np.zeros(BINS, np.int64)
    negatives[0] = 10**10
    assert Ranking(negatives, negatives.copy()).measures()["auroc_error"] == 0.5
