from itertools import product

import pytest
import torch
from sksurv.metrics import concordance_index_censored
from torch import Tensor

from perennial.common.measures.concordance import pairs


def by_hand(times: Tensor, events: Tensor, risks: Tensor) -> tuple[int, float]:
    """Straight from the definition, pair by pair."""
    comparable, concordant = 0, 0.0
    for i, j in product(range(len(times)), repeat=2):
        if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
            comparable += 1
            concordant += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return comparable, concordant


@pytest.mark.parametrize("levels", [3, 10, 10_000])
@pytest.mark.parametrize("seed", range(6))
def test_pairs_are_counted_as_by_hand_and_by_scikit_survival(seed: int, levels: int) -> None:
    """With ties of times, of risks, and of both."""
    generator = torch.Generator().manual_seed(seed)
    times, risks = (torch.randint(levels, (60,), generator=generator).double() for _ in range(2))
    events = torch.rand(60, generator=generator) < 0.6
    found = pairs(times, events, risks)
    assert found == by_hand(times, events, risks)
    _, concordant, discordant, tied, _ = concordance_index_censored(events.numpy(), times.numpy(), risks.numpy())
    assert found == (concordant + discordant + tied, concordant + tied / 2)


@pytest.mark.parametrize(
    ("times", "events", "risks", "found"),
    [
        ([1.0, 2.0, 3.0], [1, 1, 1], [3.0, 2.0, 1.0], (3, 3.0)),
        ([1.0, 2.0, 3.0], [1, 1, 1], [1.0, 1.0, 1.0], (3, 1.5)),
        ([1.0, 2.0, 3.0], [0, 1, 0], [1.0, 2.0, 3.0], (1, 0.0)),
        ([1.0, 1.0], [1, 1], [2.0, 1.0], (0, 0.0)),
        ([1.0, 1.0], [1, 0], [2.0, 1.0], (1, 1.0)),
        ([1.0, 2.0], [0, 0], [2.0, 1.0], (0, 0.0)),
        ([4.0], [1], [1.0], (0, 0.0)),
        ([], [], [], (0, 0.0)),
    ],
)
def test_small_cases(times: list[float], events: list[int], risks: list[float], found: tuple[int, float]) -> None:
    own = torch.tensor(times), torch.tensor(events).bool(), torch.tensor(risks)
    assert pairs(*own) == found


def test_a_hundred_thousand_samples() -> None:
    """Whose pairs would fill the memory. Risks that are the times turned round have every pair right."""
    generator = torch.Generator().manual_seed(0)
    times = torch.randperm(100_000, generator=generator)
    events = torch.ones(100_000, dtype=torch.bool)
    every = 100_000 * 99_999 // 2
    assert pairs(times, events, -times) == (every, every)
    assert pairs(times, events, times) == (every, 0)
    assert pairs(times, events, torch.zeros(100_000)) == (every, every / 2)
