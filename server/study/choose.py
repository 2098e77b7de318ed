"""Which trial of a search is chosen: on held-out data, or by `split`. Neither reads a test environment."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any

from perennial.common.config import RunConfig
from perennial.common.methods.references import FILE, ROUNDS, References
from perennial.common.tasks.classes import ACCURACY
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_text
from perennial.server.results.formatting import assignments, percent
from perennial.server.selection.rivals import RIVALS, WITH_REFERENCES, evidence
from perennial.server.selection.split_rule import (
    UNINFORMED,
    Score,
    Select,
    best_of,
    better,
    counted,
    most_robust,
    score,
    unusable,
)
from perennial.server.selection.summary import AS_IN_PAPER, summarise
from perennial.server.study.batch import (
    Outcome,
    Selected,
    Standing,
    StudyProgress,
    Watch,
    progress_of,
    readable,
    run_all,
)
from perennial.server.study.leave_one_out import LeftOut, leave_one_out
from perennial.server.study.prune import run_trials
from perennial.server.study.run_names import run_name
from perennial.server.study.sweep import best, differences, held_out, search_ranges, trials

SPLIT_SILENT = "split does not speak"
NONE_JUDGED = "no trial could be judged"
OF_REFERENCES = ("scenario", "model", "seed", "test_sites", "runtime", "device", "data_root", "privacy")
"""Settings that a run shares with the one that makes its references."""
MEANS = ("score", "mean", "agreeing", "misleading", "constant", "constant_mean")
MOST_REFERENCES = 12
"""Each is a model that travels with every request to evaluate."""


@dataclass(frozen=True)
class Verdict:
    """What was chosen, and by what."""

    trial: int | None
    """None: no trial could be judged."""
    by: Select
    sentence: str = ""
    """Why it was not chosen as asked, or not of all trials; else empty."""
    scores: dict[int, Score] = field(default_factory=dict)
    """By trial, wherever `split` speaks."""
    left_out: dict[int, LeftOut] = field(default_factory=dict)
    """By trial, where environments were left out."""
    rivals: dict[int, float] = field(default_factory=dict)
    """By trial, where one of the `RIVALS` chose."""

    @property
    def judged(self) -> Mapping[int, Score | LeftOut]:
        """What the trials were compared by, if not by held-out data alone."""
        return self.left_out or self.scores


def search(
    config: RunConfig,
    count: int,
    fixed: Collection[str],
    select: Select,
    out: Path,
    jobs: int,
    watch: Watch = lambda _: None,
    prune: bool = False,
    optimizers: Sequence[str] = (),
) -> tuple[list[Outcome], Verdict]:
    """Run the first `count` trials, and choose one. Raises as `run_all` does.

    With `prune` hopeless trials stop early (`server/study/prune.py`), and none of them is chosen.
    """
    configs, why_not = trials(config, count, fixed, optimizers), ""
    if select in WITH_REFERENCES:
        if config.references:
            raise UserError(
                f"references: {config.references!r} is not possible with {select}, which makes its own"
            )
        configs, why_not = with_references(configs, out, jobs, watch)
    (found,) = search_each([configs], select, prune, out, jobs, watch, why_not=why_not)
    return found


def search_each(
    groups: Sequence[Sequence[RunConfig]],
    select: Select,
    prune: bool,
    out: Path,
    jobs: int,
    watch: Watch | StudyProgress = lambda _: None,
    later: Sequence[int] = (),
    why_not: str = "",
    as_in_paper: str = "",
) -> list[tuple[list[Outcome], Verdict]]:
    """Each method's trials and the choice; `why_not` where there are no references. Raises as `run_all` does."""
    progress, left = progress_of(watch), []
    if select is Select.leave_one_out:  # which has a count of its own
        left = [leave_one_out(own, out, jobs, progress.watch) for own in groups]
    outcomes = run_trials(groups, select, prune, out, jobs, progress, later)
    if select not in (Select.held_out, Select.leave_one_out):
        outcomes = [list(map(readable, own)) for own in outcomes]
    if left:
        return [(own, choose(own, select, why, found)) for own, (found, why) in zip(outcomes, left, strict=True)]
    return [(own, choose(own, select, why_not, as_in_paper=as_in_paper)) for own in outcomes]


