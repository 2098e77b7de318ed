"""The time until an event, which some samples are only known to have passed so far without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nan
from typing import TYPE_CHECKING, Any, ClassVar

from perennial.common.measures.concordance import pairs
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
from perennial.common.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

CONCORDANCE = Measure("concordance", "concordance")
BRIER = Measure("integrated_brier_score", "integrated Brier score", higher_is_better=False, percent=False)
RISKS = 1e5
"""Risks whose logarithms differ by less than 1 / `RISKS` count as tied, so that rounding decides no pair."""
INTERVAL_SHARES = tuple(0.095 * place for place in range(1, 11))
"""Of all samples, those whose time is before the end of each interval, where nobody says which intervals."""
FINER = 4
"""Parts of each in which what is censored is counted, so that less is lost of the order within an interval."""
MOST_TIMES = 1000
"""That a caller may ask for."""
RAREST = 1e-6
"""A constant's hazard where no event happened, and one less that where it happened to all."""


@dataclass(frozen=True)
class Event(PredictionTask):
    """Times to an event (n, 2): a time from 0 on, and 1 if the event happened then, 0 if the sample was censored.

    Hazards in discrete time (Gensheimer and Narasimhan 2019): outputs are, for each interval of time, the logit of
    the probability that the event happens within it to one that it has not happened to before. An interval
    contains its upper end (in the paper its lower one), so that the product of 1 − hazards up to an interval is
    P(T > its end), as Kaplan and Meier have it. The first contains 0.
    """

    name: ClassVar[TaskName] = "event"
    headline: ClassVar[Measure] = CONCORDANCE
    prediction: ClassVar[Prediction] = Prediction("survival", "survival probability", "time")
    asks: ClassVar[tuple[str, ...]] = ("times",)
    loss_is: ClassVar[str] = "negative log-likelihood"
    constant_is: ClassVar[str] = "the hazards of a client's training data"

    times: tuple[float, ...]
    """Upper ends of the intervals, which begin at 0."""
    censoring: tuple[float, ...] = ()
    """Of the same for all clients: P(a sample is censored after this time) at each of `times`; empty: 1."""

    def __post_init__(self) -> None:
        if not self.times or not all(low < high for low, high in pairwise((0.0, *self.times, inf))):
            raise UserError(
                f"times: {self.times} is not possible; give times above 0, each later than the one before"
            )
        falls = all(high >= low > 0 for high, low in pairwise((1.0, *self.censoring)))
        if self.censoring and not (falls and len(self.censoring) == len(self.times)):
            raise UserError(
                f"censoring: {self.censoring} is not possible; give a probability above 0 for each of the "
                f"{len(self.times)} times, none above the one before"
            )

    @property
    def target_shape(self) -> tuple[int, ...]:
        return (2,)

    @property
    def outputs(self) -> int:
        return len(self.times)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Comparable pairs within the environment and how many are concordant, ties as one half; and at each of
        `times` the sum of squared errors of the survival probability, weighted against censoring."""
        return {"comparable": Column(), "concordant": Column(), "brier": Column(len(self.times))}

    @property
    def scored(self) -> Mapping[str, Column]:
        """In each interval how many test samples something is known of, and to how many the event happened
        (`observed`); and at each of `times` the sum of the survival probability."""
        counts = Column(len(self.times), whole=True, by_score=True)
        return {"at_risk": counts, "happened": counts, "survival": Column(len(self.times), by_score=True)}

    def counted(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in self.scored}
        for outputs, targets in answers:
            known, happened = self.observed(targets)
            found["at_risk"] += known.long().sum(dim=0).tolist()
            found["happened"] += happened.long().sum(dim=0).tolist()
            found["survival"] += self.predictions(outputs.double()).sum(dim=0).tolist()
        return found

    def misfit(self, targets: Tensor) -> str:
        times, events = targets.unbind(dim=1)
        if not times.isfinite().all():
            return "has a time that is no finite number"
        if times.min() < 0:
            return f"has a time of {times.min():.6g}; it must be at least 0"
        if (wrong := events[~((events == 0) | (events == 1))]).numel():
            return f"has an event of {wrong[0]:.6g}; it must be 1 where it happened, and 0 where not yet"
        return ""

    def observed(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of which intervals (..., n, T) something is known of a sample, and in which its event happened; 0 or 1.

        The paper's rule: until its event a sample has survived the intervals before, and until it was censored
        those whose middle it had reached.
        """
        import torch

        upper = like(self.times, targets)
        lower = like((-1.0, *self.times[:-1]), targets)
        middle = (lower.clamp(min=0) + upper) / 2
        time, event = targets[..., :1], targets[..., 1:] == 1
        happened = event & (time > lower) & (time <= upper)
        survived = torch.where(event, time > upper, time >= middle)
        return (survived | happened).to(targets.dtype), happened.to(targets.dtype)

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0, reduction: Reduction = "mean"
    ) -> Tensor:
        """`−Σ_j log(1 − h_j)` over the intervals survived, `− log h_j` of the one with the event; h = σ(z).

        There is nothing to smooth.
        """
        losses = self._losses(outputs, targets).sum(dim=-1)
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        import torch.nn.functional as F

        known, happened = self.observed(targets)
        return known * F.softplus(outputs) - happened * outputs

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`σ(z_j) − 1{the event is in j}` in the intervals of which something is known, 0 in the others."""
        known, happened = self.observed(targets)
        return known * outputs.sigmoid() - happened

    def usable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Wrong logits are at `WRONG` on the other side."""
        import torch

        wrong = WRONG * (1 - 2 * self.observed(targets)[1])
        return torch.where(self._losses(outputs, targets) < MOST, outputs, wrong.to(outputs.dtype))

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        import torch

        survival, targets = self.predictions(outputs.double()), targets.double()
        # Pairs are counted in many small steps, each of which a GPU would be waited for.
        each = targets[None].flatten(0, -3).cpu(), self.risks(outputs)[None].flatten(0, -2).cpu()
        found = [pairs(own[:, 0], own[:, 1] == 1, risk) for own, risk in zip(*each, strict=True)]
        counts = torch.tensor(found, dtype=torch.float64).view(*outputs.shape[:-2], 2).to(outputs.device)
        return {
            "comparable": counts[..., :1],
            "concordant": counts[..., 1:],
            "brier": self._brier(survival, targets).sum(dim=-2),
        }

    def risks(self, outputs: Tensor) -> Tensor:
        """One number (..., n) for each sample, which is higher where the event is expected sooner.

        It is the logarithm, in whole units of 1 / `RISKS`, of the part of the time up to the last of `times` that
        a sample is expected to lose: 1 minus its restricted mean survival time, along straight lines between the
        ends of intervals.
        """
        import torch.nn.functional as F

        lost = -(-F.softplus(outputs.double()).cumsum(dim=-1)).expm1()
        upper = like(self.times, lost)
        widths = upper.diff(prepend=upper.new_zeros(1)) / upper[-1]
        middle = (lost + F.pad(lost[..., :-1], (1, 0))) / 2
        return ((middle * widths).sum(dim=-1).clamp(min=1e-300).log() * RISKS).round()

    def _brier(self, survival: Tensor, targets: Tensor) -> Tensor:
        """Squared errors (..., n, T) of survival probabilities, weighted by the inverse of the probability that a
        sample is not censored before it is known whether it survives (Graf et al. 1999)."""
        upper, time = like(self.times, targets.float()).double(), targets[..., :1]  # times as targets have them
        at_ends = like(self.censoring or (1.0,) * len(self.times), targets)
        survives = time > upper
        happened = (targets[..., 1:] == 1) & ~survives
        weights = happened.double() / self._at(time, upper, at_ends) + survives.double() / at_ends
        return weights * (survival - survives.double()) ** 2

    @staticmethod
    def _at(time: Tensor, ends: Tensor, values: Tensor) -> Tensor:
        """The curve that is 1 at 0 and has these values at these ends, at a time, along straight lines."""
        import torch.nn.functional as F

        ends, values = F.pad(ends, (1, 0)), F.pad(values, (1, 0), value=1.0)
        place = (time > ends[1:-1]).sum(dim=-1)  # of the interval
        part = (time[..., 0] - ends[place]) / (ends[place + 1] - ends[place])
        return (values[place] + part.clamp(max=1) * (values[place + 1] - values[place]))[..., None]

    def must_add_up(self, count: int, sums: Sums) -> None:
        (comparable,), (concordant,) = sums["comparable"], sums["concordant"]
        whole = comparable % 1 == 2 * concordant % 1 == 0
        if not (whole and 0 <= concordant <= comparable <= count * (count - 1) / 2):
            raise ValueError(f"pairs that {count} samples cannot have")
        most = count / (self.censoring[-1] if self.censoring else 1.0) * (1 + 1e-6)
        if not all(0 <= own <= most for own in sums["brier"]):
            raise ValueError(f"Brier scores that {count} samples cannot have")
        if "survival" in sums:
            self._must_survive(count, sums)

    def _must_survive(self, count: int, sums: Sums) -> None:
        """Nobody is at risk any more after the event; and survival only falls."""
        left = float(count)
        for at_risk, happened in zip(sums["at_risk"], sums["happened"], strict=True):
            if not happened <= at_risk <= left:
                raise ValueError(f"samples at risk and events that {count} samples cannot have")
            left = at_risk - happened
        last = float(count)
        for own in sums["survival"]:
            if not 0 <= own <= last * (1 + 1e-9):
                raise ValueError(f"survival probabilities that {count} samples cannot have")
            last = own

    def brier_scores(self, count: int, sums: Sums) -> list[float]:
        """The Brier score at each of `times`, of `count` > 0 samples."""
        return [own / count for own in sums["brier"]]

    def measures(self, count: int, sums: Sums) -> dict[str, float | None]:
        """Concordance is None without comparable pairs. The Brier score is the mean from the first of `times` to
        the last, along straight lines."""
        (comparable,), (concordant,) = sums["comparable"], sums["concordant"]
        brier = list(zip(self.times, self.brier_scores(count, sums), strict=True))
        area = sum((low + high) / 2 * (end - start) for (start, low), (end, high) in pairwise(brier))
        return {
            CONCORDANCE.name: concordant / comparable if comparable else None,
            BRIER.name: area / (self.times[-1] - self.times[0]) if len(brier) > 1 else brier[0][1],
        }

    def plots(self, count: int, sums: Sums) -> list[Plot]:
        """The mean predicted survival, and what Kaplan and Meier say of the same samples at the ends of intervals:
        `Π_{i ≤ j} (1 − events_i / at risk_i)`, as far as somebody is at risk."""
        if "survival" not in sums:
            return []
        curve = [100.0]
        for at_risk, happened in zip(sums["at_risk"], sums["happened"], strict=True):
            curve.append(curve[-1] * (1 - happened / at_risk) if at_risk else nan)
        predicted = [100.0, *(100 * own / count for own in sums["survival"])]
        axes = "time", "survival (%)"
        title = "Survival: predicted, and Kaplan-Meier (no marks)"
        return [Plot(title, axes, [0.0, *self.times], predicted, observed=curve, by_site=True)]

    @property
    def about(self) -> str:
        last = f"{self.times[-1]:g}"
        when = f"from {self.times[0]:g} to {last}" if len(self.times) > 1 else f"at {last}"
        return f"pairs of one environment of a client, by the mean time before {last}; Brier score {when}"

    @property
    def others(self) -> tuple[Measure, ...]:
        return (BRIER,)

    def constant(self, targets: Tensor) -> Tensor:
        """The share of the samples in each interval to which the event happens there: hazards of least loss."""
        known, happened = (own.sum(dim=0) for own in self.observed(targets))
        return (happened / known.clamp(min=1)).clamp(RAREST, 1 - RAREST).logit()

    def predictions(self, outputs: Tensor) -> Tensor:
        """The probability that the event has not happened by each of `times` (n, T): `Π_{i ≤ j} (1 − h_i)`."""
        import torch.nn.functional as F

        return (-F.softplus(outputs).cumsum(dim=-1)).exp()

    def decided(self, predictions: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """The restricted mean survival time (n,): how long a sample is expected to be without the event until the
        last of `times`, which is the area below the curve of `survival_at`."""
        import numpy as np

        curve = np.pad(predictions.astype(np.float64), ((0, 0), (1, 0)), constant_values=1.0)
        return (curve[:, :-1] + curve[:, 1:]) / 2 @ np.diff((0.0, *self.times))

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"{time:g}" for time in self.times)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"times": list(self.times)}

    def answer(self, outputs: Tensor, asked: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """At each of `times`, or at those of the parameter `times`, which are numbers with commas between them."""
        survival = self.predictions(outputs)
        if asked and "times" in asked:
            survival = self.survival_at(survival, self._asked_times(asked["times"]))
        return {self.prediction.name: survival}

    def _asked_times(self, text: str) -> list[float]:
        try:
            times = [float(word) for word in text.split(",")]
        except ValueError:
            times = []
        if not (0 < len(times) <= MOST_TIMES and all(0 <= time <= self.times[-1] for time in times)):
            raise UserError(
                f"times: {text[:40]!r} is not possible; give at most {MOST_TIMES} numbers from 0 to "
                f"{self.times[-1]:g} with commas between them"
            )
        return times

    def survival_at(self, survival: Tensor, times: Sequence[float]) -> Tensor:
        """The survival probability (n, k) at k times from 0 to the last of `times`, of one (n, T) at those: along
        straight lines from 1 at 0, as if within an interval each moment were as likely for the event."""
        import torch
        import torch.nn.functional as F

        ends, at = torch.tensor((0.0, *self.times)).double(), torch.tensor(times).double()
        place = torch.searchsorted(ends[1:], at)
        part = ((at - ends[place]) / (ends[place + 1] - ends[place])).to(survival)
        curve = F.pad(survival, (1, 0), value=1.0)
        return torch.lerp(curve[:, place], curve[:, place + 1], part)

    def counts(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """How many samples (T + 1,) have their event in each interval and after the last, and how many were
        censored there. They add up over clients."""
        import torch

        place, happened = (
            torch.bucketize(targets[:, 0].contiguous(), like(self.times, targets)),
            targets[:, 1] == 1,
        )
        every = len(self.times) + 1
        return place[happened].bincount(minlength=every), place[~happened].bincount(minlength=every)


def censoring_curve(events: Sequence[int], censored: Sequence[int]) -> tuple[float, ...]:
    """The probability to be censored after the end of each interval, by Kaplan and Meier.

    Of the samples whose event, and of those whose censoring, lies in each interval and, as last, after all. As at
    one time in Kaplan and Meier's, the events of an interval come before its censorings.
    """
    left, curve = sum(events) + sum(censored), [1.0]
    for happened, gone in zip(events[:-1], censored[:-1], strict=True):
        left -= happened
        curve.append(curve[-1] * (1 - gone / left) if gone else curve[-1])
        left -= gone
    return tuple(curve[1:])
