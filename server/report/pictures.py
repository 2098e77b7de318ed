"""A comparison's figures as SVG files that stand alone, for a page or a paper."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from perennial.server.report.load import Run, load_runs
from perennial.server.report.panels import curve_line, environment_line, round_means
from perennial.server.report.results import Result
from perennial.server.results.figures import STYLES, Line, standalone_figure
from perennial.server.run.folder import RunFolder
from perennial.server.study.compare import Choice, Comparison


def pictures(comparison: Comparison, labels: Sequence[str] = ()) -> dict[str, str]:
    """SVG by name: `environments` and `rounds`, and `training` where methods log an accuracy in every round.

    `labels` are the rows to draw; none are the first that can be told apart. Empty where none of them has a run
    that can be read.
    """
    wanted = [choice for choice in comparison.choices if not labels or choice.label in labels]
    results = [result for choice in wanted if (result := _result(choice))][:STYLES]
    if not results:
        return {}
    made = {}
    if len(comparison.environments) > 1:
        lines = [environment_line(n, result, "final", comparison.environments) for n, result in enumerate(results)]
        made["environments"] = _picture(lines, results, "test environment", comparison.environments)
    lines = [curve_line(n, round_means(result, "accuracy")) for n, result in enumerate(results)]
    made["rounds"] = _picture(lines, results, "round")
    if svg := training_picture({result.method: result.runs[0] for result in results}):
        made["training"] = svg
    return made


def training_picture(runs: Mapping[str, Run]) -> str:
    """The accuracies that methods log in every round, by label; empty where none logs any."""
    curves = {label: found for label, run in runs.items() if (found := training_curve(run))}
    lines = [
        Line(style, list(curves[label]), [100 * value for value in curves[label].values()])
        for style, label in enumerate(runs)
        if label in curves
    ]
    if not lines:
        return ""
    return standalone_figure(lines, list(curves), "round", "training accuracy of the first seed (%)")


def _picture(lines: Sequence[Line], results: Sequence[Result], xlabel: str, names: Sequence[str] = ()) -> str:
    labels = [results[line.style].method for line in lines]
    return standalone_figure(lines, labels, xlabel, "test accuracy (%)", names=names)


def _result(choice: Choice) -> Result | None:
    runs, _ = load_runs(map(Path, choice.runs))  # what cannot be read is among the comparison's troubles
    if not runs:
        return None
    return Result(runs[0].config.scenario.name, choice.label, runs[0].config.method.evaluates[-1], True, runs)


def training_curve(run: Run) -> dict[int, float]:
    """The accuracy that the method logs, by round; nothing where it logs none.

    A game that has ended logs none any more.
    """
    logged = [(row["round"], row["metrics"]) for row in RunFolder(run.path).rows() if row["kind"] == "round"]
    return {number: metrics["accuracy"] for number, metrics in logged if "accuracy" in metrics}