def with_references(
    configs: Sequence[RunConfig], out: Path, jobs: int, watch: Watch = lambda _: None
) -> tuple[list[RunConfig], str]:
    """The runs with their references, made once for each scenario, seed and model and kept beside them.

    Where there can be none, the runs as they are, and why.
    """
    if reason := next(filter(None, map(no_references, configs)), ""):
        return list(configs), reason
    makers = [references_run(config) for config in configs]
    names = list(map(run_name, makers))
    different = dict(zip(names, makers, strict=True))

    def announce(now: Standing) -> None:  # the study's own first line comes after it
        watch(replace(now, doing=f"references for split, {now.doing}") if now.doing else now)

    made = dict(zip(different, run_all(list(different.values()), out, jobs, announce), strict=True))
    for outcome in made.values():
        if outcome.trouble or not (outcome.path / FILE).is_file():
            return list(configs), outcome.trouble or f"{outcome.path / FILE} is not there; delete {outcome.path}"
    places = [{"references": str((made[name].path / FILE).resolve())} for name in names]
    return [config.model_copy(update=place) for config, place in zip(configs, places, strict=True)], ""


def no_references(config: RunConfig) -> str:
    """Why a run can have no references; empty where it can."""
    environments, task = config.scenario.train_environments, config.predicts
    if not task.answers:
        return f"it counts right and wrong answers, and the task {task.name!r} has none"
    if len(environments) < 2:
        return f"there is one training environment, {environments[0]}, and two are needed"
    if len(environments) > MOST_REFERENCES:
        return f"there are {len(environments)} training environments, and references for at most {MOST_REFERENCES}"
    if config.left_out:
        return f"there is no reference of {config.left_out}, which left_out keeps from training"
    if why := config.privacy.no_counts(len(config.evaluated)):
        return f"references are not possible with {why}"
    return ""


def references_run(config: RunConfig) -> RunConfig:
    """The run that makes the references of a run."""
    same = {name: getattr(config, name) for name in OF_REFERENCES}
    return RunConfig(method=References(), rounds=ROUNDS, participation=1.0, **same)


def choose(
    outcomes: Sequence[Outcome],
    select: Select,
    why_not: str = "",
    left: Sequence[LeftOut | None] = (),
    as_in_paper: str = "",
) -> Verdict:
    """One of the trials, by the headline model after the last round; the earliest of equals.

    By `split` it is the `most_robust`; where no trial is better than a constant, a sentence says so. Where it does
    not speak, or no environment can be `left` out, held-out data decide. As in a paper it is the trial whose best
    round by `as_in_paper` (`summarise`) is the best of all: that reads test data.
    """
    if select is Select.as_in_paper:
        every = {number: _on_test(outcome, as_in_paper) for number, outcome in enumerate(outcomes)}
        on_test = {number: own for number, own in every.items() if own is not None}
        chosen = max(on_test, key=lambda number: (on_test[number], -number), default=None)
        return Verdict(chosen, select)
    held_out = best(outcomes)
    if select is Select.held_out:
        return Verdict(held_out, select)

    def by_held_out(reason: str) -> Verdict:
        return Verdict(held_out, Select.held_out, f"{reason}; held-out data decided")

    if select is Select.leave_one_out:
        judged = {number: own for number, own in enumerate(left) if own and outcomes[number].summary}
        if not judged:
            return by_held_out(f"{select} does not speak: {why_not or NONE_JUDGED}")
        lacking = sum(not own for own in left) if why_not else 0
        sentence = f"{lacking} of {len(left)} trials could not be judged: {why_not}" if lacking else ""
        return Verdict(best_of(judged), select, sentence, {}, judged)
    if select in RIVALS:
        values = {
            number: value
            for number, outcome in enumerate(outcomes)
            if (value := by_rival(outcome, select)) is not None
        }
        if not values:
            task = outcomes[0].config.predicts
            lacks = f"the task {task.name!r} does not count right answers" if task.headline != ACCURACY else ""
            return by_held_out(f"{select} does not speak: {why_not or lacks or NONE_JUDGED}")
        return Verdict(max(values, key=lambda number: values[number]), select, rivals=values)
    rows = {number: row for number, outcome in enumerate(outcomes) if (row := last_counts(outcome))}
    scores = {
        number: found for number, row in rows.items() if not unusable(row) and (found := score(row)) is not None
    }
    if not scores:
        return by_held_out(
            f"{SPLIT_SILENT}: {why_not or next((unusable(row) for row in rows.values()), NONE_JUDGED)}"
        )
    sentence = ""
    if not any(own.informed for own in scores.values()):
        top, of = max(scores.values(), key=lambda own: own.mean), counted(outcomes[0].config.predicts.answers)
        sentence = (
            f"{UNINFORMED}: the best mean over {of} that a reference knows and does not know is "
            f"{percent(top.mean)} % (standard error {percent(top.mean_error)}), a constant's "
            f"{percent(top.constant_mean)} %; what loses least was taken"
        )
    return Verdict(most_robust(scores)[0], Select.by_split, sentence, scores)


