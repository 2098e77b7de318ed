"""The rule of the selection `split`: which model is good where a shortcut helps and where it misleads.

A held-out sample is right (✓) or wrong (×) for the reference f_e of a training environment e
(`common/selection.py`). With n✓, n× such samples of an environment, of which a model gets c✓, c× right, summed
over clients and classes:

    a = mean c✓ / n✓,    d = mean c× / n×    over the environments,    split = min(a, d)

If f_e follows the shortcut alone, the model's accuracy where the shortcut agrees with the label with probability p
is `p a + (1 − p) d`. So split is its worst over all p, and (a + d) / 2 its average.

Which references follow a shortcut, and whether any does, is found by comparing environments two at a time
(`compared`): of those, `followers` are where the shortcut is strongest.

Of a sample with several labels, each one that is known is an answer of its own, right or wrong, and the counts are
of answers. Those of one sample may err together. How much they do is in the variance between clients; where every
environment has one client, all are taken to be right or wrong at once, which is the most. Every label and value
counts alike in a and d, as in an area under a ROC curve: else the wrong ones of a rare label are mostly its
samples, whatever the shortcut says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import permutations
from math import sqrt
from typing import Any, Protocol, TypeVar

Row = dict[str, Any]
Key = TypeVar("Key")
Counts = Sequence[Sequence[Sequence[int]]]
"""By environment, class (or label and value) and kind: right or wrong for one reference."""
LEVEL = 0.01
"""Chance that some pair of environments is told apart where they differ by sampling and by their clients alone."""
LEVEL_ALONE = 1e-6
"""The same where every environment has one client, and nothing says how much clients differ among themselves."""
LEAST_WRONG = 25
"""Wrong samples on which d must rest: its standard error is then at most 0.1."""
ERRORS = 2.0
"""Standard errors by which one score is more than another."""


class Select(StrEnum):
    """What a trial of a search is chosen by; the others leave it to held-out data where they do not speak."""

    held_out = "held-out"
    by_split = "split"
    leave_one_out = "leave-one-out"
    worst_client = "worst-client"
    less_deviation = "less-deviation"
    worst_environment = "worst-environment"
    risk_variance = "risk-variance"
    worst_group = "worst-group"
    inferred_group = "inferred-group"
    as_in_paper = "as-in-paper"
    """By test data, as a paper did; for that paper's table alone."""


WITHOUT_TEST_DATA = tuple(own for own in Select if own is not Select.as_in_paper)

VERSION = 2
"""Of the rule by which scores are compared (`most_robust`); docs/selection.md has its history."""
UNINFORMED = "nothing that was tried is better than a constant"


@dataclass(frozen=True)
class Score:
    """How a model does on the right and on the wrong samples of the follower under which it does worst."""

    score: float
    """min(a, d)."""
    mean: float
    """(a + d) / 2."""
    agreeing: float
    """a."""
    misleading: float
    """d."""
    error: float
    """Standard error of the smaller one."""
    right: int
    """n✓."""
    wrong: int
    """n×."""
    constant: float
    """Score of the best constant predictor (`_best_constant`)."""
    mean_error: float
    """Standard error of (a + d) / 2."""
    constant_mean: float
    """(a + d) / 2 of the constant predictor that has most of it."""

    @property
    def goodness(self) -> float:
        """The score, of which more is better."""
        return self.score

    @property
    def informed(self) -> bool:
        """Whether (a + d) / 2 is better than a constant's by more than `ERRORS` standard errors.

        It says whether anything but the shortcut is used: of a model that follows the shortcut alone, and of one
        that knows nothing, it is a half. It rests on all samples, and min(a, d) on the few wrong ones.
        """
        return self.mean - self.constant_mean > ERRORS * self.mean_error

    @property
    def beats_constant(self) -> bool:
        """Whether it is informed, and min(a, d) is above that of the best constant."""
        return self.informed and self.score > self.constant

    def json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def score(row: Row) -> Score | None:
    """The score of the counts in a row of kind `split`; None where no sample is right, or none is wrong.

    The least over the followers. Where no reference is one, over all references: such a score is only shown.
    """
    chosen = followers(row) or range(len(row["environments"]))
    samples = [row["samples"][number] for number in chosen]
    if not all(any(label[kind] for by in own for label in by) for own in samples for kind in (0, 1)):
        return None
    answers, together = answers_of(row), _together(row)

    def worst(said: Sequence[int]) -> float:
        return min(_share(own, _alone(own, said), kind, answers)[0] for own in samples for kind in (0, 1))

    constant = _best_constant(answers, worst)
    found = (
        _score(own, row["correct"][number], constant, answers, together[number])
        for number, own in zip(chosen, samples, strict=True)
    )
    return min(found, key=lambda own: own.score)


