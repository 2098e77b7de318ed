"""What a person sees of a run when it is done."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from perennial.common.config import RunConfig
from perennial.common.measures.scores import BINS, GROUPS, SCORE_MEASURES
from perennial.common.tasks import PredictionTask
from perennial.server.cli.console import out, print_lines
from perennial.server.cli.reference_lines import reference_lines
from perennial.server.results.formatting import members, percent, size
from perennial.server.run.folder import RunFolder, understood
from perennial.server.selection.split_rule import counted
from perennial.server.selection.summary import (
    AREAS,
    SPLIT,
    area_means,
    by_part,
    changed_line,
    overall,
    overall_of,
    site_means,
    summarise,
)


def print_run(path: Path, as_json: bool, oracle: bool, report: bool = False) -> None:
    """The result of a run folder, and with `report` its page; the last line says where that is, or how to get it.

    Raises `UserError` if there is no result, or its files are damaged.
    """
    with understood(path):
        folder = RunFolder.open(path)
        config, (summary, rows, unfinished) = folder.config(), folder.so_far()
        if oracle:
            summary |= summarise(config, rows, seconds=summary["wall_seconds"], oracle=True)
        if as_json:
            out.print_json(data=summary)
        else:
            _print(folder, config, summary, rows)
            print_lines([unfinished] if unfinished else [], "yellow")
    page = shlex.join(["perennial", "report", str(path)])
    if report:
        from perennial.server.report.page import write_page

        file = path / "report.html"
        write_page([path], file, oracle)
        page = str(file)
    if not as_json:
        print_lines([f"page of this run: {page}"])


def _print(folder: RunFolder, config: RunConfig, summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for part, models in by_part(config, summary["models"], rows).items():
        if part and not any(found["clients"] for own in models.values() for found in own.values()):
            continue  # no model there
        shown = {**summary, "models": models}
        for table in (
            headline_table(shown, config.predicts, part),
            measures_table(shown, config),
            target_table(shown, config.predicts),
            score_table(shown),
        ):
            if table:
                out.print(table)
    if clusters := cluster_table(rows):
        out.print(clusters)
    print_lines(reference_lines(folder.path, config, summary))
    traffic = f"{traffic_line(summary)}; {summary['wall_seconds']:.1f} s"
    print_lines(filter(None, (traffic, privacy_line(summary), insists_line(summary), split_line(summary))))
    print_lines(cautions(config, summary), "yellow")
    print_lines([f"run folder: {folder.path}"])


def headline_table(summary: dict[str, Any], task: PredictionTask, part: str = "") -> Table:
    """The task's headline measure on test data (mean over clients) of every model and selection, per test
    environment; `part`: of whom.

    Of sites with own data one row for each: the mean over its test environments. Their only environment has none.
    """
    measure = task.headline
    columns = {
        f"{model}\n{selection}": found
        for model, selections in summary["models"].items()
        for selection, found in selections.items()
    }
    every = list(columns.values())
    some = summary.get("evaluated")
    table = Table(
        title=f"{summary['method']} on {summary['scenario']}, {summary['rounds']} rounds, seed {summary['seed']}"
        + (f"\n{part}" if part else ""),
        caption=f"test {measure.label}, mean over clients"
        + (f" ({len(some['clients'])} drawn of {some['of']})" if some else "")
        + (
            "; oracle: round chosen on test data"
            if any("oracle" in own for own in summary["models"].values())
            else ""
        ),
    )
    environments = list(dict.fromkeys(name for found in every for name in found[measure.name]))
    own_data = summary["scenario"] == "own-data"
    sites = sorted({name for found in every for name in found["clients"]}) if own_data else []
    table.add_column("site" if sites else "test\nenvironment", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right", overflow="fold")

    def add(title: str, values: Iterable[float | None], style: str = "") -> None:
        table.add_row(title, *map(measure.text, values), style=style)

    if sites:
        by_site = [site_means(found["clients"]) for found in every]
        for site in sites:
            add(site, (own.get(site) for own in by_site))
        table.add_section()
    for name in environments if len(environments) > 1 or not sites else ():
        add(f"environment {name}" if sites else name, (found[measure.name].get(name) for found in every))
    table.add_section()
    # Where clients' test sets are of one size, the two means are the same number.
    unequal = any(measure.text(found["pooled"]) != measure.text(found["average"]) for found in every)
    numbers = [{**overall_of(found, sites, environments, measure), "pooled": found["pooled"]} for found in every]
    for row in overall(sites, environments) + ("pooled",) * unequal:
        add(row, (own[row] for own in numbers), style="bold")
    if any(found.get("areas") for found in every):
        table.add_section()
        means = [area_means(found["areas"]) for found in every]
        for name in AREAS:
            table.add_row(name.replace("_", " "), *(percent(own.get(name)) for own in means))
        losses = [found["loss"] for found in every]
        table.add_row("loss", *("–" if loss is None else f"{loss:.4f}" for loss in losses))
    table.add_section()
    add("held-out training", (found["validation"] for found in every))
    if any(found.get(SPLIT) for found in every):
        for title, name in (("split", "score"), ("its standard error", "error"), ("best constant", "constant")):
            table.add_row(title, *(percent(found.get(SPLIT, {}).get(name)) for found in every))
    table.add_row("round", *(str(found["round"]) for found in every))
    return table


def measures_table(summary: Mapping[str, Any], config: RunConfig) -> Table | None:
    """All measures of each model after the last round, all test samples together; None where accuracy is the only
    one."""
    task = config.predicts
    if not task.others:
        return None
    own, where = ("clients", "site") if config.sites_with_data else ("environments", "environment")
    table = Table(
        title=f"all test samples together, after round {summary['rounds']}",
        caption=task.about,
    )
    table.add_column("model", no_wrap=True)
    table.add_column(where, no_wrap=True)
    measures = (task.headline, *task.others)
    for measure in measures:
        table.add_column(measure.label.replace(" ", "\n"), justify="right")
    for model, selections in summary["models"].items():
        found = selections["final"]["measures"]
        for name, values in [*found[own].items(), ("all", found["all"])]:
            cells = (measure.text(values[measure.name]) for measure in measures)
            table.add_row(model, name, *cells, style="bold" if values is found["all"] else "")
        table.add_section()
    return table


def target_table(summary: Mapping[str, Any], task: PredictionTask) -> Table | None:
    """The measures of each part of a target after the last round, all test samples together; None where it has but
    one."""
    finals = {model: found["final"].get("measures", {}) for model, found in summary["models"].items()}
    every = {model: found["targets"] for model, found in finals.items() if "targets" in found}
    if not every:
        return None
    table = Table(title=f"by {task.prediction.of}, all test samples together, after round {summary['rounds']}")
    table.add_column("model", no_wrap=True)
    table.add_column(task.prediction.of, overflow="fold")
    for measure in task.target_measures:
        table.add_column(measure.label.replace(" ", "\n"), justify="right")
    for model, targets in every.items():
        for name, values in targets.items():
            table.add_row(model, name, *(measure.text(values[measure.name]) for measure in task.target_measures))
        table.add_section()
    return table


def score_table(summary: Mapping[str, Any]) -> Table | None:
    """What test samples by score say of each model after the last round; None where they were not counted."""
    finals = {model: found["final"] for model, found in summary["models"].items()}
    every = {model: found["scores"] for model, found in finals.items() if "scores" in found}
    if not every:
        return None
    positive = next(iter(every.values()))["positive"]
    own, where = ("clients", "site") if summary["scenario"] == "own-data" else ("environments", "environment")
    parts = {model: [*scores[own].items(), ("all", scores["all"])] for model, scores in every.items()}
    errors = [found["auroc_error"] or 0.0 for rows in parts.values() for _, found in rows]
    table = Table(
        title=f"class {positive} against the other, after round {summary['rounds']}",
        caption=f"in % of the test samples; AUROC from {BINS} bins of the score, by which it can be off by "
        f"{percent(max(errors))} at most; calibration error in {GROUPS} groups of bins",
    )
    table.add_column("model", no_wrap=True)
    table.add_column(where, no_wrap=True)
    for title in (f"{positive},\nof all", "sensi-\ntivity", "speci-\nficity", "AUROC", "calibr.\nerror"):
        table.add_column(title, justify="right", overflow="fold")
    for model, rows in parts.items():
        for name, found in rows:
            values = (percent(found[measure]) for measure in SCORE_MEASURES)
            counts = f"{found['positives']} of {found['samples']}"
            table.add_row(model, name, counts, *values, style="bold" if found is rows[-1][1] else "")
        table.add_section()
    return table


def cluster_table(rows: Iterable[Mapping[str, Any]]) -> Table | None:
    """Who was in which cluster after the last round, and how many clusters were chosen; None without clusters."""
    last = {row["kind"]: row for row in rows}
    if "clusters" not in last:
        return None
    chosen = last.get("heuristic")
    table = Table(
        title=f"clusters in round {last['clusters']['round']}",
        caption=f"chosen after round {chosen['round']}: {chosen['contexts']} clusters, μ = {chosen['mu']:.4g}"
        if chosen
        else None,
    )
    table.add_column("cluster", justify="right")
    table.add_column("clients", justify="right")
    table.add_column("who", overflow="fold")
    for cluster, clients in members(last["clusters"]["labels"]).items():
        table.add_row(str(cluster), str(len(clients)), ", ".join(clients))
    return table


def traffic_line(summary: dict[str, Any]) -> str:
    """Bytes per client and round, in the unit that reads best."""
    traffic = summary["bytes_per_client_and_round"]
    return f"per client and round: {size(traffic['down'])} down, {size(traffic['up'])} up"


def privacy_line(summary: dict[str, Any]) -> str:
    """What differential privacy promises, where it was on; else empty."""
    if not (found := summary.get("privacy")):
        return ""
    if found["epsilon"] is None:
        return "privacy: updates were clipped without noise, which promises nothing"
    return (
        f"privacy: ε = {found['epsilon']:.3g} at δ = {found['delta']:g} for everything that a client sent in to "
        f"{found['releases']} models (docs/privacy.md)"
    )


def insists_line(summary: Mapping[str, Any]) -> str:
    """Which sites take part in no run without protection, and what it is; empty where none says so."""
    sites: dict[str, list[str]] = {}
    for site, protection in sorted(summary.get("insists", {}).items()):
        sites.setdefault(protection, []).append(site)
    parts = [f"on {protection}: {', '.join(names)}" for protection, names in sorted(sites.items())]
    return f"sites that insist {'; '.join(parts)}" if parts else ""


def split_line(summary: Mapping[str, Any]) -> str:
    """On what the selection `split` rests, or why it does not speak; empty for a run without references."""
    if not (gate := summary.get(SPLIT)):
        return ""
    if not gate["open"]:
        return f"split does not speak: {gate['reason']}"
    found, of = list(summary["models"].values())[-1][SPLIT][SPLIT], counted(gate.get("answers", ()))
    return (
        f"split rests on {found['right']} held-out {of} that the references know and {found['wrong']} that "
        "they do not (docs/selection.md)"
    )


MAJORITIES = {
    "training": " in a round; where a method weighs by samples, the model is mostly its own",
    "test": "; `pooled` and the areas are mostly its own, the means over clients are not",
}
"""What it means that one client counts more than half of all samples."""


def cautions(config: RunConfig, summary: Mapping[str, Any]) -> Iterator[str]:
    """What somebody has to know who believes the numbers, a line each."""
    for entry in summary.get("changed", ()):
        yield changed_line(entry["round"], entry["settings"])
    if stopped := summary.get("stopped"):
        yield f"ended after round {stopped['round']} of {config.rounds}: {stopped['reason']}"
    for client, entry in sorted(summary["left_out"].items()):
        yield f"{client}: {entry['replies']} replies left out, the last in {entry['last']}"
    for what, found in summary.get("majority", {}).items():
        for client, share in found.items():
            yield f"{client} counts {100 * share:.0f} % of all {what} samples{MAJORITIES[what]}"
    every = [found for selections in summary["models"].values() for found in selections.values()]
    if untested := sorted({client for found in every for client, own in found["clients"].items() if not own}):
        yield f"{', '.join(untested)}: no test data, so not in any test {config.predicts.headline.title}"
    method = config.method
    for caution in filter(None, (method.caution(config.scenario), method.model_caution(config.model))):
        yield f"caution: {caution}"
    if config.tf32:
        yield "caution: with tf32=true products on a GPU have three digits, so a CPU has other numbers"
    if config.test_sites and not config.adapt and "global" not in method.evaluates:
        sites = ", ".join(config.test_sites)
        yield f"caution: {sites} has no row: the method {method.name} has no common model to evaluate there"
