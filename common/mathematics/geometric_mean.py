"""The weighted geometric mean, for a server over clients as for a client over mini-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from perennial.common.utils.tensors import Tensors

FLOOR = 1e-10
"""What FedILC's code adds to every magnitude before the logarithm."""
LEAST = 1e-300
"""Added elsewhere: nothing to a gradient, and the logarithm of zero is a number, which then counts 0 times."""

Zeros = Literal["exclude", "official", "paper"]
"""Where a gradient of zero belongs: to neither sign; to the negative one, with magnitude `FLOOR`, as in FedILC's
code; to both, as in the paper, where a single zero makes the whole coordinate zero."""


def summed(parts: Tensor) -> Tensor:
    """The sum along the first axis; of one part itself, since a sum would copy it."""
    return parts[0] if len(parts) == 1 else parts.sum(dim=0)


class GeometricMean:
    """`(|E⁺|/E) (Π_{E⁺} |G_e|)^{1/|E⁺|} − (|E⁻|/E) (Π_{E⁻} |G_e|)^{1/|E⁻|}`, coordinate by coordinate.

    E⁺ and E⁻ are those of the E gradients that are positive and negative there (FedILC §3.1).
    With `agreement` τ a coordinate whose mean sign is below τ in magnitude becomes 0. Gradients come one by one;
    held are, in float64, four sums whatever their number: how many are not zero, their signs, the logarithms of
    their magnitudes, and these with the sign. Half the sum and half the difference of two are those of E⁺ and E⁻.
    """

    def __init__(self, zeros: Zeros = "exclude", agreement: float = 0.0) -> None:
        self.zeros, self.agreement = zeros, agreement
        self.weight = 0
        """How many gradients have come."""
        self._dtypes: dict[str, torch.dtype] = {}
        self._sums: Tensors = {}

    def add(self, gradient: Tensors) -> None:
        """Take in one gradient, of the same names and shapes as the others."""
        self.add_all({name: part[None] for name, part in gradient.items()})

    def add_all(self, gradients: Tensors) -> None:
        """Take in several gradients, along the first axis of each tensor."""
        if not self.weight:
            self._dtypes = {name: parts.dtype for name, parts in gradients.items()}
            self._sums = {
                name: parts[0].double().new_zeros(4, *parts.shape[1:]) for name, parts in gradients.items()
            }
        floor = FLOOR if self.zeros == "official" else LEAST
        for name, parts in gradients.items():
            present, signs, logs, signed = self._sums[name]
            sign = parts.sign().double()
            nonzero, log = sign.square(), parts.double().abs().add_(floor).log_()
            present += summed(nonzero)
            signs += summed(sign)
            logs += summed(nonzero.mul_(log))
            signed += summed(sign.mul_(log))
        self.weight += len(parts)

    def result(self) -> Tensors:
        """The mean so far, in the shapes and types that came in. Raises `ValueError` before the first `add`."""
        if not self.weight:
            raise ValueError("the mean of nothing")
        return {name: self._mean(*self._sums[name]).to(dtype) for name, dtype in self._dtypes.items()}

    def _mean(self, present: Tensor, signs: Tensor, logs: Tensor, signed: Tensor) -> Tensor:
        agrees, zeros = signs.abs() >= self.agreement * self.weight, self.weight - present
        positive, negative = (present + signs) / 2, (present - signs) / 2
        up, down = (logs + signed) / 2, (logs - signed) / 2
        if self.zeros == "official":
            negative, down = negative + zeros, down + zeros * math.log(FLOOR)
        elif self.zeros == "paper":
            agrees &= zeros == 0
        return (self._group(positive, up) - self._group(negative, down)).where(agrees, 0.0)

    def _group(self, count: Tensor, logs: Tensor) -> Tensor:
        return count / self.weight * (logs / count.clamp(min=1)).exp()
