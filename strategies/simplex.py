"""The simplex {x ≥ 0, Σx = mass}, on which a server's weights of its clients lie."""

import torch
from torch import Tensor


def project(point: Tensor, mass: float = 1.0) -> Tensor:
    """The nearest point of the simplex to `point` (n ≥ 1 numbers), by sorting (Duchi et al. 2008, Figure 1)."""
    descending = point.sort(descending=True).values
    thresholds = (descending.cumsum(0) - mass) / torch.arange(1, len(point) + 1)
    positive = max(1, int((descending > thresholds).sum()))  # at mass 0 there is none
    return (point - thresholds[positive - 1]).clamp(min=0)
