"""Methods side by side: equal search budget, several seeds, FedAvg, Local and the constant predictor always in."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import ceil, log
from pathlib import Path
from statistics import fmean, pvariance, stdev
from typing import Any

from rich import table as terminal

from perennial.common.config import RunConfig, load_config
from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.methods import METHODS, method_class
from perennial.common.presets import TUNED, presets
from perennial.common.tasks import Measure, PredictionTask
from perennial.common.tasks.classes import ACCURACY
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown
from perennial.server.results.formatting import assignments
from perennial.server.results.table import Table
from perennial.server.run.folder import understood
from perennial.server.selection.rivals import WITH_REFERENCES
from perennial.server.selection.split_rule import Select
from perennial.server.selection.summary import (
    AREAS,
    AS_IN_PAPER,
    SELECTIONS,
    SPLIT,
    area_means,
    overall,
    site_means,
    summarise,
)
from perennial.server.study.batch import (
    Outcome,
    Selected,
    Standing,
    StudyProgress,
    Watch,
    other_versions,
    readable,
    run_all,
    troubles_of,
)
from perennial.server.study.choose import SPLIT_SILENT, Verdict, advice, search_each, with_references
from perennial.server.study.prune import grouped
from perennial.server.study.run_names import run_name
from perennial.server.study.sweep import differences, equals, key_of, tie, trials

BASELINES = ("fedavg", "local")
SEARCH_SEED = 0
CONSTANT = "Constant"
NO_SELECTION = "–"
"""Of a row that no round is chosen for."""


@dataclass(frozen=True)
class Entry:
    """A method of a comparison under its label, with hyper-parameters of its own."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its model that are not the scenario's."""
    searched: Collection[str] = ()
    """Of `settings` those that are but a search's first trial; it leaves the others alone."""


@dataclass(frozen=True)
class Plan:
    """A comparison. `settings` are `key=value`; a hyper-parameter goes to the methods that have it."""

    entries: tuple[Entry, ...]
    scenario: str | Scenario
    seeds: int
    trials: int = 1
    rounds: int | None = None
    trial_rounds: int | None = None
    """Of each trial of a search, which seldom needs as many as what it chooses; None: `rounds`."""
    settings: tuple[str, ...] = ()
    data_root: str | None = None
    device: str | None = None
    oracle: bool = False
    as_in_paper: str = ""
    """By what of the test data a paper chose (`summarise`): for one selection of rounds more, and for a search by
    `Select.as_in_paper`."""
    select: Select = Select.held_out
    """What a trial is chosen by."""
    counted: bool = False
    """Whether `split` judges the runs where another rule chooses, too: the same trials then serve both."""
    prune: bool = False
    """Whether hopeless trials stop early (`server/study/prune.py`)."""
    kept: frozenset[str] = frozenset()
    """Labels of entries that are not run: their numbers are kept elsewhere."""
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By label, what the same search chose before; it is not made again."""

    @property
    def scenario_name(self) -> str:
        """As it is shown."""
        return self.scenario if isinstance(self.scenario, str) else self.scenario.name


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and standard deviation with n − 1 in the denominator; that of a single seed is None."""

    mean: float
    deviation: float | None
    values: tuple[float, ...] = field(default=(), compare=False)
    """One for each seed."""

    def percent(self) -> "Spread":
        """A fraction's, in percent."""
        deviation = None if self.deviation is None else 100 * self.deviation
        return Spread(100 * self.mean, deviation, tuple(100 * value for value in self.values))

    def text(self, decimals: int) -> str:
        """Mean ± deviation."""
        return f"{self.mean:.{decimals}f}" + ("" if self.deviation is None else f" ±{self.deviation:.{decimals}f}")

    def __str__(self) -> str:
        return self.text(2)


@dataclass(frozen=True)
class Row:
    """One method under one selection."""

    label: str
    model: str
    selection: str
    measures: dict[str, Spread]
    """`worst`, `average`, `pooled`, `worst client` (`worst site` with own data), `bottom decile`, `held-out`,
    `loss`, `variance` and `entropy` of the environments' accuracies, areas, and the task's other measures."""
    seeds: int
    """How many seeds the means are over; fewer than planned where runs have trouble."""
    sites: dict[str, Spread] = field(default_factory=dict)
    """Values of sites with data of their own, each the mean over its test environments."""
    environments: dict[str, Spread] = field(default_factory=dict)
    """Values by test environment, which may be called as a measure is."""

    @property
    def columns(self) -> dict[str, Spread]:
        """Measures and environments together, as in papers' tables, where no two are called the same."""
        return self.environments | self.measures


