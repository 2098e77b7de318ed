"""Counts and tables for the selection `split` that are made up, so that the answer is known."""

from pathlib import Path
from typing import Any

import numpy as np

P = (0.9, 0.8)
"""How often the colour agrees with the label in either environment."""


def coloured(a: float, d: float, size: int = 1000, p: tuple[float, ...] = P) -> dict[str, Any]:
    """The row of a model that is right on a share a of the samples with the right colour and d of the others.

    The references are perfect colour followers; two balanced classes; eight clients, whose accuracies under the
    references lie closely around their environment's p.
    """
    samples = [[[[round(size * own / 2), round(size * (1 - own) / 2)] for _ in "01"] for own in p] for _ in p]
    correct = [[[[n[0] * a, n[1] * d] for n in own] for own in by] for by in samples]
    each = np.array([-0.01, 0.01, 0.0, 0.0])
    return {
        "kind": "split", "round": 1, "model": "global", "environments": [f"p={own}" for own in p],
        "samples": samples, "correct": correct, "clients": [len(each)] * len(p),
        "accuracy": [[float((own + each).sum()) for own in p] for _ in p],
        "squares": [[float(((own + each) ** 2).sum()) for own in p] for _ in p],
    }  # fmt: skip


SITES = ("east", "north", "south", "west")


def own_tables(folder: Path, rows: int = 1000) -> dict[str, Any]:
    """Tables of four sites in two environments, and the scenario that announces them.

    A colour tells the label in 95 and in 75 of 100 rows, a faint shape in 75.
    """
    folder.mkdir()
    for number, site in enumerate(SITES):
        draw = np.random.default_rng(number)
        label = draw.integers(0, 2, rows)
        colour, shape = (
            np.where(draw.random(rows) < p, label, 1 - label) for p in ((0.95, 0.75)[number % 2], 0.75)
        )
        lines = (f"{c},{s / 10},{y},{'ab'[number % 2]}" for c, s, y in zip(colour, shape, label, strict=True))
        (folder / f"{site}.csv").write_text("\n".join(["colour,shape,label,place", *lines]))
    return {
        "name": "own-data", "sites": SITES, "inputs": ("colour", "shape"), "environments": ("a", "b"),
        "environment_column": "place", "validation_fraction": 0.4,
    }  # fmt: skip
