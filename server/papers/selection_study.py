"""The study of `split`: searches on scenarios whose shortcut is known, and what each rule would have chosen.

What every trial says of itself without test data is kept beside its test accuracy, so that any rule can be judged
afterwards without a new run. Nothing here chooses on test data but the oracle, which is what the others are
compared with.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from perennial.common.config import load_config
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_text
from perennial.common.utils.locks import locked_folder
from perennial.common.utils.seeding import numpy_generator
from perennial.server.results.formatting import markdown_table, percent
from perennial.server.selection.rivals import RIVALS, Evidence, HeldOut, evidence
from perennial.server.selection.split_rule import Score, Select, most_robust, score, unusable
from perennial.server.study.batch import Outcome, Standing, Watch, read_lines, readable, run_all, troubles_of
from perennial.server.study.choose import with_references
from perennial.server.study.compare import measures
from perennial.server.study.sweep import trials

NAME = "selection"
FILE = f"{NAME}-trials.jsonl"
"""Of the trials that are kept, one a line."""
PAGE = Path("docs/selection.md")
"""With the tables, in the project's folder."""
TITLE = "What ways of choosing without test data choose, on scenarios whose shortcut is known"
METHODS = ("irm", "groupdro", "perinvfl", "fedsdr")
SMALL_PICTURES = ("train_per_class=500", "test_per_class=100", "validation_fraction=0.2")
SPLIT, FIRST, DEFAULTS, RANDOM = "split", "split, version 1", "the defaults", "a random trial"
ORACLE = "the best in the worst case (test data)"
DRAWS = 10_000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Variant:
    """A scenario of the study, as docs/selection.md planned it."""

    name: str
    scenario: str
    settings: tuple[str, ...] = ()
    first_seed: int = 30

    @property
    def has_shortcut(self) -> bool:
        return not self.scenario.endswith("-oracle")

    @property
    def methods(self) -> tuple[str, ...]:
        """Without a shortcut FedAvg alone: references decide whether `split` speaks, whatever the method."""
        return METHODS if self.has_shortcut else ("fedavg",)


def _marked(name: str, *settings: str) -> Variant:
    return Variant(name, "marked-mnist", tuple(f"scenario.{own}" for own in settings), 40)


VARIANTS = (
    *(Variant(name, name, tuple(f"scenario.{own}" for own in SMALL_PICTURES)) for name in ("cmnist", "cfmnist")),
    Variant("rc-fmnist", "rc-fmnist", ("scenario.train_samples=2000", "scenario.test_samples=1000")),
    Variant("causes-and-shortcut", "causes-and-shortcut"),
    *(_marked(kind, f"mark={kind}") for kind in ("patch", "background", "stripes", "rotation")),
    _marked("patch, 10 % label noise", "label_noise=0.1"),
    _marked("patch, no label noise", "label_noise=0"),
    _marked("patch, 8 environments", "train_agreement=[0.95,0.9,0.85,0.8,0.75,0.7,0.65,0.6]"),
    Variant("word", "planted-word", (), 40),
    Variant("table, 50 clients", "causes-and-shortcut", ("scenario.clients=50", "participation=0.2"), 40),
    *(
        Variant(own, own, (), 40)
        for own in ("marked-mnist-oracle", "planted-word-oracle", "causes-and-shortcut-oracle")
    ),
)


@dataclass(frozen=True)
class Size:
    """What is run."""

    variants: tuple[Variant, ...] = VARIANTS
    methods: tuple[str, ...] = METHODS
    rounds: int = 30
    seeds: int = 3
    trials: int = 10


QUICK = Size((VARIANTS[3], VARIANTS[-1]), ("irm", "groupdro"), rounds=10, seeds=1, trials=3)


@dataclass(frozen=True)
class Trial:
    """A trial of a search after its last round, with numbers as fractions."""

    variant: str
    method: str
    seed: int
    number: int
    of: int
    """How many the search had; one that stopped has no numbers and is not kept."""
    rounds: int
    worst: float
    """Accuracy in the worst test environment; this and `average` are what no rule sees but the oracle."""
    average: float
    validation: float
    """Accuracy on held-out training data, as a run's summary has it."""
    held_out: tuple[tuple[str, str, int, int, float], ...]
    """`HeldOut` by client and environment."""
    counts: dict[str, Any] | None
    """The row of kind `split`."""
    constant: float
    """The constant predictor's worst case."""
    local: float
    """Local's, at its defaults."""

    @property
    def search(self) -> tuple[str, str, int, int]:
        """What its rivals share with it."""
        return self.variant, self.method, self.seed, self.rounds

    @property
    def evidence(self) -> Evidence:
        return Evidence([HeldOut(*own) for own in self.held_out], self.counts)

    @cached_property
    def score(self) -> Score | None:
        """By `split`, where it speaks; several rules and tables ask for it."""
        return None if not self.counts or unusable(self.counts) else score(self.counts)


