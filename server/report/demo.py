"""The page of the demo: each claim with its numbers, a figure, how its settings were found, and its command."""

import os
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from re import sub
from statistics import fmean

from perennial.common.data.scenarios import SCENARIOS
from perennial.common.methods import METHODS
from perennial.common.utils.errors import UserError
from perennial.server.papers.demo import Finding, Measured, difference_text, mean, points, seeds_line
from perennial.server.report.load import load
from perennial.server.report.page import framed, html_figure, legend
from perennial.server.report.panels import Figure, curve_line, environment_line, round_means
from perennial.server.report.results import Result, result_of
from perennial.server.report.tables import Table, html_table
from perennial.server.results.figures import Line, line_figure, standalone_figure

DOCS = Path(__file__).parents[3] / "docs"  # of a checkout; the wheel has none
CONSTANT, ORACLE = 6, 7
"""Their styles, whatever else is drawn."""


def demo_page(findings: Sequence[Finding], folder: Path) -> str:
    """The page, whole. `folder` is where it will lie: pages of the documentation are linked from there."""
    links = "".join(
        f'<a href="#{finding.claim.method.name}">{escape(finding.claim.method.title)}</a>' for finding in findings
    )
    held = sum(finding.holds for finding in findings)
    return framed(
        "What the methods claim, measured here",
        f"<p>{held} of {len(findings)} claims hold. Every number on this page comes from runs on this machine, on "
        "data that come with scikit-learn or are generated: test data after the last round, means over seeds. "
        "Accuracies are in %.</p>\n"
        f'<nav aria-label="Sections">{links}</nav>\n'
        f"{html_table(_table(findings))}\n"
        f'<p class="how">{escape(seeds_line(findings))} <em>A constant</em> always says a client\'s most frequent '
        "training label, or the mean of numbers: it has learned nothing. <em>No shortcut</em> is the reference "
        "where the data have none: about what is possible.</p>\n"
        + "\n".join(_section(finding, folder) for finding in findings),
    )


def claim_picture(finding: Finding) -> str:
    """The claim's figure as a whole SVG file. Raises `UserError` where no run of it has ended."""
    lines, names = _lines(finding)
    if not lines:
        raise UserError(f"--picture: {'; '.join(finding.troubles)}")
    xlabel, ticks = _axis(finding)
    labels = [names[line.style] for line in lines]
    measure = finding.claim.task.headline
    return standalone_figure(lines, labels, xlabel, f"test {measure.axis}", names=ticks, percent=measure.percent)


# ---------------------------------------------------------------------- inside


def _table(findings: Sequence[Finding]) -> Table:
    names = ["method", "verdict", "claim", "measured"]
    numbers = ["reference", "method", "difference", "a constant", "no shortcut"]
    rows = []
    for finding in findings:
        claim, found = finding.claim, finding.numbers
        text = claim.measure.text
        ours, constant, oracle = (text(mean(found.get(name, []))) for name in ("method", "constant", "oracle"))
        measured = f"{claim.scenario}, {claim.column}"
        reference = f"{claim.reference.title} {text(mean(found['reference']))}"
        about = [claim.method.title, finding.verdict, claim.claim, measured, reference]
        rows.append([*about, ours, difference_text(finding), constant, oracle])
    return Table("The claims", [*names, *numbers], rows, names=len(names))


