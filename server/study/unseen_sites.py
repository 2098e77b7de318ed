"""How does it do where nobody trained? Every method is trained without each site in turn, and asked about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table

from perennial.common.config import RunConfig
from perennial.common.tasks import Measure, PredictionTask
from perennial.common.tasks.base import Summed, added_sums
from perennial.common.tasks.classes import ACCURACY
from perennial.common.utils.errors import UserError
from perennial.server.study.batch import Outcome, Watch, readable, run_all, troubles_of
from perennial.server.study.compare import CONSTANT, mean

LEVEL = 0.95
"""Of the confidence intervals."""

BY_SCORE = ("auroc", "sensitivity", "specificity")


@dataclass(frozen=True)
class Cell:
    """A method at a site: its headline measure, means over seeds; None where it has no model to be asked."""

    site: str
    method: str
    unseen: float | None
    """Of the method's common model, trained without the site, on its samples, those to adapt to left out."""
    low: float | None
    high: float | None
    """Between them lies the value of one seed with probability `LEVEL`, by the bootstrap over the samples."""
    samples: int
    adapted: float | None
    """Of the personal model that the site then makes of the few samples to adapt to, on the same others."""
    own: float | None
    """Of the method's main model on the site's own test samples, trained with the site."""
    positive: str = ""
    """The class that the next three are of, of two; means over seeds, on the samples of `unseen`."""
    auroc: float | None = None
    sensitivity: float | None = None
    specificity: float | None = None
    measure: Measure = ACCURACY
    """What the values are of."""


def must_leave_out(config: RunConfig) -> None:
    """Raises `UserError` where no site can be left out."""
    if len(config.scenario.client_ids) < 3:
        raise UserError(
            f"--leave-one-site-out needs three sites or more, and {config.scenario.name} has "
            f"{', '.join(config.scenario.client_ids)}: without one, a single one would train alone"
        )
    if why_not := config.all_train() or config.scenario.cannot_ask_sites():
        raise UserError(f"--leave-one-site-out is not possible with {why_not}")


def without_each_site(config: RunConfig, adapt: int) -> list[RunConfig]:
    """The configuration itself, and once without each site, evaluated after the last round."""
    last = config.model_copy(update={"references": "", "evaluate_every": config.rounds})
    sites = config.scenario.client_ids
    return [last, *(last.model_copy(update={"test_sites": (site,), "adapt": adapt}) for site in sites)]


def leave_one_site_out(
    methods: Mapping[str, RunConfig],
    seeds: int,
    out: Path,
    jobs: int,
    watch: Watch = lambda _: None,
    adapt: int = 0,
) -> tuple[list[Cell], list[str]]:
    """A cell for each site and method, and a sentence for each run that is not in it.

    `methods` are configurations by title. With `adapt` a site that is left out makes a personal model of so many
    of its samples, where the method can. Raises `UserError` where no site can be left out or one has too few
    samples, and as `run_all` does.
    """
    for config in methods.values():
        must_leave_out(config)
    first = next(iter(methods.values()))
    from perennial.server.study.constant import constant_sums  # with PyTorch

    sums = constant_sums([first.model_copy(update={"seed": seed}) for seed in range(seeds)], adapt)
    task = first.predicts
    constants = [_cell(task, site, CONSTANT, *zip(*own, strict=True)) for site, own in sums.items()]
    runs = [
        run
        for config in methods.values()
        for seed in range(seeds)
        for run in without_each_site(config.model_copy(update={"seed": seed}), adapt)
    ]
    outcomes = map(readable, run_all(runs, out, jobs, watch))
    sites, cells, ended = first.scenario.client_ids, list[Cell](), list[Outcome]()
    for title, config in methods.items():
        seeded = [list(islice(outcomes, len(sites) + 1)) for _ in range(seeds)]
        whole, *left_out = zip(*seeded, strict=True)
        common = next((name for name in config.method.evaluates if name != "personal"), "")
        for site, without in zip(sites, left_out, strict=True):
            unseen = [run.sums(common, "test", site) for run in without]
            adapted = [run.sums("personal", "test", site) for run in without]
            own = [run.sums(config.method.evaluates[-1], "test", site) for run in whole]
            cells.append(
                replace(_cell(task, site, title, unseen, adapted, own), **_by_score(without, common, site))
            )
        ended += [outcome for runs in seeded for outcome in runs]
    return sorted([*cells, *constants], key=lambda cell: cell.site), troubles_of(ended)


