"""A comparison's figures as SVG files that stand alone, for a page or a paper."""

from collections.abc import Sequence
from pathlib import Path

from server.compare import Choice, Comparison
from server.figures import STYLES, Line, standalone_figure
from server.folder import RunFolder
from server.report import Entry, Run, curve_line, environment_line, load, round_means


def pictures(comparison: Comparison, labels: Sequence[str] = ()) -> dict[str, str]:
    """SVG by name: `environments` and `rounds`, and `training` where methods log an accuracy in every round.

    `labels` are the rows to draw; none are the first that can be told apart.
    """
    wanted = [c for c in comparison.choices if c.runs and (not labels or c.label in labels)][:STYLES]
    entries = [_entry(choice) for choice in wanted]
    made = {}
    if len(comparison.environments) > 1:
        lines = [environment_line(n, entry, "final", comparison.environments) for n, entry in enumerate(entries)]
        made["environments"] = _picture(lines, entries, "test environment", comparison.environments)
    lines = [curve_line(n, round_means(entry, "accuracy")) for n, entry in enumerate(entries)]
    made["rounds"] = _picture(lines, entries, "round")
    logged = [(n, found) for n, entry in enumerate(entries) if (found := _training(entry.runs[0]))]
    if logged:
        lines = [Line(n, range(1, len(found) + 1), [100 * value for value in found]) for n, found in logged]
        made["training"] = _picture(lines, entries, "round", ylabel="training accuracy of the first seed (%)")
    return made


def _picture(
    lines: Sequence[Line],
    entries: Sequence[Entry],
    xlabel: str,
    names: Sequence[str] = (),
    ylabel: str = "test accuracy (%)",
) -> str:
    labels = [entries[line.style].method for line in lines]
    return standalone_figure(lines, labels, xlabel, ylabel, names=names)


def _entry(choice: Choice) -> Entry:
    runs = [load(Path(path)) for path in choice.runs]
    return Entry(runs[0].config.scenario.name, choice.label, runs[0].config.method.evaluates[-1], True, runs)


def _training(run: Run) -> list[float]:
    """The accuracy that the method logs of every round; nothing where it logs none."""
    metrics = [row["metrics"] for row in RunFolder(run.path).rows() if row["kind"] == "round"]
    return [row["accuracy"] for row in metrics] if all("accuracy" in row for row in metrics) else []
