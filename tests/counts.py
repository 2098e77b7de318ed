"""Counts of the selection `split` that are made up, so that the answer is known."""

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
