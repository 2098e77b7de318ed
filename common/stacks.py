"""What a cohort is asked and answers where it need not be a message for each client: in the local runtime.

A stack is the work of many clients at once. All its tensors have the clients as first axis. Nothing of it is cut
apart, or made a message, unless somebody looks at one client.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from perennial.common.utils.tensors import Tensors
from perennial.common.wire import CONFIG, METRICS, Scalar, to_record


class Requests(Sequence[Message]):
    """One request for each node, each of which is made when somebody takes it."""

    def __init__(
        self,
        action: str,
        round_: int,
        config: ConfigRecord,
        asked: Iterable[tuple[int, Mapping[str, ArrayRecord]]],
    ) -> None:
        """`asked` are the nodes, and the records of tensors for each: one object for all who get the same."""
        self.action, self.round, self.config, self.asked = action, round_, config, list(asked)
        self._last: tuple[Mapping[str, ArrayRecord] | None, RecordDict] = None, RecordDict()
        """The records of the latest message and a content of them, to be copied: most get the same."""

    def __len__(self) -> int:
        return len(self.asked)

    @overload
    def __getitem__(self, place: int) -> Message: ...
    @overload
    def __getitem__(self, place: slice) -> list[Message]: ...
    def __getitem__(self, place: int | slice) -> Message | list[Message]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        node, arrays = self.asked[place]
        if self._last[0] is not arrays:
            self._last = arrays, RecordDict({CONFIG: self.config, **arrays})
        return Message(self._last[1].copy(), node, self.action, group_id=str(self.round))


class Part(Mapping[str, Tensor]):
    """One client's tensors of a stack: views of it, made when somebody looks."""

    __slots__ = ("place", "stack")

    def __init__(self, stack: Tensors, place: int) -> None:
        self.stack, self.place = stack, place

    def __getitem__(self, name: str) -> Tensor:
        return self.stack[name][self.place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack)

    def __len__(self) -> int:
        return len(self.stack)


@dataclass(frozen=True)
class StackReply:
    """The replies of several nodes."""

    nodes: Sequence[int]
    arrays: Mapping[str, Tensors]
    """By record: tensors (nodes, …)."""
    metrics: Mapping[str, Sequence[Any]]
    """The values of all nodes, by name."""
    settings: Mapping[str, Scalar]
    """The same of all."""

    def __len__(self) -> int:
        return len(self.nodes)

    def content(self, place: int) -> RecordDict:
        """What one node's message would hold. Raises `ValueError` for a metric that is no number."""
        arrays = {
            record: {name: tensor[place] for name, tensor in tensors.items()}
            for record, tensors in self.arrays.items()
        }
        metrics = {name: values[place] for name, values in self.metrics.items()}
        return content_of(arrays, metrics, self.settings)


def content_of(
    arrays: Mapping[str, Tensors], metrics: Mapping[str, Any], settings: Mapping[str, Scalar]
) -> RecordDict:
    """A reply's records. Raises `ValueError` for a metric that is no number."""
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        name: to_record(tensors) for name, tensors in arrays.items()
    }
    content[METRICS] = record = MetricRecord()
    for name, value in metrics.items():
        try:
            record[name] = value
        except TypeError:
            words = f"a tensor of shape {[*value.shape]}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"metric {name!r}: {words[:100]} is not possible; it must be a number") from None
    if settings:
        content[CONFIG] = ConfigRecord(dict(settings))
    return RecordDict(content)
