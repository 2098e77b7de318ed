"""Metrics as counts and sums, so that any mean over samples, clients or environments can be formed exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COUNTED = ("count", "correct", "loss")
"""Columns that every evaluation has of a model on a split, with one number for each environment."""
WRONG = 100.0
"""At which PyTorch's `BCELoss` cuts the loss of an impossible answer, too."""
MOST = 1e30
"""Cross-entropy of one sample, so that the sum over all is finite."""


@dataclass(frozen=True)
class Score:
    """How a model did on a set of samples: how many, how many right, sum of their cross-entropies.

    Of a stack of clients the latter two are tensors (clients,).
    """

    count: int
    correct: int
    loss: float


@torch.no_grad()
def score(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Score:
    """Score of `logits` (..., n, classes) against `labels` (..., n); the loss is summed in float64.

    With `weights` (classes,) a sample's loss counts as its class does.
    """
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    if weights is not None:
        losses = weights[labels] * losses
    return Score(
        count=labels.shape[-1],
        correct=number_or_stack((logits.argmax(dim=-1) == labels).sum(dim=-1)),
        loss=number_or_stack(losses.double().sum(dim=-1)),
    )


def usable_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (..., n, classes) as they are; where a model has diverged and a sample's make no loss, wrong ones.

    So a client whose own model has diverged stays in every mean, as one that is never right. The cross-entropy is
    then `WRONG` for two classes.
    """
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    wrong = -WRONG * F.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    return torch.where((losses < MOST)[..., None], logits, wrong)  # no comparison with NaN holds


def number_or_stack(value: Tensor) -> Any:
    """A scalar as a number; of a stack of clients, the tensor (clients,) as it is."""
    return value if value.dim() else value.item()


def column(values: Sequence[Any]) -> Any:
    """Numbers as a list; of a stack of clients, tensors (clients,) as one (clients, values)."""
    return torch.stack(list(values), dim=1) if values and isinstance(values[0], Tensor) else list(values)