Search = Sequence[Trial]


def trials_of(outcomes: Sequence[Outcome], variant: str, constant: float, local: float) -> list[Trial]:
    """What is kept of a search. Raises `UserError` for a log that cannot be read."""
    made = (_trial_of(own, number, variant, constant, local, len(outcomes)) for number, own in enumerate(outcomes))
    return [own for own in made if own]


def _trial_of(outcome: Outcome, number: int, variant: str, constant: float, local: float, of: int) -> Trial | None:
    found = outcome.selected("final")
    if not found or found.worst is None or found.average is None or found.validation is None:
        return None
    config = outcome.config
    known = evidence(outcome.rows(), config.method.evaluates[-1], config.rounds)
    return Trial(
        variant,
        config.method.name,
        config.seed,
        number,
        of,
        config.rounds,
        found.worst,
        found.average,
        found.validation,
        tuple((own.client, own.environment, own.count, own.correct, own.loss) for own in known.held_out),
        known.counts,
        constant,
        local,
    )


# ---------------------------------------------------------------------- the runs


def measure(
    size: Size,
    out: Path,
    jobs: int,
    watch: Watch,
    data_root: str | None = None,
    device: str | None = None,
    results: Path | None = None,
) -> tuple[list[Trial], list[str]]:
    """Every trial, and a sentence for each that has no numbers.

    Runs that are there are not run again. With `results`, searches that its file holds are not run, and each new
    one is kept there at once: so the study can go on without the runs, on another machine, and several processes
    can share it. Raises as `run_all` does, and `UserError` for a file that does not fit.
    """
    kept = read_lines(results / FILE, Trial) if results else []
    wanted, found, troubles = list(_searches(size)), list[Trial](), list[str]()
    for variant, method, seed in wanted:
        there = [own for own in kept if own.search == (variant.name, method, seed, size.rounds)]
        if there and there[0].of >= size.trials:
            found += [own for own in there if own.number < size.trials]
            continue
        options = {"scenario": variant.scenario, "rounds": size.rounds, "seed": seed}
        options |= {"data_root": data_root, "device": device}
        settings = [*variant.settings, "cohort_engine=stack"]
        watch(Standing(0, 0, 0, 0, doing=f"{method} on {variant.name}, seed {seed}"))
        tried = trials(load_config(options={**options, "method": method}, settings=settings), size.trials)
        tried, why_not = with_references(tried, out, jobs, watch)
        local = load_config(options={**options, "method": "local"}, settings=settings)
        outcomes = list(map(readable, run_all([*tried, local], out, jobs, watch)))
        troubles += troubles_of(outcomes) + [f"{method} on {variant.name}, seed {seed}: {why_not}"] * bool(why_not)
        alone = outcomes.pop().selected("final")
        if not alone or alone.worst is None:
            continue
        constant = _constant(outcomes[0], seed)
        new = trials_of(outcomes, variant.name, constant, alone.worst)
        if results:
            keep(new, results)
        found += new
    return found, troubles


def keep(new: Sequence[Trial], results: Path) -> None:
    """Add trials to the file of a folder, which other processes may write meanwhile."""
    results.mkdir(parents=True, exist_ok=True)
    with locked_folder(results):
        every = {(own.search, own.number): own for own in (*read_lines(results / FILE, Trial), *new)}
        lines = [json.dumps(asdict(own), separators=(",", ":")) for _, own in sorted(every.items())]
        write_text(results / FILE, "".join(f"{line}\n" for line in lines))


def _searches(size: Size) -> Iterator[tuple[Variant, str, int]]:
    for variant in size.variants:
        for seed in range(variant.first_seed, variant.first_seed + size.seeds):
            for method in variant.methods:
                if not variant.has_shortcut or method in size.methods:
                    yield variant, method, seed


def _constant(outcome: Outcome, seed: int) -> float:
    from perennial.server.study.constant import constant_predictor  # with PyTorch

    return measures(constant_predictor(outcome.config, seed))["worst"]


