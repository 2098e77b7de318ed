"""What docs/selection.md says of when `split` ranks models rightly, on a distribution that is known exactly.

A label y, a cause that is y with probability r everywhere, and a shortcut that is y with probability p of the
environment, independent of each other given y. Every model is one of the two, or a mixture.
"""

from itertools import product
from typing import Any

import pytest

from perennial.server.selection.split_rule import score, unusable

P, SIZE = (0.9, 0.7), 200_000


def right(model: str, cause: bool, shortcut: bool) -> float:
    """Probability that a model is right on a sample whose cause and shortcut are right or not."""
    mixed = {"cause": (1.0, 0.0), "shortcut": (0.0, 1.0), "both": (0.6, 0.4), "coin": (0.0, 0.0)}
    by_cause, by_shortcut = mixed[model]
    return by_cause * cause + by_shortcut * shortcut + (1 - by_cause - by_shortcut) / 2


def cells(p: float, r: float) -> list[tuple[bool, bool, float]]:
    return [
        (cause, shortcut, (r if cause else 1 - r) * (p if shortcut else 1 - p))
        for cause, shortcut in product((True, False), repeat=2)
    ]


def accuracy(model: str, p: float, r: float) -> float:
    return sum(share * right(model, cause, shortcut) for cause, shortcut, share in cells(p, r))


def expected(follows: str, p: float, r: float, model: str = "") -> list[list[int]]:
    """Of each class the samples that a reference knows and does not know; of these those that the model knows."""
    known = unknown = 0.0
    for cause, shortcut, share in cells(p, r):
        weight = share * right(model, cause, shortcut) if model else share
        known += weight * right(follows, cause, shortcut)
        unknown += weight * (1 - right(follows, cause, shortcut))
    return [[round(SIZE * known / 2), round(SIZE * unknown / 2)]] * 2


def row(model: str, r: float) -> dict[str, Any]:
    """The expected counts; each environment's reference follows what is worth more there, four clients each."""
    follows = ["shortcut" if own > r else "cause" for own in P]
    accuracies = [[accuracy(reference, p, r) for p in P] for reference in follows]
    return {
        "kind": "split", "environments": [f"p={p}" for p in P], "clients": [4] * len(P),
        "samples": [[expected(reference, p, r) for p in P] for reference in follows],
        "correct": [[expected(reference, p, r, model) for p in P] for reference in follows],
        "accuracy": [[4 * own for own in by] for by in accuracies],
        "squares": [[4 * own**2 for own in by] for by in accuracies],
    }  # fmt: skip


@pytest.mark.parametrize("model", ["cause", "shortcut", "both", "coin"])
def test_where_the_references_follow_the_shortcut_the_score_is_the_worst_case(model: str) -> None:
    r = 0.6
    counts = row(model, r)
    assert unusable(counts) == ""
    found = score(counts)
    assert found
    each = [accuracy(model, p, r) for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert found.score == pytest.approx(min(each), abs=1e-4)
    assert found.mean == pytest.approx(sum(each) / len(each), abs=1e-4)
    for p in (0.0, 0.3, 1.0):
        assert p * found.agreeing + (1 - p) * found.misleading == pytest.approx(accuracy(model, p, r), abs=1e-4)


def test_where_they_follow_the_cause_the_score_is_the_wrong_way_round_and_the_gate_is_shut() -> None:
    scores = {model: score(row(model, 0.95)) for model in ("cause", "shortcut")}
    assert scores["cause"]
    assert scores["shortcut"]
    assert scores["cause"].score == 0
    assert scores["shortcut"].score > 0.7
    assert "do not tell the environments apart" in unusable(row("cause", 0.95))
