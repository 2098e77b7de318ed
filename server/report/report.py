"""From run folders to one page: runs of the same configuration are one line, whatever their seeds.

Rows in, markup out: `load_runs` reads, `entries` groups, the tables and the page are made from those alone. What
cannot be read is named and skipped; numbers are never filled in.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from math import nan
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from pydantic import ValidationError

from common.config import RunConfig, sentence
from common.errors import UserError
from server.folder import RunFolder
from server.report import figures
from server.report.words import members, size
from server.study.compare import Spread, measures, spread
from server.study.runs import Selected
from server.study.version import NO_NUMBER
from server.summary import SELECTIONS, Evaluation, Row, summarise

MEASURES = ("worst", "average", "worst client", "bottom decile")
TEMPLATE = Path(__file__).parent / "templates" / "report.html"
CLUSTER_FIGURES = 6

HOW = (
    "Test accuracy in %. An environment's accuracy is the mean over clients; <em>worst</em> and <em>average</em> "
    "are over environments. A client's accuracy is the mean over its environments; <em>worst client</em> and "
    "<em>bottom decile</em> (mean of the worst tenth, at least one client) are over clients. Mean ± standard "
    "deviation over seeds where there are several. <em>final</em> is the last round; <em>validation</em> is the "
    "round that is best on held-out training-environment data."
)
ORACLE = "<em>oracle</em> is the round that is best on test data: chosen on test data, not a fair result."


@dataclass(frozen=True)
class Curve:
    """A model over the rounds in which it was evaluated."""

    rounds: Sequence[int]
    sent: Sequence[float]
    """Bytes of all training exchanges so far, both ways, all clients."""
    accuracy: Sequence[float]
    held_out: Sequence[float]
    loss: Sequence[float]


@dataclass(frozen=True)
class Run:
    """A run folder that could be read."""

    path: Path
    config: RunConfig
    models: Mapping[str, Mapping[str, Selected]]
    """By model and selection."""
    curves: Mapping[str, Curve]
    clusters: Mapping[int, Mapping[str, int]]
    seconds: float
    down: float
    up: float
    left_out: int
    versions: str


@dataclass(frozen=True)
class Entry:
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
        """A test environment, or one of `MEASURES` or `held-out`, over seeds; None where there is no number."""
        return _spread(found[measure] for one in self.picked(selection) if measure in (found := measures(one)))


@dataclass(frozen=True)
class Table:
    """Text cells; the first `names` columns say what a line is about, the others hold numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    groups: Sequence[tuple[str, int]] = field(default_factory=tuple)
    """Titles over stretches of columns, the first over the names."""


# ---------------------------------------------------------------------- reading


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Run folders, or what is left of them, at or below the given folders. Raises `UserError` if one has none."""
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        below = list(_runs_below(folder))
        if not below:
            raise UserError(f"{folder} holds no run folder (one has a config.toml and a metrics.jsonl)")
        found |= dict.fromkeys(below)
    return list(found)


def _runs_below(folder: Path) -> Iterable[Path]:
    # Other things have a config.toml too, and a damaged run may have lost one of its files.
    log, config, summary = (folder / name for name in ("metrics.jsonl", "config.toml", "summary.json"))
    if log.is_file() or (config.is_file() and summary.is_file()):
        yield folder
        return
    for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        yield from _runs_below(below)


def load_runs(paths: Iterable[Path], oracle: bool = False) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and a sentence for each that cannot, or that says again what another one says."""
    runs: dict[tuple[object, ...], Run] = {}
    skipped = []
    for path in paths:
        try:
            run = load(path, oracle)
        except UserError as error:
            skipped.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        # Twice the same seed is no second seed: it would make the standard deviation smaller than it is.
        first = runs.setdefault((run.config.seed, *settings(run.config).items()), run)
        if first is not run:
            skipped.append(f"{path} has the configuration and the seed of {first.path}, which counts")
    return list(runs.values()), skipped


def load(path: Path, oracle: bool = False) -> Run:
    """A run from its folder. Raises `UserError` if it is damaged, unfinished or of another version."""
    folder = RunFolder.open(path)
    config, summary, rows = folder.config(), folder.summary(), folder.rows()
    try:
        return _run(path, config, summary, rows, oracle)
    except ValidationError as error:
        raise UserError(f"its summary.json is damaged or of another version ({sentence(error)})") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"its files are damaged or of another version ({type(error).__name__}: {error})") from None


