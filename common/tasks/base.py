"""What every task says about itself. Nothing outside of `common/tasks/` asks which task a run has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from perennial.common.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

TaskName = Literal["classes", "numbers", "labels", "event"]
EVERY_TASK: tuple[TaskName, ...] = get_args(TaskName)
Reduction = Literal["mean", "sum", "none"]
Row = dict[str, Any]
Sums = Mapping[str, Sequence[float]]
"""By column, its numbers of one environment; sums over samples, which add up over environments and clients."""
Summed = tuple[int, Sums]
"""How many samples there are, and their sums."""
LARGEST = 1e6
"""Of an output of a model for numbers or events that has diverged, so that sums stay finite."""


@dataclass(frozen=True)
class Measure:
    """A number that says how good predictions are."""

    name: str
    """In files."""
    title: str
    """In tables."""
    higher_is_better: bool = True
    percent: bool = True
    """Whether it is a share, which people read in percent; otherwise it has the targets' own unit."""

    def text(self, value: float | None, digits: int = 2) -> str:
        """A value as people read it, in percent with so many digits; a dash where there is none."""
        if value is None:
            return "–"
        return f"{100 * value:.{digits}f}" if self.percent else f"{value:#.4g}".rstrip(".")

    @property
    def unit(self) -> str:
        """What stands behind `text`."""
        return " %" if self.percent else ""

    @property
    def label(self) -> str:
        """What tables and axes say that their numbers are."""
        return f"{self.title} in %" if self.percent else self.title

    @property
    def axis(self) -> str:
        """What the axis of a figure is called."""
        return f"{self.title} (%)" if self.percent else self.title

    @property
    def factor(self) -> float:
        """From a value to the number that is shown."""
        return 100.0 if self.percent else 1.0

    def worst(self, values: Iterable[float]) -> float | None:
        """The worst of some values; None of none."""
        return (min if self.higher_is_better else max)(values, default=None)

    def goodness(self, value: float) -> float:
        """The value in a scale in which more is better."""
        return value if self.higher_is_better else -value


@dataclass(frozen=True)
class Column:
    """Sums over samples that every evaluation has of each environment, beside `count` and `loss`."""

    size: int = 1
    """How many numbers it has of an environment."""
    whole: bool = False
    """Whether they are counts of samples: whole numbers from 0 to as many as there are."""
    by_score: bool = False
    """Whether they tell how many samples have which score, and so something of single samples."""


@dataclass(frozen=True)
class AnswerTensor:
    """A tensor of what a served or an exported model answers; it has a row for each sample."""

    datatype: Literal["FP32", "INT64", "BYTES"] = "FP32"
    """By the names of the Open Inference Protocol."""
    shape: tuple[int, ...] = ()
    """Of a row."""
    texts: tuple[str, ...] = ()
    """Of BYTES, which are these texts by the numbers of another tensor."""
    texts_by: str = ""
    """That tensor's name."""


@dataclass(frozen=True)
class Prediction:
    """What a task's predictions are called."""

    name: str
    """Of the tensor in answers and exported models."""
    title: str
    """What one number is."""
    of: str
    """What each number of a row is of."""
    probability: bool = True
    """Whether each number is one; otherwise it has the target's own unit."""
    largest_first: bool = False
    """Whether people want to see the largest number first."""


@dataclass(frozen=True)
class Plot:
    """What a figure shows of some test samples, in plain numbers: a curve, or points that stand for samples."""

    title: str
    axes: tuple[str, str]
    x: Sequence[float]
    y: Sequence[float]
    counts: Sequence[int] = ()
    """Samples at each point; empty: it is a curve, of percentages."""
    observed: Sequence[float] = ()
    """What happened, at each x, beside what a model says."""
    diagonal: bool = False
    """Whether both axes are the same quantity, of a curve from 0 to 100."""
    by_site: bool = False
    """Whether each site has its own beside that of all samples."""


