"""Figures as inline SVG: the same bytes for the same numbers, coloured by the page, so that light and dark fit."""

import io
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

STYLES = 12
"""How many curves can be told apart: by colour, dashes and marker together."""
COLOURS = 8
DASHES = ((), (5, 1.5), (1.5, 1.5), (6, 1.5, 1.5, 1.5), (9, 2, 3, 2))
MARKERS = "os^DvPX*<>ph"
OBSERVED = -1
"""In place of a style: what really happened."""
MOST_NAMED = 4
"""Different values of a setting that are drawn side by side, whatever lies between them."""
POINTS = 200
CELLS = 1500
"""Most segments that a picture of cluster membership draws."""
CLIENTS = 60
MOST_AREA = 90.0
"""Of a point that stands for samples, in square points."""

# At least 3:1 against the page, told apart by people who see fewer colours; dashes and markers differ as well.
LIGHT = ("#0072b2", "#d55e00", "#00805c", "#aa3377", "#8a6d00", "#332288", "#56707f", "#882255")
DARK = ("#56b4e9", "#ff8a3d", "#2fc79a", "#ee8fc0", "#f0d442", "#b3a7ff", "#b0bec5", "#ff9d9d")

Array = NDArray[np.float64]
T = TypeVar("T")

LOOK = Path(__file__).with_name("figures.mplstyle")
INK, GRID = "#f1f100", "#f1f101"
"""As in that file: stand-ins that no curve would have by chance; the page's variables take their place."""


@dataclass(frozen=True)
class Line:
    """A curve: which of the styles or `OBSERVED`, its points, and how far they spread to either side."""

    style: int
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()


def line_figure(
    key: str,
    lines: Sequence[Line],
    *labels: str,
    names: Sequence[str] = (),
    percent: bool = True,
    diagonal: bool = False,
) -> str:
    """Curves in one panel; `names` label the x positions 0, 1, … `key` tells this figure's ids from others'.

    `labels` are those of both axes; `percent`: of accuracies. `diagonal`: where both axes are the same quantity,
    from 0 to 100, also the line of equal values.
    """
    with _figure(4.2, 2.9) as figure:
        axes = _panel(figure, lines, labels, names, percent)
        bands = iter(axes.collections)
        for line, curve in zip(lines, axes.lines, strict=True):  # names by which the page's script hides them
            parts = [("curve", curve), *([("band", next(bands))] if len(line.spread) else [])]
            for part, own in parts if line.style != OBSERVED else []:
                own.set_gid(f"{part}-{line.style}")
        if diagonal:
            _equal_values(axes)
        return _told(_svg(figure, key), axes, lines, names)


def standalone_figure(
    lines: Sequence[Line], legend: Sequence[str], *labels: str, names: Sequence[str] = (), percent: bool = True
) -> str:
    """Curves in one panel as a whole SVG file, on white and with a legend; the rest as above."""
    with _figure(7.2, 3.6) as figure:
        axes = _panel(figure, lines, labels, names, percent)
        figure.legend(axes.get_lines(), legend, loc="outside right upper", frameon=False, handlelength=3.5)
        return _file(figure)


