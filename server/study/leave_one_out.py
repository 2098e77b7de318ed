"""Leave one environment out: how good a configuration is on a training environment that it has not seen.

The third rule of selection of Gulrajani and Lopez-Paz (ICLR 2021, §2.2). A configuration is run once without each
training environment, and evaluated on that one's samples; its score is the mean over the environments.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from perennial.common.config import RunConfig
from perennial.common.tasks import Measure
from perennial.common.tasks.classes import ACCURACY
from perennial.server.study.batch import Outcome, Watch, readable, run_all

LEAST_ENVIRONMENTS = 3
"""With two, a run would train on a single one, and nothing in it could tell what stays the same."""


@dataclass(frozen=True)
class LeftOut:
    """How a configuration's headline model does on environments that it has not seen."""

    score: float
    """Mean over the environments of the headline measure on the one left out."""
    error: float
    """Its standard error; 0 where the task's sums do not tell."""
    environments: dict[str, float]
    """The values, by the environment left out."""
    samples: int
    """On which it rests."""
    measure: Measure = ACCURACY

    @property
    def goodness(self) -> float:
        """The score in a scale in which more is better."""
        return self.measure.goodness(self.score)

    def json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: value for name, value in asdict(self).items() if name != "measure"}


def not_possible(config: RunConfig) -> str:
    """Why a configuration cannot be judged so, in one sentence; empty where it can."""
    environments = config.scenario.train_environments
    if len(environments) < LEAST_ENVIRONMENTS:
        return f"leaving out one of {len(environments)} training environments leaves too few; three are needed"
    if why_not := config.all_train():
        return f"no environment can be left out with {why_not}"
    return ""


def leave_one_out(
    configs: Sequence[RunConfig], out: Path, jobs: int, watch: Watch = lambda _: None
) -> tuple[list[LeftOut | None], str]:
    """Run every configuration once without each training environment; the score of each.

    The configurations are trials of one method. The runs are kept in `out`. None: a configuration that cannot be
    judged, because a run stopped or no client has its headline model and samples of an environment left out. A
    sentence says why, of the first of them. Raises as `run_all` does.
    """
    if reason := next(filter(None, map(not_possible, configs)), ""):
        return [None] * len(configs), reason
    first, *others = [without_each_environment(config) for config in configs]
    outcomes = list(map(readable, run_all(first, out, jobs, watch)))
    found, trouble = [judge(outcomes)], next((own.trouble for own in outcomes if own.trouble), "")
    if not any(found) and not trouble:  # and so it is with every other one
        model = configs[0].method.evaluates[-1]
        reason = f"no client has a {model} model and samples of an environment that it has not seen"
        return [None] * len(configs), reason
    rest = list(map(readable, run_all([run for own in others for run in own], out, jobs, watch)))
    waiting = iter(rest)
    found += [judge([next(waiting) for _ in own]) for own in others]
    return found, trouble or next((own.trouble for own in rest if own.trouble), "")


def without_each_environment(config: RunConfig) -> list[RunConfig]:
    """The configuration without each training environment, evaluated after the last round."""
    changes = {"references": "", "evaluate_every": config.rounds}
    return [
        config.model_copy(update={**changes, "left_out": environment})
        for environment in config.scenario.train_environments
    ]


def judge(outcomes: Sequence[Outcome]) -> LeftOut | None:
    """The score of one configuration from its runs; None where one of them says nothing."""
    task = outcomes[0].config.predicts
    found = {run.config.left_out: run.sums(run.config.method.evaluates[-1], "validation") for run in outcomes}
    values = {name: value for name, own in found.items() if (value := task.value(*own)) is not None}
    if len(values) < len(found):
        return None
    errors = [task.standard_error(*own) or 0.0 for own in found.values()]
    return LeftOut(
        score=fmean(values.values()),
        error=sqrt(sum(error**2 for error in errors)) / len(found),
        environments=values,
        samples=sum(count for count, _ in found.values()),
        measure=task.headline,
    )
