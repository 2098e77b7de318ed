"""A server half on its own: clients that answer as a test tells them, and rounds with them."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from perennial.common.utils.tensors import Tensors
from perennial.common.wire import CONFIG, METRICS, NUM_EXAMPLES, from_record, to_record
from perennial.server.run.grid import LocalGrid
from perennial.strategies.base import MethodStrategy

Answer = Callable[[str, Message], RecordDict]
"""A client id and a request to the reply's content; it may raise."""


ENROLLED = MetricRecord({NUM_EXAMPLES: 10_000_000})
"""No reply of a test counts more samples."""


class ScriptedGrid(LocalGrid):
    """The scenario's clients, each answering by `answer`."""

    def __init__(self, strategy: MethodStrategy[Any], answer: Answer) -> None:
        names = strategy.run.scenario.client_ids
        self.asked: list[tuple[str, str, dict[str, Tensors]]] = []
        """Action, client and payload of every request but queries."""

        def app(message: Message, context: Any) -> Message:
            client, action = names[context.node_config["partition-id"]], message.metadata.message_type
            if action == "query":
                content = RecordDict({CONFIG: ConfigRecord({"client": client}), METRICS: ENROLLED})
            else:
                self.asked.append((action, client, payload(message)))
                content = answer(client, message)
            return Message(content, reply_to=message)

        super().__init__(app, len(names))  # type: ignore[arg-type]

    def of(self, action: str) -> dict[str, dict[str, Tensors]]:
        """The payloads of an action's requests by client id."""
        return {client: records for found, client, records in self.asked if found == action}


def payload(message: Message) -> dict[str, Tensors]:
    """A message's tensors by record name."""
    return {name: from_record(record) for name, record in message.content.array_records.items()}


def content(arrays: Mapping[str, Tensors], count: int = 10, **metrics: float) -> RecordDict:
    """A reply's content."""
    records = {name: to_record(tensors) for name, tensors in arrays.items()}
    return RecordDict({**records, METRICS: MetricRecord({NUM_EXAMPLES: count, **metrics})})


def one_round(
    strategy: MethodStrategy[Any], grid: ScriptedGrid, arrays: ArrayRecord, number: int = 1
) -> ArrayRecord | None:
    """A training round; the new global arrays."""
    grid.asked.clear()
    requests = strategy.configure_train(number, arrays, ConfigRecord(), grid)
    return strategy.aggregate_train(number, grid.send_and_receive(requests))[0]