def searches(found: Iterable[Trial]) -> list[Search]:
    """The trials, search by search, in the order of the plan."""
    order = {variant.name: number for number, variant in enumerate(VARIANTS)}
    ordered = sorted(found, key=lambda own: (order.get(own.variant, -1), own.search, own.number))
    return [list(own) for _, own in groupby(ordered, key=lambda own: own.search)]


# ---------------------------------------------------------------------- the rules


def _scores(search: Search) -> dict[int, Score]:
    return {place: own.score for place, own in enumerate(search) if own.score}


def _held_out(search: Search) -> list[float]:
    return [own.validation for own in search]


def _where_it_speaks(values: Callable[[Mapping[int, Score]], Mapping[int, float]]) -> "Rule":
    """A rule over scores of `split`; held-out data where it does not speak, or says nothing of any trial."""

    def rule(search: Search) -> list[float]:
        found = values(_scores(search))
        return [found.get(place, -1.0) for place in range(len(search))] if found else _held_out(search)

    return rule


def _rival(select: Select) -> "Rule":
    def rule(search: Search) -> list[float]:
        values = [RIVALS[select](own.evidence) for own in search]
        return _held_out(search) if None in values else [own for own in values if own is not None]

    return rule


Rule = Callable[[Search], list[float]]
"""A value for each trial, of which more is better; the earliest of equals is chosen."""
RULES: Mapping[str, Rule] = {
    SPLIT: _where_it_speaks(
        lambda scores: {place: 1 / (1 + rank) for rank, place in enumerate(most_robust(scores))}
    ),
    FIRST: _where_it_speaks(lambda scores: {place: own.score for place, own in scores.items() if own.informed}),
    "largest mean (a + d) / 2": _where_it_speaks(lambda scores: {n: own.mean for n, own in scores.items()}),
    "largest min(a, d)": _where_it_speaks(lambda scores: {n: own.score for n, own in scores.items()}),
    Select.held_out.value: _held_out,
    **{select.value: _rival(select) for select in RIVALS},
    DEFAULTS: lambda search: [float(own.number == 0) for own in search],
    RANDOM: lambda search: [0.0 for _ in search],
    ORACLE: lambda search: [own.worst for own in search],
}


@dataclass(frozen=True)
class Case:
    """What a rule makes of a search, as fractions."""

    pair: tuple[str, str]
    """Scenario and method."""
    worst: float
    average: float
    regret: float
    """What the best trial has more in the worst case."""
    above_constant: float
    """Whether it is better in the worst case; of a random trial how often."""
    above_both: float
    """And better than Local."""
    correlation: float | None
    """Spearman's, of the rule's values and the worst case over the trials; None where either is constant."""


def case(search: Search, name: str) -> Case:
    """How a rule chooses in a search."""
    values, worst = RULES[name](search), [own.worst for own in search]
    chosen = list(search) if name == RANDOM else [search[values.index(max(values))]]
    return Case(
        (search[0].variant, search[0].method),
        fmean(own.worst for own in chosen),
        fmean(own.average for own in chosen),
        max(worst) - fmean(own.worst for own in chosen),
        fmean(own.worst > own.constant for own in chosen),
        fmean(own.worst > max(own.constant, own.local) for own in chosen),
        _correlation(values, worst),
    )


def _correlation(values: Sequence[float], worst: Sequence[float]) -> float | None:
    from scipy.stats import spearmanr  # takes its time

    return float(spearmanr(values, worst)[0]) if len({*values}) > 1 and len({*worst}) > 1 else None


def interval(cases: Sequence[Case], others: Sequence[Case]) -> tuple[float, float]:
    """95 % of the mean difference in regret, others' less ours: a bootstrap over pairs of scenario and method."""
    import numpy as np

    pairs: dict[tuple[str, str], list[float]] = {}
    for ours, theirs in zip(cases, others, strict=True):
        pairs.setdefault(ours.pair, []).append(theirs.regret - ours.regret)
    sums, sizes = (np.array([how(own) for own in pairs.values()], float) for how in (sum, len))
    drawn = numpy_generator(0, NAME, "bootstrap").integers(len(pairs), size=(DRAWS, len(pairs)))
    low, high = np.quantile(sums[drawn].sum(1) / sizes[drawn].sum(1), [0.025, 0.975])
    return float(low), float(high)


# ---------------------------------------------------------------------- the tables


