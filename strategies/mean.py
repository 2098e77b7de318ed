"""A weighted mean that sees one set of tensors at a time."""

import torch
from torch import Tensor

from perennial.common.utils.tensors import Tensors


class StreamingMean:
    """Weighted mean of equally shaped tensors, summed in float64 in the order of `add`.

    Memory is one float64 copy of the model, whatever the number of clients. Integer tensors (BatchNorm's batch
    counters) come out rounded, of their own type.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._names: list[str] = []
        self._sums: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        """Take `tensors` in with a weight > 0."""
        if not self._sums:
            self._names = list(tensors)
            self._dtypes = [tensor.dtype for tensor in tensors.values()]
            self._sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors.values()]
        torch._foreach_add_(self._sums, [tensors[name] for name in self._names], alpha=weight)
        self.weight += weight

    def result(self) -> Tensors:
        """The mean so far, in the types that came in. Raises `ValueError` before the first `add`."""
        if not self._sums:
            raise ValueError("the mean of nothing")
        means = torch._foreach_div(self._sums, self.weight)
        return {
            name: (mean if dtype.is_floating_point else mean.round()).to(dtype)
            for name, mean, dtype in zip(self._names, means, self._dtypes, strict=True)
        }


def mix(old: Tensors, new: Tensors, rate: float) -> Tensors:
    """`(1 − rate) old + rate new`, exactly `old` at 0 and `new` at 1; integer tensors are the new ones.

    Where the two are on different devices, on that of `new`.
    """
    return {
        name: torch.lerp(old[name].to(tensor.device), tensor, rate) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }
