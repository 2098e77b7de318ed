"""Clients of a cohort whose work has the same shape, as one stack: which they are, and their one client half.

Every tensor of a stack has its clients as first axis: weights, data, what is received and what is kept. A client
half that says so (`Client.stacks`) does the work of all of them at once with `torch.func.vmap`, and a step costs
little more than one client's. The numbers are those of one client after the other but for rounding.
"""

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from perennial.client.captured import Given, Graphs, possible
from perennial.client.request import Request
from perennial.client.shelf import Row, form_of
from perennial.client.state import Kept, Version
from perennial.client.trainer import PIECE, Client, Orders, Received, Reply, Site
from perennial.common.config import Engine, Task
from perennial.common.data.examples import ClientData, Examples
from perennial.common.mathematics.adam import STEPS
from perennial.common.models.memory import COPIES, activation_bytes, model_bytes
from perennial.common.models.network import Network
from perennial.common.privacy.secure_aggregation import TERMS
from perennial.common.stacks import StackReply
from perennial.common.utils.tensors import Tensors

T = TypeVar("T")

MOST_CLIENTS, MOST_ELSEWHERE = 512, 1024
"""Clients in a stack, on the CPU and on another device."""
STACK_BYTES: dict[Engine, int] = {"loop": 0, "stack": 2**30, "auto": 2**25}
"""What a stack's models and activations may take. `auto`: about a processor's last cache, beyond which a stack is
no faster than its clients one by one."""
LEAST_CLIENTS: dict[Engine, int] = {"loop": 0, "stack": 2, "auto": 5}
"""Clients in a stack; in fewer, what a stack costs beyond its clients' arithmetic is more than what it saves."""
DATA_BYTES = 2**28
"""Of the samples in a stack, and of those in all stacks that are held for the next round."""


@dataclass
class Work:
    """A request to a client half, checked and decoded, and the client that it is for."""

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
    form: str = ""
    """`asked_form`, where it may become one of a stack."""


# ---------------------------------------------------------------------- which clients make a stack


def shape(work: Work, half: type[Client[Any]]) -> Hashable:
    """What must be equal for works of a half to make one stack."""
    trained, evaluated, environments = work.site.forms
    evaluates = work.action == "evaluate"
    asked = (
        environments if half.by_environment and not evaluates else "",
        evaluated if evaluates else trained,
        work.form,
    )
    if not work.before:
        return asked
    # With Adam, whose bias correction is one number, of the same number of steps.
    steps = [(name, int(own[STEPS])) for name, own in work.before.items() if STEPS in own]
    return *asked, *[(name, form_of(own)) for name, own in work.before.items()], *steps


def asked_form(request: Request, action: str, received: Received) -> str:
    """What must be equal of what the clients of a stack are asked."""
    arrays = [(name, form_of(tensors)) for name, tensors in received.arrays.items()]
    scalars = sorted(received.settings.items())
    return repr((action, request.task, scalars, arrays, len(received.references)))


