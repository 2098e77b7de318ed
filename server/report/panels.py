"""The figures of a scenario: which results are drawn, and their curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Any

from perennial.common.measures.scores import GROUPS
from perennial.common.tasks import Measure
from perennial.common.tasks.base import Plot, Summed, added_sums
from perennial.server.report.load import Run
from perennial.server.report.results import Result, over_seeds
from perennial.server.report.tables import environments_of, sites_of, titled
from perennial.server.results import figures
from perennial.server.results.formatting import members
from perennial.server.selection.summary import site_means
from perennial.server.study.batch import Selected
from perennial.server.study.compare import Spread


@dataclass(frozen=True)
class Figure:
    """A picture and the words that stand for it."""

    caption: str
    svg: str
    curves: bool = True
    """Whether each line of the legend has one."""


def drawn(found: Sequence[Result]) -> list[Result]:
    """As many results as can be told apart: the configurations best on held-out data first."""

    def held_out(result: Result) -> float:
        found = result.spread("final", "held-out")
        return result.task.headline.goodness(found.mean) if found else -inf

    def rank(result: Result) -> tuple[int, bool]:
        title = result.runs[0].config.method.title
        rivals = [
            other for other in found if other.model == result.model and other.runs[0].config.method.title == title
        ]
        return sum(held_out(other) > held_out(result) for other in rivals), not result.headline

    first = sorted(found, key=rank)[: figures.STYLES]
    return [result for result in found if result in first]


def scenario_figures(key: str, shown: Sequence[Result], selections: Sequence[str]) -> list[Figure]:
    """All panels of a scenario that have a number; the place of a result in `shown` is its style."""
    names, measure = environments_of(shown), shown[0].task.headline
    value, factor = measure.title[:1].upper() + measure.title[1:], measure.factor
    axis = measure.axis
    made: list[Figure] = []

    def add(caption: str, name: str, lines: Sequence[figures.Line], *labels: str, **options: Any) -> None:
        # Of one point, the tables have the number.
        if any(sum(not isnan(value) for value in line.y) > 1 for line in lines):
            made.append(Figure(caption, figures.line_figure(f"{key}{name}", lines, *labels, **options)))

    by_environment = {
        selection: [environment_line(style, result, selection, names) for style, result in enumerate(shown)]
        for selection in selections
    }
    for chosen, lines in _alike(by_environment):
        caption = f"{value} against test environment, {' and '.join(map(titled, chosen))}"
        labels = "test environment", axis
        add(caption, f"e{chosen[0]}", lines, *labels, names=names, percent=measure.percent)
    kinds = (
        ("value", f"Test {measure.title} against rounds", axis),
        ("held_out", f"Held-out training {measure.title} against rounds", axis),
        ("loss", "Test loss against rounds", shown[0].task.loss_is),
    )
    for kind, caption, label in kinds:
        own = 1.0 if kind == "loss" else factor
        lines = [curve_line(style, round_means(result, kind), own) for style, result in enumerate(shown)]
        add(caption, f"r{kind}", lines, "round", label, percent=kind != "loss" and measure.percent)
    sent = [[found.mean for found in round_means(result, "sent").values() if found] for result in shown]
    unit, unit_name = _unit(max((value for values in sent for value in values), default=0))
    lines = [
        _line(style, [size / unit for size in sent[style]], list(round_means(result, "value").values()), factor)
        for style, result in enumerate(shown)
    ]
    label = f"{unit_name} of the training exchanges so far, both ways"
    add(f"Test {measure.title} against bytes", "b", lines, label, axis, percent=measure.percent)
    for side, whose in (("client", "the clients'"), ("server", "the server's")):
        lines = [line for style, result in enumerate(shown) if (line := _rate_line(style, result, side))]
        add(f"Step size of {whose} optimizer", f"o{side}", lines, "round", "step size", percent=False)
    by_client = {
        selection: [_client_line(style, result.picked(selection), measure) for style, result in enumerate(shown)]
        for selection in selections
    }
    for chosen, lines in _alike(by_client):
        label = "% of the clients, from the worst to the best"
        caption = f"{value} of the clients, {' and '.join(map(titled, chosen))}"
        add(caption, f"c{chosen[0]}", lines, label, axis, percent=measure.percent)
    reliable = [line for style, result in enumerate(shown) if (line := _reliability_line(style, result))]
    labels = "score (%)", "share of positives among samples of this score (%)"
    caption = "Reliability of the scores after the last round, all clients together"
    add(caption, "s", reliable, *labels, diagonal=True)
    return made


def _alike(
    lines: Mapping[str, Sequence[figures.Line]],
) -> list[tuple[list[str], Sequence[figures.Line]]]:
    """Selections that have the same curves together, since each picked the same round."""
    found: dict[str, tuple[list[str], Sequence[figures.Line]]] = {}
    for selection, own in lines.items():
        found.setdefault(repr(own), ([], own))[0].append(selection)
    return list(found.values())


def task_figures(key: str, shown: Sequence[Result]) -> list[Figure]:
    """What the task has to show of test samples after the last round; the place of a result in `shown` is its
    style. The samples of all seeds are together."""
    where, names, samples = _samples(shown)
    task = shown[0].task
    axes = where, "predicted − true"
    errors = [{name: task.errors(*own) for name, own in each.items()} for each in samples]
    made = []
    for number, part in enumerate(dict.fromkeys(part for each in errors for own in each.values() for part in own)):
        found = [(style, {name: own[part] for name, own in each.items()}) for style, each in enumerate(errors)]
        lines = [
            figures.Line(style, [names.index(name) for name in own], *map(list, zip(*own.values(), strict=True)))
            for style, own in found
            if own
        ]
        svg = figures.spreads_figure(f"{key}d{number}", lines, [name or ALL for name in names], *axes)
        made.append(Figure(f"{part}: errors by {where}, mean ± standard deviation", svg))
    curves: dict[tuple[str, str | None], list[tuple[int, Plot]]] = {}
    for style, each in enumerate(samples):
        for name in (None, *names[:-1]):
            for plot in task.plots(*each[name]) if name in each else ():
                if name is not None and not plot.by_site:
                    continue
                if not plot.counts:
                    curves.setdefault((plot.title, name), []).append((style, plot))
                    continue
                points = list(zip(plot.x, plot.y, plot.counts, strict=True))
                svg = figures.counts_figure(f"{key}n{len(made)}", style, points, *plot.axes)
                result = shown[style]
                made.append(Figure(f"{plot.title}, {result.method}, {result.model}", svg, curves=False))
    for number, ((title, name), plots) in enumerate(curves.items()):
        first = plots[0][1]
        lines = [figures.Line(style, plot.x, plot.y) for style, plot in plots]
        # The same samples were observed to do the same, whatever models say.
        observed = {tuple(plot.observed): plot.x for _, plot in plots if plot.observed}
        lines += [figures.Line(figures.OBSERVED, x, y) for y, x in observed.items()]
        svg = figures.line_figure(f"{key}t{number}", lines, *first.axes, diagonal=first.diagonal)
        made.append(Figure(f"{title}, {name or ALL}" if first.by_site else title, svg))
    return made


ALL = "all"
"""Of the test samples of all sites or environments together."""


def _samples(shown: Sequence[Result]) -> tuple[str, list[str | None], list[dict[str | None, Summed]]]:
    """Whether test samples are told apart by site or by test environment, the names of these and, as None, of all
    together, and of each result their number and sums after the last round by name, of those that have samples."""
    sites = sites_of(shown)
    scenarios = (result.runs[0].config.scenario for result in shown)
    parts_of_all = sites or [name for own in scenarios for name in own.test_environments]
    names: list[str | None] = [*dict.fromkeys(parts_of_all), None]
    found = []
    for result in shown:
        parts: dict[str | None, list[Summed]] = {}
        for run in result.runs:
            for client, own in run.curves[result.model].last.items():
                for environment, summed in own.items():
                    for name in (client if sites else environment, None):
                        parts.setdefault(name, []).append(summed)
        found.append({name: added_sums(result.task, parts[name]) for name in names if name in parts})
    return "site" if sites else "test environment", names, found


def cluster_figure(key: str, result: Result, run: Run) -> Figure:
    """Cluster membership in every round."""
    rounds = sorted(run.clusters)
    last = {client: cluster for number in rounds for client, cluster in run.clusters[number].items()}
    clients = [client for group in members(last).values() for client in group]
    labels = {client: [run.clusters[number].get(client) for number in rounds] for client in clients}
    caption = f"{result.method}, seed {run.config.seed}: cluster of each client in each round"
    return Figure(caption, figures.membership_figure(key, rounds, labels), curves=False)


def _rate_line(style: int, result: Result, side: str) -> figures.Line | None:
    """The step size in each round; None where it has no schedule."""
    config = result.runs[0].config
    rates = {number: config.rates(number).get(side) for number in range(1, config.rounds + 1)}
    found = {number: rate for number, rate in rates.items() if rate is not None}
    return figures.Line(style, [*found], [*found.values()]) if found else None


def _line(style: int, x: Sequence[float], spreads: Sequence[Spread | None], factor: float = 100) -> figures.Line:
    several = any(one and one.deviation is not None for one in spreads)
    return figures.Line(
        style,
        x,
        [factor * one.mean if one else nan for one in spreads],
        [factor * (one.deviation or 0.0) if one else nan for one in spreads] if several else (),
    )


def environment_line(style: int, result: Result, selection: str, names: Sequence[str]) -> figures.Line:
    """A result's headline measure in each test environment."""
    values = [result.value(selection, name) for name in names]
    return _line(style, range(len(names)), values, result.task.headline.factor)


