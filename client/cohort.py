"""Clients of a cohort whose work has the same shape, as one stack: which they are, and their one client half.

Every tensor of a stack has its clients as first axis: weights, data, what is received and what is kept. A client
half that says so (`Client.stacks`) does the work of all of them at once with `torch.func.vmap`, and a step costs
little more than one client's. The numbers are those of one client after the other but for rounding.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from perennial.client.request import Request
from perennial.client.state import Kept, Version
from perennial.client.trainer import PIECE, Client, Received, Reply, Site
from perennial.common.config import Engine, Task
from perennial.common.data.examples import ClientData, Examples
from perennial.common.mathematics.adam import STEPS
from perennial.common.models.memory import COPIES, activation_bytes, model_bytes
from perennial.common.models.network import Network
from perennial.common.privacy.secure_aggregation import TERMS
from perennial.common.utils.tensors import Tensors

T = TypeVar("T")

MOST_CLIENTS = 128
"""Clients in a stack."""
STACK_BYTES: dict[Engine, int] = {"loop": 0, "stack": 2**30, "auto": 2**25}
"""What a stack's models and activations may take. `auto`: about a processor's last cache, beyond which a stack is
no faster than its clients one by one."""
LEAST_CLIENTS: dict[Engine, int] = {"loop": 0, "stack": 2, "auto": 5}
"""Clients in a stack; in fewer, what a stack costs beyond its clients' arithmetic is more than what it saves."""
DATA_BYTES = 2**28
"""Of the samples in a stack, and of those in all stacks that are held for the next round."""


@dataclass(frozen=True)
class Work:
    """A request to a client half, checked and decoded, and the client that it is for."""

    message: Message
    request: Request
    action: str
    task: Task
    site: Site
    received: Received
    place: str
    """RUN/CLIENT, under which the client's versions lie."""
    versions: Sequence[Version]
    """Those that the client may start from, oldest first."""
    made_by: str
    before: Kept
    """What the newest of them has."""


# ---------------------------------------------------------------------- which clients make a stack


def shape(work: Work, half: type[Client[Any]]) -> Hashable:
    """What must be equal for works of a half to make one stack."""
    return (
        _environments(work) if half.by_environment and work.action != "evaluate" else (),
        work.action,
        work.request.task,
        work.request.run,
        work.request.round,
        repr(sorted(work.received.settings.items())),
        _shapes(work.received.arrays),
        _shapes(work.before),
        # Of the same number of steps with Adam, whose bias correction is one number.
        tuple((name, int(own[STEPS])) for name, own in sorted(work.before.items()) if STEPS in own),
        len(work.received.references),
        tuple((name, part.x.shape, part.x.dtype) for name, part in _samples_of(work)),
    )


def stackable(half: type[Client[Any]], message: Message) -> bool:
    """Whether this half does what is asked for a stack. What is masked for secure aggregation is one client's."""
    return message.metadata.message_type in vars(half).get("stacks", ()) and TERMS not in message.content


