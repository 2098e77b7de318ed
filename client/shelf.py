"""What the clients of stacks keep: each of their tensors is a row of one tensor for all."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from logging import WARNING

import torch
from torch import Tensor

from perennial.common.flower.names import log
from perennial.common.utils.tensors import Tensors


def form_of(tensors: Mapping[str, Tensor]) -> str:
    """Names, shapes and types of one client's tensors."""
    if isinstance(tensors, Row):
        return tensors.shelf.form
    return repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()])


class Row(Mapping[str, Tensor]):
    """One client's tensors on a shelf, whose place is free again when nobody holds this."""

    __slots__ = ("number", "shelf")

    def __init__(self, shelf: "Shelf", number: int) -> None:
        self.shelf, self.number = shelf, number

    def __getitem__(self, name: str) -> Tensor:
        """A view, to be read as long as this is held."""
        return self.shelf.tensors[name][self.number]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shelf.tensors)

    def __len__(self) -> int:
        return len(self.shelf.tensors)

    def __del__(self) -> None:
        self.shelf.free.append(self.number)


class Shelf:
    """Room for tensors of one form, with as many rows as have been needed at a time."""

    def __init__(self, like: Tensors) -> None:
        """`like` are one client's."""
        self.form = form_of(like)
        self.tensors = {name: tensor.detach().new_empty((0, *tensor.shape)) for name, tensor in like.items()}
        self.free: deque[int] = deque()

    def put(self, stack: Tensors, count: int) -> list[Row]:
        """A row for each client of a stack (count, …), whose tensors are copied."""
        if len(self.free) < count:
            self._grow(count)
        rows = [Row(self, self.free.popleft()) for _ in range(count)]
        places = self._places(rows)
        for name, tensor in self.tensors.items():
            tensor.index_copy_(0, places, stack[name].detach().to(tensor.device))
        return rows

    def take(self, rows: Sequence[Row], device: torch.device) -> Tensors:
        """The tensors of some rows as a stack."""
        places = self._places(rows)
        return {name: tensor.index_select(0, places).to(device) for name, tensor in self.tensors.items()}

    def _places(self, rows: Sequence[Row]) -> Tensor:
        device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
        return torch.tensor([row.number for row in rows]).to(device)

    def _grow(self, count: int) -> None:
        """Room for at least `count` more; on the host, which is said once, where the device has none."""
        there = len(next(iter(self.tensors.values()), ()))
        more = max(count, there)
        try:
            self.tensors = {name: _longer(tensor, more) for name, tensor in self.tensors.items()}
        except torch.OutOfMemoryError:
            log(WARNING, "perennial: what clients keep has no room on the device; it is held in the host's memory")
            self.tensors = {name: _longer(tensor.cpu(), more) for name, tensor in self.tensors.items()}
        self.free.extend(range(there, there + more))


def _longer(tensor: Tensor, more: int) -> Tensor:
    return torch.cat([tensor, tensor.new_empty((more, *tensor.shape[1:]))])
