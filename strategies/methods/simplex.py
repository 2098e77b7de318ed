"""The simplex {x ≥ 0, Σx = mass}, on which a server's weights of its clients lie."""

from collections.abc import Iterable, Mapping
from math import log

import torch
from torch import Tensor

from perennial.strategies.exchange import Exchange


def project(point: Tensor, mass: float = 1.0) -> Tensor:
    """The nearest point of the simplex to `point` (n ≥ 1 numbers), by sorting (Duchi et al. 2008, Figure 1)."""
    descending = point.sort(descending=True).values
    thresholds = (descending.cumsum(0) - mass) / torch.arange(1, len(point) + 1)
    positive = max(1, int((descending > thresholds).sum()))  # at mass 0 there is none
    return (point - thresholds[positive - 1]).clamp(min=0)


def told(weights: Mapping[str, float], exchanges: Iterable[Exchange]) -> tuple[dict[str, float], dict[str, float]]:
    """For the log, whose rows must not grow with the federation: the weights of the clients that a round has
    asked, and of all the least, the largest and the entropy (natural logarithm)."""
    asked = {client for each in exchanges for client in (*each.clients.values(), *each.left_out)}
    own = {client: weight for client, weight in weights.items() if client in asked}
    entropy = -sum(weight * log(weight) for weight in weights.values() if weight > 0)
    return own, {"least": min(weights.values()), "largest": max(weights.values()), "entropy": entropy}
