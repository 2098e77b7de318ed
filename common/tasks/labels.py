"""Several labels, each of which a sample has or has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from perennial.common.measures.scores import BINS, area, area_deviation, average_precision, bins_of
from perennial.common.tasks.base import (
    Column,
    Measure,
    Plot,
    Prediction,
    PredictionTask,
    Reduction,
    Sums,
    TaskName,
    like,
)
from perennial.common.tasks.classes import MOST, WRONG

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from perennial.common.measures.scores import Counts

AUROC = Measure("auroc_of_labels", "mean AUROC")
AVERAGE_PRECISION = Measure("average_precision", "mean average precision")
MACRO_F1 = Measure("macro_f1", "macro F1")
MICRO_F1 = Measure("micro_f1", "micro F1")
OF_A_LABEL = (
    Measure("frequency", "frequency"),
    Measure("auroc", "AUROC"),
    Measure("average_precision", "average precision"),
    Measure("f1", "F1"),
)
"""Of one label: among the samples of which it is known, how many have it; and how well it is told."""
RAREST = 1e-6
"""Frequency of a label that no sample has, and of the samples without one that all have, in a constant."""


@dataclass(frozen=True)
class Labels(PredictionTask):
    """K labels (n, K), each 1, 0, or NaN where it is not known; outputs are logits."""

    name: ClassVar[TaskName] = "labels"
    headline: ClassVar[Measure] = AUROC
    prediction: ClassVar[Prediction] = Prediction("probabilities", "probability", "label", largest_first=True)
    loss_is: ClassVar[str] = "binary cross-entropy"
    constant_is: ClassVar[str] = "how frequent each label is in a client's training data"

    names: tuple[str, ...]
    weights: tuple[tuple[float, float], ...] = ()
    """Of each label, what a sample without it and one with it counts in its loss; empty: all count 1."""

    @property
    def target_shape(self) -> tuple[int, ...]:
        return (len(self.names),)

    @property
    def outputs(self) -> int:
        return len(self.names)

    @property
    def answers(self) -> tuple[int, ...]:
        """Each label is one."""
        return (2,) * self.outputs

    def kinds(self, targets: Tensor) -> Tensor:
        import torch

        first = 2 * torch.arange(self.outputs, device=targets.device)
        return torch.where(targets.isnan(), -1, first + targets.nan_to_num().long())

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Decided at a half, as F1 is."""
        return ((outputs > 0) == (targets == 1)) & ~targets.isnan()

    def right_of(self, count: int, sums: Sums) -> tuple[int, int]:
        half = BINS // 2
        negatives, positives = zip(*self._by_score(sums).values(), strict=True)
        known = sum(int(own.sum()) for own in (*negatives, *positives))
        return known, sum(int(own[:half].sum()) for own in negatives) + sum(
            int(own[half:].sum()) for own in positives
        )

    @property
    def columns(self) -> Mapping[str, Column]:
        """Of each label the samples without it and those with it in each bin of the score, from the lowest."""
        each = Column(len(self.names) * BINS, whole=True, by_score=True)
        return {"negatives": each, "positives": each}

    def misfit(self, targets: Tensor) -> str:
        for place, name in enumerate(self.names):
            own = targets[:, place]
            if (wrong := own[~((own == 0) | (own == 1) | own.isnan())]).numel():
                return f"has a {name} of {wrong[0]:.6g}; a label is 0 or 1, or missing"
        return ""

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0, reduction: Reduction = "mean"
    ) -> Tensor:
        """`1/K Σ_k w_k BCE(z_k, y_k)`; a missing label adds 0. Smoothing makes of y `(1 − s) y + s / 2`."""
        import torch.nn.functional as F

        smooth = targets.nan_to_num() * (1 - smoothing) + smoothing / 2
        losses = F.binary_cross_entropy_with_logits(outputs, smooth, reduction="none")
        losses = self._counted(losses, targets).mean(dim=-1)
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`w_k (σ(z_k) − y_k) / K`, and 0 where the label is missing."""
        return self._counted(outputs.sigmoid() - targets.nan_to_num(), targets) / self.outputs

    def _counted(self, values: Tensor, targets: Tensor) -> Tensor:
        """Values of samples and labels, times their weights; 0 where a label is missing."""
        import torch

        if self.weights:
            without, having = (like(own, values) for own in zip(*self.weights, strict=True))
            values = values * torch.where(targets == 1, having, without)
        return torch.where(targets.isnan(), 0.0, values)

    def usable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Wrong logits are at `WRONG` on the other side."""
        import torch
        import torch.nn.functional as F

        losses = F.binary_cross_entropy_with_logits(outputs, targets.nan_to_num(), reduction="none")
        wrong = WRONG * (1 - 2 * targets.nan_to_num())
        return torch.where(losses < MOST, outputs, wrong.to(outputs.dtype))  # no comparison with NaN holds

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        import torch

        labels = torch.arange(self.outputs, device=outputs.device)
        places = (labels * BINS + bins_of(outputs.double())).flatten(-2)
        none = places.new_zeros((*places.shape[:-1], self.outputs * BINS))
        return {
            name: none.scatter_add(-1, places, (targets == value).long().flatten(-2))
            for name, value in (("negatives", 0), ("positives", 1))
        }

    def must_add_up(self, count: int, sums: Sums) -> None:
        for place, name in enumerate(self.names):
            bins = slice(place * BINS, (place + 1) * BINS)
            if sum(sums["negatives"][bins]) + sum(sums["positives"][bins]) > count:
                raise ValueError(f"more samples with and without {name} than there are")

    def _by_score(self, sums: Sums) -> dict[str, tuple[Counts, Counts]]:
        """Negatives and positives (bins,) of each label."""
        import numpy as np

        parts = [np.array(sums[kind], np.int64).reshape(-1, BINS) for kind in ("negatives", "positives")]
        return dict(zip(self.names, zip(*parts, strict=True), strict=True))

    def by_label(self, sums: Sums) -> dict[str, dict[str, float | None]]:
        """By label: how many samples are known to have it, and not to; area under the ROC curve and average
        precision, None without samples of both kinds, each with how much the bins can change it at most; and F1,
        exactly, None where no sample has the label or is said to."""
        found: dict[str, dict[str, float | None]] = {}
        for name, (negatives, positives) in self._by_score(sums).items():
            both = bool(negatives.any() and positives.any())
            auroc, auroc_error = area(negatives, positives) if both else (None, None)
            precision, precision_error = average_precision(negatives, positives) if both else (None, None)
            found[name] = {
                "negatives": int(negatives.sum()),
                "positives": int(positives.sum()),
                "auroc": auroc,
                "auroc_error": auroc_error,
                "average_precision": precision,
                "average_precision_error": precision_error,
                "f1": _f1(negatives, positives),
            }
        return found

    @property
    def target_measures(self) -> tuple[Measure, ...]:
        return OF_A_LABEL

    def by_target(self, count: int, sums: Sums) -> dict[str, dict[str, float | None]]:
        found: dict[str, dict[str, float | None]] = {}
        for name, own in self.by_label(sums).items():
            having, known = own["positives"] or 0, (own["positives"] or 0) + (own["negatives"] or 0)
            values = {**own, "frequency": having / known if known else None}
            found[name] = {measure.name: values[measure.name] for measure in OF_A_LABEL}
        return found

    def plots(self, count: int, sums: Sums) -> list[Plot]:
        """The ROC curve and the curve of precision and recall of each label that has samples of both kinds."""
        made = []
        for name, (negatives, positives) in self._by_score(sums).items():
            if not (negatives.any() and positives.any()):
                continue
            wrong, right = (100 * own[::-1].cumsum() / own.sum() for own in (negatives, positives))
            axes = "1 − specificity (%)", "sensitivity (%)"
            x, y = [0.0, *wrong.tolist()], [0.0, *right.tolist()]
            made.append(Plot(f"{name}: ROC curve", axes, x, y, diagonal=True))
            said = (negatives + positives)[::-1].cumsum()
            there = said > 0
            precision = (100 * positives[::-1].cumsum()[there] / said[there]).tolist()
            axes = "recall (%)", "precision (%)"
            made.append(Plot(f"{name}: precision against recall", axes, right[there].tolist(), precision))
        return made

    def measures(self, count: int, sums: Sums) -> dict[str, float | None]:
        """Means over the labels that have a value, and F1 of all labels' decisions together."""
        labels = self.by_label(sums).values()
        means = {
            name: fmean(values)
            if (values := [value for own in labels if (value := own[name]) is not None])
            else None
            for name in ("auroc", "average_precision", "f1")
        }
        negatives, positives = (sum(own) for own in zip(*self._by_score(sums).values(), strict=True))
        return {
            AUROC.name: means["auroc"],
            AVERAGE_PRECISION.name: means["average_precision"],
            MACRO_F1.name: means["f1"],
            MICRO_F1.name: _f1(negatives, positives),
        }

    def standard_error(self, count: int, sums: Sums) -> float | None:
        """The mean of the labels' own, which may err together."""
        found = [area_deviation(*own) for own in self._by_score(sums).values() if all(part.any() for part in own)]
        return fmean(found) if found else None

    @property
    def about(self) -> str:
        return "means over the labels that have samples of both kinds, of F1 over those with a positive"

    @property
    def others(self) -> tuple[Measure, ...]:
        return (AVERAGE_PRECISION, MACRO_F1, MICRO_F1)

    def constant(self, targets: Tensor) -> Tensor:
        """The log-odds of each label among the samples of which it is known; 0 where there is none."""
        frequency = targets.nanmean(dim=0).nan_to_num(nan=0.5)
        return frequency.clamp(RAREST, 1 - RAREST).logit()

    def predictions(self, outputs: Tensor) -> Tensor:
        """The probability of each label (n, K)."""
        return outputs.sigmoid()

    def decided(self, predictions: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """1 for each label (n, K) that is as likely as not or more, else 0."""
        return (predictions >= 0.5).astype(int)

    @property
    def parts(self) -> tuple[str, ...]:
        return self.names


def _f1(negatives: Counts, positives: Counts) -> float | None:
    """Of decisions on samples by score: 2 TP / (2 TP + FP + FN)."""
    half = BINS // 2
    right = 2 * int(positives[half:].sum())
    every = right + int(negatives[half:].sum() + positives[:half].sum())
    return right / every if every else None
