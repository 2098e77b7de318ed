"""Kaplan and Meier's curve, straight from its definition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def kaplan_meier(times: npt.NDArray[Any], happened: npt.NDArray[np.bool_], at: Sequence[float]) -> list[float]:
    """The share of those at risk that goes on without it, after each of the times `at`."""
    curve = []
    for end in at:
        share = 1.0
        for time in np.unique(times[happened & (times <= end)]):
            share *= 1 - (happened & (times == time)).sum() / (times >= time).sum()
        curve.append(float(share))
    return curve