class PredictionTask(ABC):
    """The targets of a run, and all that follows from what they are."""

    name: ClassVar[TaskName]
    """In settings and tables."""
    headline: ClassVar[Measure]
    """By which models and rounds are chosen and compared."""
    loss_is: ClassVar[str]
    """What `loss` is, in a word or two."""
    constant_is: ClassVar[str]
    """What `constant` is, in a few words."""
    prediction: ClassVar[Prediction]
    asks: ClassVar[tuple[str, ...]] = ()
    """Parameters with which a caller of a served model may say more of what to predict."""
    target_dtype: ClassVar[str] = "float32"

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Of one sample's target."""
        return ()

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many numbers a model gives for a sample."""

    @property
    def answers(self) -> tuple[int, ...]:
        """The answers that a model gives for a sample, on which the selection `split` rests: how many values each
        can have. Empty where an answer is neither right nor wrong."""
        return ()

    def kinds(self, targets: Tensor) -> Tensor:
        """The right value (..., n, answers) of each answer, numbered through all `answers`; -1 where not known."""
        raise NotImplementedError(f"{self.name} have no answers that are right or wrong")

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Which answers (..., n, answers) are right; one that is not known is not."""
        raise NotImplementedError(f"{self.name} have no answers that are right or wrong")

    def right_of(self, count: int, sums: Sums) -> tuple[int, int]:
        """Of the sums of `count` samples how many answers are known, and how many of these are right."""
        raise NotImplementedError(f"{self.name} have no answers that are right or wrong")

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]:
        """What an evaluation sums, by name."""

    @property
    def scored(self) -> Mapping[str, Column]:
        """What an evaluation has of test samples beside them where the run's `scores` asks for it: it tells
        something of single samples."""
        return {}

    def counted(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, list[Any]]:
        """The columns `scored`, flat lists, of usable outputs and targets in several environments."""
        return {}

    @abstractmethod
    def misfit(self, targets: Tensor) -> str:
        """What of targets of the right shape and type cannot be, and what would be right; empty if all can."""

    @abstractmethod
    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0, reduction: Reduction = "mean"
    ) -> Tensor:
        """The loss of each sample (n,), or its mean or sum (), of outputs (n, `outputs`) and their targets.

        The mean is over all n samples, whatever they count, so that mini-batches have the mean of all samples.
        """

    def mapped_loss(self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The mean `loss` (), by operations that `torch.func.vmap` has a fast form of."""
        return self.loss(outputs, targets, smoothing=smoothing)

    @abstractmethod
    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The derivative (n, `outputs`) of each sample's loss in its outputs, in closed form."""

    def scale_slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The derivative (n,) of each sample's loss in s at s = 1, of outputs s · z: IRMv1's dummy classifier
        (Arjovsky et al. 2019)."""
        return (self.residuals(outputs, targets) * outputs).sum(dim=-1)

    @abstractmethod
    def usable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Outputs as they are; where a model has diverged, ones that are wrong and have a finite loss.

        So a client whose own model has diverged stays in every mean. Leading axes of a stack are allowed here and
        in `sums`.
        """

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The `columns` (..., size) of usable outputs (..., n, `outputs`)."""

    @abstractmethod
    def must_add_up(self, count: int, sums: Sums) -> None:
        """Raises `ValueError` unless sums that came from elsewhere can be those of `count` samples.

        Here and in what is made of sums, those of `scored` are among them where they were asked for.
        """

    @abstractmethod
    def measures(self, count: int, sums: Sums) -> dict[str, float | None]:
        """`headline` and the other measures of `count` > 0 samples, by name; None where they have none."""

    def value(self, count: int, sums: Sums) -> float | None:
        """The headline measure; None without samples, and where they have none."""
        return self.measures(count, sums)[self.headline.name] if count else None

    def standard_error(self, count: int, sums: Sums) -> float | None:
        """That of the headline measure of so many samples; None where the sums do not tell."""
        return None

    def interval(self, count: int, sums: Sums, level: float) -> tuple[float, float] | None:
        """Between which the headline measure of other samples lies with this probability, by the bootstrap over
        samples in its normal limit; None where the sums do not tell."""
        value, error = self.value(count, sums), self.standard_error(count, sums)
        if value is None or error is None:
            return None
        reach = NormalDist().inv_cdf((1 + level) / 2) * error
        return value - reach, value + reach

    @property
    def others(self) -> tuple[Measure, ...]:
        """The measures beside the headline, in the order of tables."""
        return ()

    @property
    def target_measures(self) -> tuple[Measure, ...]:
        """The measures of `by_target`, in the order of tables."""
        return ()

    def by_target(self, count: int, sums: Sums) -> dict[str, dict[str, float | None]]:
        """Where a target has several parts, the measures of each, by name; of `count` > 0 samples."""
        return {}

    def errors(self, count: int, sums: Sums) -> dict[str, tuple[float, float]]:
        """Of each part of a target that is a number: mean and standard deviation of predicted minus true value, in
        its own unit, of `count` > 0 samples."""
        return {}

    def plots(self, count: int, sums: Sums) -> list[Plot]:
        """What figures show of `count` > 0 samples."""
        return []

    @property
    def about(self) -> str:
        """What a reader of a table of all measures has to know."""
        return ""

    @abstractmethod
    def constant(self, targets: Tensor) -> Tensor:
        """The outputs (`outputs`,) that are best for all of these targets, by the headline measure."""

    @abstractmethod
    def predictions(self, outputs: Tensor) -> Tensor:
        """What a model with these outputs says, in the targets' own unit: for each sample as many numbers as a
        target has, or more where a prediction is more than a target."""

    def decided(self, predictions: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Predictions (n, ...) as `Result.predict` has them: the targets that they come down to."""
        return predictions

    @property
    def parts(self) -> tuple[str, ...]:
        """What each number of a prediction is of, as people call it; by default its number."""
        return tuple(map(str, range(self.outputs)))

    @property
    def metadata(self) -> dict[str, Any]:
        """What the metadata of a served model have, as JSON, so that its answers can be read."""
        return {f"{self.prediction.of}s": list(self.parts)}

    @property
    def facts(self) -> dict[str, Any]:
        """What an exported file has, as JSON, so that the outputs of the network alone can be read, too."""
        return self.metadata

    @property
    def answer_tensors(self) -> Mapping[str, AnswerTensor]:
        """What a served or an exported model answers, by name; the first are the predictions."""
        return {self.prediction.name: AnswerTensor(shape=(len(self.parts),))}

    def answer(self, outputs: Tensor, asked: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """The answer's tensors without those of texts, in their order, to outputs (n, `outputs`).

        `asked`: values of the parameters `asks`. Raises `UserError` for one that is impossible. Without any it can
        be traced for an export.
        """
        return {self.prediction.name: self.predictions(outputs)}


def like(values: tuple[float, ...], tensor: Tensor) -> Tensor:
    """Numbers of a task as a tensor of another one's type, on its device; to be read only."""
    import torch

    make = _tensor.__wrapped__ if torch.compiler.is_exporting() else _tensor  # what is traced is not to be kept
    return make(values, tensor.dtype, tensor.device)


@lru_cache(maxsize=64)
def _tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    import torch

    return torch.tensor(values, dtype=dtype).to(device)


def must_be_targets(what: str, task: PredictionTask, targets: Tensor) -> None:
    """Raises `UserError` where targets of the right shape and type cannot be this task's."""
    if wrong := len(targets) and task.misfit(targets):
        raise UserError(f"{what}: y {wrong}")


# ---------------------------------------------------------------------- rows of the log


def checked_sums(task: PredictionTask, given: Mapping[str, Sequence[float]], counts: Sequence[int]) -> Row:
    """The columns of a reply, flat lists, as a row of the log has them: by name, one entry for each environment.
    Of `scored` those that are there.

    `counts` are the environments' samples. Raises `ValueError` or `TypeError` where they cannot be.
    """
    found: Row = {}
    columns = {**task.columns, **{name: column for name, column in task.scored.items() if name in given}}
    for name, column in columns.items():
        values, size = given[name], column.size
        if len(values) != size * len(counts):
            raise ValueError(f"{name} has another length than was asked for")
        for value in values:
            if column.whole and (type(value) is not int or not 0 <= value <= max(counts)):
                raise ValueError(f"{name}: {value!r:.40} is no whole number from 0 to {max(counts)}")
            if type(value) not in (int, float):
                raise TypeError(f"{name}: {value!r:.40} is no number")
        found[name] = [list(values[place : place + size]) for place in range(0, len(values), size)]
    for place, count in enumerate(counts):
        task.must_add_up(count, {name: values[place] for name, values in found.items()})
    return {
        name: [own[0] for own in values] if columns[name].size == 1 else values for name, values in found.items()
    }


def sums_of(task: PredictionTask, row: Row) -> dict[str, tuple[int, Sums]]:
    """By environment that has samples, their number and the task's sums, from a row of the log."""
    found: dict[str, tuple[int, Sums]] = {}
    columns = [*task.columns, *(name for name in task.scored if name in row)]
    for place, (name, count) in enumerate(zip(row["environment"], row["count"], strict=True)):
        if count:
            own = {column: row[column][place] for column in columns}
            found[name] = count, {key: value if isinstance(value, list) else [value] for key, value in own.items()}
    return found


def added_sums(task: PredictionTask, parts: Iterable[Summed]) -> Summed:
    """Samples and sums of several environments or clients together; of `scored` those that all of them have."""
    every = list(parts)
    count = sum(number for number, _ in every)
    shared = {name: own for name, own in task.scored.items() if every and all(name in sums for _, sums in every)}
    known = {**task.columns, **shared}
    each = [[sums[name] for _, sums in every] for name in known]
    columns = zip(known.items(), each, strict=True)
    return count, {
        name: [sum(values) for values in zip(*own, strict=True)] if own else [0] * column.size
        for (name, column), own in columns
    }


def values_of(task: PredictionTask, row: Row) -> dict[str, float]:
    """The headline measure by environment, of those that have it, from a row of the log."""
    each = {name: task.value(count, sums) for name, (count, sums) in sums_of(task, row).items()}
    return {name: value for name, value in each.items() if value is not None}