def curve_line(style: int, means: Mapping[int, Spread | None], factor: float = 100) -> figures.Line:
    """A quantity against rounds."""
    return _line(style, list(means), list(means.values()), factor)


def _client_line(style: int, picked: Iterable[Selected], measure: Measure) -> figures.Line:
    means = [mean for one in picked for mean in site_means(one.clients).values()]
    means.sort(key=measure.goodness)
    shares = [100 * (index + 0.5) / len(means) for index in range(len(means))]
    return figures.Line(style, shares, [measure.factor * value for value in means])


def _reliability_line(style: int, result: Result) -> figures.Line | None:
    """The share of positives against the mean score of each group of scores, the samples of all seeds together."""
    groups: dict[int, list[tuple[int, float, float]]] = {}
    for one in result.picked("final"):
        for group in one.scores.all.reliability if one.scores else ():
            groups.setdefault(int(group[1] * GROUPS), []).append(group)
    if not groups:
        return None
    points = []
    for _, own in sorted(groups.items()):
        count = sum(samples for samples, _, _ in own)
        points.append([sum(100 * group[0] * group[place] for group in own) / count for place in (1, 2)])
    return figures.Line(style, *map(list, zip(*points, strict=True)))


def round_means(result: Result, kind: str) -> dict[int, Spread | None]:
    """One of a curve's quantities over the runs of a result that have it, by round; None where none has."""
    found: dict[int, list[float]] = {}
    for run in result.runs:
        curve = run.curves[result.model]
        for number, value in zip(curve.rounds, getattr(curve, kind), strict=True):
            found.setdefault(number, []).append(value)
    return {
        number: over_seeds(value for value in values if not isnan(value))
        for number, values in sorted(found.items())
    }


def _unit(most: float) -> tuple[float, str]:
    sizes = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in sizes if most >= unit[0]), (1.0, "bytes"))
