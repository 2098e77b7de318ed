"""How does it do where nobody trained? Every method is trained without each site in turn, and asked about it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from perennial.common.config import RunConfig
from perennial.common.errors import UserError
from perennial.server.study.compare import CONSTANT
from perennial.server.study.runs import Outcome, Watch, run_all

LEVEL = 0.95
"""Of the confidence intervals."""


@dataclass(frozen=True)
class Cell:
    """A method at a site: accuracies as fractions, means over seeds; None where it has no model to be asked."""

    site: str
    method: str
    unseen: float | None
    """Of the method's common model, trained without the site, on all its samples."""
    low: float | None
    high: float | None
    """Between them lies the accuracy with probability `LEVEL`, by the bootstrap over the site's samples."""
    samples: int
    own: float | None
    """Of the method's main model on the site's own test samples, trained with the site."""


def must_leave_out(config: RunConfig) -> None:
    """Raises `UserError` where no site can be left out."""
    if len(config.scenario.client_ids) < 3:
        raise UserError(
            f"--leave-one-site-out needs three sites or more, and {config.scenario.name} has "
            f"{', '.join(config.scenario.client_ids)}: without one, a single one would train alone"
        )
    if why_not := config.all_train():
        raise UserError(f"--leave-one-site-out is not possible with {why_not}")


def without_each(config: RunConfig) -> list[RunConfig]:
    """The configuration itself, and once without each site, evaluated after the last round."""
    last = config.model_copy(update={"references": "", "evaluate_every": config.rounds})
    return [last, *(last.model_copy(update={"test_sites": (site,)}) for site in config.scenario.client_ids)]


def leave_one_site_out(
    methods: Mapping[str, RunConfig], seeds: int, out: Path, jobs: int, watch: Watch = lambda _: None
) -> tuple[list[Cell], list[str]]:
    """A cell for each site and method, and a sentence for each run that is not in it.

    `methods` are configurations by title. Raises `UserError` where no site can be left out, and as `run_all` does.
    """
    for config in methods.values():
        must_leave_out(config)
    runs = [
        run
        for config in methods.values()
        for seed in range(seeds)
        for run in without_each(config.model_copy(update={"seed": seed}))
    ]
    outcomes = run_all(runs, out, jobs, watch)
    sites = next(iter(methods.values())).scenario.client_ids
    each, cells = len(sites) + 1, list[Cell]()
    for number, title in enumerate(methods):
        own = outcomes[number * seeds * each : (number + 1) * seeds * each]
        cells += [_cell(site, title, own[::each], own[place::each]) for place, site in enumerate(sites, 1)]
    cells += constant_cells(next(iter(methods.values())))
    troubles = [outcome.trouble for outcome in outcomes if outcome.trouble]
    return sorted(cells, key=lambda cell: cell.site), list(dict.fromkeys(troubles))


def constant_cells(config: RunConfig) -> list[Cell]:
    """The predictor that always says one label: the other sites' most frequent one, and the site's own."""
    import torch

    from perennial.server.study.constant import constant_rows

    scenario, cells = config.scenario, []
    data = [scenario.client_data(number, config.seed, config.data_folder) for number in range(scenario.clients)]
    labels = [torch.bincount(own.train.y, minlength=scenario.classes) for own in data]
    for number, site in enumerate(scenario.client_ids):
        tested = data[number].for_testing(scenario.train_environments, scenario.test_environments).test.values()
        others = int((sum(labels) - labels[number]).argmax())
        samples = sum(len(part) for part in tested)
        unseen = sum(int((part.y == others).sum()) for part in tested) / samples
        own = [row for row in constant_rows(site, data[number]) if row["split"] == "test"]
        right, here = (sum(sum(row[name]) for row in own) for name in ("correct", "count"))
        low, high = interval(unseen, samples)
        cells.append(Cell(site, CONSTANT, unseen, low, high, samples, right / here if here else None))
    return cells


def _cell(site: str, method: str, whole: Sequence[Outcome], without: Sequence[Outcome]) -> Cell:
    common = [name for name in without[0].config.method.evaluates if name != "personal"]
    headline = whole[0].config.method.evaluates[-1]
    unseen = [run.counts(common[0], "test", site) for run in without] if common else []
    unseen = [(right, total) for right, total in unseen if total]
    own = [right / total for right, total in (run.counts(headline, "test", site) for run in whole) if total]
    samples = unseen[0][1] if unseen else 0
    mean = fmean(right / total for right, total in unseen) if unseen else None
    low, high = (None, None) if mean is None else interval(mean, samples)
    return Cell(site, method, mean, low, high, samples, fmean(own) if own else None)


def interval(accuracy: float, samples: int) -> tuple[float, float]:
    """The bootstrap's percentiles: right answers among n resampled ones are binomial, so nothing is drawn."""
    from scipy.stats import binom

    tail = (1 - LEVEL) / 2
    low, high = binom.ppf([tail, 1 - tail], samples, accuracy)
    return float(low) / samples, float(high) / samples


def sites_table(cells: Sequence[Cell]) -> Table:
    """Site × method."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    table = Table(
        title="trained without the site, and asked about it",
        caption="accuracy in % of the common model on all samples of a site that did not train, with its 95 % "
        "interval (bootstrap over the site's samples); in brackets, of the main model on the site's own test "
        "samples when it trains, too; means over seeds",
    )
    table.add_column("site")
    table.add_column("samples", justify="right")
    for method in methods:
        table.add_column(method, justify="right")
    for site in dict.fromkeys(cell.site for cell in cells):
        own = {cell.method: cell for cell in cells if cell.site == site}
        most = max(cell.samples for cell in own.values())
        table.add_row(site, str(most), *(_text(own[method]) for method in methods))
    return table


def _text(cell: Cell) -> str:
    own = "–" if cell.own is None else f"{100 * cell.own:.1f}"
    if cell.unseen is None or cell.low is None or cell.high is None:
        return f"– ({own})"
    return f"{100 * cell.unseen:.1f} [{100 * cell.low:.1f}, {100 * cell.high:.1f}] ({own})"


def sites_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Plain data, fractions instead of percent."""
    return [asdict(cell) for cell in cells]
