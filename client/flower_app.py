"""The client half of a method as the ClientApp of a plain Flower app: `perennial.client_app`."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from inspect import signature
from logging import ERROR, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from torch import nn

from perennial.client.app import Handler, OneHandlerApp
from perennial.client.host import Host, client_class, pick_device
from perennial.client.state import Kept, Version, file_name, version_named
from perennial.client.trainer import Site
from perennial.common import flower_app
from perennial.common.config import Task, load_config, parse_task
from perennial.common.flower.arrays import plain_record
from perennial.common.flower.names import ErrorCode, log
from perennial.common.flower_app import (
    CLIPPING_NORM,
    MANY,
    PROXIMAL_MU,
    SERVER_ROUND,
    TEST,
    PlainModel,
    module_of,
    plain_data,
    registered,
)
from perennial.common.methods import method_class
from perennial.common.models.network import network
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import flattened, unflattened
from perennial.common.wire import (
    CLIENT,
    CONFIG,
    KEPT,
    METRICS,
    MODEL,
    NUM_EXAMPLES,
    REFUSED,
    RESUMED,
    ROUND,
    RUN,
    TASK,
    from_record,
    records,
    to_record,
)

Data = Callable[[Context], Any] | Callable[[int, int], Any]
"""Flower's context, or a client's number and how many there are, to `(train, test)`, each `(x, y)` or
`(x, y, environment)`, tensors or arrays, or a PyTorch data set of such samples, or its loader."""
Mod = Callable[[Message, Context, Handler], Message]
"""As in `flwr.clientapp.mod`."""
PREFIX = "perennial/"
"""What the names of our records in Flower's state begin with."""
UNFIT = "unfit"
"""Name of a record in Flower's state, where the ServerApp was told already why it does not fit."""


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


class Unfit(UserError):  # noqa: N818 - of two halves
    """The ServerApp's strategy and this ClientApp cannot work together."""


class PlainHost(Host):
    """A host whose clients' data an app's function gives."""

    def __init__(
        self,
        method: str,
        data: Data,
        model: PlainModel,
        device: torch.device,
        own: Mapping[str, Any],
        clips: bool = False,
    ) -> None:
        """`own` are the settings for a strategy that brings none: of the method, `seed` and `environments`.

        `clips` says whether somebody is there to clip the updates, where a strategy leaves that to the clients.
        """
        super().__init__({}, device=device)
        self.method, self.read, self.model = method, data, model
        self.settings, self.clips = own, clips
        self.module = module_of(model)
        self.context: Context
        self.warned = set[str]()

    def handle(self, message: Message, number: int = 0) -> Message:
        """Answer a strategy of ours, or one of Flower's own. Raises `UserError`, and as the base."""
        configs = records(message.content, ConfigRecord)
        if TASK in configs.get(CONFIG, ConfigRecord()) or message.metadata.message_type not in (
            "train",
            "evaluate",
        ):
            return super().handle(message, number)
        kind = method_class(self.method)
        if not flower_app.has_fedavgs_server(kind):
            ours = f"from perennial.strategies import {kind.__name__}"
            raise Unfit(f"method {self.method!r} needs its own server half in the ServerApp: {ours}")
        arrays = records(message.content, ArrayRecord)
        if len(arrays) != 1 or len(configs) != 1:
            raise Unfit(
                "the ServerApp's strategy must send one record of arrays and one of settings; "
                f"this one sends {', '.join(map(repr, message.content)) or 'none'}"
            )
        ((name, record),) = arrays.items()
        (config,) = configs.values()
        return self._as_of_flower(message, number, name, record, config)

    def _as_of_flower(
        self, message: Message, number: int, name: str, record: ArrayRecord, config: ConfigRecord
    ) -> Message:
        """Flower's request as one of ours, and the reply as Flower's strategies read it."""
        if CLIPPING_NORM in config and not self.clips:
            raise Unfit(
                "the strategy leaves clipping to the clients: perennial.client_app(…, mods=[fixedclipping_mod])"
            )
        ours = flower_app.names(self.module)
        received, like = from_record(record), self.module.state_dict()
        if {key: tensor.shape for key, tensor in received.items()} != {key: like[key].shape for key in like}:
            raise Unfit(
                "model: the ServerApp sends other arrays than this ClientApp's model has; give both the same"
            )
        # A mean of numpy's may have another type than what it is the mean of.
        model = {ours[key]: tensor.to(like[key].dtype) for key, tensor in received.items()}
        text = self._task(config)
        if not isinstance(number_of_round := config.get(SERVER_ROUND), int):
            raise Unfit(f"the ServerApp's strategy does not send {SERVER_ROUND!r}, the number of the round")
        run = str(self.context.run_id)
        about = ConfigRecord({TASK: text, RUN: run, ROUND: number_of_round, KEPT: [], RESUMED: []})
        given = message.content
        message.content = RecordDict({MODEL: to_record(model), CONFIG: about})
        try:
            reply = super().handle(message, number).content
        finally:
            message.content = given
        metrics = records(reply, MetricRecord)[METRICS]
        if message.metadata.message_type == "evaluate":
            return Message(RecordDict({METRICS: _test_means(parse_task(text), metrics)}), reply_to=message)
        trained = from_record(records(reply, ArrayRecord)[MODEL])
        sent = plain_record(to_record({key: trained[ours[key]] for key in record}))
        return Message(RecordDict({name: sent, METRICS: metrics}), reply_to=message)

    def _task(self, config: ConfigRecord) -> str:
        """The task at hand, as a server of ours would say it: of this app's settings and those in the request."""
        kind = method_class(self.method)
        told = {key: value for key, value in config.items() if key in kind.model_fields and key != "name"}
        if self.method == "fedprox" and PROXIMAL_MU in config:
            told["proximity"] = config[PROXIMAL_MU]
        used = {*told, SERVER_ROUND, CLIPPING_NORM} | ({PROXIMAL_MU} if "proximity" in told else set())
        for key in sorted(config.keys() - used - self.warned):
            self.warned.add(key)
            log(
                WARNING,
                "perennial: the ServerApp's setting %r is none of method %s, and is not used",
                key,
                self.method,
            )
        return self.task_text(told)

    def task_text(self, told: Mapping[str, Any] = {}) -> str:
        """The same of these hyper-parameters. Raises `UserError`."""
        own = dict(self.settings)
        clients = self.context.node_config.get("num-partitions", MANY) if hasattr(self, "context") else MANY
        scenario = {"name": "plain", "labels": flower_app.classes_of(self.module), "clients": clients}
        options = {
            "seed": own.pop("seed"),
            "scenario": {**scenario, "environments": own.pop("environments")},
            "method": {**own, **told, "name": self.method},
            "model": self.model.model_dump(),
        }
        return load_config(options={**options, "rounds": 1}).task()

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
        read: Callable[..., Any] = self.read
        told = (number, scenario.clients) if len(signature(read).parameters) == 2 else (self.context,)
        data = plain_data(read(*told), len(scenario.train_environments)).to(self.device)
        net = network(self.model, tuple(data.train.x.shape[1:]), scenario.task.outputs, self.device)
        return Site(scenario.client_ids[number], data, net, task.seed)