def _run(path: Path, config: RunConfig, summary: dict[str, Any], rows: list[Row], oracle: bool) -> Run:
    ours = {"method": config.method.name, "scenario": config.scenario.name, "seed": config.seed}
    for name, value in ours.items():
        if summary[name] != value:
            raise ValueError(f"summary.json says {name} {summary[name]!r}, config.toml {value!r}")
    trained = [row for row in rows if row["kind"] == "round"]
    if [row["round"] for row in trained] != list(range(1, summary["rounds"] + 1)):
        raise ValueError(f"metrics.jsonl does not hold the {summary['rounds']} rounds of summary.json")
    found = summary["models"]
    if oracle:
        again = summarise(config, rows, seconds=0.0, oracle=True)["models"]
        found = {model: {**chosen, "oracle": again[model]["oracle"]} for model, chosen in found.items()}
    sent = list(accumulate(float(row["bytes_down"] + row["bytes_up"]) for row in trained))
    return Run(
        path=path,
        config=config,
        models={
            model: {selection: _selected(facts) for selection, facts in found[model].items()}
            for model in config.method.evaluates
        },
        curves={model: _curve(model, rows, sent) for model in config.method.evaluates},
        clusters={
            int(row["round"]): {str(client): int(cluster) for client, cluster in row["labels"].items()}
            for row in rows
            if row["kind"] == "clusters"
        },
        seconds=float(summary["wall_seconds"]),
        down=float(summary["bytes_per_client_and_round"]["down"]),
        up=float(summary["bytes_per_client_and_round"]["up"]),
        left_out=sum(int(entry["replies"]) for entry in summary["left_out"].values()),
        versions=", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
    )


def _selected(facts: Mapping[str, Any]) -> Selected:
    found = Selected.model_validate(facts)
    measures(found)  # it has clients, or the run is skipped here and now
    return found


def _curve(model: str, rows: Iterable[Row], sent: Sequence[float]) -> Curve:
    by_round: dict[int, list[Row]] = {}
    for row in rows:
        if row["kind"] == "evaluation" and row["model"] == model:
            by_round.setdefault(row["round"], []).append(row)
    evaluations = [Evaluation(own).summary() for own in by_round.values()]
    return Curve(
        rounds=list(by_round),
        sent=[sent[number - 1] for number in by_round],
        accuracy=[_number(found["average"]) for found in evaluations],
        held_out=[_number(found["validation"]) for found in evaluations],
        loss=[_test_loss(own) for own in by_round.values()],
    )


def _test_loss(rows: Iterable[Row]) -> float:
    """Mean over test environments of the mean over clients, as `average` is for the accuracy."""
    by_environment: dict[str, list[float]] = {}
    for row in rows:
        if row["split"] == "test":
            for name, count, loss in zip(row["environment"], row["count"], row["loss"], strict=True):
                if count:
                    by_environment.setdefault(name, []).append(loss / count)
    return float(np.mean([np.mean(values) for values in by_environment.values()])) if by_environment else nan


def _number(value: float | None) -> float:
    return nan if value is None else float(value)


def _spread(values: Iterable[float]) -> Spread | None:
    found = list(values)
    return spread(found) if found else None


# ---------------------------------------------------------------------- grouping


def entries(runs: Iterable[Run]) -> list[Entry]:
    """Runs of the same configuration together, by scenario and method; each model that is evaluated on its own."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(settings(run.config).items()), []).append(run)
    keys, grouped = [dict(key) for key in groups], list(groups.values())
    scenarios = _labels([key["scenario.name"] for key in keys], [_part(key, scenario=True) for key in keys])
    titles = [own[0].config.method.title for own in grouped]
    methods = _labels(
        [f"{scenario}\n{title}" for scenario, title in zip(scenarios, titles, strict=True)],
        [_part(key, scenario=False) for key in keys],
    )
    order = sorted(range(len(keys)), key=lambda index: (scenarios[index], titles[index]))
    return [
        Entry(scenarios[index], methods[index].partition("\n")[2], model, model == models[-1], grouped[index])
        for index in order
        for models in [grouped[index][0].config.method.evaluates]
        for model in models
    ]


def settings(config: RunConfig) -> dict[str, str]:
    """Every setting that a result depends on, but the seed, by its dotted name."""
    return {name: value for name, value in config.flat().items() if name not in {*NO_NUMBER, "seed"}}


def _part(values: Mapping[str, str], *, scenario: bool) -> dict[str, str]:
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
            ", ".join(f"{key}={rival.get(key, '')}" for key in _telling(rivals[name])) for rival in rivals[name]
        ]
        number = rivals[name].index(own)
        short = texts[number] if max(map(len, texts)) <= 40 else f"#{number + 1}"
        labels.append(f"{name} ({short})" if short else name)
    return labels


def _telling(rivals: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings in which they differ."""
    names = dict.fromkeys(name for own in rivals for name in own)
    return [name for name in names if len({own.get(name) for own in rivals}) > 1]