def _score(samples: Counts, correct: Counts, constant: float, answers: Sequence[int], together: float) -> Score:
    (a, of_a), (d, of_d) = (_share(samples, correct, kind, answers) for kind in (0, 1))
    of_a, of_d = of_a * together, of_d * together
    right, wrong = (sum(label[kind] for own in samples for label in own) for kind in (0, 1))

    def mean(said: Sequence[int]) -> float:
        counts = _alone(samples, said)
        return (_share(samples, counts, 0, answers)[0] + _share(samples, counts, 1, answers)[0]) / 2

    return Score(
        score=min(a, d),
        mean=(a + d) / 2,
        agreeing=a,
        misleading=d,
        error=sqrt(of_a if a < d else of_d),
        right=right,
        wrong=wrong,
        constant=constant,
        mean_error=sqrt(of_a + of_d) / 2,
        constant_mean=_best_constant(answers, mean),
    )


def _share(samples: Counts, correct: Counts, kind: int, answers: Sequence[int]) -> tuple[float, float]:
    """The share of a kind of samples that is right, as the mean over the environments that have any, and the
    variance of that mean.

    Of several answers an environment's share is the mean over those labels and values that it has any of. Its
    variance has (c + 1) / (n + 2) for the share of a few, which may all be right by chance.
    """
    several, shares = len(answers) > 1, []
    for counts in zip(samples, correct, strict=True):
        sizes, rights = ([label[kind] for label in own] for own in counts)
        if not several:
            sizes, rights = [sum(sizes)], [sum(rights)]
        parts = [(right / n, (right + 1) / (n + 2), n) for n, right in zip(sizes, rights, strict=True) if n]
        if parts:
            spread = sum((q * (1 - q) if several else p * (1 - p)) / n for p, q, n in parts)
            shares.append((sum(p for p, *_ in parts) / len(parts), spread / len(parts) ** 2))
    variance = sum(own for _, own in shares) / len(shares) ** 2
    return sum(share for share, _ in shares) / len(shares), variance


def _alone(samples: Counts, said: Sequence[int]) -> Counts:
    """What a constant predictor gets right."""
    return [[kinds if own in said else (0, 0) for own, kinds in enumerate(by)] for by in samples]


def answers_of(row: Row) -> Sequence[int]:
    """The answers of a sample, each as how many values it can have; where a row does not say, there is one."""
    found: Sequence[int] = row.get("answers") or [len(row["samples"][0][0])]
    return found


def _best_constant(answers: Sequence[int], value: Callable[[Sequence[int]], float]) -> float:
    """The best value of a constant predictor, that says one thing for each answer.

    Of several answers one after the other takes what makes the value best, until none makes it better: this is the
    best one where the value is a sum over answers, as the mean is.
    """
    firsts = [sum(answers[:place]) for place in range(len(answers))]
    said, best, before = firsts, value(firsts), float("-inf")
    while best > before:
        before = best
        for place, (first, size) in enumerate(zip(firsts, answers, strict=True)):
            for kind in range(first, first + size):
                other = [*said[:place], kind, *said[place + 1 :]]
                if (own := value(other)) > best:
                    said, best = other, own
    return best


def counted(answers: Sequence[int]) -> str:
    """What the counts are of, as people call it."""
    return "labels" if len(answers) > 1 else "samples"


def most_robust(scores: Mapping[Key, Score]) -> list[Key]:
    """The best one first: of those whose mean is within one standard error of the largest the largest min(a, d),
    the earliest of equals; then the others in the same way.

    The mean says how much a model knows beside the shortcut, and rests on all samples. Those that it cannot tell
    apart are told apart by the worst case (the one-standard-error rule: Breiman et al. 1984, §3.4.3). Where none
    is better than a constant this is the choice that loses least.
    """
    left, order = dict(scores), list[Key]()
    while left:
        top = max(left.values(), key=lambda own: own.mean)
        near = [key for key, own in left.items() if own.mean >= top.mean - top.mean_error]
        order.append(max(near, key=lambda key: left[key].score))
        del left[order[-1]]
    return order


