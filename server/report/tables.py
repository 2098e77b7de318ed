"""The tables of a report: made from results alone, written as Markdown, HTML or CSV."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain

from rich import table as terminal

from perennial.common.measures.scores import BINS, SCORE_MEASURES
from perennial.server.report.load import Run
from perennial.server.report.results import Result, by_scenario, differing, over_seeds, settings_part
from perennial.server.results.formatting import members, size
from perennial.server.selection.summary import SPLIT, site_means
from perennial.server.study.compare import Spread, summarised, text

GUIDE = (
    "Numbers on test data. An environment's is the mean over clients; <em>worst</em> and <em>average</em> "
    "are over environments. A client's is the mean over its environments; <em>worst client</em> and "
    "<em>bottom decile</em> (mean of the worst tenth, at least one client) are over clients. A client with data "
    "of its own is a site. Mean ± standard deviation over seeds where there are several. <em>final</em> is the "
    "last round; <em>validation</em> is the round that is best on held-out training-environment data."
)
SPLIT_TEXT = (
    "<em>split</em> is the round that is best where models of single training environments are right and where "
    "they are wrong, on held-out training data (docs/selection.md)."
)
UNSEEN_TEXT = (
    "<em>unseen sites</em> trained nothing (test_sites); <em>training sites</em> are the others of the same run."
)
ORACLE = "<em>oracle</em> is the round that is best on test data: chosen on test data, not a fair result."


@dataclass(frozen=True)
class Table:
    """Text cells; the first `names` columns say what a line is about, the others hold numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    groups: Sequence[tuple[str, int]] = field(default_factory=tuple)
    """Titles over stretches of columns, the first over the names."""


def tables(found: Sequence[Result], selections: Sequence[str]) -> dict[str, list[Table]]:
    """The tables of every scenario."""
    return {
        scenario: [
            summary_table(own, selections),
            environment_table(own, selections),
            *(table for table in _if_any(own, selections)),
            *(membership_table(result, result.runs[0]) for result in clustered(own)),
        ]
        for scenario, own in by_scenario(found).items()
    }


def _if_any(found: Sequence[Result], selections: Sequence[str]) -> list[Table]:
    """The tables of a scenario that not every scenario has."""
    made = (
        site_table(found, selections),
        other_table(found, selections),
        target_table(found),
        score_table(found),
        settings_table(found),
    )
    return [table for table in made if table]


def _label(found: Sequence[Result]) -> str:
    return found[0].task.headline.label


def table_of(made: terminal.Table) -> Table:
    """What a terminal shows, its first column being names."""
    rows = list(zip(*(map(str, column.cells) for column in made.columns), strict=True))
    return Table(str(made.title), [str(column.header) for column in made.columns], rows)


def summary_table(found: Sequence[Result], selections: Sequence[str]) -> Table:
    """Worst, average, worst client or site and bottom decile, the selections side by side."""
    measures = _measures(found)
    head = ["method", "model", "seeds", *(measure for _ in selections for measure in measures)]
    rows = [
        [
            *(result.method, result.model, result.seeds),
            *(_cell(result.spread(selection, name), result) for selection in selections for name in measures),
        ]
        for result in found
    ]
    groups = [("", 3), *((titled(selection), len(measures)) for selection in selections)]
    return Table(f"Summary: test {_label(found)}", head, rows, 3, groups)


def environment_table(found: Sequence[Result], selections: Sequence[str]) -> Table:
    """Accuracy in every test environment and on held-out training data; the rounds that were picked."""
    names = environments_of(found)
    rows = [
        [
            *(result.method, result.model, titled(selection)),
            *(_cell(result.value(selection, name), result) for name in names),
            _cell(result.spread(selection, "held-out"), result),
            ", ".join(str(one.round) for one in result.picked(selection)) or "–",
        ]
        for result in found
        for selection in selections
    ]
    head = ["method", "model", "selection", *names, "held-out training", "round"]
    return Table(f"Test {_label(found)} by environment", head, rows, 3)


def site_table(found: Sequence[Result], selections: Sequence[str]) -> Table | None:
    """Accuracy at every site with data of its own; None where there are none."""
    sites = sites_of(found)
    rows = []
    for result in found:
        for selection in selections:
            means = [site_means(one.clients) for one in result.picked(selection)]
            known = [[own[name] for own in means if name in own] for name in sites]
            cells = (_cell(over_seeds(values), result) for values in known)
            rows.append([result.method, result.model, titled(selection), *cells])
    head = ["method", "model", "selection", *sites]
    return Table(f"Test {_label(found)} by site", head, rows, 3) if sites else None


