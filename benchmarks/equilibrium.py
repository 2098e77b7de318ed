"""Rounds until the games of FL Games end, against the number of clients, and the curves on the way.

    uv run python benchmarks/equilibrium.py [TABLE ...] [--rows TITLE/TITLE] [--seeds N] [--rounds N]
        [--out POOL] [--figures FOLDER] [--json]

Runs what is missing of the rows of `reproduce/TABLE.toml`, one after another, in the same pool and under the same
names as `perennial reproduce`, which has no row without all others. The figures are `equilibrium.svg`, where more
than one table has a row, and `TABLE-training.svg`. A game that has not ended by the last round counts neither in
the mean nor in the figure; the table says how many did end.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from server.compare import base_config
from server.figures import Line, standalone_figure
from server.folder import RunFolder
from server.pictures import training_picture
from server.report import load
from server.reproduce import load_reproduction
from server.runs import Outcome, run_all

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


def ending(run: Path) -> int | None:
    """The round in which a game ended."""
    return next((row["round"] for row in RunFolder.open(run).rows() if row["kind"] == "equilibrium"), None)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def main() -> None:
    """Run what is missing, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=TABLES)
    parser.add_argument("--rows", default="/".join(ROWS), help="titles, with / between them")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, default=Path("pool"))
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    titles = given.rows.split("/")
    rows: list[dict[str, Any]] = []
    pictures: dict[str, str] = {}
    points: dict[str, dict[int, list[int]]] = {title: {} for title in titles}
    for name in given.tables:
        found = outcomes(name, titles, given.out, given.seeds, given.rounds)
        pictures[f"{name}-training"] = training_picture(
            {title: load(runs[0].path) for title, runs in found.items()}
        )
        for title, runs in found.items():
            ended = [ending(run.path) for run in runs]
            final = [selected for run in runs if (selected := run.selected("final"))]
            clients = runs[0].config.scenario.clients
            points[title][clients] = [number for number in ended if number]
            rows.append(
                {
                    "table": name,
                    "row": title,
                    "clients": clients,
                    "ended": ended,
                    "held-out": [100 * (one.validation or 0.0) for one in final],
                    "test": [100 * one.pooled for one in final],
                }
            )
    if given.json:
        print(json.dumps(rows, indent=2))
    else:
        shown = Table("table", "row", "clients", "ended", "rounds", "held-out", "test")
        for row in rows:
            lasted = [number for number in row["ended"] if number]
            accuracies = spread(row["held-out"]), spread(row["test"])
            counted = f"{len(lasted)} of {len(row['ended'])}"
            shown.add_row(row["table"], row["row"], str(row["clients"]), counted, spread(lasted), *accuracies)
        Console().print(shown)
    lines = [
        Line(
            style,
            [clients for clients, ended in by_clients.items() if ended],
            [mean(ended) for ended in by_clients.values() if ended],
            [stdev(ended) if len(ended) > 1 else 0.0 for ended in by_clients.values() if ended],
        )
        for style, by_clients in enumerate(points.values())
    ]
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
