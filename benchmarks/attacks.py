"""What hostile clients do to a run under each rule of `aggregation`, and what a rule costs when nobody is hostile.

    uv run --group dev python benchmarks/attacks.py [--minutes M] [--pool FILE] [--page FILE] [--figure FILE]

Each run is one line of the pool. Runs that are there already are not made again, so the command goes on where it
was stopped; with --minutes it begins no run after that. At its end it writes the tables between the markers of the
page, and the figure, from whatever the pool has; with --dry that is all it does.

*Attacks*: 1 to 3 of 8 clients, and the rule is told how many. *Price*: nobody is hostile and the rule withstands
2; two of the eight clients have the second environment, and the six others the first. cmnist is in small, and
needs its raw data (PERENNIAL_DATA); without them its runs are left out.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from byzantine_clients import ATTACKS, attack

from perennial.common.config import RunConfig, load_config
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenarios.colored import ColoredDigits
from perennial.common.utils.errors import RunStopped, UserError
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

METHODS = ("fedavg", "ditto", "fediir", "perinvfl", "fedsdr")
RULES = ("mean", "median", "trimmed-mean", "multi-krum", "geometric-median", "centred-clipping")
MIXED = tuple(f"nearest-neighbours + {rule}" for rule in RULES[1:])
ROUNDS, CLIENTS, MINORITY = 20, 8, (6, 7)
ATTACKED = [(attack, number) for attack in ATTACKS for number in (1, 2, 3)]
"""Each attack and number of hostile clients."""
SECOND = (0.8, 0.1)
"""P(colour agrees with the label) in the second environment: the thesis', and the other way round."""
PAGE = Path(__file__).parents[1] / "docs" / "robust.md"
POOL = Path(__file__).parents[1] / "results" / "attacks.jsonl"


class Minority(ColoredDigits):
    """Colored digits, of whose eight clients two have the second environment."""

    name: Literal["colored-digits-minority"] = "colored-digits-minority"  # type: ignore[assignment]

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        found = super().shares(seed, raw)
        return [replace(share, environments=(int(number in MINORITY),)) for number, share in enumerate(found)]


@dataclass(frozen=True)
class Cell:
    """One run."""

    scenario: str
    method: str
    rule: str
    attack: str = "none"
    hostile: int = 0
    second: float = 0.8
    seed: int = 0

    def config(self) -> RunConfig:
        """Raises `UserError` where the rule does not withstand so many."""
        before, _, rule = self.rule.rpartition(" + ")
        scenario: dict[str, Any] = {"name": self.scenario, "train_agreement": (0.9, self.second)}
        if self.scenario == "cmnist":
            scenario |= {"train_per_class": 200, "test_per_class": 40}
        settings = [f"aggregation={rule}", f"aggregation.before={before or 'nothing'}"]
        settings += [f"aggregation.hostile={self.hostile or 2}", f"seed={self.seed}", "cohort_engine=auto"]
        settings += [f"{name}={ROUNDS}" for name in ("rounds", "evaluate_every", "checkpoint_every")]
        return load_config(options={"method": self.method, "scenario": scenario}, settings=settings)


def cells() -> Iterator[Cell]:
    """All runs, the most telling ones first."""

    def price(
        second: float, methods: Sequence[str], rules: Sequence[str] = RULES, seed: int = 0
    ) -> Iterator[Cell]:
        yield from (
            Cell("colored-digits-minority", m, r, second=second, seed=seed) for m in methods for r in rules
        )

    def attacks(scenario: str, method: str, hostile: int, rules: Sequence[str] = RULES) -> Iterator[Cell]:
        yield from (Cell(scenario, method, r) for r in rules)
        yield from (Cell(scenario, method, r, a, hostile) for a in ATTACKS for r in rules)

    for seed in (0, 1, 2):
        for second in SECOND[::-1]:
            yield from price(second, METHODS, seed=seed)
    of_rules = ((RULES, ("colored-digits", "cmnist")), (MIXED, ("colored-digits",)))
    slow = METHODS[-1]
    for methods in (METHODS[:-1], (slow,)):
        for rules, scenarios in of_rules:
            for scenario in scenarios if methods != (slow,) else scenarios[:1]:
                for method in methods:
                    for hostile in (1, 2, 3):
                        yield from attacks(scenario, method, hostile, rules)
            for second in SECOND[::-1] if rules is MIXED else ():
                for seed in (0, 1, 2):
                    yield from price(second, methods, MIXED, seed)
    for hostile in (1, 2, 3):
        yield from attacks("cmnist", slow, hostile)


