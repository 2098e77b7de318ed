"""Four messy tables: empty cells, columns of text, other shares of the classes at each site."""

from pathlib import Path

import numpy as np

SITES = ("cleveland", "hungary", "switzerland", "va")


def hospitals(folder: Path, rows: int = 40) -> None:
    """A table for each site; 15 % of the cells are empty."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for place, site in enumerate(SITES):
        ill = random.random(rows) < 0.3 + 0.1 * place
        columns = {
            "age": (50 + 6 * ill + random.normal(0, 8, rows)).round(),
            "pressure": (130 + 12 * ill + random.normal(0, 15, rows)).round(),
            "pain": np.where(random.random(rows) < 0.3 + 0.4 * ill, "typical", "none"),
            "thal": random.choice(["fixed", "normal"], rows),
        }
        cells = [["" if random.random() < 0.15 else str(value) for value in values] for values in columns.values()]
        lines = zip(*cells, np.where(ill, "ill", "well"), strict=True)
        text = "\n".join(",".join(line) for line in [(*columns, "label"), *lines])
        (folder / f"{site}.csv").write_text(text + "\n")