def knob_figure(
    tried: Mapping[str, Sequence[Any]],
    scores: Sequence[tuple[float, float]],
    ylabel: str,
    logs: Sequence[str] = (),
    chosen: int | None = None,
    factor: float = 100.0,
) -> str:
    """A search as a whole SVG file: for each setting a panel of what was tried against the score that it had.

    `tried` has the values by setting, `scores` each trial's score and its standard error, which are drawn times
    `factor`; `logs` are the settings with a logarithmic axis; trial number `chosen` stands out.
    """
    count = max(1, len(tried))
    across = min(3, count)
    down = -(-count // across)
    with _figure(2.9 * across, 2.5 * down) as figure:
        panels = figure.subplots(down, across, squeeze=False).flatten()
        y, errors = (factor * np.array(part, dtype=float) for part in zip(*scores, strict=True))
        for axes, (name, values) in zip(panels, tried.items(), strict=False):
            numbers = all(isinstance(value, int | float) for value in values)
            each = sorted(set(values)) if numbers else sorted(set(values), key=str)
            apart = not numbers or len(each) <= MOST_NAMED  # a choice between a few
            x = [each.index(value) if apart else float(value) for value in values]
            axes.errorbar(x, y, yerr=errors, fmt="o", color=_colour(0), elinewidth=0.8)
            if chosen is not None:
                ring = {"markersize": 9, "markerfacecolor": "none", "color": _colour(1)}
                axes.plot(x[chosen], y[chosen], "o", label="chosen", **ring)
            if apart:
                axes.set_xticks(
                    range(len(each)), [f"{own:g}" if numbers else _short(str(own), 10) for own in each]
                )
                axes.set_xlim(-0.5, len(each) - 0.5)
            elif name in logs and min(x) > 0:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.xaxis.set_minor_formatter(NullFormatter())
            else:
                axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.set_xlabel(_short(name, 30))
        for axes in panels[len(tried) :]:
            axes.axis("off")
        for axes in panels[: len(tried) : across]:
            axes.set_ylabel(ylabel)
        if chosen is not None and tried:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", frameon=False)
        return _file(figure)


def points_figure(
    points: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, ylabel: str, level: float, label: str
) -> str:
    """Points of two accuracies in percent as a whole SVG file, with the line of equal values.

    Each of the names in `points` has a ring within the one before, so that equal points are seen. A dashed line is
    at x = `level`, and the legend calls it `label`.
    """
    with _figure(6.8, 4.0) as figure:
        axes: Axes = figure.subplots()
        _equal_values(axes)
        axes.axvline(level, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0, label=label)
        for number, (name, own) in enumerate(points.items()):
            x, y = zip(*own, strict=True) if own else ((), ())
            size = 10 - 3 * number
            axes.plot(x, y, "o", markersize=size, markerfacecolor="none", color=_colour(number), label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel, box_aspect=1)
        figure.legend(loc="outside right upper", frameon=False)
        return _file(figure)


def gains_figure(gains: Mapping[str, Sequence[tuple[float, float, float]]], xlabel: str, ylabel: str) -> str:
    """What was gained there (x) and here (y), with a bar to either side of y, in points, as a whole SVG file.

    `gains` has them by group. The diagonal is the line of equal gains, the level one is no gain.
    """
    with _figure(6.8, 4.0) as figure:
        axes: Axes = figure.subplots()
        axes.axline((0, 0), slope=1, color=INK, linewidth=0.8, zorder=1)
        axes.axhline(0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        for number, (name, own) in enumerate(gains.items()):
            x, y, errors = zip(*own, strict=True) if own else ((), (), ())
            style, colour = MARKERS[number], _colour(number)
            axes.errorbar(x, y, errors, fmt=style, color=colour, mfc="none", elinewidth=0.8, label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        figure.legend(loc="outside right upper", frameon=False)
        return _file(figure)


def shares_figure(
    counts: Mapping[str, Sequence[int]],
    texts: Mapping[str, Sequence[str]],
    parts: Mapping[str, str],
) -> str:
    """Bars of equal length, one for each of `counts`, cut into its parts, as a whole SVG file.

    `texts` is what stands in each part, where it has room; `parts` the colour of each by name.
    """
    with _figure(7.6, 0.5 + 0.42 * len(counts)) as figure:
        axes: Axes = figure.subplots()
        totals, left = [sum(own) for own in counts.values()], np.zeros(len(counts))
        for place, (name, colour) in enumerate(parts.items()):
            widths = np.array([own[place] / total for own, total in zip(counts.values(), totals, strict=True)])
            bars = axes.barh(
                list(counts), widths, left=left, label=name, height=0.7, color=colour, edgecolor=INK, linewidth=0.4
            )
            shown = [
                own[place] if width > 0.014 * len(own[place]) else ""
                for own, width in zip(texts.values(), widths, strict=True)
            ]
            ink = "white" if colour in LIGHT else INK
            axes.bar_label(bars, shown, label_type="center", color=ink, fontsize=8)
            left = left + widths
        axes.invert_yaxis()
        axes.set(xlim=(0, 1), xticks=[])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        return _file(figure)


def counts_figure(key: str, style: int, points: Sequence[tuple[float, float, int]], *labels: str) -> str:
    """Points (x, y, samples) whose area is as the samples, and the line of equal values. `key` as above."""
    x, y, counts = (np.array(own, dtype=float) for own in zip(*points, strict=True))
    with _figure(4.2, 3.4) as figure:
        axes: Axes = figure.subplots()
        ends = min(x.min(), y.min()), max(x.max(), y.max())
        axes.plot(ends, ends, color=INK, linewidth=0.8, zorder=0)
        # Without lines, which markers alone would have where they touch.
        sizes = MOST_AREA * counts / counts.max()
        axes.scatter(x, y, sizes, color=_colour(style), alpha=0.7, linewidths=0)
        xlabel, ylabel = (_short(label, 40) for label in labels)
        axes.set(xlabel=xlabel, ylabel=ylabel, box_aspect=1)
        return _svg(figure, key)


def spreads_figure(key: str, lines: Sequence[Line], names: Sequence[str], *labels: str) -> str:
    """Means with a bar of their spread to either side, those of several lines beside each other at each of
    `names`, which a line's x are places of; and the line of 0. `key` as above."""
    with _figure(4.2, 2.9) as figure:
        axes: Axes = figure.subplots()
        axes.axhline(0, color=INK, linewidth=0.8, zorder=0)
        for place, line in enumerate(lines):
            beside = 0.7 * ((place + 0.5) / len(lines) - 0.5)
            style, colour = MARKERS[line.style % STYLES], _colour(line.style)
            x = np.asarray(line.x, dtype=float) + beside
            axes.errorbar(x, line.y, line.spread, fmt=style, color=colour, elinewidth=0.9, capsize=1.5)
        _name_places(axes, names)
        axes.set_xlim(-0.5, len(names) - 0.5)
        xlabel, ylabel = labels
        axes.set(xlabel=xlabel, ylabel=_short(ylabel, 40))
        return _svg(figure, key)


def swatch(key: str, style: int) -> str:
    """A piece of a curve for the legend; `key` as above."""
    with _figure(0.62, 0.2, constrained=False) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        _draw(axes, Line(style, [0, 1, 2], [0, 0, 0]), every=[1])
        axes.set_xlim(0, 2)
        return _svg(figure, f"{key}swatch{style}")


def membership_figure(key: str, rounds: Sequence[int], labels: Mapping[str, Sequence[int | None]]) -> str:
    """A row per client, coloured and numbered by its cluster in each round; white where it was in none."""
    clients = _thinned(list(labels), CLIENTS)
    columns = list(range(len(rounds)))
    segments = _segments(clients, columns, labels)
    if len(segments) > CELLS:
        columns = _thinned(columns, max(2, CELLS // max(1, len(clients))))
        segments = _segments(clients, columns, labels)
    step = max(1.0, float(np.median(np.diff(rounds)))) if len(rounds) > 1 else 1.0
    edges = [rounds[column] - step / 2 for column in columns] + [rounds[-1] + step / 2]
    with _figure(8.6, 0.7 + 0.17 * max(4, len(clients))) as figure:
        axes = figure.subplots()
        axes.grid(False)
        for cluster in sorted({cluster for _, _, _, cluster in segments}):
            own = [(row, edges[a], edges[b]) for row, a, b, found in segments if found == cluster]
            corners = [[(a, r - 0.42), (b, r - 0.42), (b, r + 0.42), (a, r + 0.42), (a, r)] for r, a, b in own]
            codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(own)
            path = Outline(np.array(corners).reshape(-1, 2), codes)
            axes.add_patch(PathPatch(path, facecolor=_colour(cluster), alpha=0.75, linewidth=0))
        if len(segments) <= CELLS // 3:
            for row, first, _, cluster in segments:
                axes.text(edges[first] + step * 0.15, row, str(cluster), va="center", fontsize=7)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(len(clients) - 0.5, -0.5)
        axes.set_yticks(range(len(clients)), [_short(client, 24) for client in clients], fontsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.set_xlabel("round")
        return _svg(figure, key)


# ---------------------------------------------------------------------- inside


def _panel(
    figure: Figure, lines: Sequence[Line], labels: Sequence[str], names: Sequence[str], percent: bool
) -> Axes:
    axes: Axes = figure.subplots()
    for line in lines:
        _draw(axes, line)
    xlabel, ylabel = labels
    axes.set(xlabel=xlabel, ylabel=ylabel)
    ends = [np.asarray(line.y, dtype=float) + side * _around(line) for line in lines for side in (-1, 1)]
    values = np.concatenate(ends)
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if values.size else (0.0, 100.0)
    if percent:
        room = max(1.0, 0.05 * (high - low))
        axes.set_ylim(max(low - room, -2.0), min(high + room, 102.0))
        axes.yaxis.set_major_locator(MaxNLocator(6))
    elif low > 0 and high > 100 * low:
        axes.set_yscale("log")
    if names:
        _name_places(axes, names)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=xlabel in ("round", "clients")))
    return axes


def _name_places(axes: Axes, names: Sequence[str]) -> None:
    """The names of x = 0, 1, …, as many as can be read."""
    short = {place: _short(names[place], 14) for place in _thinned(range(len(names)), 24)}
    axes.set_xticks([*short], [*short.values()])
    if sum(len(name) + 2 for name in short.values()) > 50:
        axes.tick_params(axis="x", rotation=60)


@contextmanager
def _figure(width: float, height: float, constrained: bool = True) -> Iterator[Figure]:
    """A figure of so many inches, drawn and written within this."""
    # Not the user's own matplotlibrc: the same numbers give the same page everywhere.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that the measuring font lacks; browsers have another
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(matplotlib.rc_params_from_file(LOOK, use_default_template=False))
        yield Figure(figsize=(width, height), layout="constrained" if constrained else None)


def _colour(style: int) -> str:
    return f"#f0f0{style % COLOURS:02x}"


def _draw(axes: Axes, line: Line, every: list[int] | None = None) -> None:
    keep = _thinned(range(len(line.x)), POINTS)
    x, y = np.asarray(line.x, dtype=float)[keep], np.asarray(line.y, dtype=float)[keep]
    if len(line.spread):
        around = _around(line)[keep]
        axes.fill_between(x, y - around, y + around, color=_colour(line.style), alpha=0.13, linewidth=0)
    if line.style == OBSERVED:
        axes.plot(x, y, color=INK, linewidth=1.2)
        return
    style = line.style % STYLES
    (drawn,) = axes.plot(x, y, color=_colour(style), marker=MARKERS[style])
    drawn.set_markevery(every or _thinned(range(len(x)), 11))
    if dashes := DASHES[style % len(DASHES)]:
        drawn.set_dashes(dashes)


def _around(line: Line) -> Array:
    return np.nan_to_num(np.asarray(line.spread, dtype=float)) if len(line.spread) else np.zeros(len(line.y))


def _equal_values(axes: Axes) -> None:
    """The line on which both axes have the same percentage."""
    axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8, zorder=0)
    axes.set(xlim=(-2, 102), ylim=(-2, 102))


def _short(name: str, most: int) -> str:
    """As much of a name as can be drawn."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _segments(
    clients: Sequence[str], columns: Sequence[int], labels: Mapping[str, Sequence[int | None]]
) -> list[tuple[int, int, int, int]]:
    """Stretches of equal membership: row, first column, column after the last, cluster."""
    found: list[tuple[int, int, int, int]] = []
    for row, client in enumerate(clients):
        own = [labels[client][column] for column in columns]
        for cluster, group in groupby(range(len(columns)), own.__getitem__):
            places = list(group)
            if cluster is not None:
                found.append((row, places[0], places[-1] + 1, cluster))
    return found


def _thinned(items: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly spread, the first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[int(index)] for index in np.linspace(0, len(items) - 1, most).round()]


def _told(svg: str, axes: Axes, lines: Sequence[Line], names: Sequence[str]) -> str:
    """The figure with the numbers of its points, which the page's script shows under the pointer.

    `box` is where the axes are in the picture's own units, left, top, right and bottom; `x` and `y` are what they
    show there, of y the logarithms where `log` says so.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    unit, height = 72 / figure.dpi, 72 * figure.get_figheight()
    box, log = axes.get_window_extent(), axes.get_yscale() == "log"
    y = [float(np.log10(end)) if log else end for end in axes.get_ylim()]
    facts = {
        "box": [
            round(end, 2) for end in (box.x0 * unit, height - box.y1 * unit, box.x1 * unit, height - box.y0 * unit)
        ],
        "x": axes.get_xlim(),
        "y": y,
        "log": log,
        "names": [*names],
        "lines": [_points(line) for line in lines],
    }
    return svg.replace("<svg ", f'<svg data-figure="{escape(json.dumps(facts, ensure_ascii=False))}" ', 1)


def _points(line: Line) -> dict[str, Any]:
    """A curve's drawn points, with four digits."""
    keep = [place for place in _thinned(range(len(line.x)), POINTS) if np.isfinite(line.y[place])]
    parts = {"x": line.x, "y": line.y, "spread": line.spread}
    digits = {name: [float(f"{own[place]:.4g}") for place in keep] for name, own in parts.items() if len(own)}
    return {"style": line.style, **digits}


def _file(figure: Figure) -> str:
    """The figure as a whole SVG file, on white."""
    file = io.StringIO()
    figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    text = re.sub(r"#f0f0(\d\d)", lambda style: LIGHT[int(style[1])], file.getvalue())
    return text.replace(INK, "#222222").replace(GRID, "#c8c8c8")


def _svg(figure: Figure, key: str) -> str:
    """The figure as an element of an HTML page, in the page's colours and font, with ids of its own."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.S)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    # Names that only group; what something refers to (a marker, a clip) keeps its id, told apart by figure.
    text = re.sub(r' id="(\w+_\d+)"', "", text)
    text = text.replace(' id="', f' id="{key}-').replace("url(#", f"url(#{key}-")
    text = text.replace('xlink:href="#', f'href="#{key}-')
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0].replace("\n", "")), text)
    text = text.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    text = re.sub(r"#f0f0(\d\d)", lambda style: f"var(--s{int(style[1])})", text)
    return re.sub(r"\n\s*", "\n", text).strip()