@dataclass(frozen=True)
class Choice:
    """What the search chose for a method."""

    label: str
    method: str
    trial: int | None
    """None: no trial could be judged, and the method has no rows."""
    settings: dict[str, Any]
    """Hyper-parameters that the chosen trial drew."""
    runs: list[str]
    """Folders of the runs that its rows are the means of, by seed."""
    tied: int = 1
    """How many trials are as good as this one on held-out data, itself included."""
    by: str = Select.held_out.value
    """What the trial was chosen by."""
    sentence: str = ""
    """Why not as asked."""
    pruned: int = 0
    """How many trials were stopped early."""


@dataclass(frozen=True)
class Comparison:
    """A finished comparison, plain enough for JSON."""

    scenario: str
    environments: list[str]
    rounds: int
    seeds: int
    trials: int
    trial_rounds: int | None
    """Where trials had fewer than `rounds`."""
    choices: list[Choice]
    rows: list[Row]
    troubles: list[str]
    """A sentence for each run that is not in the means."""
    older: list[str]
    """Folders that another version of the code made; not read."""
    advice: str = ""
    """Which method is first by `split`, if that was asked for."""
    sites: list[str] = field(default_factory=list)
    """Those with data of their own; none where clients are parts of a data set."""
    measure: Measure = ACCURACY
    """What environments, sites and the overall numbers are values of."""
    others: tuple[Measure, ...] = ()
    """The task's other measures, of all test samples together."""

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(row.label for row in self.rows))
        about = f"{self.scenario}, {self.rounds} rounds, {self.seeds} seeds"
        return f"<Comparison of {methods} on {about}; it has a table>"

    def __str__(self) -> str:
        """The summary, as the command line shows it."""
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(file=text, width=120, force_terminal=False).print(comparison_tables(self)[0])
        return text.getvalue().rstrip()

    def json(self) -> dict[str, Any]:
        """Everything, fractions instead of percent."""
        measures = {"measure": self.measure.name, "others": [measure.name for measure in self.others]}
        return {**asdict(self), **measures}

    @property
    def table(self) -> Table:
        """A row for each method, selection and measure: mean and deviation over seeds.

        Measures are the headline measure in each test environment, and `Row.measures`. An environment that is
        called as one of these has "environment" before its name.
        """
        return Table(
            {
                "method": row.label,
                "model": row.model,
                "selection": row.selection,
                "measure": f"environment {name}" if name in apart else name,
                "mean": value.mean,
                "deviation": value.deviation,
                "seeds": row.seeds,
            }
            for row in self.rows
            for measures, apart in ((row.environments, row.measures), (row.measures, {}))
            for name, value in measures.items()
        )

    def row(self, label: str, selection: str) -> Row | None:
        """A method's row under a selection; the constant predictor's is the same under all."""
        found = (row for row in self.rows if row.label == label and row.selection in (selection, NO_SELECTION))
        return next(found, None)


def entries_of(methods: Iterable[str]) -> tuple[Entry, ...]:
    """The methods by name, each once. Raises `UserError` for a name that is none, or of our own means."""
    names = list(methods)
    if hidden := [name for name in names if not method_class(name).listed]:
        raise UserError(unknown("method", hidden[0], METHODS))
    return tuple(Entry(method_class(name).title, name) for name in dict.fromkeys(names))