def stacks(works: Sequence[tuple[T, Work]], engine: Engine) -> Iterator[list[tuple[T, Work]]]:
    """Works of one `shape` in stacks of about the same size, in their order; none where stacks would not pay.

    How many there are in one depends on the sizes of model, mini-batches and data alone, so it is the same in
    every repetition.
    """
    task, action = works[0][1].task, works[0][1].action
    key = task.model, task.scenario.input_shape, task.predicts.outputs
    model, activations, convolves = model_bytes(*key), *activation_bytes(*key)
    data = sum(part.x.nbytes for _, part in _samples_of(works[0][1]))
    samples = 0 if action == "evaluate" else getattr(task.method, "batch_size", PIECE)
    own = COPIES * model + 2 * samples * activations + (data if action == "evaluate" else 0)
    most = min(MOST_CLIENTS, STACK_BYTES[engine] // own, DATA_BYTES // max(1, data))
    slower = engine == "auto" and convolves  # many convolutions at once are slower than each
    if most < LEAST_CLIENTS[engine] or slower:
        return
    for stack in evenly(works, most):
        if len(stack) >= LEAST_CLIENTS[engine]:
            yield stack


def evenly(items: Sequence[T], most: int) -> Iterator[list[T]]:
    """Items in runs of at most `most` items, whose lengths differ by one at most."""
    count = -(-len(items) // most)
    bounds = [len(items) * place // count for place in range(count + 1)] if count else []
    for start, end in pairwise(bounds):
        yield list(items[start:end])


def window(task: Task) -> int:
    """How many requests may be answered before the first reply is asked for."""
    model = model_bytes(task.model, task.scenario.input_shape, task.predicts.outputs)
    return max(1, min(MOST_CLIENTS, STACK_BYTES["stack"] // model))


def _shapes(records: Mapping[str, Tensors]) -> Hashable:
    return tuple(
        (record, tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()))
        for record, tensors in sorted(records.items())
    )


def _environments(work: Work) -> Hashable:
    """How many training samples there are of each environment."""
    found, counts = torch.unique(work.site.data.train.environment, return_counts=True)
    return tuple(found.tolist()), tuple(counts.tolist())


def _samples_of(work: Work) -> list[tuple[str, Examples]]:
    """The samples that an action may look at."""
    data = work.site.data
    held_out = [("", data.validation), *data.test.items()] if work.action == "evaluate" else []
    return [("", data.train), *held_out]


# ---------------------------------------------------------------------- what a stack is made of


@dataclass(frozen=True)
class StackedExamples(Examples):
    """As many samples of each client: `x` (clients, n, *input_shape), `y` and `environment` (clients, n)."""

    def __len__(self) -> int:
        return self.y.shape[1]

    def __getitem__(self, index: Tensor) -> "StackedExamples":
        """By number: the same of each client (b,) or its own (clients, b); or by a condition (clients, n)."""
        if index.dtype == torch.bool:
            counts = index.sum(dim=1).tolist()
            if len(set(counts)) > 1:
                raise TypeError("the clients of a stack must choose as many samples each")
            x, y, environment = (
                values[index].view(len(counts), counts[0], *values.shape[2:])
                for values in (self.x, self.y, self.environment)
            )
            return StackedExamples(x, y, environment)
        if index.dim() == 1:
            index = index.expand(len(self.y), -1)
        first = torch.arange(len(self.y), device=index.device)[:, None] * len(self)
        rows, size = (first + index).flatten(), index.shape

        def own(values: Tensor) -> Tensor:
            return values.flatten(0, 1).index_select(0, rows).view(*size, *values.shape[2:])

        return StackedExamples(own(self.x), own(self.y), own(self.environment))


register_pytree_node(  # within `vmap` one client's samples
    StackedExamples, lambda e: ([e.x, e.y, e.environment], None), lambda parts, _: Examples(*parts)
)


class _Linear(nn.Linear):
    """A linear layer to be mapped over weights, whose gradient comes to lie in memory as the weights do."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.mT).mT + self.bias


class StackNetwork(Network):
    """A `Network` to be mapped over weights."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        for layer in self._model.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = _Linear


@lru_cache(maxsize=8)
def _network(*settings: Any) -> StackNetwork:
    return StackNetwork(*settings)


class StackedData:
    """The training data of stacks, held for the next round as long as there is room."""

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[str, ...], StackedExamples] = OrderedDict()

    def train(self, works: Sequence[Work]) -> StackedExamples:
        """The clients' training data."""
        key = tuple(work.site.client for work in works)
        if key not in self._cached:
            self._cached[key] = _examples([work.site.data.train for work in works])
            while sum(cached.x.nbytes for cached in self._cached.values()) > DATA_BYTES:
                self._cached.popitem(last=False)
                if not self._cached:
                    return _examples([work.site.data.train for work in works])
        return self._cached[key]

    def clear(self) -> None:
        """Let go of all."""
        self._cached.clear()


def _examples(parts: Sequence[Examples]) -> StackedExamples:
    x, y, environment = zip(*((part.x, part.y, part.environment) for part in parts), strict=True)
    return StackedExamples(torch.stack(x), torch.stack(y), torch.stack(environment))


def _stacked(records: Sequence[Mapping[str, Tensors]]) -> dict[str, Tensors]:
    """Each client's records as one of a stack; what is the same for all takes no more memory than one."""

    def one(tensors: list[Tensor]) -> Tensor:
        first = tensors[0]
        if any(tensor is not first for tensor in tensors):
            return torch.stack(tensors)
        return first.expand(len(tensors), *first.shape)

    return {
        record: {name: one([own[record][name] for own in records]) for name in tensors}
        for record, tensors in records[0].items()
    }


# ---------------------------------------------------------------------- its work


def answers(half: type[Client[Any]], works: Sequence[Work], train: StackedExamples) -> list[tuple[Reply, Kept]]:
    """The reply of each client of a stack, and what it keeps from now on. Raises what the half raises.

    Nothing is changed: what is kept counts once it is stored.
    """
    first, count = works[0], len(works)
    data = ClientData(train, train, {})
    if first.action == "evaluate":
        parts = [work.site.data for work in works]
        test = {name: _examples([own.test[name] for own in parts]) for name in parts[0].test}
        data = ClientData(train, _examples([own.validation for own in parts]), test)
    net = first.site.network
    site = Site(
        "",
        data,
        _network(net.settings, net.input_shape, net.outputs, net.device, net.bf16),
        first.site.seed,
        tuple(work.site.client for work in works),
        first.site.task,
        training=first.site.training,
    )
    before = _stacked([work.before for work in works])
    received = replace(
        first.received,
        arrays=_stacked([work.received.arrays for work in works]),
        references=[
            _stacked([{"": work.received.references[place]} for work in works])[""]
            for place in range(len(first.received.references))
        ],
    )
    client = half(site, first.task.method, dict(before))
    replies = _replies(client.answer(first.action, received), count)
    changed = {name: tensors for name, tensors in client.kept.items() if tensors is not before.get(name)}
    # Copies, since a part of a stack would hold the memory of all of it.
    own = {name: [_copies(tensors) for tensors in _unstacked(found, count)] for name, found in changed.items()}
    kept = [
        {name: own[name][place] if name in own else work.before[name] for name in client.kept}
        for place, work in enumerate(works)
    ]
    return list(zip(replies, kept, strict=True))


def _replies(reply: Reply, count: int) -> list[Reply]:
    arrays = {name: _unstacked(tensors, count) for name, tensors in reply.arrays.items()}
    metrics = {
        name: value.tolist() if isinstance(value, Tensor) else [value] * count
        for name, value in reply.metrics.items()
    }
    return [
        Reply(
            {name: found[place] for name, found in arrays.items()},
            {name: values[place] for name, values in metrics.items()},
            reply.settings,
        )
        for place in range(count)
    ]


def _unstacked(tensors: Tensors, count: int) -> list[Tensors]:
    """Each client's tensors of a stack's. One without axes, such as a number of steps, is the same for all."""
    parts = {
        name: tensor.detach().unbind() if tensor.dim() else (tensor.detach(),) * count
        for name, tensor in tensors.items()
    }
    if wrong := [name for name, own in parts.items() if len(own) != count]:
        raise ValueError(f"{wrong[0]!r} has no part for each of the {count} clients of the stack")
    return [{name: own[place] for name, own in parts.items()} for place in range(count)]


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}
