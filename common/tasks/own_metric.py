"""A measure and a loss of one's own in place of a task's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from perennial.common.tasks.base import Column, Measure, PredictionTask, Reduction, Sums
from perennial.common.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

OfSamples = Callable[["Tensor", "Tensor"], "Tensor"]
"""Outputs (n, k) and targets of n samples, to a number for each (n,), or to sums over them."""
METRIC = Measure("metric", "metric of its own", percent=False)
"""What a measure of one's own is called in files."""


def mean(count: int, sums: Sequence[float]) -> float | None:
    """The first sum over the number of samples."""
    return sums[0] / count


@dataclass(frozen=True)
class Metric:
    """A measure of one's own: sums over samples, which add up over clients, and what they come to."""

    sums: OfSamples
    """Outputs (n, k) and targets of any n samples to the sums (size,) over them."""
    value: Callable[[int, Sequence[float]], float | None] = mean
    """The number of samples and the sums to the measure; None where there is none."""
    title: str = ""
    """In tables; empty: the name by which a run asks for it."""
    higher_is_better: bool = True
    percent: bool = False
    """Whether it is a share, which people read in percent."""
    standard_error: Callable[[int, Sequence[float]], float | None] = lambda count, sums: None


def named(text: str, found: Any) -> Metric:
    """What a run's setting `metric` names: a metric, or a function of which one is made. Raises `ValueError`."""
    if isinstance(found, Metric):
        return replace(found, title=found.title or text.partition(":")[2].replace("_", " "))
    if callable(found):
        return of_function(found)
    raise ValueError(f"metric: {text!r} is of type {type(found).__name__}; it must be a function or a Metric")


def must_work(task: PredictionTask, metric: str, loss: str) -> None:
    """Try a task with a metric or a loss of one's own, by what the run calls them, on two samples.

    Raises `ValueError` where it cannot take them.
    """
    if not metric and not loss:
        return
    import torch

    outputs = torch.zeros(2, task.outputs)
    targets = torch.zeros(2, *task.target_shape, dtype=getattr(torch, task.target_dtype))
    tries: dict[str, tuple[str, Callable[[Tensor, Tensor], object]]] = {
        "loss": (loss, task.loss),
        "metric": (metric, task.sums),
    }
    for setting, (text, function) in tries.items():
        try:
            if text:
                function(outputs, targets)
        except UserError as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            shapes = f"outputs {[*outputs.shape]} and targets {[*targets.shape]}"
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(f"{setting}: {text!r} cannot take {shapes}: {why}") from None


@lru_cache(maxsize=64)
def of_function(function: OfSamples) -> Metric:
    """The mean of what a function gives for each sample (n,); more is better."""

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        import torch

        values = function(outputs, targets)
        if values.shape != outputs.shape[:1]:
            raise UserError(
                f"metric: {function.__name__} gives the shape {[*values.shape]} of {len(outputs)} samples; "
                "it must give a number for each, or be a perennial.Metric"
            )
        values = values.double()
        return torch.stack([values.sum(), values.square().sum()])

    def standard_error(count: int, sums: Sequence[float]) -> float:
        return sqrt(max(0.0, sums[1] / count - (sums[0] / count) ** 2) / count)

    return Metric(sums, title=function.__name__.replace("_", " "), standard_error=standard_error)


def with_own(task: PredictionTask, metric: Metric | None, loss: OfSamples | None) -> PredictionTask:
    """A task whose headline measure, or whose loss of each sample, is another one."""
    if metric is None and loss is None:
        return task
    return _kind(type(task), metric, loss)(**{own.name: getattr(task, own.name) for own in fields(task)})  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _kind(base: type[PredictionTask], metric: Metric | None, loss: OfSamples | None) -> type[PredictionTask]:
    kind = _with_loss(base, loss) if loss else base
    return _with_metric(kind, metric) if metric else kind


def _with_metric(base: Any, metric: Metric) -> Any:
    class Measured(base):  # type: ignore[misc]
        headline: ClassVar[Measure] = Measure(METRIC.name, metric.title, metric.higher_is_better, metric.percent)

        @property
        def columns(self) -> Mapping[str, Column]:
            import torch

            targets = torch.zeros(1, *self.target_shape, dtype=getattr(torch, self.target_dtype))
            (size,) = metric.sums(torch.zeros(1, self.outputs), targets).shape
            return {**super().columns, METRIC.name: Column(size)}

        @property
        def others(self) -> tuple[Measure, ...]:
            return (base.headline, *super().others)

        def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            import torch

            if outputs.dim() > 2:  # a stack's, and who wrote the metric knows of none
                each = [metric.sums(*one) for one in zip(outputs, targets, strict=True)]
                own = torch.stack(each)
            else:
                own = metric.sums(outputs, targets)
            return {**super().sums(outputs, targets), METRIC.name: own.detach().double()}

        def must_add_up(self, count: int, sums: Sums) -> None:
            super().must_add_up(count, sums)
            if not all(map(isfinite, sums[METRIC.name])):
                raise ValueError(f"{METRIC.name} has a sum that is not finite")

        def measures(self, count: int, sums: Sums) -> dict[str, float | None]:
            return {METRIC.name: metric.value(count, sums[METRIC.name]), **super().measures(count, sums)}

        def standard_error(self, count: int, sums: Sums) -> float | None:
            return metric.standard_error(count, sums[METRIC.name])

        interval = PredictionTask.interval

    return Measured


def _with_loss(base: Any, losses: OfSamples) -> Any:
    class WithLoss(base):  # type: ignore[misc]
        loss_is: ClassVar[str] = losses.__name__.replace("_", " ")

        def loss(
            self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0, reduction: Reduction = "mean"
        ) -> Tensor:
            found = losses(outputs, targets)
            if found.shape != outputs.shape[:1]:
                raise UserError(
                    f"loss: {losses.__name__} gives the shape {[*found.shape]} of {len(outputs)} samples; "
                    "it must give a number for each"
                )
            return found if reduction == "none" else found.mean() if reduction == "mean" else found.sum()

        def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
            """By autograd, since nobody has said the closed form."""
            from torch.func import grad

            slopes: Tensor = grad(lambda z: losses(z, targets).sum())(outputs)
            return slopes

        scale_slopes = PredictionTask.scale_slopes

    return WithLoss
