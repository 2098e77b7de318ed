"""Tables of four sites that have every kind of target."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

SITES = ("east", "north", "south", "west")
COLUMNS = {"numbers": "days", "labels": "flu,cough", "event": "time,died"}


def hospitals(folder: Path) -> dict[str, npt.NDArray[np.float64]]:
    """A table of each site with two features and every kind of target; the numbers by column, NaN where empty."""
    rng, every = np.random.default_rng(0), dict[str, list[float]]()
    for place, site in enumerate(SITES):
        n = 150 + 20 * place
        age, dose = rng.normal(60 + 3 * place, 10, n), rng.normal(0, 1, n)
        time, gone = rng.exponential(np.exp(4 - (age - 60) / 20)) + 0.1, rng.exponential(90, n) + 0.1
        columns = {
            "age": age.round(2),
            "dose": dose.round(3),
            "days": (5 + 0.1 * age + dose + rng.normal(0, 0.5, n)).round(3),
            "flu": (rng.random(n) < 1 / (1 + np.exp(-(age - 60) / 6))).astype(float),
            "cough": np.where(rng.random(n) < 0.2, np.nan, rng.random(n) < 1 / (1 + np.exp(-2 * dose))),
            "time": np.minimum(time, gone).round(3),
            "died": (time <= gone).astype(float),
        }
        folder.mkdir(exist_ok=True)
        rows = zip(*columns.values(), strict=True)
        cells = (",".join("" if np.isnan(cell) else f"{cell:g}" for cell in row) for row in rows)
        (folder / f"{site}.csv").write_text("\n".join([",".join(columns), *cells]) + "\n")
        for name, values in columns.items():
            every.setdefault(name, []).extend(np.round(values, 3).tolist())
    return {name: np.array(values) for name, values in every.items()}


def dropped(task: str) -> list[str]:
    """The columns that are neither features nor targets of a task."""
    own = COLUMNS[task].split(",")
    return [name for name in ("days", "flu", "cough", "time", "died") if name not in own]
