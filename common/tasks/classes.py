"""One of several classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from perennial.common.measures.scores import BINS, COLUMNS, columns, count_by_score
from perennial.common.tasks.base import (
    AnswerTensor,
    Column,
    Measure,
    Prediction,
    PredictionTask,
    Reduction,
    Sums,
    TaskName,
    like,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

WRONG = 100.0
"""At which PyTorch's `BCELoss` cuts the loss of an impossible answer, too."""
MOST = 1e30
"""Cross-entropy of one sample, so that the sum over all is finite."""
ACCURACY = Measure("accuracy", "accuracy")


@dataclass(frozen=True)
class Classes(PredictionTask):
    """The number (n,) of a sample's class; outputs are logits, the loss is the cross-entropy."""

    name: ClassVar[TaskName] = "classes"
    headline: ClassVar[Measure] = ACCURACY
    loss_is: ClassVar[str] = "cross-entropy"
    constant_is: ClassVar[str] = "a client's most frequent training label"
    prediction: ClassVar[Prediction] = Prediction("probabilities", "probability", "class", largest_first=True)
    target_dtype: ClassVar[str] = "int64"

    classes: int
    weights: tuple[float, ...] = ()
    """What a sample of each class counts in the loss; empty: all count 1."""
    names: tuple[str, ...] = ()
    """In the order of the classes' numbers; empty where they have none."""

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def answers(self) -> tuple[int, ...]:
        return (self.classes,)

    def kinds(self, targets: Tensor) -> Tensor:
        return targets[..., None]

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(dim=-1) == targets)[..., None]

    def right_of(self, count: int, sums: Sums) -> tuple[int, int]:
        return count, int(sums["correct"][0])

    @property
    def columns(self) -> Mapping[str, Column]:
        return {"correct": Column(whole=True)}

    @property
    def scored(self) -> Mapping[str, Column]:
        """Of two classes: test samples of each by score (`common/measures/scores.py`)."""
        each = Column(BINS, whole=True, by_score=True)
        return dict.fromkeys(COLUMNS, each) if self.classes == 2 else {}

    def counted(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, list[Any]]:
        return {**columns([count_by_score(logits, labels) for logits, labels in answers])}

    def misfit(self, targets: Tensor) -> str:
        low, high = int(targets.min()), int(targets.max())
        if 0 <= low <= high < self.classes:
            return ""
        return f"has the class {low if low < 0 else high}; classes are 0 to {self.classes - 1}"

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0, reduction: Reduction = "mean"
    ) -> Tensor:
        """`w_y CE(z, y)`: with class weights w the mean is divided by n, and not by their sum as in PyTorch.

        Targets may also be shares of each class (n, classes): then it is `−Σ_k w_k y_k log softmax(z)_k`.
        """
        import torch.nn.functional as F

        if targets.is_floating_point():
            weights = like(self.weights, outputs) if self.weights else None
            return F.cross_entropy(outputs, targets, weights, label_smoothing=smoothing, reduction=reduction)
        if not self.weights:
            return F.cross_entropy(outputs, targets, label_smoothing=smoothing, reduction=reduction)
        weights = like(self.weights, outputs)
        losses = weights[targets] * F.cross_entropy(outputs, targets, label_smoothing=smoothing, reduction="none")
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()

    def mapped_loss(self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """Of PyTorch's cross-entropy a map goes through its decomposition in Python."""
        if self.weights or smoothing:
            return self.loss(outputs, targets, smoothing=smoothing)
        return -outputs.log_softmax(dim=-1).gather(-1, targets[..., None]).mean()

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`w_y (softmax(z) − onehot(y))`."""
        import torch.nn.functional as F

        d = outputs.softmax(dim=1) - F.one_hot(targets, outputs.shape[1])
        return like(self.weights, outputs)[targets, None] * d if self.weights else d

    def scale_slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`w_y Σ_k (softmax(z)_k − 1{y = k}) z_k`; logits (0, z) give binary cross-entropy's `(σ(z) − y) z`."""
        expected = (outputs.softmax(dim=1) * outputs).sum(dim=1)
        slopes = expected - outputs.gather(1, targets[:, None]).squeeze(1)
        return like(self.weights, outputs)[targets] * slopes if self.weights else slopes

    def usable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Wrong logits have the cross-entropy `WRONG` for two classes."""
        import torch
        import torch.nn.functional as F

        losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
        wrong = -WRONG * F.one_hot(targets, outputs.shape[-1]).to(outputs.dtype)
        return torch.where((losses < MOST)[..., None], outputs, wrong)  # no comparison with NaN holds

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"correct": (outputs.argmax(dim=-1) == targets).sum(dim=-1, keepdim=True)}

    def must_add_up(self, count: int, sums: Sums) -> None:
        if sums["correct"][0] > count:
            raise ValueError("more correct answers than samples")

    def measures(self, count: int, sums: Sums) -> dict[str, float | None]:
        return {ACCURACY.name: sums["correct"][0] / count}

    def standard_error(self, count: int, sums: Sums) -> float | None:
        """`√(p (1 − p) / n)` of the share p that is right."""
        share = sums["correct"][0] / count
        return sqrt(share * (1 - share) / count)

    def interval(self, count: int, sums: Sums, level: float) -> tuple[float, float] | None:
        """The bootstrap's percentiles: right answers among n resampled ones are binomial, so nothing is drawn."""
        from scipy.stats import binom

        tail = (1 - level) / 2
        low, high = binom.ppf([tail, 1 - tail], count, sums["correct"][0] / count)
        return float(low) / count, float(high) / count

    def constant(self, targets: Tensor) -> Tensor:
        """Of equally frequent classes the smallest."""
        import torch.nn.functional as F

        return F.one_hot(targets.bincount(minlength=self.classes).argmax(), self.classes).float()

    def predictions(self, outputs: Tensor) -> Tensor:
        """The probability of each class (n, classes)."""
        return outputs.softmax(dim=-1)

    def decided(self, predictions: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """The likeliest class (n,): its name, or its number where all names are whole numbers."""
        import numpy as np

        likeliest: npt.NDArray[np.intp] = predictions.argmax(axis=1)
        whole = all(re.fullmatch("0|-?[1-9][0-9]*", name) for name in self.names)
        names = [int(name) for name in self.names] if whole else self.names
        return np.array(names)[likeliest] if names else likeliest

    @property
    def parts(self) -> tuple[str, ...]:
        return self.names or super().parts

    @property
    def metadata(self) -> dict[str, Any]:
        """Nothing: the answer has the class beside the probabilities."""
        return {}

    @property
    def facts(self) -> dict[str, Any]:
        return {"classes": list(self.names) or self.classes}

    @property
    def answer_tensors(self) -> Mapping[str, AnswerTensor]:
        found = {**super().answer_tensors, "class": AnswerTensor("INT64")}
        return {**found, "label": AnswerTensor("BYTES", (), self.names, "class")} if self.names else found

    def answer(self, outputs: Tensor, asked: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """The class is the one that an evaluation counts."""
        return {**super().answer(outputs), "class": outputs.argmax(dim=-1)}
