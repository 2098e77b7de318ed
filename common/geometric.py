"""The weighted geometric mean, for a server over clients as for a client over mini-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from perennial.common.models import Tensors

FLOOR = 1e-10
"""What FedILC's code adds to every magnitude before the logarithm."""

Zeros = Literal["exclude", "official", "paper"]
"""Where a gradient of zero belongs: to neither sign; to the negative one, with magnitude `FLOOR`, as in FedILC's
code; to both, as in the paper, where a single zero makes the whole coordinate zero."""


class GeometricMean:
    """`(|E⁺|/E) (Π_{E⁺} |G_e|)^{1/|E⁺|} − (|E⁻|/E) (Π_{E⁻} |G_e|)^{1/|E⁻|}`, coordinate by coordinate.

    E⁺ and E⁻ are those of the E gradients that are positive and negative there (FedILC §3.1).
    With `agreement` τ a coordinate whose mean sign is below τ in magnitude becomes 0. Gradients come one by one;
    held are sums of logarithms, in float64, and counts, whatever their number.
    """

    def __init__(self, zeros: Zeros = "exclude", agreement: float = 0.0) -> None:
        self.zeros, self.agreement = zeros, agreement
        self.weight = 0
        """How many gradients have come."""
        self._like: Tensors = {}

    def add(self, gradient: Tensors) -> None:
        """Take in one gradient, of the same names and shapes as the others."""
        import torch

        flat = torch.cat([part.flatten() for part in gradient.values()]).double()
        if not self.weight:
            self._like = gradient
            self._logs = flat.new_zeros(2, len(flat))
            self._counts = torch.zeros_like(self._logs, dtype=torch.int32)
        logs = (flat.abs() + (FLOOR if self.zeros == "official" else 0.0)).log()
        for sign, members in enumerate((flat > 0, flat < 0)):
            self._logs[sign] += torch.where(members, logs, 0.0)
            self._counts[sign] += members
        self.weight += 1

    def result(self) -> Tensors:
        """The mean so far, in the shapes and types that came in. Raises `ValueError` before the first `add`."""
        import torch

        if not self.weight:
            raise ValueError("the mean of nothing")
        (positive, negative), (up, down) = self._counts, self._logs
        zeros = self.weight - positive - negative
        agrees = (positive - negative).abs() >= self.agreement * self.weight
        if self.zeros == "official":
            negative, down = negative + zeros, down + zeros * math.log(FLOOR)
        elif self.zeros == "paper":
            agrees &= zeros == 0
        value = torch.where(agrees, self._group(positive, up) - self._group(negative, down), 0.0)
        parts = torch.split(value, [part.numel() for part in self._like.values()])
        return {
            name: part.view_as(like).to(like.dtype)
            for (name, like), part in zip(self._like.items(), parts, strict=True)
        }

    def _group(self, count: Tensor, logs: Tensor) -> Tensor:
        return count.double() / self.weight * (logs / count.clamp(min=1)).exp()