def compare(plan: Plan, out: Path, jobs: int, watch: Watch = lambda _: None) -> Comparison:
    """Choose hyper-parameters with seed 0, run the chosen ones with every seed, put the results side by side.

    Raises `UserError` for what the user can put right, `RunStopped` if a worker process dies.
    """
    every_entry = with_baselines(plan.entries)
    entries = [entry for entry in every_entry if entry.label not in plan.kept]
    bases = {entry.label: base_config(plan, entry, every_entry) for entry in entries}
    first = next(iter(bases.values()))
    short = plan.trial_rounds
    if short and plan.trials == 1:
        raise UserError(f"trial_rounds: {short} is not possible with trials=1, which is no search; say how many")
    if short and short >= first.rounds:
        raise UserError(f"trial_rounds: {short} is not possible; a run has {first.rounds}, and a trial fewer")
    if plan.select is Select.as_in_paper and not plan.as_in_paper:
        raise UserError(f"{plan.select} is not possible here: nothing says by what test data a paper chose")
    seeds = f"{plan.seeds} seed{'s' * (plan.seeds > 1)}"
    methods = f"{len(entries)} method{'s' * (len(entries) > 1)} on {plan.scenario_name}"
    watch(Standing(0, 0, 0, 0, doing=f"{methods}, {seeds}: loading PyTorch and the data"))
    from perennial.server.study.constant import constant_predictor

    constant = [constant_predictor(first, seed) for seed in range(plan.seeds)]

    places, why_not = _references(plan, bases, out, jobs, watch)

    def seeded(label: str, config: RunConfig, seed: int, rounds: int = first.rounds) -> RunConfig:
        references = places.get((label, seed), "")
        return config.model_copy(update={"seed": seed, "rounds": rounds, "references": references})

    tried = {
        label: [
            seeded(label, config, SEARCH_SEED, short or first.rounds)
            for config in trials_of(plan, entry, bases[label])
        ]
        for label, entry in zip(bases, entries, strict=True)
    }
    progress = StudyProgress(watch)
    searched: dict[str, list[Outcome]] = {}
    verdicts = {label: Verdict(0, Select.held_out) for label in tried}
    if plan.trials > 1:
        known = {
            label: Verdict(number, plan.select)
            for label, own in plan.choices.items()
            for number, config in enumerate(tried.get(label, ()))
            if differences(config, bases[label]) == own
        }
        groups = {label: own for label, own in tried.items() if label not in known}
        later = [first.rounds] * (len(set(map(run_name, bases.values()))) * (plan.seeds - (not short)))
        found = search_each(
            [*groups.values()], plan.select, plan.prune, out, jobs, progress, later, why_not, plan.as_in_paper
        )
        searched = {label: own for label, (own, _) in zip(groups, found, strict=True)}
        verdicts = known | {label: verdict for label, (_, verdict) in zip(groups, found, strict=True)}
        progress.ended = len({run_name(config) for configs in groups.values() for config in configs})
    final = {
        label: [seeded(label, configs[number], seed) for seed in range(plan.seeds)]
        for label, configs in tried.items()
        if (number := verdicts[label].trial) is not None
    }
    # Trials of all rounds that were chosen are the runs with seed 0.
    ended = {
        label: [own[number]]
        for label, own in ({} if short else searched).items()
        if (number := verdicts[label].trial) is not None
    }
    rest = {label: configs[len(ended.get(label, ())) :] for label, configs in final.items()}
    others = run_all([config for configs in rest.values() for config in configs], out, jobs, progress)
    by_label = zip(rest, grouped(others, rest.values()), strict=True)
    outcomes = {label: list(map(readable, ended.get(label, []) + own)) for label, own in by_label}

    selections = (
        *SELECTIONS,
        *[SPLIT] * bool(places),
        *["oracle"] * plan.oracle,
        *[AS_IN_PAPER] * bool(plan.as_in_paper),
    )
    choices, rows = [], []
    troubles = list[str]()
    sites, task = list(first.sites_with_data), first.predicts
    for entry in entries:
        label, verdict = entry.label, verdicts[entry.label]
        if verdict.trial is None:
            choices.append(Choice(label, entry.method, None, {}, []))
            troubles.append(
                f"{label}: none of {plan.trials} trials can be judged, so it has no rows: they stopped, or "
                "nothing is held out (validation_fraction)"
            )
            continue
        choices.append(
            Choice(
                label,
                entry.method,
                verdict.trial,
                differences(tried[label][verdict.trial], bases[label]),
                runs=[str(outcome.path) for outcome in outcomes[label]],
                tied=len(equals(searched[label])) if label in searched and verdict.by is Select.held_out else 1,
                by=verdict.by.value,
                sentence=verdict.sentence,
                pruned=sum(outcome.pruned is not None for outcome in searched.get(label, ())),
            )
        )
        for selection in selections:
            picked = [_pick(outcome, selection, plan.as_in_paper, troubles) for outcome in outcomes[label]]
            model, found_ = bases[label].method.evaluates[-1], [one for one in picked if one]
            rows += _rows(label, model, selection, found_, sites, task)
    troubles = [*troubles_of([*_flat(searched), *_flat(outcomes)]), *troubles]
    rows += _rows(CONSTANT, "constant", NO_SELECTION, constant, sites, task)
    every = [config for configs in (*tried.values(), *final.values()) for config in configs]
    return Comparison(
        scenario=plan.scenario_name,
        environments=list(first.scenario.test_environments),
        rounds=first.rounds,
        seeds=plan.seeds,
        trials=plan.trials,
        trial_rounds=short,
        choices=choices,
        rows=rows,
        troubles=list(dict.fromkeys(troubles)),
        older=[str(path) for path in other_versions(every, out)],
        advice=(f"{SPLIT_SILENT}: {why_not}" if why_not else advice(outcomes) if places and not plan.kept else ""),
        sites=sites,
        measure=task.headline,
        others=task.others,
    )


