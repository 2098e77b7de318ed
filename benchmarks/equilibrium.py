"""Rounds until the games of FL Games end, against the number of clients, and the curves on the way.

    uv run python benchmarks/equilibrium.py [TABLE ...] [--rows TITLE/TITLE] [--seeds N] [--rounds N]
        [--out POOL] [--figures FOLDER]

Runs what is missing of the rows of `reproduce/TABLE.toml`, one after another, in the same pool and under the same
names as `perennial reproduce`. The figures are `equilibrium.svg`, where more than one table has a row, and
`TABLE-training.svg`. A game that has not ended by the last round counts neither in the mean nor in the figure; the
table says how many did end.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perennial.server.papers.kept import ended_in
from perennial.server.papers.reproduce import load_reproduction
from perennial.server.report.load import load
from perennial.server.report.pictures import training_picture
from perennial.server.results.figures import Line, standalone_figure
from perennial.server.study.batch import Outcome, run_all
from perennial.server.study.compare import base_config, spread

TABLES = ("cmnist-games", "cmnist-games-5", "cmnist-games-10")
ROWS = ("F-FL Games, sequential", "F-FL Games, parallel")


def outcomes(
    name: str, titles: Sequence[str], out: Path, seeds: int | None, rounds: int | None
) -> dict[str, list[Outcome]]:
    """The runs of a table's rows, by title and seed; those that are missing are made. Raises `UserError`."""
    table = load_reproduction(name)
    plan = table.plan(quick=False, seeds=seeds, rounds=rounds)
    found = {}
    for entry in plan.entries:
        if entry.label in titles:
            base = base_config(plan, entry, plan.entries)
            found[entry.label] = run_all(
                [base.model_copy(update={"seed": seed}) for seed in range(plan.seeds)], out, jobs=1
            )
    return found


def text(values: Sequence[float]) -> str:
    """Mean and standard deviation; a dash where nothing was measured."""
    return spread(values).text(1) if values else "–"


def main() -> None:
    """Run what is missing, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=TABLES)
    parser.add_argument("--rows", default="/".join(ROWS), help="titles, with / between them")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, default=Path("pool"))
    parser.add_argument("--figures", type=Path)
    given = parser.parse_args()

    titles = given.rows.split("/")
    shown = Table("table", "row", "clients", "ended", "rounds", "held-out", "test")
    lasted: dict[tuple[str, int], list[int]] = {}
    """By row and number of clients, the rounds of the games that have ended."""
    pictures: dict[str, str] = {}
    for name in given.tables:
        found = outcomes(name, titles, given.out, given.seeds, given.rounds)
        pictures[f"{name}-training"] = training_picture(
            {title: load(runs[0].path) for title, runs in found.items()}
        )
        for title, runs in found.items():
            final = [selected for run in runs if (selected := run.selected("final"))]
            clients, rounds = runs[0].config.scenario.clients, [ended_in(run.path) for run in runs]
            ended = lasted[title, clients] = [number for number in rounds if number]
            held_out = [100 * (one.validation or 0.0) for one in final]
            measured = map(text, (ended, held_out, [100 * one.pooled for one in final]))
            shown.add_row(name, title, str(clients), f"{len(ended)} of {len(runs)}", *measured)
    Console().print(shown)
    lines = []
    for style, title in enumerate(titles):
        points = {clients: spread(own) for (row, clients), own in lasted.items() if row == title and own}
        means = [point.mean for point in points.values()]
        lines.append(Line(style, list(points), means, [point.deviation or 0.0 for point in points.values()]))
    if len(given.tables) > 1:
        pictures["equilibrium"] = standalone_figure(
            lines, titles, "clients", "rounds to equilibrium", percent=False
        )
    if given.figures:
        given.figures.mkdir(parents=True, exist_ok=True)
        for name, svg in pictures.items():
            (given.figures / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
