"""A comparison's figures as SVG files that stand alone, for a page or a paper."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from perennial.server.report.load import Run, load_runs
from perennial.server.report.panels import curve_line, environment_line, round_means
from perennial.server.report.results import result_of
from perennial.server.results.figures import STYLES, Line, standalone_figure
from perennial.server.run.folder import RunFolder
from perennial.server.study.compare import Comparison


def pictures(comparison: Comparison, labels: Sequence[str] = ()) -> dict[str, str]:
    """SVG by name: `environments` and `rounds`, and `training` where methods log an accuracy in every round.

    `labels` are the rows to draw; none are the first that can be told apart. Empty where none of them has a run
    that can be read.
    """
    wanted = [choice for choice in comparison.choices if not labels or choice.label in labels]
    # What cannot be read is among the comparison's troubles.
    found = [result_of(load_runs(map(Path, choice.runs))[0], choice.label) for choice in wanted]
    results = [result for result in found if result][:STYLES]
    if not results:
        return {}
    measure = comparison.measure
    titles, ylabel = (
        [result.method for result in results],
        f"test {measure.title}{' (%)' if measure.percent else ''}",
    )
    made = {}
    if len(names := comparison.environments) > 1:
        lines = [environment_line(n, result, "final", names) for n, result in enumerate(results)]
        made["environments"] = standalone_figure(
            lines, titles, "test environment", ylabel, names=names, percent=measure.percent
        )
    lines = [curve_line(n, round_means(result, "value"), measure.factor) for n, result in enumerate(results)]
    made["rounds"] = standalone_figure(lines, titles, "round", ylabel, percent=measure.percent)
    if svg := training_picture({result.method: result.runs[0] for result in results}):
        made["training"] = svg
    return made


def training_picture(runs: Mapping[str, Run]) -> str:
    """The accuracies that methods log in every round, by label; empty where none logs any."""
    curves = {(style, label): training_curve(run) for style, (label, run) in enumerate(runs.items())}
    curves = {key: curve for key, curve in curves.items() if curve}
    if not curves:
        return ""
    lines = [Line(style, [*own], [100 * value for value in own.values()]) for (style, _), own in curves.items()]
    labels = [label for _, label in curves]
    return standalone_figure(lines, labels, "round", "training accuracy of the first seed (%)")


def training_curve(run: Run) -> dict[int, float]:
    """The accuracy that the method logs, by round; nothing where it logs none.

    A game that has ended logs none any more.
    """
    logged = [(row["round"], row["metrics"]) for row in RunFolder(run.path).rows() if row["kind"] == "round"]
    return {number: metrics["accuracy"] for number, metrics in logged if "accuracy" in metrics}