def accuracies(folder: RunFolder, model: str, clients: Sequence[str]) -> dict[str, float]:
    """After the last round, in %, means over these clients: on held-out data of their own environment, and of the
    test environments the least and the mean."""
    rows = [
        r for r in folder.rows() if r["kind"] == "evaluation" and r["model"] == model and r["client"] in clients
    ]
    by: dict[str, list[list[float]]] = {"validation": [], "test": []}
    for row in (row for row in rows if row["round"] == ROUNDS and row["split"] in by):
        by[row["split"]].append([100 * hit / n for hit, n in zip(row["correct"], row["count"], strict=True) if n])
    test = [fmean(column) for column in zip(*by["test"], strict=True)]
    held_out = fmean(found for row in by["validation"] for found in row)
    return {"held-out": held_out, "worst": min(test), "average": fmean(test)}


def run(cell: Cell) -> dict[str, Any]:
    """Make the run; its line of the pool."""
    try:
        config = cell.config()
    except UserError as error:
        return {**asdict(cell), "refused": str(error)}
    here, hostile = LocalRuntime(config), list(range(cell.hostile))
    if cell.attack != "none":
        attack(here, cell.attack, hostile)
    begun, ids = time.process_time(), config.scenario.client_ids
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder.create(Path(path) / "run", config)
        try:
            here.run(folder)
        except RunStopped as error:
            return {**asdict(cell), "stopped": str(error)}
        model = config.method.evaluates[-1]
        honest = [client for number, client in enumerate(ids) if number not in hostile]
        found = accuracies(folder, model, honest)
        if cell.scenario.endswith("minority"):
            for who, numbers in (("minority", MINORITY), ("majority", set(range(CLIENTS)) - set(MINORITY))):
                own = accuracies(folder, model, [ids[number] for number in numbers])
                found |= {f"{who} {name}": value for name, value in own.items()}
    return {**asdict(cell), **found, "seconds": time.process_time() - begun}


# ---------------------------------------------------------------------- the page


def shown(row: Mapping[str, Any] | None, *names: str) -> str:
    """A cell of a table."""
    if row is None:
        return ""
    if "refused" in row:
        return "refused"
    return "stopped" if "stopped" in row else " / ".join(f"{row[name]:.0f}" for name in names)


def table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """A table of a page, line by line; `rows` are names and cells."""
    yield f"\n{title}\n"
    yield f"| {' | '.join(columns)} |\n|---|" + "--:|" * (len(columns) - 1)
    yield from (f"| {name} | {' | '.join(cells)} |" for name, cells in rows)


def tables(pool: Mapping[Cell, Mapping[str, Any]]) -> Iterator[str]:
    """The page's tables, line by line."""

    def price(second: float, rule: str) -> list[str]:
        return [
            shown(_mean(of_price(pool, method, rule, second)), "worst", "minority held-out") for method in METHODS
        ]

    def attacked(scenario: str, method: str, attack: str) -> str:
        own = [(cell, row) for cell, row in pool.items() if (cell.scenario, cell.method) == (scenario, method)]
        kinds = [
            [r for c, r in own if c.attack == attack and (c.rule == "mean") == plain] for plain in (True, False)
        ]
        return " / ".join(map(_least, kinds))

    def hit(scenario: str, method: str, rule: str) -> list[str]:
        cells = {c: shown(pool.get(Cell(scenario, method, rule, *c)), "held-out") for c in ATTACKED}
        least = [" / ".join(cells[attack, number] or "·" for number in (1, 2, 3)) for attack in ATTACKS]
        return [shown(pool.get(Cell(scenario, method, rule)), "held-out"), *least] if any(cells.values()) else []

    for second in SECOND[::-1]:
        rules = [(rule, cells) for rule in (*RULES, *MIXED) if any(cells := price(second, rule))]
        title = f"**Price, second environment p = {second}** (worst / held-out accuracy of the minority)"
        yield from table(title, ("rule", *METHODS), rules)
    for scenario in ("colored-digits", "cmnist"):
        rows = [(method, [attacked(scenario, method, name) for name in ("none", *ATTACKS)]) for method in METHODS]
        title = f"**Attacks, {scenario}** (held-out accuracy of the honest; mean / rules)"
        yield from table(title, ("method", "none", *ATTACKS), rows)
    yield "\n<details><summary>Every rule and number of hostile clients</summary>"
    for scenario in ("colored-digits", "cmnist"):
        for method in METHODS:
            rules = [(rule, cells) for rule in (*RULES, *MIXED) if (cells := hit(scenario, method, rule))]
            title = f"**{method} on {scenario}** (held-out accuracy of the honest; 1 / 2 / 3 of 8 hostile)"
            yield from table(title, ("rule", "none", *ATTACKS), rules)
    yield "\n</details>"