def _section(finding: Finding, folder: Path) -> str:
    claim, key = finding.claim, finding.claim.method.name
    scenario = SCENARIOS[claim.scenario]
    lines, names = _lines(finding)
    xlabel, ticks = _axis(finding)
    measure = claim.task.headline
    caption = f"Test {measure.title} against {xlabel}, {claim.scenario}"
    picture = ""
    if lines:
        svg = line_figure(key, lines, xlabel, measure.axis, names=ticks, percent=measure.percent)
        picture = f"{legend(key, names)}\n{html_figure(Figure(caption, svg))}"
        picture += f'<p class="note">Mean over {claim.seeds} seeds; shades: standard deviation.</p>'
    rows = [
        [title, *map(claim.measure.text, [mean(values), *values])]
        for title, values in ((title, finding.numbers[name]) for name, title in finding.titles.items())
    ]
    rows.append(
        ["difference", difference_text(finding), *(points(own, claim.measure) for own in finding.differences)]
    )
    head = ["", claim.measure.axis, *(f"seed {seed}" for seed in range(claim.seeds))]
    numbers = Table(f"{claim.column}, after {claim.rounds} rounds", head, rows)
    page = METHODS[key].module() + ".md"
    command = shlex.join(["perennial", "demo", "--only", key])
    recipe = shlex.join(["perennial", "run", "--recipe", f"demo/{key}"])
    settings = sub("`(.+?)`", r"<code>\1</code>", escape(claim.found))
    return (
        f'<section id="{key}"><h2>{escape(finding.claim.method.title)} '
        f'<span class="verdict {"" if finding.holds else "not"}">{finding.verdict}</span></h2>\n'
        f'<p class="claim">{escape(claim.claim)}</p>\n'
        f'<div class="beside"><div>{picture}</div><div>{html_table(numbers)}'
        f"<p>{_sentence(finding)}</p>"
        + "".join(f"<p>{escape(trouble)}</p>" for trouble in finding.troubles)
        + f"<p>Data: {escape(scenario.title)}; {len(scenario.client_ids)} clients.</p>\n"
        f"<p>Settings: {settings}</p>\n"
        f"<p>This row again: <code>{escape(command)}</code>. One run of the method: "
        f"<code>{escape(recipe)}</code>.</p>\n"
        f"<p>{escape(METHODS[key].source)}. {_linked(page, folder)}</p></div></div></section>"
    )


def _sentence(finding: Finding) -> str:
    """What the numbers say, and whether a constant would have done as well."""
    ours, theirs = finding.claim.method.title, finding.claim.reference.title
    difference, error = finding.difference, finding.error
    if not finding.complete or difference is None or error is None:
        return "Not all of its runs have ended, so there is no verdict."
    if difference:
        measure, place = finding.claim.measure, "above" if difference > 0 else "below"
        points_of, of = (" points", "") if measure.percent else ("", f" in {measure.axis}")
        sentence = f"{ours} is {measure.factor * abs(difference):.2f}{points_of} {place} {theirs}{of}"
        sentence += f", {abs(difference) / error:.1f} standard errors" if error else ", in every seed alike"
    else:
        sentence = f"{ours} is as good as {theirs}"
    own, constant = (mean(finding.numbers[name]) for name in ("method", "constant"))
    if own is not None and constant is not None:
        sentence += f". It is {'above' if own > constant else 'not above'} a constant prediction"
    return escape(f"{sentence}.")


def _linked(page: str, folder: Path) -> str:
    """The method's page; a link where it lies beside the code."""
    name = f"docs/methods/{page}"
    if not (file := DOCS / "methods" / page).is_file():
        return f"Equations and results: {name}"
    return f'Equations and results: <a href="{escape(os.path.relpath(file, folder))}">{name}</a>'


def _axis(finding: Finding) -> tuple[str, Sequence[str]]:
    """What the figure is drawn against: the test environments, or the rounds where there is but one."""
    environments = SCENARIOS[finding.claim.scenario].test_environments
    return ("test environment", environments) if len(environments) > 1 else ("round", ())


def _lines(finding: Finding) -> tuple[list[Line], dict[int, str]]:
    """The curves, and the names of their styles."""
    _, environments = _axis(finding)
    shown = {style: own for style, own in enumerate(finding.measured)}
    names = {style: own.side.title for style, own in shown.items()}
    if finding.oracle:
        shown[ORACLE], names[ORACLE] = finding.oracle, f"{finding.oracle.side.title}, no shortcut"
    results = {style: result for style, own in shown.items() if (result := _result(own))}
    if not results:
        return [], {}
    if environments:
        lines = [environment_line(style, result, "final", environments) for style, result in results.items()]
        x: Sequence[float] = range(len(environments))
        constant = [fmean(found.values[name] for found in finding.constant) for name in environments]
    else:
        factor = finding.claim.task.headline.factor
        lines = [curve_line(style, round_means(result, "value"), factor) for style, result in results.items()]
        x = [min(min(line.x) for line in lines), max(max(line.x) for line in lines)]
        constant = [fmean(found.average or 0.0 for found in finding.constant)] * 2
    factor = finding.claim.task.headline.factor
    lines.append(Line(CONSTANT, x, [factor * value for value in constant]))
    return lines, {style: names[style] for style in results} | {CONSTANT: "a constant"}


def _result(measured: Measured) -> Result | None:
    """A method's runs that have ended as reports have them; None where none has."""
    runs = [load(outcome.path) for outcome in measured.outcomes if outcome.summary]
    return result_of(runs, measured.side.title, measured.side.measured)
