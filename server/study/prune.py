"""Median pruning: the trials of a search whose score after a third of the rounds is below the median stop there.

As Optuna's `MedianPruner` does, but with one look at the scores of all trials in the same round. So the same ones
stop however many run at a time, and after an interruption.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import TypeVar

from perennial.common.config import RunConfig
from perennial.common.tasks.classes import ACCURACY
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_text
from perennial.server.run.folder import PRUNED
from perennial.server.selection.split_rule import Select
from perennial.server.selection.summary import SPLIT, Evaluation
from perennial.server.study.batch import Outcome, Pruned, StudyProgress, Watch, progress_of, run_all

LEAST = 5
"""Trials with a score that a median is taken of; with fewer none stops."""
T = TypeVar("T")
SHARE = 1 / 3
"""Of the rounds, after which the scores are looked at."""


def early_round(config: RunConfig) -> int:
    """The first evaluation after `SHARE` of the rounds; the last round where there is none before."""
    every = config.evaluate_every
    return min(config.rounds, every * ceil(config.rounds * SHARE / every))


def below_median(outcomes: Sequence[Outcome], select: Select) -> dict[int, Pruned]:
    """The trials that stop: by `split` where it speaks, else by held-out data. The defaults never do.

    A setting that destroys the model leaves the shortcut, too. So by `split` an `informed` trial stops only where
    most are: else the median may be above all that is worth choosing. It depends on the rows of `early_round`
    alone, whatever came after it.
    """
    first = outcomes[0].config
    round_ = early_round(first)
    if round_ == first.rounds:
        return {}
    found = {number: _evaluation(outcome, round_) for number, outcome in enumerate(outcomes)}
    split = {number: own for number, evaluation in found.items() if (own := evaluation.score())}
    spared = {0}
    if split and select is Select.by_split:
        by, scores = Select.by_split, {number: own.score for number, own in split.items()}
        informed = {number for number, own in split.items() if own.informed}
        spared |= informed if 2 * len(informed) <= len(split) else set()
    else:
        by, scores = Select.held_out, {n: own.held_out for n, own in found.items() if own.held_out is not None}
    if len(scores) < LEAST:
        return {}
    measure = ACCURACY if by is Select.by_split else first.predicts.headline
    middle = median(scores.values())
    return {
        number: Pruned(round_, first.rounds, by, own, middle, measure)
        for number, own in scores.items()
        if number not in spared and measure.goodness(own) < measure.goodness(middle)
    }


def run_trials(
    groups: Sequence[Sequence[RunConfig]],
    select: Select,
    prune: bool,
    out: Path,
    jobs: int,
    watch: Watch | StudyProgress = lambda _: None,
    later: Sequence[int] = (),
) -> list[list[Outcome]]:
    """Each method's trials, of which the hopeless ones stop early if `prune`. Raises as `run_all` does.

    All have the same rounds. `later` as in `run_all`. By leave-one-out none stops: it has no early score.
    """
    every = [config for group in groups for config in group]
    if not every:
        return []
    until = early_round(every[0])
    prune = prune and select is not Select.leave_one_out
    if not prune or len(groups[0]) < LEAST or until == every[0].rounds:
        return grouped(run_all(every, out, jobs, watch, later), groups)

    progress = progress_of(watch)
    started = grouped(run_all(every, out, jobs, progress, later, until), groups)
    stopped = [below_median(outcomes, select) for outcomes in started]
    pairs = list(zip(started, stopped, strict=True))
    continuing = {
        own.path.name: own.config for outcomes, stops in pairs for n, own in enumerate(outcomes) if n not in stops
    }
    for outcomes, stops in pairs:
        for number, why in stops.items():
            if outcomes[number].waits and outcomes[number].path.name not in continuing:
                write_text(outcomes[number].path / PRUNED, f"{why.sentence}\n")
    if progress.rounds_done:
        count = sum(map(len, stopped))
        progress(doing=f"{count} of {len(every)} trials stop after round {until}, below the median")
    progress.ended = len({outcome.path.name for outcomes in started for outcome in outcomes} - continuing.keys())
    ended = dict(zip(continuing, run_all(list(continuing.values()), out, jobs, progress, later), strict=True))
    return [
        [
            replace(own, summary=None, trouble="", pruned=stops[n]) if n in stops else ended[own.path.name]
            for n, own in enumerate(outcomes)
        ]
        for outcomes, stops in pairs
    ]


def _evaluation(outcome: Outcome, round_: int) -> Evaluation:
    """The headline model's in a round. That of a run that stopped later counts, too.

    Empty where there is none, or the log is damaged: whoever then chooses among the trials says so.
    """
    here = (round_, outcome.config.method.evaluates[-1])
    try:
        rows = outcome.rows()
    except UserError:
        rows = []
    wanted = (row for row in rows if row.get("kind") in ("evaluation", SPLIT))
    own = (row for row in wanted if (row["round"], row["model"]) == here)
    return Evaluation(own, outcome.config.predicts)


def grouped(outcomes: Sequence[T], groups: Iterable[Sequence[RunConfig]]) -> list[list[T]]:
    """What there is for each run of several groups, one after the other, by group."""
    remaining = iter(outcomes)
    return [[next(remaining) for _ in group] for group in groups]