def _by_score(runs: Sequence[Outcome], model: str, site: str) -> dict[str, Any]:
    """Fields of a cell that runs have of a model; none where test samples are not counted by score."""
    finals = [run.summary.models[model]["final"] for run in runs if run.summary and model in run.summary.models]
    found = [final.scores.clients[site] for final in finals if final.scores and site in final.scores.clients]
    positive = next((final.scores.positive for final in finals if final.scores), "")
    return {"positive": positive, **{name: mean(getattr(part, name) for part in found) for name in BY_SCORE}}


def _cell(
    task: PredictionTask,
    site: str,
    method: str,
    unseen: Sequence[Summed],
    adapted: Sequence[Summed],
    own: Sequence[Summed],
) -> Cell:
    samples = max((count for count, _ in [*unseen, *adapted]), default=0)
    # Of a mean over seeds the interval is too wide, by how much the seeds' mistakes differ.
    count, sums = added_sums(task, unseen)
    seeds = sum(bool(number) for number, _ in unseen) or 1
    of_one = {name: [value / seeds for value in values] for name, values in sums.items()}
    low, high = (task.interval(round(count / seeds), of_one, LEVEL) if count else None) or (None, None)
    value, then, there = (mean(task.value(*part) for part in parts) for parts in (unseen, adapted, own))
    return Cell(site, method, value, low, high, samples, then, there, measure=task.headline)


def sites_table(cells: Sequence[Cell], adapt: int = 0) -> Table:
    """Site × method."""
    samples, then = "all samples", ""
    if adapt:
        samples = f"the samples but {adapt}"
        then = f"; behind an arrow, of the personal model that the site makes of these {adapt}, on the same others"
    told = any(cell.low is not None for cell in cells)
    interval = ", with its 95 % interval (one seed's, by the bootstrap over the samples)" if told else ""
    table = Table(
        title="trained without the site, and asked about it",
        caption=f"{cells[0].measure.label} of the common model on {samples} of a site that did not train{interval}"
        f"{then}; in brackets, of the main model on the site's own test samples when it trains, too; means over "
        "seeds",
    )
    counts = {cell.site: str(cell.samples) for cell in cells if cell.method == CONSTANT}
    return _by_site(table, cells, _text, {"samples": counts})


RARE = (
    "Where a class is rare or weighted, a good model may be right less often than the constant; then compare its "
    "AUROC with the constant's, 50 %."
)
"""What goes with `scores_table`."""


def scores_table(cells: Sequence[Cell]) -> Table | None:
    """Site × method: what accuracy does not tell of two classes; None where samples are not counted by score."""
    known = [cell for cell in cells if cell.auroc is not None]
    if not known:
        return None
    table = Table(
        title=f"the same, of class {next(cell.positive for cell in cells if cell.positive)} against the other",
        caption="AUROC in %; in brackets, sensitivity and specificity",
    )
    methods = {cell.method for cell in known}
    return _by_site(table, [cell for cell in cells if cell.method in methods], _scores_text, {})


def _by_site(
    table: Table, cells: Sequence[Cell], text: Callable[[Cell], str], more: Mapping[str, Mapping[str, str]]
) -> Table:
    """The table with a row for each site: `more` columns by name and site, then one of each method."""
    methods = dict.fromkeys(cell.method for cell in cells)
    table.add_column("site")
    for name in (*more, *methods):
        table.add_column(name, justify="right")
    for site in dict.fromkeys(cell.site for cell in cells):
        own = {cell.method: text(cell) for cell in cells if cell.site == site}
        table.add_row(site, *(column[site] for column in more.values()), *(own[method] for method in methods))
    return table


def _scores_text(cell: Cell) -> str:
    values = (ACCURACY.text(value, 1) for value in (cell.auroc, cell.sensitivity, cell.specificity))
    return "{} ({}, {})".format(*values)


def _text(cell: Cell) -> str:
    measure = cell.measure
    text = measure.text(cell.unseen, 1)
    if cell.low is not None and cell.high is not None:
        text += f" [{measure.text(cell.low, 1)}, {measure.text(cell.high, 1)}]"
    if cell.adapted is not None:
        text += f" → {measure.text(cell.adapted, 1)}"
    return f"{text} ({measure.text(cell.own, 1)})"


def sites_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Plain data, fractions instead of percent."""
    return [{**asdict(cell), "measure": cell.measure.name} for cell in cells]