def by_scenario(found: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries by scenario, in their order."""
    groups: dict[str, list[Entry]] = {}
    for entry in found:
        groups.setdefault(entry.scenario, []).append(entry)
    return groups


# ---------------------------------------------------------------------- tables


def summary_table(found: Sequence[Entry], selections: Sequence[str]) -> Table:
    """Worst, average, worst client and bottom decile, the selections side by side."""
    head = ["method", "model", "seeds", *(measure for _ in selections for measure in MEASURES)]
    rows = [
        [
            *(entry.method, entry.model, entry.seeds),
            *(_cell(entry.spread(selection, measure)) for selection in selections for measure in MEASURES),
        ]
        for entry in found
    ]
    groups = [("", 3), *((_titled(selection), len(MEASURES)) for selection in selections)]
    return Table("Summary: test accuracy in %", head, rows, 3, groups)


def environment_table(found: Sequence[Entry], selections: Sequence[str]) -> Table:
    """Accuracy in every test environment and on held-out training data; the rounds that were picked."""
    names = _environments(found)
    rows = [
        [
            *(entry.method, entry.model, _titled(selection)),
            *(_cell(entry.spread(selection, measure)) for measure in (*names, "held-out")),
            ", ".join(str(one.round) for one in entry.picked(selection)) or "–",
        ]
        for entry in found
        for selection in selections
    ]
    head = ["method", "model", "selection", *names, "held-out training", "round"]
    return Table("Test accuracy in % by environment", head, rows, 3)


def cluster_table(entry: Entry, run: Run) -> Table:
    """Who was in which cluster at the end."""
    last = run.clusters[max(run.clusters)]
    return Table(
        f"{entry.method}, seed {run.config.seed}: clusters in round {max(run.clusters)}",
        ["cluster", "clients", "who"],
        [[str(cluster), str(len(who)), ", ".join(who)] for cluster, who in members(last).items()],
        3,
    )


def run_table(found: Sequence[Entry]) -> Table:
    """Every run folder once."""
    rows = [
        [
            str(run.path),
            entry.scenario,
            entry.method,
            run.config.runtime,
            run.versions or "not recorded",
            str(run.config.seed),
            str(run.config.rounds),
            f"{run.seconds:.1f}",
            size(run.down),
            size(run.up),
            str(run.left_out),
        ]
        for entry in found
        if entry.headline
        for run in entry.runs
    ]
    head = ["run folder", "scenario", "method", "runtime", "versions", "seed", "rounds", "seconds"]
    traffic = ["down per client and round", "up", "replies left out"]
    return Table("Runs", [*head, *traffic], rows, 5)


def settings_table(found: Sequence[Entry]) -> Table | None:
    """What stands behind the numbers of numbered configurations; None where there are none."""
    numbered = [entry for entry in found if entry.headline and "(#" in entry.method]
    flat = [_part(settings(entry.runs[0].config), scenario=False) for entry in numbered]
    names = _telling(flat)
    rows = [
        [entry.method, *(_short(own.get(name, "")) for name in names)]
        for entry, own in zip(numbered, flat, strict=True)
    ]
    return Table("Numbered configurations", ["method", *names], rows) if rows else None


def to_csv(found: Sequence[Entry], selections: Sequence[str]) -> str:
    """The numbers of the summary and of all environments in full, as fractions: a line per model and selection."""
    names = _environments(found)
    about = ["scenario", "method", "model", "selection", "chosen on test data", "seeds", "rounds picked"]
    numbers = {**{name: name for name in (*MEASURES, "held-out")}, **{f"accuracy {name}": name for name in names}}
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*about, *(column for title in numbers for column in (title, f"{title} sd"))])
    for entry in found:
        for selection in selections:
            spreads = [entry.spread(selection, measure) for measure in numbers.values()]
            cells = [value for one in spreads for value in ((one.mean, one.deviation) if one else (None, None))]
            writer.writerow(
                [
                    *(entry.scenario, entry.method, entry.model, selection),
                    "yes" if selection == "oracle" else "no",
                    entry.seeds,
                    " ".join(str(one.round) for one in entry.picked(selection)),
                    *("" if cell is None else repr(cell) for cell in cells),
                ]
            )
    return file.getvalue()


def _cell(value: Spread | None) -> str:
    return str(value.percent()) if value else "–"


def _titled(selection: str) -> str:
    return "oracle (chosen on test data)" if selection == "oracle" else selection


def _environments(found: Iterable[Entry]) -> list[str]:
    picked = (one for entry in found for run in entry.runs for one in run.models[entry.model].values())
    return list(dict.fromkeys(name for one in picked for name in one.accuracy))


def _short(text: str) -> str:
    try:
        return text if text.lstrip("-").isdecimal() else f"{float(text):.5g}"
    except ValueError:
        return text


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """A picture and the words that stand for it."""

    caption: str
    svg: str


def drawn(found: Sequence[Entry]) -> list[Entry]:
    """As many entries as can be told apart: the configurations best on held-out data first."""

    def held_out(entry: Entry) -> float:
        found = entry.spread("final", "held-out")
        return found.mean if found else -1.0

    def rank(entry: Entry) -> tuple[int, bool]:
        title = entry.runs[0].config.method.title
        rivals = [
            other for other in found if other.model == entry.model and other.runs[0].config.method.title == title
        ]
        return sum(held_out(other) > held_out(entry) for other in rivals), not entry.headline

    first = sorted(found, key=rank)[: figures.STYLES]
    return [entry for entry in found if entry in first]


def scenario_figures(key: str, shown: Sequence[Entry], selections: Sequence[str]) -> list[Figure]:
    """All panels of a scenario; the place of an entry in `shown` is its style."""
    names = _environments(shown)
    made = []
    for selection in selections:
        lines = [environment_line(style, entry, selection, names) for style, entry in enumerate(shown)]
        svg = figures.line_figure(f"{key}e{selection}", lines, "test environment", "accuracy (%)", names=names)
        made.append(Figure(f"Accuracy against test environment, {_titled(selection)}", svg))
    kinds = (
        ("accuracy", "Test accuracy against rounds", "accuracy (%)"),
        ("held_out", "Held-out training accuracy against rounds", "accuracy (%)"),
        ("loss", "Test loss against rounds", "cross-entropy"),
    )
    for kind, caption, label in kinds:
        factor = 1 if kind == "loss" else 100
        lines = [curve_line(style, round_means(entry, kind), factor) for style, entry in enumerate(shown)]
        svg = figures.line_figure(f"{key}r{kind}", lines, "round", label, percent=kind != "loss")
        made.append(Figure(caption, svg))
    sent = [[found.mean for found in round_means(entry, "sent").values() if found] for entry in shown]
    unit, unit_name = _unit(max((value for values in sent for value in values), default=0))
    lines = [
        _line(style, [value / unit for value in sent[style]], list(round_means(entry, "accuracy").values()))
        for style, entry in enumerate(shown)
    ]
    label = f"{unit_name} of the training exchanges so far, both ways"
    svg = figures.line_figure(f"{key}b", lines, label, "accuracy (%)")
    made.append(Figure("Test accuracy against bytes", svg))
    for selection in selections:
        lines = [_client_line(style, entry.picked(selection)) for style, entry in enumerate(shown)]
        label = "% of the clients, from the worst to the best"
        svg = figures.line_figure(f"{key}c{selection}", lines, label, "accuracy (%)")
        made.append(Figure(f"Accuracy of the clients, {_titled(selection)}", svg))
    return made


def cluster_figure(key: str, entry: Entry, run: Run) -> Figure:
    """Cluster membership in every round."""
    rounds = sorted(run.clusters)
    last = {client: cluster for number in rounds for client, cluster in run.clusters[number].items()}
    clients = [client for group in members(last).values() for client in group]
    labels = {client: [run.clusters[number].get(client) for number in rounds] for client in clients}
    caption = f"{entry.method}, seed {run.config.seed}: cluster of each client in each round"
    return Figure(caption, figures.membership_figure(key, rounds, labels))


def _line(style: int, x: Sequence[float], spreads: Sequence[Spread | None], factor: float = 100) -> figures.Line:
    several = any(one and one.deviation is not None for one in spreads)
    return figures.Line(
        style,
        x,
        [factor * one.mean if one else nan for one in spreads],
        [factor * (one.deviation or 0.0) if one else nan for one in spreads] if several else (),
    )


def environment_line(style: int, entry: Entry, selection: str, names: Sequence[str]) -> figures.Line:
    """An entry's accuracy in each test environment."""
    return _line(style, range(len(names)), [entry.spread(selection, name) for name in names])


def curve_line(style: int, means: Mapping[int, Spread | None], factor: float = 100) -> figures.Line:
    """A quantity against rounds."""
    return _line(style, list(means), list(means.values()), factor)


def _client_line(style: int, picked: Iterable[Selected]) -> figures.Line:
    accuracies = sorted(
        float(np.mean(list(own.values()))) for one in picked for own in one.clients.values() if own
    )
    shares = [100 * (index + 0.5) / len(accuracies) for index in range(len(accuracies))]
    return figures.Line(style, shares, [100 * value for value in accuracies])


def round_means(entry: Entry, kind: str) -> dict[int, Spread | None]:
    """One of a curve's quantities over the runs of an entry, by round."""
    found: dict[int, list[float]] = {}
    for run in entry.runs:
        curve = run.curves[entry.model]
        for number, value in zip(curve.rounds, getattr(curve, kind), strict=True):
            found.setdefault(number, []).append(value)
    return {number: _spread(values) for number, values in sorted(found.items())}


def _unit(most: float) -> tuple[float, str]:
    sizes = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in sizes if most >= unit[0]), (1.0, "bytes"))


