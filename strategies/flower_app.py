"""A method's server half as a strategy for somebody's own ServerApp: `from perennial.strategies import FedIIR`."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from perennial.common import flower_app
from perennial.common.config import load_config
from perennial.common.flower.arrays import plain_record
from perennial.common.methods import METHODS
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.wire import CLIENT, CONFIG, METRICS, MODEL, NUM_EXAMPLES, from_record, records, to_record
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, MetricMeans
from perennial.strategies.registry import strategy_for
from perennial.strategies.screening import Rejected

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
NO_HANDLER = "No query function registered"
"""What Flower says of a ClientApp that does not know our question which client it is."""


class PlainStrategy(Strategy):
    """A method's strategy without our configuration; what is its own are the method's hyper-parameters."""

    method: ClassVar[str]

    def __init__(
        self,
        model: nn.Module | type[nn.Module],
        *,
        clients: int | None = None,
        fraction_train: float = 1.0,
        min_available_nodes: int = 2,
        wait: float = 120.0,
        quorum: float = 0.5,
        deadline: float = 600.0,
        seed: int = 0,
        environments: int = 1,
        input_shape: tuple[int, ...] = (),
        **hyper_parameters: Any,
    ) -> None:
        """`model` is the ClientApp's, too. Raises `UserError` for a setting that is none, or out of bounds.

        Without `clients` there are as many as nodes when `start` begins. `fraction_train` of them are asked in a
        round, drawn by `seed`; of an exchange `quorum` must answer within `deadline` seconds. `environments` is
        the number of training environments in the federation. A few methods' servers ask how many features there
        are; without `input_shape`, the shape of a sample, it is what the classifier's first linear layer takes.
        """
        settings = flower_app.registered(model)
        module = flower_app.module_of(settings)
        self._names = flower_app.names(module)
        self._least = max(min_available_nodes, clients or 0)
        scenario = {"name": "plain", "shape": input_shape, "labels": flower_app.classes_of(module)}
        self._options: dict[str, Any] = {
            "method": {**hyper_parameters, "name": self.method},
            "scenario": {**scenario, "environments": environments, "clients": clients or flower_app.MANY},
            "model": settings.model_dump(),
            "participation": fraction_train,
            "wait": wait,
            "quorum": quorum,
            "deadline": deadline,
            "seed": seed,
        }
        load_config(options={**self._options, "rounds": 1})
        self._clients = clients
        self._inner: MethodStrategy[Any] | None = None

    @property
    def inner(self) -> MethodStrategy[Any]:
        """The method's server half, which there is once `start` knows the clients."""
        if self._inner is None:
            raise UserError(f"{type(self).__name__}: call strategy.start(grid, arrays, num_rounds)")
        return self._inner

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Flower's loop; the arrays, of the module's own state dict, come back under its own names.

        What a method's server has beside them, as FedADG its generator, stays there; where there is no one model,
        as with FL Games, all of its models come back.

        Raises `UserError` for arrays that are not the model's, and `RunStopped` when too few clients answer.
        """
        if set(initial_arrays) != set(self._names):
            odd = min(set(initial_arrays) ^ set(self._names))
            raise UserError(f"initial_arrays: {odd!r} is in the arrays or in the model, and not in both")
        nodes = self._await(grid)
        scenario = {**self._options["scenario"], "clients": self._clients or nodes}
        config = load_config(options={**self._options, "scenario": scenario, "rounds": num_rounds})
        self._inner = strategy_for(config, uuid4().hex[:12])
        proximity = getattr(config.method, "proximity", None) if self.method == "fedprox" else None
        about = {"train": dict(train_config or {}), "evaluate": dict(evaluate_config or {})}
        about["train"] |= {} if proximity is None else {flower_app.PROXIMAL_MU: proximity}
        self._halves = Halves(grid, self._inner, self._names, about)

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            return evaluate_fn(number, self._back(arrays)) if evaluate_fn else None

        arrays = _renamed(initial_arrays, self._names)
        try:
            result = super().start(
                self._halves,
                arrays,
                num_rounds,
                min(timeout, config.deadline),
                train_config,
                evaluate_config,
                evaluated if evaluate_fn else None,
            )
        except RunStopped as error:
            refused = [f"{name}: {why}" for name, why in self.inner.roster.refused.items()]
            raise RunStopped("; ".join([str(error), *refused[:3]])) from None
        # A method whose clients keep all they train sends none.
        result.arrays = plain_record(self._back(result.arrays or arrays))
        return result

    def _back(self, arrays: ArrayRecord) -> ArrayRecord:
        """The module's tensors under its own names, or all if none is the module's."""
        back = {ours: theirs for theirs, ours in self._names.items()}
        own = {name: array for name, array in arrays.items() if name in back}
        return _renamed(ArrayRecord(own) if own else arrays, back)

    def _await(self, grid: Grid) -> int:
        """How many nodes there are, once they are enough. Raises `RunStopped` after `wait` seconds."""
        wait = self._options["wait"]
        end = time.monotonic() + wait
        while (there := len(list(grid.get_node_ids()))) < self._least:
            if time.monotonic() >= end:
                raise RunStopped(f"only {there} of {self._least} nodes were there after {wait:g} s")
            time.sleep(0.5)
        return there

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        if not self._halves.nodes:
            return self.inner.aggregate_evaluate(server_round, replies)
        means = MetricMeans()  # an ordinary ClientApp evaluates as it likes
        for reply in self.inner.accepted(replies, check=_must_count):
            means.add(reply)
        return means.result()

    def summary(self) -> None:
        """Nothing to log that `start` does not."""


def _must_count(reply: AcceptedReply) -> None:
    if NUM_EXAMPLES not in reply.metrics:
        raise Rejected(f"metric {NUM_EXAMPLES!r} is missing")


class Halves(Grid):
    """A Grid by whose nodes an ordinary ClientApp may run: our strategy sees its replies as if they were ours.

    Which one it is shows in the answer to the first question. An ordinary ClientApp gets the records `arrays` and
    `config`, as from Flower's own strategies, and its nodes are the clients in the order of their ids.
    """

    def __init__(
        self,
        inner: Grid,
        strategy: MethodStrategy[Any],
        names: Mapping[str, str],
        settings: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`names` are ours by the module's own; `settings` are what to send, by the action."""
        self.inner, self.strategy, self.settings = inner, strategy, settings
        self.ours, self.theirs = names, {ours: theirs for theirs, ours in names.items()}
        self.nodes: dict[int, str] = {}
        """The client's id of each node with an ordinary ClientApp."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        asked = {message.metadata.dst_node_id: message for message in messages}
        out = [self._request(message) if node in self.nodes else message for node, message in asked.items()]
        replies = list(self.inner.send_and_receive(out, timeout=timeout))
        strangers = [
            reply.metadata.src_node_id
            for reply in replies
            if reply.has_error() and NO_HANDLER in (reply.error.reason or "")
        ]
        if strangers and type(self.strategy) is not MethodStrategy:
            name = self.strategy.run.method.name
            raise UserError(
                f"the nodes have an ordinary ClientApp, and method {name!r} needs its own client half there: "
                f"app = perennial.client_app({name!r}, …)"
            )
        free = [client for client in self.strategy.run.scenario.client_ids if client not in self.nodes.values()]
        self.nodes |= dict(zip(sorted(strangers), free, strict=False))
        return [self._reply(reply, asked) for reply in replies]

    def _request(self, message: Message) -> Message:
        of, content = message.metadata, RecordDict()
        if of.message_type != "query":
            model = _renamed(records(message.content, ArrayRecord)[MODEL], self.theirs)
            about = {**self.settings[of.message_type], flower_app.SERVER_ROUND: int(of.group_id)}
            content = RecordDict({flower_app.ARRAYS: plain_record(model), CONFIG: ConfigRecord(about)})
        return Message(content, of.dst_node_id, of.message_type, ttl=of.ttl, group_id=of.group_id)

    def _reply(self, reply: Message, asked: Mapping[int, Message]) -> Message:
        node = reply.metadata.src_node_id
        if node not in self.nodes or node not in asked:
            return reply
        if asked[node].metadata.message_type == "query":
            who = ConfigRecord({CLIENT: self.nodes[node]})
            any_count = MetricRecord({NUM_EXAMPLES: self.strategy.run.most_examples})  # it says so with each reply
            return Message(RecordDict({CONFIG: who, METRICS: any_count}), reply_to=asked[node])
        if reply.has_content():
            arrays, metrics = records(reply.content, ArrayRecord), records(reply.content, MetricRecord)
            content = RecordDict({METRICS: next(iter(metrics.values()), MetricRecord())})
            if arrays:
                record = next(iter(arrays.values()))
                content[MODEL] = ArrayRecord({self.ours.get(name, name): array for name, array in record.items()})
            reply.content = content
        return reply

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    @property
    def run(self) -> Any:
        return self.inner.run

    def set_run(self, run: Any) -> None:
        self.inner.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.inner.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(message_ids)


def _renamed(arrays: ArrayRecord, to: Mapping[str, str]) -> ArrayRecord:
    return to_record(flower_app.renamed(from_record(arrays), to))


def named(name: str) -> type[PlainStrategy]:
    """The strategy of the method whose hyper-parameters are a class of this name. Raises `AttributeError`."""
    for method, kind in METHODS.items():
        if kind.__name__ == name:
            return type(name, (PlainStrategy,), {"method": method, "__doc__": f"{kind.title}: {kind.summary}."})
    raise AttributeError(f"no method's strategy is called {name!r}")
