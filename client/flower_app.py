"""The client half of a method as the ClientApp of a plain Flower app: `perennial.client_app`."""

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from perennial.client.app import OneHandlerApp
from perennial.client.host import Host, client_class, pick_device
from perennial.client.state import Kept, Version, file_name, version_named
from perennial.client.trainer import Site
from perennial.common.config import Task
from perennial.common.flower.arrays import plain_record
from perennial.common.flower_app import PlainModel, module_of, plain_data, registered
from perennial.common.methods import method_class
from perennial.common.models.network import network
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import flattened, unflattened
from perennial.common.wire import CLIENT, CONFIG, METRICS, REFUSED, from_record, records, to_record

Data = Callable[[Context], Any]
"""Flower's context to `(train, test)`, each `(x, y)` or `(x, y, environment)`, tensors or arrays."""
PREFIX = "perennial/"
"""What the names of our records in Flower's state begin with."""


class ContextStates(MutableMapping[str, list[Version]]):
    """What a client keeps, in Flower's own state of it, which Flower hands from message to message.

    Records are named as files are. There are those of one run only: another one's take their place.
    """

    def __init__(self, state: RecordDict) -> None:
        self.state = state

    def __getitem__(self, place: str) -> list[Version]:
        own = [(name, record) for name, record in self._records().items() if name.rpartition("/")[0] == place]
        versions = [
            version
            for name, record in own
            if (version := version_named(name.rpartition("/")[2], partial(_kept, record)))
        ]
        if not versions:
            raise KeyError(place)
        return versions

    def __setitem__(self, place: str, versions: list[Version]) -> None:
        self.clear()
        for one in versions:
            self.state[f"{PREFIX}{place}/{file_name(one)}"] = plain_record(to_record(flattened(one.kept)))

    def __delitem__(self, place: str) -> None:
        for name in [name for name in self.state if name.startswith(f"{PREFIX}{place}/")]:
            del self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter({name.rpartition("/")[0] for name in self._records()})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _records(self) -> dict[str, ArrayRecord]:
        """By place and name of the version."""
        found = records(self.state, ArrayRecord).items()
        return {name.removeprefix(PREFIX): record for name, record in found if name.startswith(PREFIX)}


def _kept(record: ArrayRecord) -> Kept:
    return unflattened(from_record(record))


class PlainHost(Host):
    """A host whose clients' data an app's function gives."""

    def __init__(self, method: str, data: Data, model: PlainModel, device: torch.device) -> None:
        super().__init__({}, device=device)
        self.method, self.read, self.model = method, data, model
        self.module = module_of(model)
        self.context: Context

    def site(self, text: str, task: Task, number: int) -> Site:
        """The client that Flower's context is of, its data asked for once per process. Raises `UserError`."""
        if task.method.name != self.method:
            raise UserError(f"method: the ServerApp has {task.method.name!r}, and this ClientApp {self.method!r}")
        if task.model != self.model:
            module_of(PlainModel())  # which is none
        if not 0 <= number < (clients := task.scenario.clients):
            raise UserError(f"partition-id {number} is not possible; the ServerApp has clients={clients}")
        registered(self.module)  # Flower's simulation carries this host to processes that know none
        return super().site(text, task, number)

    def _load(self, task: Task, number: int) -> Site:
        scenario = task.scenario
        data = plain_data(self.read(self.context), len(scenario.train_environments)).to(self.device)
        net = network(self.model, tuple(data.train.x.shape[1:]), scenario.task.outputs, self.device)
        return Site(scenario.client_ids[number], data, net, task.seed)


def client_app(
    method: str, data: Data, model: nn.Module | type[nn.Module], *, device: str = "auto"
) -> OneHandlerApp:
    """A ClientApp that trains and evaluates by a method, for a ServerApp that has the method's strategy.

    `data` is asked once per client and process, with Flower's context, whose `node_config` must have a
    `partition-id`; it gives `(train, test)`, each `(x, y)` or `(x, y, environment)`. `model` is the ServerApp's,
    too. What a method keeps at a client lies in Flower's own state of it. Raises `UserError`.
    """
    client_class(method_class(method))
    host = PlainHost(method, data, registered(model), pick_device(device))

    def handle(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        host.states, host.context = ContextStates(context.state), context
        number = context.node_config.get("partition-id")
        try:
            if not isinstance(number, int):
                raise UserError("the node's configuration has no partition-id; give it a whole number from 0")
            return host.handle(message, number)
        except UserError as error:
            if message.metadata.message_type != "query":
                raise
            who = ConfigRecord({CLIENT: "", REFUSED: str(error)})
            return Message(RecordDict({CONFIG: who, METRICS: MetricRecord()}), reply_to=message)

    return OneHandlerApp(handle)
