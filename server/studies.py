"""Many runs: searches and comparisons. The command line calls the same functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter, signature
from math import inf
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import path_of
from perennial.common.utils.suggestions import unknown
from perennial.server.results.result import Result
from perennial.server.results.table import Table
from perennial.server.runs import (
    MOST,
    POOL,
    Settings,
    as_texts,
    configured,
    must_be_said_once,
    save_in_memory,
    without_data,
)
from perennial.server.selection.split_rule import WITHOUT_TEST_DATA, Select
from perennial.server.study import compare as comparing
from perennial.server.study import unseen_sites
from perennial.server.study.batch import Outcome, Watch, troubles_of
from perennial.server.study.choose import Verdict, keep, search, why_lines
from perennial.server.study.compare import Comparison as Comparison
from perennial.server.study.sweep import key_of
from perennial.server.study.trial_tables import sweep_rows
from perennial.server.study.unseen_sites import Cell as Cell

if TYPE_CHECKING:
    from perennial.common.data.scenario import Scenario
    from perennial.server.in_memory import InMemory


F = TypeVar("F", bound=Callable[..., Any])
OF_ONE_RUN = ("method", "preset", "seed")
"""What a study does not take from a configuration file: it gives every method the same chance."""


@dataclass(frozen=True)
class Search:
    """The trials of a method, and which of them was chosen."""

    outcomes: list[Outcome]
    verdict: Verdict
    files: list[Path] = field(default_factory=list)
    """What `tune` wrote: the chosen configuration and a picture."""

    def __repr__(self) -> str:
        return f"<Search of {len(self.outcomes)} trials: {'; '.join(self.why)}>"

    @property
    def table(self) -> Table:
        """A row for each trial."""
        return Table(sweep_rows(self.outcomes, self.verdict))

    @property
    def why(self) -> list[str]:
        """Sentences: what was chosen, why, and what comes next."""
        return why_lines(self.outcomes, self.verdict)

    @property
    def chosen(self) -> Outcome | None:
        """The trial that was chosen; None where none could be judged."""
        return None if self.verdict.trial is None else self.outcomes[self.verdict.trial]

    @property
    def settings(self) -> dict[str, Any]:
        """The method's settings in the chosen trial, as `run` takes them. Raises `UserError` without one."""
        method = self._must_be_chosen().config.method
        values: dict[str, Any] = method.model_dump(mode="json", exclude={"name"}, exclude_none=True)
        return values

    @cached_property
    def result(self) -> Result:
        """The chosen trial's run. Raises `UserError` where there is none."""
        return Result(self._must_be_chosen().path)

    @property
    def troubles(self) -> list[str]:
        """A sentence for each trial that did not end well, and for each client whose replies were left out."""
        return troubles_of(self.outcomes)

    def _must_be_chosen(self) -> Outcome:
        if not self.chosen:
            raise UserError("no trial could be judged, so nothing is chosen")
        return self.chosen


class StudyOptions(TypedDict, total=False):
    """What every study takes by name."""

    config: Path | str | None
    """A file that has a scenario, in place of one, such as one for data of your own; rounds, model and other
    settings of the run are also taken from it, and the method is not."""
    rounds: int | None
    settings: Settings
    """Which are not drawn."""
    jobs: int
    """How many runs go on at a time (1). With more, each has a process of its own, and a script needs
    `if __name__ == "__main__":`."""
    out: Path | str
    """Folder of the run folders (runs/studies)."""
    data_root: Path | str | None
    device: str | None
    watch: Watch
    """Is told how the study stands."""


