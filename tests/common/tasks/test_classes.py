import math

import pytest
import torch
from torch import Tensor

from perennial.common.tasks.classes import WRONG, Classes


def score(logits: Tensor, labels: Tensor) -> tuple[int, int, float]:
    """Samples, right ones, and the sum of their losses, as a client sums them."""
    task = Classes(logits.shape[-1])
    loss = task.loss(logits, labels, reduction="none").double().sum()
    return len(labels), int(task.sums(logits, labels)["correct"]), float(loss)


def test_score_of_hand_made_logits() -> None:
    # Losses: log(1 + e^-2), log(1 + e^2), log 2.
    found = score(torch.tensor([[2.0, 0.0], [2.0, 0.0], [5.0, 5.0]]), torch.tensor([0, 1, 0]))
    assert found[:2] == (3, 2)
    assert found[2] == pytest.approx(math.log1p(math.exp(-2)) + math.log1p(math.exp(2)) + math.log(2))


def test_scores_of_parts_add_up_to_the_score_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(100, 5, generator=generator), torch.randint(0, 5, (100,), generator=generator)
    whole, parts = score(logits, labels), [score(logits[i::3], labels[i::3]) for i in range(3)]
    assert whole == pytest.approx(tuple(map(sum, zip(*parts, strict=True))), abs=1e-9)


def test_the_loss_sum_keeps_what_float32_would_lose() -> None:
    big, small = torch.tensor([[0.0, 2.0**25]]), torch.tensor([[0.0, 0.0]])
    logits = torch.cat([big, small.expand(1000, 2)])
    expected = 2.0**25 + 1000 * float(torch.tensor(2.0).log())
    assert score(logits, torch.zeros(1001, dtype=torch.long))[2] == pytest.approx(expected, abs=1e-3)


def test_no_samples_score_nothing() -> None:
    assert score(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)) == (0, 0, 0.0)


def test_what_a_diverged_model_says_is_wrong() -> None:
    logits = torch.tensor([[2.0, 0.0], [math.nan, 0.0], [math.inf, 0.0], [0.0, 1e38], [0.0, -math.inf]])
    labels = torch.tensor([1, 0, 0, 0, 0])
    task = Classes(2)
    kept = task.usable(logits, labels)
    assert torch.equal(kept[[0, 4]], logits[[0, 4]])  # also where a class is impossible
    found = score(kept, labels)
    assert found[:2] == (5, 1)
    assert found[2] == pytest.approx(math.log1p(math.exp(2)) + 3 * WRONG)
    stack = task.sums(task.usable(logits.expand(2, 5, 2), labels.expand(2, 5)), labels.expand(2, 5))
    assert stack["correct"].tolist() == [[1], [1]]