def other_table(found: Sequence[Result], selections: Sequence[str]) -> Table | None:
    """The task's other measures, of all test samples together; None where accuracy is the only one."""
    others = found[0].task.others
    rows = [
        [
            *(result.method, result.model, titled(selection)),
            *(text(own.title, result.spread(selection, own.title), own, others) for own in others),
        ]
        for result in found
        for selection in selections
    ]
    head = ["method", "model", "selection", *(own.label for own in others)]
    return Table("Other measures, all test samples together", head, rows, 3) if others else None


def target_table(found: Sequence[Result]) -> Table | None:
    """The measures of each part of a target, of all test samples after the last round; None where it has one."""
    task, rows = found[0].task, []
    for result in found:
        each = [one.measures.targets for one in result.picked("final") if one.measures]
        for name in dict.fromkeys(chain(*each)):
            every = {
                own: [value for targets in each if (value := targets.get(name, {}).get(own.name)) is not None]
                for own in task.target_measures
            }
            cells = (text("", over_seeds(values), own) for own, values in every.items())
            rows.append([result.method, result.model, name, *cells])
    head = ["method", "model", task.prediction.of, *(own.label for own in task.target_measures)]
    title = f"By {task.prediction.of}, all test samples together after the last round"
    return Table(title, head, rows, 3) if rows else None


def score_table(found: Sequence[Result]) -> Table | None:
    """What test samples by score say after the last round; None where they were not counted."""
    rows, sites = [], sites_of(found)
    for result in found:
        scores = [one.scores for one in result.picked("final") if one.scores]
        each = [own.clients if sites else own.environments for own in scores]
        lines = [(name, [own[name] for own in each if name in own]) for name in dict.fromkeys(chain(*each))]
        for name, parts in [*lines, *([("all", [own.all for own in scores])] if scores else [])]:
            values = [[getattr(part, measure) for part in parts] for measure in SCORE_MEASURES]
            spreads = (over_seeds(value for value in own if value is not None) for own in values)
            rows.append(
                [result.method, result.model, scores[0].positive, name, *(text("", own) for own in spreads)]
            )
    where = "site" if sites else "environment"
    head = ["method", "model", "positive class", where, *SCORE_MEASURES.values()]
    title = f"Test samples by score after the last round, in %; AUROC and calibration error from {BINS} bins"
    return Table(title, head, rows, 4) if rows else None


def membership_table(result: Result, run: Run) -> Table:
    """Who was in which cluster at the end."""
    last = run.clusters[max(run.clusters)]
    return Table(
        f"{result.method}, seed {run.config.seed}: clusters in round {max(run.clusters)}",
        ["cluster", "clients", "who"],
        [[str(cluster), str(len(who)), ", ".join(who)] for cluster, who in members(last).items()],
        3,
    )


def run_table(found: Sequence[Result]) -> Table:
    """Every run folder once."""
    rows = [
        {
            "run folder": str(run.path),
            "scenario": result.scenario,
            "method": result.method,
            "runtime": run.config.runtime,
            "versions": run.versions or "not recorded",
            "seed": str(run.config.seed),
            "rounds": str(run.config.rounds),
            "seconds": f"{run.seconds:.1f}",
            "down per client and round": size(run.down),
            "up": size(run.up),
            "replies left out": str(run.left_out),
        }
        for result in found
        if result.headline
        for run in result.runs
    ]
    return Table("Runs", list(rows[0]), [list(row.values()) for row in rows], 5)


def settings_table(found: Sequence[Result]) -> Table | None:
    """What stands behind the numbers of numbered configurations; None where there are none."""
    numbered = [result for result in found if result.headline and "(#" in result.method]
    flat = [settings_part(result.runs[0].settings, scenario=False) for result in numbered]
    names = differing(flat)
    rows = [
        [result.method, *(_short(own.get(name, "")) for name in names)]
        for result, own in zip(numbered, flat, strict=True)
    ]
    return Table("Numbered configurations", ["method", *names], rows) if rows else None