def _test_means(task: Task, metrics: MetricRecord) -> MetricRecord:
    """Loss and headline measure of each model on a client's test data, from its counts and sums."""
    kind, found, count = task.scenario.task, dict[str, int | float](), 0
    for model in task.method.evaluates:
        sums: dict[str, Any] = {
            name: metrics[f"{model}/{TEST}/{name}"] for name in ("count", "loss", *kind.columns)
        }
        ((count,), (loss,)) = sums.pop("count"), sums.pop("loss")
        if not count:
            raise UserError("data: there are no test samples; give some, or fraction_evaluate=0 to the strategy")
        value = kind.value(count, sums)
        found |= {
            f"{model}/loss": loss / count,
            f"{model}/{kind.headline.name}": float("nan") if value is None else value,
        }
    return MetricRecord({**found, NUM_EXAMPLES: count})


def client_app(
    method: str,
    data: Data,
    model: nn.Module | type[nn.Module],
    *,
    device: str = "auto",
    mods: Sequence[Mod] = (),
    seed: int = 0,
    environments: int = 1,
    **hyper_parameters: Any,
) -> OneHandlerApp:
    """A ClientApp that trains and evaluates by a method, for a ServerApp that has the method's strategy.

    If the method's server half is FedAvg's, the ServerApp may as well have one of Flower's own strategies. Such a
    strategy says nothing of the method: then `hyper_parameters`, `seed` and the number of training `environments`
    count, and what its `train_config` says of hyper-parameters. A strategy of ours says all that itself.

    `data` is asked once per client and process, with Flower's context, whose `node_config` must have a
    `partition-id`, or, with two parameters, as `load_data(partition_id, num_partitions)` of Flower's templates;
    what it gives is at `Data`. `model` is the ServerApp's, too. What a method keeps at a client lies in Flower's
    own state of it. `mods` are Flower's, around training.
    Raises `UserError`.
    """
    kind = method_class(method)
    client_class(kind)
    own = {**hyper_parameters, "seed": seed, "environments": environments}
    host = PlainHost(method, data, registered(model), pick_device(device), own, clips=bool(mods))
    if flower_app.has_fedavgs_server(kind):
        host.task_text()
    elif hyper_parameters:
        name = min(hyper_parameters)
        raise UserError(
            f"method.{name}: give it to the ServerApp's strategy, which is perennial.strategies.{kind.__name__}"
        )

    def handle(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        host.states, host.context = ContextStates(context.state), context
        number = context.node_config.get("partition-id")
        try:
            if not isinstance(number, int):
                raise UserError("the node's configuration has no partition-id; give it a whole number from 0")
            return host.handle(message, number)
        except Unfit as error:
            # Flower's strategies log an error's words, and go on; at what is neither they stop, without words.
            log(ERROR, "perennial: %s", error)
            if UNFIT not in context.state:
                context.state[UNFIT] = ConfigRecord()
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
            return Message(RecordDict({UNFIT: MetricRecord()}), reply_to=message)
        except UserError as error:
            if message.metadata.message_type != "query":
                raise
            who = ConfigRecord({CLIENT: "", REFUSED: str(error)})
            return Message(RecordDict({CONFIG: who, METRICS: MetricRecord()}), reply_to=message)

    answer: Handler = handle
    for mod in reversed(mods):
        answer = _around(mod, answer)

    def choose(message: Message, context: Context) -> Message:
        return (answer if message.metadata.message_type == "train" else handle)(message, context)

    return OneHandlerApp(choose)


def _around(mod: Mod, call: Handler) -> Handler:
    return lambda message, context: mod(message, context, call)