# ---------------------------------------------------------------------- pages


def tables(found: Sequence[Entry], selections: Sequence[str]) -> dict[str, list[Table]]:
    """The tables of every scenario."""
    return {
        scenario: [
            summary_table(own, selections),
            environment_table(own, selections),
            *(table for table in [settings_table(own)] if table),
            *(cluster_table(entry, entry.runs[0]) for entry in _clustered(own)),
        ]
        for scenario, own in by_scenario(found).items()
    }


def to_markdown(found: Sequence[Entry], skipped: Sequence[str], selections: Sequence[str]) -> str:
    """All tables as Markdown."""
    parts = ["# Perennial report", _how(selections).replace("<em>", "*").replace("</em>", "*")]
    for scenario, made in tables(found, selections).items():
        parts += [f"## {_plain(scenario)}", *map(markdown_table, made)]
    parts += ["## Runs", markdown_table(run_table(found))]
    if skipped:
        parts += ["## Skipped", "\n".join(f"- {_plain(line)}" for line in skipped)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A pipe table under its title; titles over columns become part of the columns' names."""
    over = [title for title, span in table.groups for _ in range(span)] or [""] * len(table.head)
    head = [f"{title}: {name}" if title else name for title, name in zip(over, table.head, strict=True)]
    rule = ["---" if column < table.names else "---:" for column in range(len(head))]
    lines = [map(_plain, head), rule, *(map(_plain, row) for row in table.rows)]
    return f"**{_plain(table.title)}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_html(found: Sequence[Entry], skipped: Sequence[str], selections: Sequence[str]) -> str:
    """The page, whole: no script, and nothing that is loaded."""
    sections = []
    all_tables = tables(found, selections)
    for number, (scenario, own) in enumerate(by_scenario(found).items()):
        shown = drawn(own)
        pictures = scenario_figures(f"f{number}", shown, selections)
        clustered = _clustered(own)[:CLUSTER_FIGURES]
        memberships = [cluster_figure(f"f{number}m{i}", entry, entry.runs[0]) for i, entry in enumerate(clustered)]
        first, *others = all_tables[scenario]
        about = own[0].runs[0].config.scenario
        sections.append(
            f'<section id="s{number}"><h2>{escape(scenario)}</h2>\n'
            f"<p>{escape(about.title)}; {len(about.client_ids)} clients, "
            f"{len(about.test_environments)} test environments. {escape(about.source)}</p>\n"
            f"{html_table(first)}\n<h3>Figures</h3>\n{_legend(shown, len(own))}\n"
            f'<div class="figures">{"".join(map(_html_figure, pictures))}</div>\n'
            + "".join(f'<div class="wide">{_html_figure(figure, curves=False)}</div>' for figure in memberships)
            + "".join(map(html_table, others))
            + "</section>"
        )
    return Template(TEMPLATE.read_text()).substitute(
        about=f"{len({run.path for entry in found for run in entry.runs})} runs, "
        f"{len(all_tables)} {'scenario' if len(all_tables) == 1 else 'scenarios'}",
        skipped_link='<a href="#skipped">Skipped</a>' if skipped else "",
        links="".join(f'<a href="#s{number}">{escape(name)}</a>' for number, name in enumerate(all_tables)),
        how=_how(selections),
        colours="".join(f"--s{index}:{value};" for index, value in enumerate(figures.LIGHT)),
        dark_colours="".join(f"--s{index}:{value};" for index, value in enumerate(figures.DARK)),
        sections="\n".join(sections),
        runs=html_table(run_table(found)) + _configurations(found),
        skipped='<section id="skipped"><h2>Skipped</h2><ul>'
        + "".join(f"<li>{escape(line)}</li>" for line in skipped)
        + "</ul></section>"
        if skipped
        else "",
    )


def html_table(table: Table) -> str:
    """A table in a box of its own that scrolls where the screen is narrow."""
    groups = "".join(
        f'<th scope="colgroup" colspan="{span}">{escape(title)}</th>' if title else f'<td colspan="{span}"></td>'
        for title, span in table.groups
    )
    starts = {sum(span for _, span in table.groups[:index]) for index in range(1, len(table.groups))}
    classes = [
        " ".join([*(["n"] if column >= table.names else []), *(["start"] if column in starts else [])])
        for column in range(len(table.head))
    ]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>'
        for kind, name in zip(classes, table.head, strict=True)
    )
    rows = "".join(
        "<tr>"
        + f'<th scope="row">{escape(row[0]).replace("=", "=<wbr>")}</th>'
        + "".join(
            f'<td class="{"wrap" if len(cell) > 40 else kind}">{escape(cell)}</td>'
            for kind, cell in zip(classes[1:], row[1:], strict=True)
        )
        + "</tr>\n"
        for row in table.rows
    )
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<caption>{escape(table.title)}</caption>\n<thead>"
        + (f"<tr>{groups}</tr>" if groups else "")
        + f"<tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n"
    )


