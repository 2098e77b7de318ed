"""One or several numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perennial.common.tasks.base import (
    LARGEST,
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

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

NumbersLoss = Literal["squared", "absolute", "huber", "poisson"]
MAE = Measure("mean_absolute_error", "mean absolute error", higher_is_better=False, percent=False)
RMSE = Measure("root_mean_squared_error", "root mean squared error", higher_is_better=False, percent=False)
R2 = Measure("r2", "R²", percent=False)
LARGEST_LOG = 30.0
"""Of a rate's logarithm that a diverged model gives: the square of its error, summed, is a float32 still."""
LARGEST_TARGET = 1e12
"""For the same reason."""
CELLS = 20
"""Stretches of the same width into which true and predicted values are counted, each beside the other."""
REACH = 3.0
"""From `mean`, in units of `scale`; the outermost stretches hold all that is farther as well."""


@dataclass(frozen=True)
class Numbers(PredictionTask):
    """K numbers (n, K) in their own unit; a model's outputs are in units of `scale` from `mean`.

    With the Poisson loss they are counts, and outputs are the logarithms of their rates.
    """

    name: ClassVar[TaskName] = "numbers"
    headline: ClassVar[Measure] = MAE
    loss_is: ClassVar[str] = "loss in units of the scale"
    constant_is: ClassVar[str] = "the median of a client's training targets"
    prediction: ClassVar[Prediction] = Prediction("value", "value", "target", probability=False)

    names: tuple[str, ...] = ("y",)
    """Of the targets."""
    kind: NumbersLoss = "squared"
    """The loss: ½r², |r|, Huber's with its corner at 1, or Poisson's e^z − y z, counted from its least value in z,
    y − y ln y, so that no loss is negative; r is the residual in units of `scale`."""
    mean: tuple[float, ...] = ()
    """Of each target; empty: 0."""
    scale: tuple[float, ...] = ()
    """Of each target; empty: 1."""
    least: tuple[float, ...] = ()
    """What each target is at least; empty: anything finite."""
    most: tuple[float, ...] = ()

    @property
    def target_shape(self) -> tuple[int, ...]:
        return (len(self.names),)

    @property
    def outputs(self) -> int:
        return len(self.names)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Sums of |e|, e², y, y² and e over samples, of each target in its own unit; e is the predicted minus the
        true value y, which is counted from `mean`."""
        names = ("absolute", "squared", "target", "target_squared", "error")
        return dict.fromkeys(names, Column(len(self.names)))

    @property
    def scored(self) -> Mapping[str, Column]:
        """Of each target how many test samples have which true and which predicted value, `CELLS` × `CELLS`. Not
        of counts, whose range nobody has announced."""
        each = Column(len(self.names) * CELLS**2, whole=True, by_score=True)
        return {} if self.kind == "poisson" else {"cells": each}

    def counted(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, list[Any]]:
        return {"cells": [own for answer in answers for own in self._cells(*answer)]} if self.scored else {}

    def _cells(self, outputs: Tensor, targets: Tensor) -> list[int]:
        import torch

        true, predicted = (
            ((self.standardised(own.double()) / REACH + 1) / 2 * CELLS).floor().clamp(0, CELLS - 1).long()
            for own in (targets, self.predictions(outputs))
        )
        places = (torch.arange(self.outputs, device=true.device) * CELLS + true) * CELLS + predicted
        found: list[int] = places.flatten().bincount(minlength=self.outputs * CELLS**2).tolist()
        return found

    def misfit(self, targets: Tensor) -> str:
        for place, name in enumerate(self.names):
            own = targets[:, place]
            if not own.isfinite().all():
                return f"has a {name} that is no finite number"
            if (size := own.abs().max()) > LARGEST_TARGET:
                return f"has a {name} of size {size:.6g}, more than {LARGEST_TARGET:.0g}; give it in a larger unit"
            least = self.least[place] if self.least else 0.0 if self.kind == "poisson" else None
            if least is not None and own.min() < least:
                return f"has a {name} of {own.min():.6g}; it must be at least {least:.6g}"
            if self.most and own.max() > self.most[place]:
                return f"has a {name} of {own.max():.6g}; it must be at most {self.most[place]:.6g}"
        return ""

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0, reduction: Reduction = "mean"
    ) -> Tensor:
        """A sample's loss is the mean of its targets'. There is nothing to smooth."""
        import torch.nn.functional as F

        if self.kind == "poisson":
            losses = outputs.exp() - targets * outputs - targets + targets.xlogy(targets)
        else:
            d = outputs - self.standardised(targets)
            if self.kind == "squared":
                losses = d.square() / 2
            else:
                losses = d.abs() if self.kind == "absolute" else F.huber_loss(d, d * 0, reduction="none")
        losses = losses.mean(dim=-1)
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`(z − t) / K` for the squared loss, its sign for the absolute one, cut at ±1 for Huber's,
        `(e^z − y) / K` for Poisson's; t is the standardised target."""
        if self.kind == "poisson":
            return (outputs.exp() - targets) / self.outputs
        d = outputs - self.standardised(targets)
        return {"squared": d, "absolute": d.sign(), "huber": d.clamp(-1, 1)}[self.kind] / self.outputs

    def standardised(self, targets: Tensor) -> Tensor:
        """`(y − mean) / scale`."""
        if self.mean:
            targets = targets - like(self.mean, targets)
        return targets / like(self.scale, targets) if self.scale else targets

    def predictions(self, outputs: Tensor) -> Tensor:
        """The targets (n, K) that a model expects, in their own unit."""
        if self.kind == "poisson":
            return outputs.exp()
        if self.scale:
            outputs = outputs * like(self.scale, outputs)
        return outputs + like(self.mean, outputs) if self.mean else outputs

    def decided(self, predictions: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """(n, K), of one target (n,)."""
        return predictions[:, 0] if len(self.names) == 1 else predictions

    @property
    def parts(self) -> tuple[str, ...]:
        return self.names

    @property
    def facts(self) -> dict[str, Any]:
        """With what makes values of outputs: of counts the exponential, of others `scale` and `mean`."""
        scaled = {name: list(own) for name in ("mean", "scale") if (own := getattr(self, name))}
        return {**self.metadata, "loss": self.kind, **{f"target_{name}": own for name, own in scaled.items()}}

    def usable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Within ±`LARGEST` units of scale."""
        most = LARGEST_LOG if self.kind == "poisson" else LARGEST
        return outputs.nan_to_num(nan=most, posinf=most, neginf=-most).clamp(-most, most)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = self.predictions(outputs).double() - targets.double()
        own = targets.double()
        if self.mean:  # so that R² keeps its digits where targets are far from 0
            own = own - like(self.mean, targets).double()
        parts = {"absolute": errors.abs(), "squared": errors**2, "target": own, "target_squared": own**2}
        parts["error"] = errors
        return {name: part.sum(dim=-2) for name, part in parts.items()}

    def must_add_up(self, count: int, sums: Sums) -> None:
        for absolute, squared, target, target_squared, error in zip(
            *(sums[name] for name in self.columns), strict=True
        ):
            # By Cauchy and Schwarz (Σ a)² ≤ n Σ a²; and Σ a² ≤ (Σ |a|)².
            bounds = (
                (absolute**2, count * squared),
                (squared, absolute**2),
                (target**2, count * target_squared),
                (abs(error), absolute),
            )
            # With `not`, since no comparison with NaN holds.
            if not (absolute >= 0 and all(low <= high * (1 + 1e-6) + 1e-9 for low, high in bounds)):
                raise ValueError(f"sums of errors and targets that {count} samples cannot have")
        if "cells" in sums and any(sum(own) != count for own in self._by_target(sums["cells"])):
            raise ValueError("the cells of true and predicted values have other counts than there are samples")

    def _by_target(self, cells: Sequence[float]) -> list[Sequence[float]]:
        return [cells[place * CELLS**2 :][: CELLS**2] for place in range(self.outputs)]

    def measures(self, count: int, sums: Sums) -> dict[str, float | None]:
        """Means over the targets. R² is None where a target is the same everywhere."""
        each = range(len(sums["absolute"]))
        spread = [sums["target_squared"][place] - sums["target"][place] ** 2 / count for place in each]
        constant = any(own <= 1e-12 * sums["target_squared"][place] for place, own in enumerate(spread))
        r2 = None if constant else sum(1 - e / s for e, s in zip(sums["squared"], spread, strict=True)) / len(each)
        return {
            MAE.name: sum(sums["absolute"]) / count / len(each),
            RMSE.name: sum(sqrt(own / count) for own in sums["squared"]) / len(each),
            R2.name: r2,
        }

    def standard_error(self, count: int, sums: Sums) -> float | None:
        """That of the mean of |e|, whose variance follows from Σ|e| and Σe²; of several targets, which may err
        together, the mean of theirs."""
        pairs = zip(sums["absolute"], sums["squared"], strict=True)
        variances = [max(0.0, squared / count - (absolute / count) ** 2) for absolute, squared in pairs]
        return sum(sqrt(own / count) for own in variances) / len(variances)

    @property
    def target_measures(self) -> tuple[Measure, ...]:
        return (MAE, RMSE, R2)

    def by_target(self, count: int, sums: Sums) -> dict[str, dict[str, float | None]]:
        """Of several targets."""
        if len(self.names) == 1:
            return {}
        return {
            name: self.measures(count, {column: [sums[column][place]] for column in self.columns})
            for place, name in enumerate(self.names)
        }

    def errors(self, count: int, sums: Sums) -> dict[str, tuple[float, float]]:
        means = [own / count for own in sums["error"]]
        variances = [own / count - mean**2 for own, mean in zip(sums["squared"], means, strict=True)]
        spreads = [sqrt(max(0.0, own)) for own in variances]
        return dict(zip(self.names, zip(means, spreads, strict=True), strict=True))

    def plots(self, count: int, sums: Sums) -> list[Plot]:
        """Of each target the samples in the middle of their cells, where they were counted."""
        if "cells" not in sums:
            return []
        made = []
        for place, (name, cells) in enumerate(zip(self.names, self._by_target(sums["cells"]), strict=True)):
            mean, scale = self.mean[place] if self.mean else 0.0, self.scale[place] if self.scale else 1.0
            middles = [mean + scale * REACH * (2 * (own + 0.5) / CELLS - 1) for own in range(CELLS)]
            there = [(divmod(own, CELLS), int(found)) for own, found in enumerate(cells) if found]
            x, y = ([middles[own[axis]] for own, _ in there] for axis in (0, 1))
            axes = f"{name}, true", f"{name}, predicted"
            counts = [found for _, found in there]
            made.append(Plot(f"{name}: predicted against true values", axes, x, y, counts, diagonal=True))
        return made

    @property
    def about(self) -> str:
        if len(self.names) == 1:
            return f"errors in the unit of {self.names[0]}"
        return f"means over {', '.join(self.names)}, of each in its own unit"

    @property
    def others(self) -> tuple[Measure, ...]:
        return (RMSE, R2)

    def constant(self, targets: Tensor) -> Tensor:
        """Each target's median, which has the least mean absolute error."""
        median = targets.median(dim=0).values
        return median.clamp(min=1e-6).log() if self.kind == "poisson" else self.standardised(median)
