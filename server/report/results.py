"""Runs of the same configuration are one result, whatever their seeds: a line of every table, a curve of figures.

What tells two configurations of a method apart becomes part of its label.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perennial.common.tasks import PredictionTask
from perennial.server.report.load import Run
from perennial.server.study.batch import Selected
from perennial.server.study.compare import Spread, measures, spread


@dataclass(frozen=True)
class Result:
    """A configuration's model over seeds: one line of every table, one curve of every figure."""

    scenario: str
    method: str
    """Title, and what tells it from other configurations of the method."""
    model: str
    headline: bool
    runs: Sequence[Run]

    @property
    def seeds(self) -> str:
        """As a person writes them: `0, 1, 2`."""
        return ", ".join(str(seed) for seed in sorted({run.config.seed for run in self.runs}))

    def picked(self, selection: str) -> list[Selected]:
        """What the selection picked in each run in which it can pick."""
        return [run.models[self.model][selection] for run in self.runs if selection in run.models[self.model]]

    def spread(self, selection: str, measure: str) -> Spread | None:
        """One of `measures` over seeds; None where there is no number."""
        sites, own = self.runs[0].config.sites_with_data, self.task
        every = (measures(one, sites, own.headline, own.others) for one in self.picked(selection))
        return over_seeds(found[measure] for found in every if measure in found)

    @property
    def task(self) -> PredictionTask:
        """What was to be predicted."""
        return self.runs[0].config.predicts

    def value(self, selection: str, environment: str) -> Spread | None:
        """In a test environment over seeds; None where there is no number."""
        found = (one.values for one in self.picked(selection))
        return over_seeds(own[environment] for own in found if environment in own)


def result_of(runs: Sequence[Run], method: str, model: str | None = None) -> Result | None:
    """Runs that are known to be one result, of the method's main model or of another; None of none."""
    if not runs:
        return None
    config = runs[0].config
    return Result(config.scenario.name, method, model or config.method.evaluates[-1], True, runs)


def results(runs: Iterable[Run]) -> list[Result]:
    """Runs of the same configuration together, by scenario and method; each model that is evaluated on its own."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.settings.items()), []).append(run)
    keys, grouped = [dict(key) for key in groups], list(groups.values())
    scenarios = _labels(
        [key["scenario.name"] for key in keys], [settings_part(key, scenario=True) for key in keys]
    )
    titles = [", ".join(filter(None, (own[0].config.method.title, own[0].unfinished))) for own in grouped]
    methods = _labels(
        [f"{scenario}\n{title}" for scenario, title in zip(scenarios, titles, strict=True)],
        [settings_part(key, scenario=False) for key in keys],
    )
    order = sorted(range(len(keys)), key=lambda index: (scenarios[index], titles[index]))
    return [
        Result(scenarios[index], methods[index].partition("\n")[2], model, model == models[-1], grouped[index])
        for index in order
        for models in [list(grouped[index][0].models)]
        for model in models
    ]


def by_scenario(found: Iterable[Result]) -> dict[str, list[Result]]:
    """Results by scenario, in their order."""
    groups: dict[str, list[Result]] = {}
    for result in found:
        groups.setdefault(result.scenario, []).append(result)
    return groups


def over_seeds(values: Iterable[float]) -> Spread | None:
    """Mean and standard deviation; None where there is no number."""
    found = list(values)
    return spread(found) if found else None


def settings_part(values: Mapping[str, str], *, scenario: bool) -> dict[str, str]:
    """The settings of the scenario, or all others, by their short names."""
    return {
        name.removeprefix("method.").removeprefix("scenario."): value
        for name, value in values.items()
        if name.startswith("scenario.") == scenario
    }


def _labels(names: Sequence[str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Each name with the settings that tell it from others of that name; with a number where that is too long."""
    rivals: dict[str, list[Mapping[str, str]]] = {}
    for name, own in zip(names, settings, strict=True):
        if own not in rivals.setdefault(name, []):
            rivals[name].append(own)
    labels = []
    for name, own in zip(names, settings, strict=True):
        texts = [
            ", ".join(f"{key}={rival.get(key, '')}" for key in differing(rivals[name])) for rival in rivals[name]
        ]
        number = rivals[name].index(own)
        short = texts[number] if max(map(len, texts)) <= 40 else f"#{number + 1}"
        labels.append(f"{name} ({short})" if short else name)
    return labels


def differing(rivals: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings in which they differ."""
    names = dict.fromkeys(name for own in rivals for name in own)
    return [name for name in names if len({own.get(name) for own in rivals}) > 1]
