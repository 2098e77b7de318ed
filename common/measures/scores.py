"""How well the scores of a binary task are placed: counts of samples by score, which add up over clients.

The score of a sample is the probability that the model gives to the second class, which is the positive one.
Clients send how many negatives and positives have a score in each of `BINS` bins of the same width,
((b − 1)/BINS, b/BINS], and never a score. In the upper half are the samples that the model calls positive. From
the counts come sensitivity and specificity, exactly; the area under the ROC curve, with the most that the bins can
hide of it; and how far scores are from the share of positives among the samples that have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Counts = npt.NDArray[np.int64]

BINS = 100
GROUPS = 10
"""Groups of bins in which scores are compared with shares, each 0.1 wide."""
SCORES = "score-bins"
"""Setting of an evaluation request: the number of bins; without it no counts are asked for."""
SCORE = "score"
"""Kind of the rows of the log that have a client's test samples by score."""
COLUMNS = ("negatives by score", "positives by score")


@dataclass(frozen=True)
class Summable:
    """Counts and sums, which add up field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: own + getattr(other, name) for name, own in vars(self).items()})


@dataclass(frozen=True)
class Scores(Summable):
    """Samples of one model by score."""

    negatives: Counts
    """(BINS,), from the lowest score to the highest."""
    positives: Counts

    @property
    def right(self) -> int:
        """Samples whose class the model tells."""
        half = BINS // 2
        return int(self.positives[half:].sum() + self.negatives[:half].sum())

    def measures(self) -> dict[str, Any]:
        """How many samples and positives there are, and `SCORE_MEASURES`; None where a class is missing.

        `auroc_error` is how much the bins can change the area at most; the calibration error can be off by half a
        bin, 0.005. `reliability`: of each group of bins that has samples how many it has, their mean score, and
        the share of positives.
        """
        positives, negatives = int(self.positives.sum()), int(self.negatives.sum())
        half, both = BINS // 2, bool(positives and negatives)
        auroc, error = area(self.negatives, self.positives) if both else (None, None)
        groups = self._reliability()
        far = sum(count * abs(share - score) for count, score, share in groups)
        return {
            "samples": positives + negatives,
            "positives": positives,
            "sensitivity": int(self.positives[half:].sum()) / positives if positives else None,
            "specificity": int(self.negatives[:half].sum()) / negatives if negatives else None,
            "auroc": auroc,
            "auroc_error": error,
            "calibration_error": far / (positives + negatives) if positives + negatives else None,
            "reliability": groups,
        }

    def _reliability(self) -> list[tuple[int, float, float]]:
        import numpy as np

        middle = (np.arange(BINS) + 0.5) / BINS
        every = self.negatives + self.positives
        groups = zip(*(np.split(part, GROUPS) for part in (every, every * middle, self.positives)), strict=True)
        return [
            (int(count.sum()), float(score.sum() / count.sum()), float(right.sum() / count.sum()))
            for count, score, right in groups
            if count.sum()
        ]


def added(found: Sequence[Scores]) -> Scores:
    """The sum of counts, of one at least."""
    return sum(found[1:], found[0])


SCORE_MEASURES = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "auroc": "AUROC",
    "calibration_error": "calibration error",
}
"""What people call the measures."""


def area(negatives: Counts, positives: Counts) -> tuple[float, float]:
    """The area under the ROC curve of counts by score (bins,), and how much the binning can change it at most."""
    pairs = int(positives.sum()), int(negatives.sum())
    below = negatives.cumsum() - negatives / 2
    # In floats: the product of all clients' counts may be more than 63 bits hold.
    within = float(positives @ negatives.astype(float))
    return float(positives @ below) / pairs[0] / pairs[1], within / 2 / pairs[0] / pairs[1]


def area_deviation(negatives: Counts, positives: Counts) -> float:
    """The standard error of the area of counts by score (bins,), each with a sample (DeLong et al. 1988).

    As the bootstrap has it, with n in place of n − 1.
    """
    auroc, _ = area(negatives, positives)
    below = (negatives.cumsum() - negatives / 2) / negatives.sum()
    above = 1 - (positives.cumsum() - positives / 2) / positives.sum()
    shares = (positives, below), (negatives, above)
    return float(sum(own @ (placed - auroc) ** 2 / own.sum() ** 2 for own, placed in shares) ** 0.5)


def average_precision(negatives: Counts, positives: Counts) -> tuple[float, float]:
    """Average precision of counts by score (bins,) with a positive sample, and how much the binning can change it
    at most.

    All samples of a bin count as tied. Within it, a positive has at most the precision at the end of its positives
    alone, and at least that of its rank after all negatives.
    """
    import numpy as np

    positives, negatives = positives[::-1], negatives[::-1]  # from the highest score down
    right, wrong = positives.cumsum(), negatives.cumsum()
    count, there = right[-1], positives > 0
    shares = (
        positives[there] * right[there] / bottom[there] for bottom in (right + wrong, right + wrong - negatives)
    )
    found, most = (float(share.sum() / count) for share in shares)
    ranks = np.arange(1, count + 1)
    least = float((ranks / (ranks + np.repeat(wrong, positives))).mean())
    return found, max(most - found, found - least)


def bins_of(margins: Tensor) -> Tensor:
    """The bin, from 0, of each margin (float64) between the logits of the positive class and the negative one."""
    import torch

    bins = (margins.sigmoid() * BINS).ceil().long().clamp(1, BINS) - 1
    # A margin too small for the sigmoid to differ from 1/2 still decides what the model says.
    half = BINS // 2
    return torch.where(margins > 0, bins.clamp(min=half), bins.clamp(max=half - 1))


def count_by_score(logits: Tensor, labels: Tensor) -> Scores:
    """Samples with logits (n, 2) and labels (n,) by score."""
    import torch

    bins = bins_of(logits[:, 1].double() - logits[:, 0].double())
    return Scores(*(torch.bincount(bins[labels == c], minlength=BINS).cpu().numpy() for c in (0, 1)))


# ---------------------------------------------------------------------- on the wire


def columns(found: Sequence[Scores]) -> dict[str, list[int]]:
    """Counts in several environments as `COLUMNS`, lists of plain numbers, environment after environment."""
    parts = {COLUMNS[0]: [own.negatives for own in found], COLUMNS[1]: [own.positives for own in found]}
    return {name: [int(count) for part in own for count in part] for name, own in parts.items()}


def from_columns(given: Mapping[str, Any], counts: Sequence[int], right: Sequence[int]) -> list[Scores]:
    """What `columns` made, of environments with so many samples, of which the model has so many right.

    Raises `ValueError`, `KeyError` or `TypeError` where it cannot be.
    """
    bins = counts_in(given, COLUMNS, (len(counts), BINS), max(counts, default=0))
    found = [Scores(*own) for own in zip(*bins, strict=True)]
    for own, count, correct in zip(found, counts, right, strict=True):
        if int(own.negatives.sum() + own.positives.sum()) != count:
            raise ValueError("the bins of the score have other counts than there are samples")
        if own.right != correct:
            raise ValueError("the bins of the score have other right answers than were counted")
    return found


def counts_in(given: Mapping[str, Any], names: Sequence[str], shape: tuple[int, ...], most: int) -> list[Counts]:
    """Columns that arrived as flat lists, in their shape. Raises `ValueError` or `TypeError` where one has another
    length, or something else in it than whole numbers from 0 to `most`."""
    import numpy as np

    if wrong := [name for name in names if len(given[name]) != prod(shape)]:
        raise ValueError(f"{wrong[0]} has another length than was asked for")
    return [np.array(whole(given[name], most), np.int64).reshape(shape) for name in names]


def whole(values: Sequence[Any], most: int) -> Sequence[int]:
    """The values, if each is a whole number from 0 to `most`. Raises `ValueError`."""
    for value in values:
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{value!r:.40} is no whole number from 0 to {most}")
    return values
