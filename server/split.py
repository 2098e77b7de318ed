"""The rule of the selection `split`: which model is good where a shortcut helps and where it misleads.

A held-out sample of environment e' is right (✓) or wrong (×) for the reference f_e of another environment e
(`common/split.py`). With n✓, n× such samples, of which a model gets c✓, c× right, summed over clients, classes and
pairs e ≠ e':

    a = c✓ / n✓,    d = c× / n×,    split = min(a, d)

If f_e follows the shortcut alone, the model's accuracy where the shortcut agrees with the label with probability p
is `p a + (1 − p) d`. So split is its worst over all p, and (a + d) / 2 its average.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import copysign, sqrt
from typing import Any

Row = dict[str, Any]
LEAST_T = 4.0
"""|t| beyond which environments differ under a reference."""
LEAST_WRONG = 100
"""Wrong samples on which d must rest."""
LARGEST_T = 1e6
"""Of clients that do not differ at all among themselves."""
ERRORS = 2.0
"""Standard errors by which one score is more than another."""


class Select(StrEnum):
    """What a trial of a search is chosen by; `split` leaves it to held-out data where it does not speak."""

    held_out = "held-out"
    by_split = "split"


CONSTANT = "nothing that was tried is better than a constant"


@dataclass(frozen=True)
class Score:
    """How a model does on the right and on the wrong samples."""

    score: float
    """min(a, d)."""
    mean: float
    """(a + d) / 2."""
    agreeing: float
    """a."""
    misleading: float
    """d."""
    error: float
    """Standard error of d."""
    right: int
    """n✓; a sample counts once for each reference of another environment."""
    wrong: int
    """n×."""
    constant: float
    """Score of the best constant predictor."""
    balanced: float
    """min(a, d) with every class counting alike; a constant has 1 / classes."""

    @property
    def beats_constant(self) -> bool:
        """By more than `ERRORS` standard errors."""
        return self.score - self.constant > ERRORS * self.error

    def json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def score(row: Row) -> Score | None:
    """The score of the counts in a row of kind `split`; None where no sample is right, or none is wrong."""
    samples, correct = (_across(row[name]) for name in ("samples", "correct"))
    n, c = (tuple(sum(column) for column in zip(*counts, strict=True)) for counts in (samples, correct))
    if not all(n):
        return None
    a, d = c[0] / n[0], c[1] / n[1]
    # With E environments a sample is counted E − 1 times, which makes no more samples of it.
    alone = n[1] / (len(row["samples"]) - 1)
    return Score(
        score=min(a, d),
        mean=(a + d) / 2,
        agreeing=a,
        misleading=d,
        error=sqrt(d * (1 - d) / alone),
        right=n[0],
        wrong=n[1],
        constant=max(min(own[0] / n[0], own[1] / n[1]) for own in samples),
        balanced=min(_balanced(samples, correct, kind) for kind in (0, 1)),
    )


def first(scores: dict[int, Score]) -> int:
    """The number with the best score, the earliest of equals."""
    return max(scores, key=lambda number: (scores[number].score, -number))


def more(one: Score, other: Score) -> bool:
    """Whether the difference is more than two standard errors, as if they were of different samples."""
    return one.score - other.score > ERRORS * sqrt(one.error**2 + other.error**2)


# ---------------------------------------------------------------------- when it speaks


def shut(row: Row) -> str:
    """Why a row's counts are not to be used, in one sentence; empty where they are.

    Without a shortcut the wrong samples are noise, and the rule would prefer a coin to a good model. So the
    environments must be told apart by something whose usefulness differs: under every reference, that of the same
    environment must be the easier one, by Welch's t over clients.
    """
    names: list[str] = row["environments"]
    if len(names) < 2:
        return f"there is one training environment, {names[0]}, and two are needed"
    for name, clients in zip(names, row["clients"], strict=True):
        if clients < 2:
            return f"environment {name} has held-out samples at {clients} client{'s' * (clients != 1)}, not at two"
    for number, name in enumerate(names):
        own = row["samples"][number][number]
        total, known = sum(map(sum, own)), sum(right for right, _ in own)
        guess = max(map(sum, own)) / total
        if known / total - guess <= ERRORS * sqrt(guess * (1 - guess) / total):
            return (
                f"the reference of {name} is right on {100 * known / total:.1f} % of its own environment's "
                f"held-out samples, and a constant on {100 * guess:.1f} %"
            )
    wrong = sum(kind[1] for kind in _across(row["samples"])) / (len(names) - 1)
    if wrong < LEAST_WRONG:
        return f"{wrong:.0f} held-out samples are wrong for a reference, and {LEAST_WRONG} are needed"
    tests = welch(row)
    if not any(all(abs(t) > LEAST_T for t in own) and len({t > 0 for t in own}) == 1 for own in tests):
        best = max(tests, key=lambda own: min(map(abs, own)))
        return (
            f"the references do not tell the environments apart (t = {', '.join(f'{t:+.1f}' for t in best)}; "
            f"one sign and more than {LEAST_T:g} are needed)"
        )
    return ""


def welch(row: Row) -> list[list[float]]:
    """For each environment and reference, Welch's t of the accuracies that the reference has on the held-out data
    of that environment's clients, against those of all other environments'.

    0 where a side has fewer than two clients.
    """
    clients: list[int] = row["clients"]
    found = []
    for here in range(len(clients)):
        own = []
        for sums, squares in zip(row["accuracy"], row["squares"], strict=True):
            totals = [
                (clients[here], sums[here], squares[here]),
                tuple(sum(column) - column[here] for column in (clients, sums, squares)),
            ]
            own.append(_welch(*totals[0], *totals[1]))
        found.append(own)
    return found


def _welch(n: float, total: float, squares: float, n_: float, total_: float, squares_: float) -> float:
    if min(n, n_) < 2:
        return 0.0
    difference = total / n - total_ / n_
    if abs(difference) < 1e-9:
        return 0.0
    variances = [
        max(0.0, square - sum_ * sum_ / count) / (count - 1) / count
        for count, sum_, square in ((n, total, squares), (n_, total_, squares_))
    ]
    spread = sqrt(sum(variances))
    return copysign(min(LARGEST_T, abs(difference) / spread if spread else LARGEST_T), difference)


def _across(counts: Sequence[Any]) -> list[tuple[int, int]]:
    """Of each class the right and the wrong samples, over all references and other environments than theirs."""
    classes = len(counts[0][0])
    pairs = [own for e, by in enumerate(counts) for other, own in enumerate(by) if other != e]
    return [(sum(own[y][0] for own in pairs), sum(own[y][1] for own in pairs)) for y in range(classes)]


def _balanced(samples: Sequence[tuple[int, int]], correct: Sequence[tuple[int, int]], kind: int) -> float:
    """Mean over the classes that have such samples."""
    shares = [c[kind] / n[kind] for n, c in zip(samples, correct, strict=True) if n[kind]]
    return sum(shares) / len(shares)
