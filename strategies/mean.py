"""A weighted mean that sees one set of tensors at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perennial.common.stacks import Part
from perennial.common.utils.tensors import Tensors

PIECE = 2**22
"""Numbers of a stack that are made float64 at a time."""


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
        self._stack: Tensors = {}
        self._weights: list[float] = []
        """Of the clients of a stack that are to be taken in together."""

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        """Take `tensors` in with a weight > 0. A part of a stack must stay as it is until `result`."""
        self.weight += weight
        if isinstance(tensors, Part):
            if tensors.stack is not self._stack:
                self._take_stack()
                self._stack, self._weights = tensors.stack, [0.0] * len(next(iter(tensors.stack.values()), ()))
            if self._weights:
                self._weights[tensors.place] += weight
            return
        self._take_stack()
        self._begin(tensors)
        torch._foreach_add_(self._sums, [tensors[name] for name in self._names], alpha=weight)

    def add_stack(self, stack: Tensors, weights: Sequence[float]) -> None:
        """Take in the clients of a stack (clients, …), each with its weight, as `add` would one after the other.
        It must stay as it is until `result`."""
        self._take_stack()
        self._stack, self._weights = stack, [float(weight) for weight in weights] if stack else []
        for weight in weights:
            self.weight += weight

    def _begin(self, like: Tensors) -> None:
        if not self._sums:
            self._names = list(like)
            self._dtypes = [tensor.dtype for tensor in like.values()]
            self._sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in like.values()]

    def _take_stack(self) -> None:
        """The clients of the stack, each with its weight, in pieces of bounded memory."""
        if not self._weights:
            return
        stack, self._stack = self._stack, {}
        self._begin({name: tensor[0] for name, tensor in stack.items()})
        weights = torch.tensor(self._weights, dtype=torch.float64).to(self._sums[0].device)
        self._weights = []
        for name, total in zip(self._names, self._sums, strict=True):
            size = max(1, PIECE // max(1, total.numel()))
            pieces = torch.split(stack[name].reshape(len(weights), -1), size)
            for piece, share in zip(pieces, torch.split(weights, size), strict=True):
                total += (share @ piece.double()).view_as(total)

    def result(self) -> Tensors:
        """The mean so far, in the types that came in. Raises `ValueError` before the first `add`."""
        self._take_stack()
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