def measures(
    found: Selected, sites: Sequence[str] = (), measure: Measure = ACCURACY, others: Sequence[Measure] = ()
) -> dict[str, float]:
    """Everything but environments that a row averages over seeds, of one seed.

    A client's value is its mean over the test environments; the bottom decile is the mean over the worst tenth of
    the clients, at least one. The worst client is the worst site where `sites` have own data. An area is the
    mean over test environments. Of a run without test data only what is measured on held-out data is there.
    """
    clients = sorted(site_means(found.clients).values(), key=measure.goodness)
    tenth = clients[: ceil(len(clients) / 10)]
    of_all = {
        "worst": found.worst,
        "average": found.average,
        "pooled": found.pooled,
        "worst site" if sites else "worst client": clients[0] if clients else None,
        "bottom decile": fmean(tenth) if clients else None,
        "held-out": found.validation,
        "loss": found.loss,
    }
    return {
        **{name: value for name, value in of_all.items() if value is not None},
        **(fairness(list(found.values.values())) if measure.percent else {}),
        **area_means(found.areas),
        **{own.title: value for own in others if (value := _of_all(found, own)) is not None},
    }


def _of_all(found: Selected, measure: Measure) -> float | None:
    return found.measures.all.get(measure.name) if found.measures else None


def fairness(accuracies: Sequence[float]) -> dict[str, float]:
    """How evenly a model does in several environments; nothing for fewer than two, or if it is never right.

    `variance`: 1000 times the variance (n) of the accuracies; `entropy`: 10 times that of the accuracies as shares
    of their sum, natural logarithm (FedILC Table 3).
    """
    total = sum(accuracies)
    if len(accuracies) < 2 or not total:
        return {}
    shares = [value / total for value in accuracies if value]
    return {
        "variance": 1000 * pvariance(accuracies),
        "entropy": -10 * sum(share * log(share) for share in shares),
    }


DECIMALS = {"loss": 4, "variance": 3, "entropy": 3}
"""Of the measures that are no fractions; fractions are shown in percent, with two."""


def as_shown(name: str, value: Spread) -> Spread:
    """A number of classes in the unit of the tables."""
    return value if name in DECIMALS else value.percent()


def text(name: str, value: Spread | None, measure: Measure = ACCURACY, others: Sequence[Measure] = ()) -> str:
    """A number as tables have it; a dash where there is none."""
    if not value:
        return "–"
    own = next((other for other in others if other.title == name), ACCURACY if name in AREAS else measure)
    if own.percent or name in DECIMALS:
        return as_shown(name, value).text(DECIMALS.get(name, 2))
    return own.text(value.mean) + ("" if value.deviation is None else f" ±{own.text(value.deviation)}")


def mean(values: Iterable[float | None]) -> float | None:
    """Of the numbers that there are; None where there is none."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation (n − 1) over seeds."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, tuple(values))


# ---------------------------------------------------------------------- what people see

AREAS_TEXT = (
    "areas in %, over all clients' samples; hard batch: of 0/1 predictions, mean over full batches with both "
    "classes, as FedILC's code has them"
)


def summarised(sites: Collection[str], environments: Collection[str]) -> tuple[str, ...]:
    """The measures of a summary's test accuracies."""
    return (*overall(sites, environments), *(() if sites else ("worst client",)), "bottom decile")


