"""The work of a stack on a GPU as one CUDA graph: done again in later rounds without Python.

A graph reads and writes fixed memory. So what a round brings is copied there, the draws of all clients in one
transfer, and what comes out is copied from there. Which halves can be captured, `Client.captures` says.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from logging import WARNING
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from perennial.client.trainer import Orders, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.flower.names import log
from perennial.common.utils.tensors import Tensors

MOST = 8
"""Graphs that are held; each has memory of its own."""


@dataclass(frozen=True)
class Given:
    """All that a stack's work depends on, beside its clients' draws."""

    received: Received
    before: dict[str, Tensors]
    train: Examples

    def tensors(self) -> list[Tensor]:
        """In a fixed order; what is the same for all clients once."""
        found = tree_leaves([dict(self.received.arrays), self.before])
        found += [self.train.x, self.train.y, self.train.environment]
        return [tensor[:1] if _one_for_all(tensor) else tensor for tensor in found]

    def held(self, *, data: bool) -> "Given":
        """A copy in memory of its own, of the data only if `data`."""
        arrays, before = tree_map(_copy, [dict(self.received.arrays), self.before])
        train = self.train
        if data:
            train = replace(train, x=train.x.clone(), y=train.y.clone(), environment=train.environment.clone())
        return Given(replace(self.received, arrays=arrays), before, train)


Work = Callable[[Given, Orders], tuple[Reply, dict[str, Tensors]]]
"""A stack's reply, and what its clients keep from now on."""


class Graphs:
    """Works of stacks that have been captured, the latest ones."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, _Captured | None] = OrderedDict()
        self._seen: OrderedDict[Hashable, _Noted] = OrderedDict()

    def do(
        self, key: Hashable, work: Work, given: Given, seed: int, clients: Sequence[str], *, data: bool
    ) -> tuple[Reply, dict[str, Tensors]]:
        """The work, which is captured when it comes for the second time: so what comes once costs nothing. Then it
        is also done step by step, and what was captured is used only if it has the same numbers but for rounding.

        `key` is all that it depends on beside tensors and draws; without `data` it is of these data alone, too.
        """
        key = (key, None if data else id(given.train), tuple(map(_form, given.tensors())))
        if key not in self._graphs:
            if key not in self._seen:
                self._seen[key] = orders = _Noted(given.train)
                _forget(self._seen, 8 * MOST)
                return work(given, orders)
            graph, found = self._capture(work, given, self._seen.pop(key), data), work(given, Orders())
            if graph and not _close(graph.again(given, seed, clients), found):
                log(WARNING, "perennial: a stack's work goes on step by step, since captured it has other numbers")
                graph = None
            self._graphs[key] = graph
            _forget(self._graphs, MOST)
            return found
        self._graphs.move_to_end(key)
        graph = self._graphs[key]
        if graph is None:
            return work(given, Orders())
        return graph.again(given, seed, clients)

    def _capture(self, work: Work, given: Given, noted: "_Noted", data: bool) -> "_Captured | None":
        try:
            return _Captured(work, given, noted, data)
        except Exception as error:
            log(WARNING, "perennial: a stack's work goes on step by step, since it cannot be captured: %r", error)
            return None

    def clear(self) -> None:
        """Let go of all."""
        self._graphs.clear()
        self._seen.clear()


class _Captured:
    """One work in fixed memory."""

    def __init__(self, work: Work, given: Given, noted: "_Noted", data: bool) -> None:
        self._given, self._source, self._data = given.held(data=data), given.train, data
        self._orders = _Placed(noted, len(given.train.y), given.train.y.device)
        self._graph = Graph(lambda: work(self._given, self._orders))

    def again(self, given: Given, seed: int, clients: Sequence[str]) -> tuple[Reply, dict[str, Tensors]]:
        new, old = given.tensors(), self._given.tensors()
        if given.train is self._source:
            new, old = new[:-3], old[:-3]
        self._source = given.train
        if new:
            torch._foreach_copy_(old, new)
        self._orders.draw(seed, clients, given.received.round)
        reply, kept = self._graph.replay()
        arrays, metrics, after = tree_map(_copy, [dict(reply.arrays), dict(reply.metrics), kept])
        same = {name for name, tensors in kept.items() if tensors is self._given.before.get(name)}
        return replace(reply, arrays=arrays, metrics=metrics), {
            name: given.before[name] if name in same else tensors for name, tensors in after.items()
        }


class CudaGraph:
    """What a function without arguments does on the GPU."""

    def __init__(self, work: Callable[[], tuple[Reply, dict[str, Tensors]]]) -> None:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what libraries do at the first time is not to be captured
            work()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._found = work()

    def replay(self) -> tuple[Reply, dict[str, Tensors]]:
        """Does it again; what it found then, in the same memory every time."""
        self._graph.replay()
        return self._found


Graph = CudaGraph


def possible(device: torch.device) -> bool:
    """Whether there are graphs on a device."""
    return device.type == "cuda"


class _Noted(Orders):
    """Orders, and how many of which there were. The data are held, so that their id is no other's."""

    def __init__(self, train: Examples) -> None:
        self.train = train
        self.taken: dict[tuple[str, int], int] = {}

    def passes(
        self, seed: int, clients: str | Sequence[str], round_: int, purpose: str, count: int, device: torch.device
    ) -> Iterator[Tensor]:
        drawn = super().passes(seed, clients, round_, purpose, count, device)
        for number, order in enumerate(drawn, start=1):
            self.taken[purpose, count] = max(number, self.taken.get((purpose, count), 0))
            yield order


class _Placed(Orders):
    """Orders of fixed memory, which are drawn beforehand."""

    def __init__(self, noted: _Noted, clients: int, device: torch.device) -> None:
        self._taken = noted.taken
        sizes = [clients * count * passes for (_, count), passes in self._taken.items()]
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._all, sizes) if sizes else ()
        self._orders = {
            (purpose, count): part.view(passes, clients, count)
            for ((purpose, count), passes), part in zip(self._taken.items(), parts, strict=True)
        }

    def passes(
        self, seed: int, clients: str | Sequence[str], round_: int, purpose: str, count: int, device: torch.device
    ) -> Iterator[Tensor]:
        yield from self._orders[purpose, count]

    def draw(self, seed: int, clients: Sequence[str], round_: int) -> None:
        """The orders of a round into their memory, in one transfer."""
        here, drawn = torch.device("cpu"), []
        for (purpose, count), passes in self._taken.items():
            orders = super().passes(seed, clients, round_, purpose, count, here)
            drawn += [order.flatten() for order in islice(orders, passes)]
        if drawn:
            together = torch.cat(drawn)
            if self._all.is_cuda:
                together = together.pin_memory()
            self._all.copy_(together.to(self._all.device, non_blocking=True))


def _close(one: tuple[Reply, dict[str, Tensors]], other: tuple[Reply, dict[str, Tensors]]) -> bool:
    """Whether two answers are equal but for rounding."""
    pairs = zip(
        *(tree_leaves([dict(reply.arrays), dict(reply.metrics), kept]) for reply, kept in (one, other)),
        strict=True,
    )
    return all(
        torch.allclose(mine, its, rtol=1e-3, atol=1e-4, equal_nan=True)
        for mine, its in pairs
        if isinstance(mine, Tensor)
    )


def _one_for_all(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) > 1 and tensor.stride(0) == 0


def _copy(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value[:1].clone().expand_as(value) if _one_for_all(value) else value.clone()


def _form(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype


def _forget(held: "OrderedDict[Hashable, Any]", most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)