def _html_figure(figure: Figure, curves: bool = True) -> str:
    label = escape(f"{figure.caption}; a curve per line of the legend" if curves else figure.caption)
    return (
        f'<figure><figcaption>{escape(figure.caption)}</figcaption><div role="img" aria-label="{label}">'
        f"{figure.svg}</div></figure>\n"
    )


def _legend(shown: Sequence[Entry], among: int) -> str:
    items = "".join(
        f"<li>{figures.swatch(style)}<span>{escape(f'{entry.method}, {entry.model}')}</span></li>"
        for style, entry in enumerate(shown)
    )
    note = (
        "Lines are means over seeds, shades their standard deviation; test accuracy and loss are means over "
        "environments. The clients are those of all seeds together."
    )
    if len(shown) < among:
        note += (
            f" {len(shown)} of the {among} lines of the table are drawn: of each method the configurations "
            "that are best on held-out training-environment data after the last round."
        )
    return f'<ul class="legend">{items}</ul><p class="note">{note}</p>'


def _configurations(found: Sequence[Entry]) -> str:
    return "".join(
        f"<details><summary>{escape(f'{entry.scenario}: {entry.method}, seeds {entry.seeds}')}</summary>"
        f"<pre>{escape(entry.runs[0].config.toml())}</pre></details>\n"
        for entry in found
        if entry.headline
    )


def _clustered(found: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in found if entry.headline and entry.runs[0].clusters]


def _how(selections: Sequence[str]) -> str:
    return f"{HOW} {ORACLE}" if "oracle" in selections else HOW


def _plain(text: str) -> str:
    """Text that means nothing in Markdown."""
    text = re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)
    return " ".join(text.split())


# ---------------------------------------------------------------------- all of it


def report(folders: Sequence[Path], form: str = "html", oracle: bool = False) -> tuple[str, list[str]]:
    """The report of all runs at or below the folders, as "html", "markdown" or "csv", and what was skipped.

    Raises `UserError` if there is nothing to report.
    """
    runs, skipped = load_runs(find_runs(folders), oracle)
    if not runs:
        raise UserError(f"none of {len(skipped)} run folders can be reported; the first: {skipped[0]}")
    selections = (*SELECTIONS, "oracle") if oracle else SELECTIONS
    found = entries(runs)
    if form == "csv":
        text = to_csv(found, selections)
    else:
        text = (to_markdown if form == "markdown" else to_html)(found, skipped, selections)
    # Half a character (a name from a damaged file) cannot be written.
    return text.encode("utf-8", "replace").decode(), skipped