def stackable(half: type[Client[Any]], action: str, arrays: Container[str]) -> bool:
    """Whether this half does what is asked for a stack. What is masked for secure aggregation is one client's."""
    return action in vars(half).get("stacks", ()) and TERMS not in arrays


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
    device = works[0][1].site.network.device
    most = min(most_clients(device), STACK_BYTES[engine] // own, DATA_BYTES // max(1, data))
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


def window(task: Task, device: torch.device) -> int:
    """How many requests may be answered before the first reply is asked for."""
    model = model_bytes(task.model, task.scenario.input_shape, task.predicts.outputs)
    return max(1, min(most_clients(device), STACK_BYTES["stack"] // model))


def most_clients(device: torch.device) -> int:
    """The most in a stack: on the CPU more leave its cache."""
    return MOST_CLIENTS if device.type == "cpu" else MOST_ELSEWHERE


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

    def numbered(self) -> Mapping[int, Examples]:
        """The samples of each environment, which are found once: a GPU is waited for."""
        return self._numbered

    @cached_property
    def _numbered(self) -> Mapping[int, Examples]:
        return super().numbered()

    @cached_property
    def _first(self) -> Tensor:
        """The place of each client's first sample among those of all."""
        return torch.arange(len(self.y), device=self.y.device)[:, None] * len(self)

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
        rows, size = (self._first + index).flatten(), index.shape

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


def answers(
    half: type[Client[Any]], works: Sequence[Work], train: StackedExamples, graphs: Graphs
) -> tuple[Reply, dict[str, Tensors]]:
    """The stack's reply, and all that its clients keep from now on; a record that is as it was is empty.

    Raises what the half raises.

    Nothing is changed: what is kept counts once it is stored.
    """
    first = works[0]
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
    before = {name: _kept([work.before[name] for work in works], net.device) for name in first.before}
    received = replace(
        first.received,
        arrays=_stacked([work.received.arrays for work in works]),
        references=[
            _stacked([{"": work.received.references[place]} for work in works])[""]
            for place in range(len(first.received.references))
        ],
    )

    def work(given: Given, orders: Orders) -> tuple[Reply, dict[str, Tensors]]:
        own = replace(site, data=replace(data, train=given.train), orders=orders)
        client = half(own, first.task.method, dict(given.before))
        return client.answer(first.action, given.received), client.kept

    given = Given(received, before, train)
    key = (half, first.form, half.phase(first.task.method, site.training, received.round))
    if capturable(half, first, net):
        reply, after = graphs.do(key, work, given, site.seed, site.stack, data=not half.by_environment)
    else:
        reply, after = work(given, Orders())
    return reply, {name: {} if tensors is before.get(name) else tensors for name, tensors in after.items()}


def capturable(half: type[Client[Any]], work: Work, net: Network) -> bool:
    """Whether a stack's work may be captured: of a half that says so, a model that draws nothing, and no optimizer
    that counts its steps from round to round."""
    counts = any(STEPS in own for own in work.before.values())
    said = work.action in vars(half).get("captures", ())
    return said and possible(net.device) and not (net.draws or counts or work.received.references)


def stack_reply(reply: Reply, nodes: Sequence[int]) -> StackReply:
    """A stack's reply as it leaves. Raises `ValueError` where it is not one answer for each client."""
    arrays = {name: whole(tensors, len(nodes)) for name, tensors in reply.arrays.items()}
    found = StackReply(nodes, arrays, _numbers(reply.metrics, len(nodes)), reply.settings)
    found.content(0)  # raises for what no message could hold
    return found


def whole(tensors: Tensors, count: int) -> Tensors:
    """A stack's tensors, each with an axis of clients: one without axes, such as a number of steps, is the same
    for all. Raises `ValueError` for one that has not as many."""
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        found[name] = tensor if tensor.dim() else tensor.expand(count)
        if len(found[name]) != count:
            raise ValueError(f"{name!r} has no part for each of the {count} clients of the stack")
    return found


def _numbers(metrics: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """A stack's metrics on the host, which waits once for the device for all of one type."""
    found: dict[str, list[Any]] = {name: [value] * count for name, value in metrics.items()}
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
    for dtype in {value.dtype for value in tensors.values()}:
        alike = {name: value for name, value in tensors.items() if value.dtype == dtype}
        columns = [value.reshape(count, -1) for value in alike.values()]
        sizes = [column.shape[1] for column in columns]
        here = torch.split(torch.cat(columns, 1).cpu(), sizes, 1)
        for (name, value), part in zip(alike.items(), here, strict=True):
            found[name] = part.view(value.shape).tolist()
    return found


def _kept(own: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensors:
    """What each client of a stack keeps in a record, as one."""
    rows = [tensors for tensors in own if isinstance(tensors, Row)]
    if len(rows) == len(own) and all(row.shelf is rows[0].shelf for row in rows):
        return rows[0].shelf.take(rows, device)
    return {name: torch.stack([tensors[name].to(device) for tensors in own]) for name in own[0]}
