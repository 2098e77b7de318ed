"""Metrics as counts and sums, so that any mean over samples, clients or environments can be formed exactly."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """How a model did on a set of samples: how many, how many right, sum of their cross-entropies."""

    count: int
    correct: int
    loss: float


@torch.no_grad()
def score(logits: Tensor, labels: Tensor) -> Score:
    """Score of `logits` (n, classes) against `labels` (n,); the loss is summed in float64."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return Score(
        count=labels.shape[0],
        correct=int((logits.argmax(dim=1) == labels).sum()),
        loss=float(losses.double().sum()),
    )