def markdown_table(table: Table) -> str:
    """A pipe table under its title; titles over columns become part of the columns' names."""
    over = [title for title, span in table.groups for _ in range(span)] or [""] * len(table.head)
    head = [f"{title}: {name}" if title else name for title, name in zip(over, table.head, strict=True)]
    rule = ["---" if column < table.names else "---:" for column in range(len(head))]
    lines = [map(markdown_text, head), rule, *(map(markdown_text, row) for row in table.rows)]
    return f"**{markdown_text(table.title)}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def html_table(table: Table) -> str:
    """A table in a box of its own that scrolls where the screen is narrow."""
    groups = "".join(
        f'<th scope="colgroup" colspan="{span}">{escape(title)}</th>' if title else f'<td colspan="{span}"></td>'
        for title, span in table.groups
    )
    starts = {sum(span for _, span in table.groups[:index]) for index in range(1, len(table.groups))}
    kinds = [
        " ".join(["n"] * (column >= table.names) + ["start"] * (column in starts))
        for column in range(len(table.head))
    ]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, table.head, strict=True)
    )

    about = [(name, table.head.index(name)) for name in ("scenario", "method") if name in table.head]

    def line(name: str, *cells: str) -> str:
        others = (
            f'<td class="{"wrap" if len(cell) > 40 else kind}">{escape(cell)}</td>'
            for kind, cell in zip(kinds[1:], cells, strict=True)
        )
        whose = "".join(f' data-{key}="{escape((name, *cells)[place])}"' for key, place in about)
        wrap = ' class="wrap"' if len(name) > 40 else ""
        return (
            f'<tr{whose}><th scope="row"{wrap}>{escape(name).replace("=", "=<wbr>")}</th>{"".join(others)}</tr>\n'
        )

    body = "".join(line(*row) for row in table.rows)
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<caption>{escape(table.title)}</caption>\n<thead>{f'<tr>{groups}</tr>' if groups else ''}"
        f"<tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def to_csv(found: Sequence[Result], selections: Sequence[str]) -> str:
    """The numbers of the summary and of all environments in full, as fractions: a line per model and selection.

    `settings` are those that tell a method's configurations on a scenario apart.
    """
    measures = dict.fromkeys(["worst", *_measures(found), "held-out"])
    rivals: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for result in found:
        rivals.setdefault(_titles(result), []).append(result.runs[0].settings)
    rows = []
    for result in found:
        scenario, method = _titles(result)
        own = result.runs[0].settings
        apart = [f"{name}={own[name]}" for name in differing(rivals[scenario, method]) if name in own]
        for selection in selections:
            spreads = {measure: result.spread(selection, measure) for measure in measures}
            about = result.task.headline.title
            spreads |= {f"{about} {name}": result.value(selection, name) for name in environments_of(found)}
            spreads |= {own.title: result.spread(selection, own.title) for own in result.task.others}
            means = {title: one and one.mean for title, one in spreads.items()}
            deviations = {f"{title} sd": one and one.deviation for title, one in spreads.items()}
            rows.append(
                {
                    "scenario": scenario,
                    "method": method,
                    "settings": ", ".join(apart),
                    "model": result.model,
                    "selection": selection,
                    "chosen on test data": "yes" if selection == "oracle" else "no",
                    "seeds": result.seeds,
                    "rounds picked": " ".join(str(one.round) for one in result.picked(selection)),
                    **{
                        title: number
                        for pair in zip(means.items(), deviations.items(), strict=True)
                        for title, number in pair
                    },
                    "run folders": "; ".join(str(run.path) for run in result.runs),
                }
            )
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _titles(result: Result) -> tuple[str, str]:
    config = result.runs[0].config
    return config.scenario.name, config.method.title


def reading_guide(found: Sequence[Result], selections: Sequence[str]) -> str:
    """How to read the numbers, as HTML."""
    unseen = any(result.runs[0].config.test_sites for result in found)
    notes = {SPLIT_TEXT: SPLIT in selections, UNSEEN_TEXT: unseen, ORACLE: "oracle" in selections}
    return " ".join([GUIDE, *(text for text, there in notes.items() if there)])


def markdown_text(text: str) -> str:
    """Text that means nothing in Markdown."""
    text = re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)
    return " ".join(text.split())


def clustered(found: Iterable[Result]) -> list[Result]:
    """The results of methods that cluster, one of each configuration."""
    return [result for result in found if result.headline and result.runs[0].clusters]


def _measures(found: Sequence[Result]) -> list[str]:
    """The measures of the summary of all results, each once."""
    configs = [result.runs[0].config for result in found]
    every = (summarised(own.sites_with_data, own.scenario.test_environments) for own in configs)
    return list(dict.fromkeys(name for own in every for name in own))


def _cell(value: Spread | None, result: Result) -> str:
    return text("", value, result.task.headline)


def titled(selection: str) -> str:
    """A selection's name; one on test data says so."""
    return "oracle (chosen on test data)" if selection == "oracle" else selection


def sites_of(found: Iterable[Result]) -> list[str]:
    """The sites of results on data of their own; none where clients are parts of a data set."""
    scenarios = (result.runs[0].config.scenario for result in found)
    return list(dict.fromkeys(name for own in scenarios if own.dataset == "own" for name in own.client_ids))


def environments_of(found: Iterable[Result]) -> list[str]:
    """The test environments of all results, each once."""
    picked = (one for result in found for run in result.runs for one in run.models[result.model].values())
    return list(dict.fromkeys(name for one in picked for name in one.values))


def _short(text: str) -> str:
    try:
        return text if text.lstrip("-").isdecimal() else f"{float(text):.5g}"
    except ValueError:
        return text