class Judged(Protocol):
    """What has a score with a standard error."""

    @property
    def goodness(self) -> float: ...
    @property
    def error(self) -> float: ...


def best_of(scores: Mapping[int, Judged]) -> int:
    """The number with the best score, the earliest of equals."""
    return max(scores, key=lambda number: (scores[number].goodness, -number))


def better(one: Judged, other: Judged) -> bool:
    """Whether the difference is more than two standard errors, as if they were of different samples."""
    return one.goodness - other.goodness > ERRORS * sqrt(one.error**2 + other.error**2)


# ---------------------------------------------------------------------- when it speaks


@dataclass(frozen=True)
class Pair:
    """Two training environments, by number, and how surely one is easier under the references of both."""

    easier: int
    harder: int
    t: float
    """Under the reference that tells them apart less; with `freedom` degrees of freedom, 0 for a normal."""
    freedom: int
    chance: float
    """Of a t as large or larger in any pair, where the environments do not differ."""

    @property
    def limit(self) -> float:
        """What the chance must be below."""
        return LEVEL if self.freedom else LEVEL_ALONE


def unusable(row: Row) -> str:
    """Why a row's counts are not to be used, in one sentence; empty where they are.

    Without a shortcut the wrong samples are noise, and the rule would prefer a coin to a good model. So there must
    be followers, and enough samples that they do not know.
    """
    names, answers = row["environments"], answers_of(row)
    of, wanted = counted(answers), LEAST_WRONG * len(answers)
    if len(names) < 2:
        return f"there is one training environment, {names[0]}, and two are needed"
    with_any = [name for name, clients in zip(names, row["clients"], strict=True) if clients]
    if len(with_any) < 2:
        where = f"environment {with_any[0]} alone" if with_any else "no environment"
        return f"{where} has held-out samples, and two are needed"
    learnt = _learnt(row)
    if len(learnt) < 2:
        number = next(number for number, clients in enumerate(row["clients"]) if clients and number not in learnt)
        known, guess, _ = _own(row, number)
        return (
            f"the reference of {names[number]} is right on {100 * known:.1f} % of its own environment's held-out "
            f"{of}, which is not surely more than the {100 * guess:.1f} % of a constant (two standard errors)"
        )
    pairs = compared(row)
    chosen = _strongest(pairs)
    wrong = {number: sum(kind[1] for kind in _everywhere(row["samples"][number])) for number in chosen or learnt}
    least = min(wrong, key=lambda number: wrong[number])
    if wrong[least] < wanted:
        return (
            f"{wrong[least]} held-out {of} are wrong for the reference of {names[least]}, and {wanted} are needed"
        )
    if not chosen:
        best = min(pairs, key=lambda pair: (pair.chance, -pair.t))
        return (
            f"the references do not tell the environments apart ({names[best.harder]} is harder than "
            f"{names[best.easier]} with t = {best.t:.1f}, which is chance with probability {best.chance:.2g}, and "
            f"{best.limit:g} is the limit)"
        )
    return ""


def gate(row: Row) -> dict[str, Any]:
    """Whether the counts are used, if not why, and by which comparisons, as plain data."""
    reason, pairs = unusable(row), compared(row)
    found = [asdict(pair) for pair in pairs]
    said = {"answers": row["answers"]} if "answers" in row else {}
    return {"open": not reason, "reason": reason, "followers": _strongest(pairs), "pairs": found, **said}


def followers(row: Row) -> list[int]:
    """The environments, by number, whose references follow a shortcut: easier than another, and harder than none.

    There the shortcut is strongest. One that turns round has two, one for either direction.
    """
    return _strongest(compared(row))


def _strongest(pairs: Sequence[Pair]) -> list[int]:
    apart = [pair for pair in pairs if pair.chance < pair.limit]
    return sorted({pair.easier for pair in apart} - {pair.harder for pair in apart})