def _problem(
    scenario: str | Scenario | InMemory | None,
    config: Path | str | None = None,
    rounds: int | None = None,
    settings: Settings = (),
    jobs: int = 1,
    out: Path | str = POOL,
    data_root: Path | str | None = None,
    device: str | None = None,
    watch: Watch = lambda _: None,
) -> tuple[dict[str, Any], Path, int, Watch]:
    """What determines a study's runs, as arguments; and where they go, how many at a time, and who is told.

    What its file has is weaker than the arguments. Raises `UserError`.
    """
    (jobs,) = _counts(jobs=jobs)
    pool, texts = path_of(out, "out"), as_texts(settings)
    stronger = {"rounds": rounds, "data_root": data_root, "device": device}
    must_be_said_once(stronger, texts)
    if (config is None) == (scenario is None):
        raise UserError("scenario: name one, or a configuration file that has one, one of the two")
    if config is not None:
        from perennial.common.config import load_config, read

        file = path_of(config, "config")
        values = read(file)
        # Which loads its plug-ins. Where it names no method, one that has every task.
        whole = load_config(file, {} if "method" in values else {"method": "fedavg"})
        scenario = whole.scenario
        if "rounds" in values and "rounds" not in map(key_of, texts):
            rounds = rounds or whole.rounds
        flat: dict[str, Any] = {}
        for key, value in values.items():
            if key in ("plugins", "scenario", "rounds", *OF_ONE_RUN) or stronger.get(key) is not None:
                continue
            flat |= (
                {f"{key}.{name}": own for name, own in value.items()} if isinstance(value, dict) else {key: value}
            )
        texts = (*as_texts(flat), *texts)
    assert scenario is not None
    root = save_in_memory(scenario, data_root, pool)
    runs = {
        "scenario": without_data(scenario),
        "rounds": rounds,
        "settings": texts,
        "data_root": root,
        "device": device,
    }
    return runs, pool, jobs, watch


def _listed(function: F) -> F:
    """With the options of all studies in its signature, where notebooks look for them."""
    own, shared = signature(function), list(signature(_problem).parameters.values())[1:]
    named = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    options = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in shared]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


@_listed
def sweep(
    method: str,
    scenario: str | Scenario | InMemory | None,
    trials: int,
    *,
    select: str = Select.by_split.value,
    prune: bool = False,
    seed: int = 0,
    optimizers: Sequence[str] = (),
    **options: Unpack[StudyOptions],
) -> Search:
    """Random search over a method's search ranges; trial 0 is the defaults. Called again, it continues.

    `select` is "split", "held-out" or "leave-one-out" (docs/selection.md). Of `optimizers`, such as ["sgd",
    "adamw"], each trial draws one, and a step size from this one's range. The options of all studies: `config`, a
    file in place of a scenario; `rounds`; `settings`, which are not drawn; `jobs`, how many runs go on at a time;
    `out`, the folder of the runs; `data_root`; `device`; `watch`, which is told how the study stands.

    Raises `UserError`, and `RunStopped` if a process dies.
    """
    (trials,) = _counts(trials=trials)
    runs, pool, jobs, watch = _problem(scenario, **options)
    base = configured(method, seed=seed, **runs)
    fixed = [key_of(setting) for setting in runs["settings"]]
    return Search(*search(base, trials, fixed, _select(select), pool, jobs, watch, prune, list(optimizers)))


@_listed
def tune(
    method: str,
    scenario: str | Scenario | InMemory | None,
    trials: int,
    *,
    select: str = Select.by_split.value,
    prune: bool = True,
    seed: int = 0,
    optimizers: Sequence[str] = (),
    **options: Unpack[StudyOptions],
) -> Search:
    """Choose a method's settings without target data: as `sweep`, with hopeless trials stopped early.

    Also writes the chosen configuration and a picture of the search into `out`. Arguments and errors are as with
    `sweep`.
    """
    _counts(2, trials=trials)
    pool = path_of(options.get("out", POOL), "out")
    found = sweep(
        method, scenario, trials, select=select, prune=prune, seed=seed, optimizers=optimizers, **options
    )
    return replace(found, files=keep(found.outcomes, found.verdict, _select(select), pool))