def comparison_tables(comparison: Comparison) -> list[terminal.Table]:
    """The summary, the accuracies per test environment and per site, areas and losses where there are areas."""
    seeds = f"{comparison.seeds} seed{'s' if comparison.seeds > 1 else ''}"
    spread_text = "mean ± standard deviation (n − 1) over seeds" if comparison.seeds > 1 else "one seed"
    rows, measure = comparison.rows, comparison.measure
    summary = (
        f"{comparison.scenario}, {comparison.rounds} rounds, {seeds}, "
        f"{budget(comparison.trials, comparison.trial_rounds)} per method"
    )
    caption = (
        f"test {measure.label}, {spread_text}; of a client its mean over the test environments, the bottom decile "
        "the mean of the worst tenth of the clients"
    )
    if any(row.selection == "oracle" for row in rows):
        caption += "; oracle: the round that is best on test data"
    measured = [
        {name: text(name, own, measure, comparison.others) for name, own in row.measures.items()} for row in rows
    ]
    environments = [_texts(row.environments, measure) for row in rows]
    of_clients = f"test {measure.label}, mean over clients, {spread_text}"
    names: Sequence[str] = (*summarised(comparison.sites, comparison.environments), "held-out")
    tables: list[tuple[str, str, Sequence[str], list[dict[str, str]]]] = [
        (summary, caption, names, measured),
        ("per test environment", of_clients, comparison.environments, environments),
    ]
    if any("auroc" in row.measures for row in rows):
        caption = f"mean cross-entropy; {AREAS_TEXT}; {spread_text}"
        tables.append(("loss and areas", caption, ("loss", *AREAS), measured))
    if comparison.others:
        names = [own.title for own in comparison.others]
        caption = f"all test samples together, {spread_text}"
        tables.append(("other measures", caption, names, measured))
    if comparison.sites:
        caption = f"test {measure.label}, of a site its mean over the test environments, {spread_text}"
        tables.append(("per site", caption, comparison.sites, [_texts(row.sites, measure) for row in rows]))
    made = []
    for title, caption, columns, shown in tables:
        table = terminal.Table("method (model)", "selection", title=title, caption=caption)
        for column in columns:
            table.add_column(column.replace("_hard_batch", " hard batch").replace(" ", "\n"), justify="right")
        for label, of_method in groupby(zip(rows, shown, strict=True), key=lambda pair: pair[0].label):
            for row, own in of_method:
                name = label if label == CONSTANT else f"{label} ({row.model})"
                name += "" if row.seeds == comparison.seeds else f", {row.seeds} of {seeds}"
                table.add_row(name, row.selection, *(own.get(column, "–") for column in columns))
            table.add_section()
        made.append(table)
    return made


def _texts(values: Mapping[str, Spread], measure: Measure) -> dict[str, str]:
    return {name: text("", own, measure) for name, own in values.items()}


def budget(trials: int, rounds: int | None) -> str:
    """What a search may spend on a method."""
    return f"{trials} trial{'' if trials == 1 else 's'}" + (f" of {rounds} rounds" if rounds else "")


def comparison_lines(comparison: Comparison) -> list[str]:
    """What the search chose."""
    reasons = [
        f"{own.label}: {own.sentence}"
        for own in comparison.choices
        if own.sentence and not own.sentence.startswith(SPLIT_SILENT)
    ]
    reasons += [comparison.advice] * bool(comparison.advice)
    if comparison.trials == 1:
        return ["hyper-parameters: what was set, else the defaults; no search", *reasons]
    chosen = [
        f"{choice.label}: trial {choice.trial} of {comparison.trials}"
        + (" (the defaults)" if choice.trial == 0 else f" ({assignments(choice.settings)})")
        + (f"; {tied}" if (tied := tie(choice.tied, choice.trial)) else "")
        + (f"; {choice.pruned} stopped early" if choice.pruned else "")
        for choice in comparison.choices
        if choice.trial is not None
    ]
    return [*chosen, *reasons]


def trouble_lines(comparison: Comparison) -> list[str]:
    """A sentence for each run left out, and one for folders of another version of the code."""
    if not (names := comparison.older):
        return comparison.troubles
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    skipped = "skipped, made by another version of the code or of files of your own"
    return [*comparison.troubles, f"{skipped}: {', '.join(names[:3])}{more}"]


# ---------------------------------------------------------------------- inside