def by_rival(outcome: Outcome, select: Select) -> float | None:
    """What one of the `RIVALS` says of the headline model after the last round. Raises as `rows` does."""
    if not outcome.summary:
        return None
    return RIVALS[select](evidence(outcome.rows(), outcome.config.method.evaluates[-1], outcome.summary.rounds))


def _on_test(outcome: Outcome, column: str) -> float | None:
    """How good the headline model is by what a paper chose by, in the round that is best by it; more is better."""
    if not outcome.summary:
        return None
    config = outcome.config
    made = summarise(config, outcome.rows(), seconds=0, as_in_paper=column)["models"][config.method.evaluates[-1]]
    if AS_IN_PAPER not in made:
        return None
    found = Selected.model_validate(made[AS_IN_PAPER])
    if column == "loss":
        return None if found.loss is None else -found.loss
    return config.predicts.headline.goodness(found.values[column])


def last_counts(outcome: Outcome) -> dict[str, Any] | None:
    """The headline model's row of counts after the last round; None where there is none. Raises as `rows` does."""
    if not outcome.summary:
        return None
    model = outcome.config.method.evaluates[-1]
    found = (row for row in reversed(outcome.rows()) if row.get("kind") == "split" and row.get("model") == model)
    return next(found, None)


def advice(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Which of several methods is first by `split` after the last round, in one sentence; by label, over seeds.

    A method's score is the mean over its runs with counts; the standard error of that goes with it. They are
    compared as trials are.
    """
    checked = {label: list(map(readable, found)) for label, found in outcomes.items()}
    rows = {label: [row for own in found if (row := last_counts(own))] for label, found in checked.items()}
    reasons = [unusable(row) for found in rows.values() for row in found]
    if not reasons or any(reasons):
        return f"{SPLIT_SILENT}: {next(filter(None, reasons), 'no run has counts')}"
    each = {label: [own for row in found if (own := score(row))] for label, found in rows.items()}
    scores = {label: average(own) for label, own in each.items() if own}
    order = most_robust(scores)
    seeds = {label: (len(each[label]), len(outcomes[label])) for label in order}
    named = {label: label + f" ({has} of {all_} seeds)" * (has < all_) for label, (has, all_) in seeds.items()}
    top = scores[order[0]]
    text = f"first by split: {named[order[0]]} with {percent(top.score)} % (standard error {percent(top.error)})"
    # One whose mean is less may be above, and comes after all the same.
    if len(order) > 1 and (second := scores[order[1]]).score <= top.score:
        far = "more" if better(top, second) else "no more"
        points = percent(top.score - second.score)
        text += f", {points} points and {far} than two standard errors before {named[order[1]]}"
    far = "more" if top.informed else "no more"
    text += (
        f"; the best constant has {percent(top.constant)} %, and the mean over right and wrong samples is "
        f"{percent(top.mean - top.constant_mean)} points and {far} than two standard errors above a constant's"
    )
    return text if any(own.beats_constant for own in scores.values()) else f"{text}: {UNINFORMED}"


def average(scores: Sequence[Score]) -> Score:
    """Mean over runs of different seeds; counts are added up."""
    count = len(scores)
    means = {name: sum(getattr(own, name) for own in scores) / count for name in MEANS}
    return Score(
        **means,
        error=sqrt(sum(own.error**2 for own in scores)) / count,
        mean_error=sqrt(sum(own.mean_error**2 for own in scores)) / count,
        right=sum(own.right for own in scores),
        wrong=sum(own.wrong for own in scores),
    )


# ---------------------------------------------------------------------- what a person sees of it


def why_lines(outcomes: Sequence[Outcome], verdict: Verdict) -> list[str]:
    """What was chosen, why, and what comes next."""
    lines = [verdict.sentence] if verdict.sentence else []
    if verdict.trial is None:
        return [*lines, f"{NONE_JUDGED}, so nothing is chosen"]
    lines.append(f"chosen: {named(outcomes, verdict.trial)}, by {verdict.by}")
    if verdict.by is Select.held_out:
        found = outcomes[verdict.trial].selected("final")
        measure = outcomes[verdict.trial].config.predicts.headline
        held_out_text = (
            f"{measure.text(found.validation)}{measure.unit} on held-out training data" if found else ""
        )
        return [*lines, held_out_text] if found else lines
    if verdict.rivals:
        return [*lines, f"{verdict.by}: {verdict.rivals[verdict.trial]:.4f} after the last round"]
    scores = verdict.judged
    answers = outcomes[verdict.trial].config.predicts.answers
    lines.append(_basis(chosen := scores[verdict.trial], counted(answers)))
    others = {number: own for number, own in scores.items() if number != verdict.trial}
    if others:
        second = best_of(others) if verdict.left_out else most_robust(verdict.scores)[1]
        far = "more" if better(chosen, own := others[second]) else "no more"
        behind = f"{far} than two standard errors {_worse(own)}"
        if isinstance(own, Score) and isinstance(chosen, Score) and own.score > chosen.score:
            behind = f"with a mean of {percent(own.mean)} % in place of {percent(chosen.mean)} %"
        lines.append(f"next best: {named(outcomes, second)}, {verdict.by} {_score_text(own)}, {behind}")
    return lines


def _basis(own: Score | LeftOut, of: str) -> str:
    """A score, its standard error, and how many samples it rests on; `of` says what `split` counts."""
    measure = own.measure if isinstance(own, LeftOut) else ACCURACY
    text = f"{_score_text(own)} (standard error {measure.text(own.error)})"
    if isinstance(own, LeftOut):
        each = ", ".join(f"{name} {measure.text(value)}{measure.unit}" for name, value in own.environments.items())
        return f"leave-one-out {text} on {own.samples} held-out samples of environments not trained on: {each}"
    below = "" if own.beats_constant else f" and is no worse: {UNINFORMED} in the worst case"
    return (
        f"split {text}: {percent(own.agreeing)} % of {own.right} held-out {of} that the references know, "
        f"{percent(own.misleading)} % of {own.wrong} that they do not; the best constant has "
        f"{percent(own.constant)} %{below}"
    )


def _score_text(own: Score | LeftOut) -> str:
    measure = own.measure if isinstance(own, LeftOut) else ACCURACY
    return f"{measure.text(own.score)}{measure.unit}"


def _worse(own: Score | LeftOut) -> str:
    return "above" if isinstance(own, LeftOut) and not own.measure.higher_is_better else "below"


def named(outcomes: Sequence[Outcome], trial: int) -> str:
    """A trial with the hyper-parameters in which it differs from trial 0."""
    drawn = differences(outcomes[trial].config, outcomes[0].config)
    return f"trial {trial} ({assignments(drawn) or 'the defaults'})"


# ---------------------------------------------------------------------- what is kept of it


def keep(outcomes: Sequence[Outcome], verdict: Verdict, select: Select, folder: Path) -> list[Path]:
    """Write the chosen configuration, which `--config` takes, and a picture of the search; their files.

    The digits of their names are another search's on other data, with other settings or by another rule.
    """
    from perennial.server.results.figures import knob_figure  # matplotlib takes its time

    config = outcomes[0].config
    search = f"{run_name(config.model_copy(update={'references': ''}))} {select}"
    digits = sha256(search.encode()).hexdigest()[:8]
    stem = f"tuned-{config.method.name}-{config.scenario.name}-s{config.seed}-{digits}"
    files = []
    if verdict.trial is not None:
        files.append(folder / f"{stem}.toml")
        chosen = outcomes[verdict.trial].config
        write_text(files[-1], chosen.model_copy(update={"references": ""}).toml())
    ranges = search_ranges(type(config.method))
    judged = {number: (found.score, found.error) for number, found in verdict.judged.items()}
    alone = verdict.rivals or held_out(outcomes)
    judged = judged or {number: (value, 0.0) for number, value in alone.items()}
    if judged:
        files.append(folder / f"{stem}.svg")
        tried = {name: [getattr(outcomes[n].config.method, name) for n in judged] for name in ranges}
        tried = {name: values for name, values in tried.items() if len(set(values)) > 1}
        measure = ACCURACY if verdict.scores else config.predicts.headline
        by = f"leave-one-out {measure.title}" if verdict.left_out else f"held-out {measure.title}"
        label = f"{'split' if verdict.scores else by}{measure.unit and ', %'}"
        label, factor = (verdict.by.value, 1.0) if verdict.rivals else (label, measure.factor)
        logs = [name for name in tried if ranges[name].kind == "log"]
        chosen_at = list(judged).index(verdict.trial) if verdict.trial in judged else None
        write_text(files[-1], knob_figure(tried, list(judged.values()), label, logs, chosen_at, factor))
    return files