@_listed
def compare(
    methods: Iterable[str],
    scenario: str | Scenario | InMemory | None = None,
    *,
    seeds: int = 3,
    trials: int = 1,
    trial_rounds: int | None = None,
    select: str = Select.by_split.value,
    prune: bool = False,
    oracle: bool = False,
    **options: Unpack[StudyOptions],
) -> Comparison:
    """Methods side by side, tuned alike; FedAvg, Local and a constant prediction are always in. It continues, too.

    Each method's settings are chosen of `trials` with seed 0, and run with the seeds 0, 1, … A trial has
    `trial_rounds`, where that is given, in place of all. `oracle` adds the round that is best on test data,
    labelled so. The rest, and the errors, are as with `sweep`. `Comparison.table` has the numbers.
    """
    seeds, trials = _counts(seeds=seeds, trials=trials)
    if trial_rounds is not None:
        (trial_rounds,) = _counts(1, inf, trial_rounds=trial_rounds)
    runs, pool, jobs, watch = _problem(scenario, **options)
    plan = comparing.Plan(
        entries=_entries(methods),
        seeds=seeds,
        trials=trials,
        trial_rounds=trial_rounds,
        oracle=oracle,
        select=_select(select),
        prune=prune,
        **runs,
    )
    return comparing.compare(plan, pool, jobs, watch)


@_listed
def leave_one_site_out(
    methods: Iterable[str],
    scenario: str | Scenario | InMemory | None = None,
    *,
    seeds: int = 3,
    adapt: int = 0,
    **options: Unpack[StudyOptions],
) -> tuple[list[Cell], list[str]]:
    """What each method does at a site that nobody trained at: a cell for each site and method, and troubles.

    FedAvg, Local and a constant prediction are always in. With `adapt` the site then makes a personal model of so
    many of its samples, where the method can; the others are asked about. Other arguments and errors are as with
    `compare`.
    """
    (seeds,) = _counts(seeds=seeds)
    (adapt,) = _counts(0, inf, adapt=adapt)
    runs, pool, jobs, watch = _problem(scenario, **options)
    plan = comparing.Plan(entries=_entries(methods), seeds=seeds, **runs)
    entries = comparing.with_baselines(plan.entries)
    bases = {entry.label: comparing.base_config(plan, entry, entries) for entry in entries}
    return unseen_sites.leave_one_site_out(bases, seeds, pool, jobs, watch, adapt)


def _entries(methods: Iterable[str]) -> tuple[comparing.Entry, ...]:
    """Raises `UserError` for a name that is none, and for a dict, whose values nothing would read."""
    names = [methods] if isinstance(methods, str) or not isinstance(methods, Iterable) else list(methods)
    if isinstance(methods, Mapping) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"methods: {methods!r:.100} is not possible; give a list of names, and what all share as settings"
        )
    return comparing.entries_of(names)


def _counts(least: int = 1, most: float = MOST, /, **counts: object) -> list[int]:
    """The counts. Raises `UserError` for the first that is no whole number, too small or too large."""
    found = []
    for name, value in counts.items():
        number = int(value) if isinstance(value, Integral) else -1
        if not least <= number <= most:
            above = f", and at most {most}" if number > most else ""
            raise UserError(
                f"{name}: {value!r:.100} is not possible; it must be a whole number, at least {least}{above}"
            )
        found.append(number)
    return found


def not_used(config: Path | str) -> str:
    """A sentence on what of a configuration file a study leaves aside; empty where there is no such thing.

    Raises `UserError`.
    """
    from perennial.common.config import read

    values = read(path_of(config, "config"))
    method = values.get("method")
    found = [f"[method] {method.get('name', '')}"] if isinstance(method, dict) and {*method} - {"name"} else []
    found += [f"{key} = {values[key]}" for key in OF_ONE_RUN if key != "method" and key in values]
    if not found:
        return ""
    return (
        f"of {config}, not used: {', '.join(found)}; in a study every method starts from its defaults, with the "
        "study's own seeds"
    )


def _select(name: str) -> Select:
    if name not in WITHOUT_TEST_DATA:
        raise UserError(f"select: {unknown('selection', name, WITHOUT_TEST_DATA)}")
    return Select(name)