def with_baselines(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The entries, and those of `BASELINES` that are not among them."""
    there = {entry.method for entry in entries}
    return (*entries, *(entry for entry in entries_of(BASELINES) if entry.method not in there))


def base_config(plan: Plan, entry: Entry, entries: tuple[Entry, ...]) -> RunConfig:
    config = entry_config(plan, entry, entries)
    if config.seed != SEARCH_SEED:
        raise UserError(f"--set seed={config.seed} is not possible here; say how many with --seeds")
    if config.references:
        raise UserError(f"references: {config.references!r} is not possible here; those of each seed are made")
    return config


def entry_config(
    plan: Plan,
    entry: Entry,
    entries: tuple[Entry, ...],
    options: Mapping[str, Any] | None = None,
    settings: Iterable[str] = (),
) -> RunConfig:
    """The configuration of one of the entries, its baselines among them.

    `options` and `settings` in place of the plan's. Raises `UserError` as `load_config` does.
    """
    planned = {
        "method": {"name": entry.method, **entry.settings},
        "scenario": plan.scenario,
        "model": entry.model,
        "rounds": plan.rounds,
        "seed": SEARCH_SEED,
        "data_root": plan.data_root,
        "device": plan.device,
    }
    stronger = {key: value for key, value in (options or {}).items() if value is not None}
    return load_config(options=planned | stronger, settings=[*_settings_for(plan, entry, entries), *settings])


def _references(
    plan: Plan, bases: Mapping[str, RunConfig], out: Path, jobs: int, watch: Watch
) -> tuple[dict[tuple[str, int], str], str]:
    """The file of references of each label and seed; none where `split` cannot or need not speak. Also why it
    cannot, where it was to choose."""
    wanted = plan.select in WITH_REFERENCES
    if not (wanted or plan.counted):
        return {}, ""
    keys = [(label, seed) for label in bases for seed in range(plan.seeds)]
    configs = [bases[label].model_copy(update={"seed": seed}) for label, seed in keys]
    found, why_not = with_references(configs, out, jobs, watch)
    if why_not:
        return {}, why_not if wanted else ""
    return dict(zip(keys, (config.references for config in found), strict=True)), ""


def _settings_for(plan: Plan, entry: Entry, entries: tuple[Entry, ...]) -> list[str]:
    """The settings without the hyper-parameters that the entry sets itself or only other methods have, and without
    the preset `tuned` where only others have one."""
    elsewhere = {name for other in entries for name in method_class(other.method).model_fields}
    left = elsewhere - method_class(entry.method).model_fields.keys() | entry.settings.keys()
    name = plan.scenario_name
    family = SCENARIOS[name].name if name in SCENARIOS else ""
    tuned = [own.method for own in entries if (own.method, family) in presets()]
    return [
        setting
        for setting in plan.settings
        if (entry.method in tuned or not tuned if _is_preset(setting) else key_of(setting) not in left)
    ]


def _is_preset(setting: str) -> bool:
    key, _, value = setting.partition("=")
    return key.strip() == "preset" and value.strip().strip("\"'") == TUNED


def trials_of(plan: Plan, entry: Entry, base: RunConfig) -> list[RunConfig]:
    return trials(base, plan.trials, {*entry.settings, *map(key_of, plan.settings)} - {*entry.searched})


def _flat(parts: Mapping[str, list[Outcome]]) -> list[Outcome]:
    return [outcome for outcomes in parts.values() for outcome in outcomes]


def _pick(outcome: Outcome, selection: str, as_in_paper: str, troubles: list[str]) -> Selected | None:
    if selection not in ("oracle", AS_IN_PAPER, SPLIT) or not outcome.summary:
        return outcome.selected(selection)
    try:
        with understood(outcome.path):
            made = summarise(outcome.config, outcome.rows(), seconds=0, oracle=True, as_in_paper=as_in_paper)
    except UserError as error:
        troubles.append(f"{error}; its {selection} numbers are left out")
        return None
    found = made["models"][outcome.config.method.evaluates[-1]]
    return Selected.model_validate(found[selection]) if selection in found else None


def _rows(
    label: str, model: str, selection: str, found: list[Selected], sites: Sequence[str], task: PredictionTask
) -> list[Row]:
    if not found:
        return []
    each = [site_means(one.clients) for one in found]
    known = {site: [means[site] for means in each if site in means] for site in sites}
    own = {site: spread(values) for site, values in known.items() if values}
    environments = _means([one.values for one in found])
    measured = _means([measures(one, sites, task.headline, task.others) for one in found])
    return [Row(label, model, selection, measured, len(found), own, environments)]


def _means(seeds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Over seeds, of what all of them have."""
    names = [name for name in seeds[0] if all(name in seed for seed in seeds)]
    return {name: spread([seed[name] for seed in seeds]) for name in names}