def compared(row: Row) -> list[Pair]:
    """How surely one environment is easier than another, for every ordered pair whose references have learnt.

    Under both references, and so under the harder one's own: that is at home there, which works against it. Where
    environments differ in what their samples look like, every reference does best at home.

    Classes are compared one by one, so that their shares do not matter (Mantel and Haenszel 1959). Clients of one
    environment that differ more than samples do by chance make every difference less sure (the quasi-binomial
    model, McCullagh and Nelder 1989, §4.5), and with few clients more is needed (Student's t). Of several pairs
    each must be surer (Bonferroni).
    """
    import numpy as np
    from scipy.special import ndtr, stdtr

    learnt = _learnt(row)
    samples = np.array(row["samples"], dtype=float)
    known, total = samples[..., 0], samples.sum(axis=3)
    spread, freedom = _overdispersion(row)
    pairs = []
    for pair in permutations(learnt, 2):
        t = min(_difference(known[e][list(pair)], total[e][list(pair)]) / sqrt(spread[e]) for e in pair)
        chance = float(stdtr(freedom, -t) if freedom else ndtr(-t))
        pairs.append(Pair(*pair, t, freedom, min(1.0, len(learnt) * (len(learnt) - 1) * chance)))
    return pairs


def _difference(known: Any, total: Any) -> float:
    """How much more of one environment's samples are known than of the other's: the Mantel-Haenszel statistic, a
    normal deviate. Arrays by environment and class."""
    import numpy as np

    both, of_both = known.sum(axis=0), total.sum(axis=0)
    there = of_both > 1
    k, n, n_0, n_1 = both[there], of_both[there], total[0][there], total[1][there]
    variance = float((n_0 * n_1 * k * (n - k) / (n**2 * (n - 1))).sum())
    return float((known[0][there] - n_0 * k / n).sum()) / np.sqrt(variance) if variance else 0.0


def _overdispersion(row: Row) -> tuple[list[float], int]:
    """The variance of clients' accuracies as a multiple of a binomial's, at least 1, for each reference; and its
    degrees of freedom, 0 where no environment has two clients. Then the answers of a sample count as one.

    The clients of an environment count as equally large, which makes it no smaller.
    """
    clients: list[int] = row["clients"]
    freedom = sum(max(0, count - 1) for count in clients)
    least = 1.0 if freedom else float(len(answers_of(row)))
    found = []
    for samples, sums, squares in zip(row["samples"], row["accuracy"], row["squares"], strict=True):
        terms = []
        for own, count, sum_, square in zip(samples, clients, sums, squares, strict=True):
            size = sum(map(sum, own))
            share = sum(right for right, _ in own) / max(1, size)
            if count > 1 and 0 < share < 1:
                terms.append(max(0.0, square - sum_**2 / count) * size / count / (share * (1 - share)))
        found.append(max(least, sum(terms) / max(1, freedom)))
    return found, freedom


def _together(row: Row) -> Sequence[float]:
    """What the variance of a share is multiplied by, for each reference: answers of one sample may err together.
    Clients tell how much."""
    if len(answers_of(row)) == 1:
        return [1.0] * len(row["environments"])
    return _overdispersion(row)[0]


def _learnt(row: Row) -> list[int]:
    """Environments whose reference is better at home than a constant, by `ERRORS` standard errors."""
    found, together = [], _together(row)
    for number in range(len(row["environments"])):
        known, guess, total = _own(row, number)
        if known - guess > ERRORS * sqrt(together[number] * guess * (1 - guess) / max(1, total)):
            found.append(number)
    return found


def _own(row: Row, number: int) -> tuple[float, float, int]:
    """Of an environment's held-out samples the share that its reference knows, that of the largest class (of a
    constant's answers, if there are several), and how many there are."""
    own = row["samples"][number][number]
    total = sum(map(sum, own))
    sizes, known, largest = iter(map(sum, own)), sum(right for right, _ in own), 0
    for size in answers_of(row):
        largest += max(next(sizes) for _ in range(size))
    return known / max(1, total), largest / max(1, total), total


def _everywhere(counts: Sequence[Any]) -> list[tuple[int, int]]:
    """Of each class the right and the wrong samples of all environments, under one reference."""
    return [(sum(own[y][0] for own in counts), sum(own[y][1] for own in counts)) for y in range(len(counts[0]))]