def rules_table(found: Sequence[Search], title: str) -> Table:
    """Every rule over all searches on scenarios with a shortcut."""
    heads = (
        "worst",
        "average",
        "regret",
        "more than split's (95 %)",
        "above constant",
        "above both",
        "correlation",
    )
    table = _table(title, ("chosen by",), heads)
    names = [name for name in RULES if name != DEFAULTS or not any(search[0].number for search in found)]
    of = {name: [case(search, name) for search in found] for name in names}
    for rule, own in of.items():
        low, high = interval(of[SPLIT], own)
        correlations = [value for one in own if (value := one.correlation) is not None]
        between = "–" if rule == SPLIT else f"{100 * low:+.1f} to {100 * high:+.1f}".replace("-", "−")
        table.add_row(
            rule,
            *(percent(fmean(getattr(one, what) for one in own)) for what in ("worst", "average", "regret")),
            between,
            *(
                f"{100 * fmean(getattr(one, what) for one in own):.0f} %"
                for what in ("above_constant", "above_both")
            ),
            f"{fmean(correlations):.2f}".replace("-", "−") if correlations and rule != ORACLE else "–",
        )
    return table


def group_table(found: Sequence[Search], title: str, key: Callable[[Trial], str]) -> Table:
    """The worst case that a few rules get, in the mean over the searches that share a key."""
    names = (DEFAULTS, Select.held_out.value, FIRST, SPLIT, ORACLE)
    table = _table(title, ("",), ("searches", "split speaks", *names))
    for group in dict.fromkeys(key(search[0]) for search in found):
        own = [search for search in found if key(search[0]) == group]
        spoke = sum(bool(_scores(search)) for search in own)
        table.add_row(
            group,
            str(len(own)),
            str(spoke),
            *(percent(fmean(case(search, name).worst for search in own)) for name in names),
        )
    return table


def _table(title: str, names: Sequence[str], heads: Sequence[str]) -> Table:
    table = Table(*names, title=title)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def tables(found: Iterable[Trial]) -> dict[str, Table]:
    """All tables of the study, by the name that the page knows them by."""
    every = searches(found)
    with_shortcut = {variant.name for variant in VARIANTS if variant.has_shortcut}
    own = [search for search in every if search[0].variant in with_shortcut]
    others = [search for search in every if search[0].variant not in with_shortcut]
    later = [search[1:] for search in own]
    made = {}
    if own:
        made["rules"] = rules_table(own, "All searches with a shortcut")
        made["rules without trial 0"] = rules_table(later, "The same without trial 0")
        made["scenarios"] = group_table(own, "By scenario: worst test environment", lambda one: one.variant)
        made["methods"] = group_table(own, "By method: worst test environment", lambda one: one.method)
    if others:
        made["no shortcut"] = group_table(others, "Without a shortcut", lambda one: one.variant)
    return made


def figure(found: Iterable[Trial]) -> str:
    """What was chosen against the best trial, search by search, as a whole SVG file."""
    from perennial.server.results.figures import points_figure  # matplotlib takes its time

    every = [own for own in searches(found) if not own[0].variant.endswith("-oracle")]
    points = {
        f"chosen by {name}": [(100 * max(t.worst for t in own), 100 * case(own, name).worst) for own in every]
        for name in (Select.held_out.value, SPLIT)
    }
    constant = 100 * fmean(own[0].constant for own in every)
    axes = "worst test environment of the best trial (%)", "of the trial chosen (%)"
    return points_figure(points, *axes, constant, "a constant predictor")


def page_and_figure(page: Path, results: Path) -> dict[Path, str]:
    """The page with each table between its marks, `<!-- table: NAME -->` and `<!-- end -->`; and its figure.

    Raises `UserError` for a page that is not there or has no mark for one, and where no trials are kept.
    """
    if not (found := read_lines(results / FILE, Trial)):
        raise UserError(f"--keep {results}: {FILE} is not there, or empty; `perennial reproduce {NAME}` makes it")
    if not page.is_file():
        raise UserError(f"--overview {page}: there is no such file; the tables go between the marks of a page")
    text = page.read_text(encoding="utf-8")
    for name, table in tables(found).items():
        before, mark, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise UserError(f"--overview {page}: there is no <!-- table: {name} --> with an <!-- end --> after it")
        cells = zip(*(map(str, column.cells) for column in table.columns), strict=True)
        lines = markdown_table([str(column.header) for column in table.columns], list(cells))
        text = f"{before}{mark}\n" + "\n".join(lines) + f"\n\n{end}{after}"
    return {page: text, page.with_suffix(".svg"): figure(found)}
