"""How well a model's scores rank the samples of a binary task: areas, from counts that add up over clients.

The score of a sample is its margin z₁ − z₀. Clients send how many negatives and positives are in each of `BINS`
bins of it, never the scores. Within a bin the order is lost, and a pair counts one half: `auroc_error` is how far
that can be off at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.common.measures.scores import Summable, area, counts_in, whole

BINS = 4096
BATCH = "ranking-batch"
"""Setting of an evaluation request: the size of the batches of `hard_areas`; without it no areas are asked for."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ranking(Summable):
    """Counts and sums of one model on some samples."""

    negatives: Counts
    """(BINS,), from the lowest margin to the highest."""
    positives: Counts
    batches: int = 0
    """Full batches with both classes."""
    hard_auroc: float = 0.0
    """Sum over these of the areas under the curves of 0/1 predictions."""
    hard_auprc: float = 0.0

    def measures(self) -> dict[str, float]:
        """Areas of the scores, and as FedILC's code has them of 0/1 predictions; none where a class is missing."""
        found = {}
        positives, negatives = int(self.positives.sum()), int(self.negatives.sum())
        if positives and negatives:
            found["auroc"], found["auroc_error"] = area(self.negatives, self.positives)
            # Average precision: of each bin as a threshold, the precision times the recall that it adds.
            right = self.positives[::-1].cumsum()
            taken = right + self.negatives[::-1].cumsum()
            found["auprc"] = float((self.positives[::-1] * right / taken.clip(min=1)).sum() / positives)
        if self.batches:
            found["auroc_hard_batch"] = self.hard_auroc / self.batches
            found["auprc_hard_batch"] = self.hard_auprc / self.batches
        return found


def rank(logits: Tensor, labels: Tensor, batch: int) -> Ranking:
    """The ranking of samples with logits (n, 2) and labels (n,). NaN of a diverged model counts as 0."""
    margin = (logits[:, 1] - logits[:, 0]).nan_to_num()
    place = F.softsign(margin).double()  # in [-1, 1], fine around 0, and no end to clip at
    bins = ((place + 1) / 2 * BINS).long().clamp(max=BINS - 1)
    negatives, positives = (torch.bincount(bins[labels == c], minlength=BINS).cpu().numpy() for c in (0, 1))
    aurocs, auprcs = hard_areas(logits.argmax(dim=1), labels, batch)
    return Ranking(negatives, positives, len(aurocs), float(aurocs.sum()), float(auprcs.sum()))


def hard_areas(predicted: Tensor, labels: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Areas (k,) under ROC and precision-recall curve of 0/1 predictions, of the k full batches with both classes.

    So FedILC's code scores. The curves have one inner point, where precision and recall are the predictions', the
    areas are trapezoids', and the one under ROC is the balanced accuracy.
    """
    full = len(labels) // batch
    guess, truth = (bits[: full * batch].view(full, batch).double() for bits in (predicted, labels))
    both = (truth.sum(dim=1) > 0) & (truth.sum(dim=1) < batch)
    guess, truth = guess[both], truth[both]
    positives, hits, taken = truth.sum(dim=1), (guess * truth).sum(dim=1), guess.sum(dim=1)
    recall, base = hits / positives, positives / batch
    precision = torch.where(taken > 0, hits / taken.clamp(min=1), 1.0)
    specificity = 1 - (taken - hits) / (batch - positives)
    auprc = recall * (1 + precision) / 2 + (1 - recall) * (precision + base) / 2
    return (recall + specificity) / 2, auprc


# ---------------------------------------------------------------------- on the wire

COLUMNS = ("negatives", "positives", "batches", "hard_auroc", "hard_auprc")


def columns(rankings: Sequence[Ranking]) -> dict[str, list[int] | list[float]]:
    """Rankings in several environments as `COLUMNS`, lists of plain numbers."""
    counts = {name: [n for own in rankings for n in getattr(own, name).tolist()] for name in COLUMNS[:2]}
    return {**counts, **{name: [getattr(own, name) for own in rankings] for name in COLUMNS[2:]}}


def from_columns(given: Mapping[str, Any], counts: Sequence[int], batch: int) -> list[Ranking]:
    """What `columns` made, of environments with so many samples each and batches of `batch` samples.

    Raises `ValueError` or `TypeError` where it cannot be.
    """
    # Each count is no more than there are samples, so no sum of them runs over.
    bins = counts_in(given, COLUMNS[:2], (len(counts), BINS), max(counts, default=0))
    if wrong := [name for name in COLUMNS[2:] if len(given[name]) != len(counts)]:
        raise ValueError(f"{wrong[0]} has another length than was asked for")
    rankings = [Ranking(*found) for found in zip(*bins, *(given[name] for name in COLUMNS[2:]), strict=True)]
    for found, count in zip(rankings, counts, strict=True):
        if int(found.negatives.sum() + found.positives.sum()) != count:
            raise ValueError("the bins have other counts than there are samples")
        whole([found.batches], count // batch)
        if not all(0 <= total <= found.batches + 1e-6 for total in (found.hard_auroc, found.hard_auprc)):
            raise ValueError("an area above 1")
    return rankings