def of_price(
    pool: Mapping[Cell, Mapping[str, Any]], method: str, rule: str, second: float
) -> list[Mapping[str, Any]]:
    """The runs without hostile clients, one of each seed."""
    wanted = "colored-digits-minority", method, rule, second
    return [row for cell, row in pool.items() if (cell.scenario, cell.method, cell.rule, cell.second) == wanted]


def _least(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of several runs, refused ones apart."""
    if any("stopped" in row for row in rows):
        return "stopped"
    found = [row["held-out"] for row in rows if "held-out" in row]
    return f"{min(found):.0f}" if found else "·"


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Over seeds."""
    rows = [row for row in rows if "worst" in row]
    names = ("worst", "minority held-out", "average")
    return {name: fmean(row[name] for row in rows) for name in names} if rows else None


def figure(pool: Mapping[Cell, Mapping[str, Any]], path: Path) -> None:
    """The price: `worst` of each method under each rule, as differences to the mean; a point is a seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perennial"
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(1, len(SECOND), figsize=(11, 4), sharey=True, layout="constrained")
    for axis, second in zip(axes, SECOND[::-1], strict=True):
        for place, method in enumerate(METHODS):
            for number, rule in enumerate(RULES):
                points = [row["worst"] for row in of_price(pool, method, rule, second) if "worst" in row]
                across = [place + 0.12 * (number - 2.5)] * len(points)
                axis.scatter(across, points, s=16, color=f"C{number}", label=rule if not place else None)
        axis.set_xticks(range(len(METHODS)), METHODS)
        axis.set_title(f"second environment p = {second}")
    axes[0].set_ylabel("worst test accuracy, %")
    axes[1].legend(fontsize="small")
    drawing.savefig(path, metadata={"Date": None})


def made(file: Path) -> dict[Cell, dict[str, Any]]:
    """The runs that a pool has."""
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {Cell(**{n: v for n, v in row.items() if n in Cell.__dataclass_fields__}): row for row in rows}


def text(pool: Mapping[Cell, Mapping[str, Any]]) -> str:
    """What stands between the page's markers."""
    wanted = list(dict.fromkeys(cells()))
    count = sum(cell in pool for cell in wanted)
    head = f"{count} of {len(wanted)} runs are made; an empty cell or a dot is a run that is not."
    return "\n".join([head, *tables(pool)])


def write(pool: Mapping[Cell, Mapping[str, Any]], page: Path, picture: Path) -> None:
    """The tables between the page's markers, and the figure."""
    begin, end = "<!-- attacks.py: begin -->", "<!-- attacks.py: end -->"
    head, _, rest = page.read_text().partition(begin)
    page.write_text(head + begin + "\n" + text(pool) + "\n\n" + end + rest.partition(end)[2])
    figure(pool, picture)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=float("inf"))
    arguments.add_argument("--pool", type=Path, default=POOL)
    arguments.add_argument("--page", type=Path, default=PAGE)
    arguments.add_argument("--figure", type=Path, default=PAGE.with_name("robust-price.svg"))
    arguments.add_argument("--dry", action="store_true", help="make no run")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    pool = made(given.pool)
    end = time.monotonic() + 60 * given.minutes
    for cell in () if given.dry else dict.fromkeys(cells()):
        if cell in pool or (cell.scenario == "cmnist" and not os.environ.get("PERENNIAL_DATA")):
            continue
        if time.monotonic() > end:
            break
        pool[cell] = run(cell)
        with given.pool.open("a") as file:
            file.write(json.dumps(pool[cell]) + "\n")
    write(pool, given.page, given.figure)


if __name__ == "__main__":
    main()
