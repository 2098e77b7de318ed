"""One send-and-receive: the requests that it makes, and which of the replies may be used."""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from perennial.common import wire
from perennial.common.flower.names import ErrorCode
from perennial.common.utils.errors import RunStopped, UserError, printable, some_of
from perennial.common.utils.tensors import Tensors, change_marks
from perennial.common.wire import CONFIG, METRICS, NUM_EXAMPLES, records
from perennial.strategies.screening import (
    LONGEST_REASON,
    Limits,
    Rejected,
    Template,
    accept,
    check_metrics,
    check_sizes,
)

Payload = Mapping[str, Tensors]
"""Named records of one request."""
PerClient = Callable[[str], Payload]
"""A payload of its own for each client id."""

LONGEST_ERROR = 1000
"""Letters of an error's reason that are looked at: an exception's class and the first of what it says."""


@dataclass(frozen=True)
class AcceptedReply:
    """One client's reply, once it has been screened."""

    client: str
    arrays: Mapping[str, Tensors]
    metrics: MetricRecord
    settings: ConfigRecord

    def __getitem__(self, record: str) -> Tensors:
        return self.arrays[record]

    @property
    def num_examples(self) -> int:
        """The client's training samples."""
        count = self.metrics[NUM_EXAMPLES]
        assert isinstance(count, int)  # screened
        return count


SILENT = (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""Flower's errors in the place of an answer where none came."""


@dataclass
class Exchange:
    """What is known of a send-and-receive while its replies come in."""

    action: str
    round: int
    clients: dict[int, str]
    """Client id by node id of those asked."""
    expect: Callable[[str], Mapping[str, Template]]
    optional: Mapping[str, Template] = field(default_factory=dict)
    """Records that a reply may bring beyond those expected."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why a client's reply was not used, by client id."""
    silent: set[str] = field(default_factory=set)
    """Those of them that did not answer at all."""
    bytes_down: int = 0
    """Of tensor values that went to clients."""
    bytes_up: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    """How many training samples each client counts whose reply could be used."""
    _sent: list[tuple[str, Tensors, list[tuple[int, int]]]] = field(default_factory=list)
    """The records that are under way, and their marks when they were sent."""

    def requests(self, payload: PerClient, config: ConfigRecord) -> list[Message]:
        """One request per client, with the same `config` for all."""
        messages = []
        encoded: dict[int, tuple[Tensors, ArrayRecord]] = {}
        for node, client in self.clients.items():
            content = RecordDict({CONFIG: config})
            given = payload(client)
            _must_not_be_reserved(given, f"a request to {self.action!r}")
            for name, tensors in given.items():
                # The same tensors for several clients become one record.
                if id(tensors) not in encoded:
                    encoded[id(tensors)] = tensors, wire.to_record(tensors)
                    sent = wire.from_record(encoded[id(tensors)][1])
                    self._sent.append((name, sent, change_marks(sent)))
                content[name] = encoded[id(tensors)][1]
                self.bytes_down += wire.payload_bytes(tensors)
            messages.append(Message(content, node, self.action, group_id=str(self.round)))
        return messages

    def accepted(
        self,
        replies: Iterable[Message],
        limits: Limits,
        quorum: float,
        check: Callable[[AcceptedReply], object] = lambda _: None,
    ) -> Iterator[AcceptedReply]:
        """The replies that may be used, in client-id order, one at a time.

        A reply that is an error, lacks a record, has another shape or type or a number that is not finite is left
        out and named in `left_out`; so is one for which `check` raises `Rejected`, or anything else. Raises
        `RunStopped` after the last reply when fewer than `quorum`, a share of those asked, could be used.
        """
        if isinstance(replies, Sequence):  # a stock Grid's: in order of arrival
            replies = sorted(replies, key=lambda reply: self.clients.get(reply.metadata.src_node_id, ""))
        asked = len(self.clients) + len(self.left_out)
        waiting = dict(self.clients)
        used = 0
        for message in replies:
            client = waiting.pop(message.metadata.src_node_id, None)
            if client is None:
                continue  # the SuperLink's word on a lost node: that client is named below
            expect = self.expect(client)
            _must_not_be_reserved(expect, f"the reply that it expects to {self.action!r}")
            try:
                reply = self._screened(client, message, expect, limits)
                check(reply)
            except Exception as error:  # whatever a reply makes anything here raise is its client's fault
                self.left_out[client] = str(error if isinstance(error, Rejected) else Rejected(_raised(error)))
                if message.has_error() and message.error.code in SILENT:
                    self.silent.add(client)
                continue
            self.bytes_up += sum(wire.payload_bytes(tensors) for tensors in reply.arrays.values())
            used += 1
            if NUM_EXAMPLES in reply.metrics:
                self.samples[client] = reply.num_examples
            yield reply
        for name, tensors, before in self._sent:
            # In the local runtime, clients that are asked later would get another one.
            if change_marks(tensors) != before:
                action = f"while {self.action!r} is under way"
                raise UserError(
                    f"the server half changes {name!r} in place {action}; make a new record of new tensors"
                )
        self._sent.clear()
        self.left_out |= {client: "did not answer in time" for client in waiting.values()}
        self.silent |= set(waiting.values())
        need = math.ceil(round(quorum * asked, 9))  # 0.55 * 20 is a little more than 11
        if used < need:
            reasons = some_of([f"{client}: {reason}" for client, reason in sorted(self.left_out.items())])
            raise RunStopped(
                f"round {self.round}: only {used} of {asked} clients gave a usable answer to "
                f"{self.action!r}, and quorum={quorum} asks for {need} ({reasons})"
            )

    def _screened(
        self, client: str, message: Message, expect: Mapping[str, Template], limits: Limits
    ) -> AcceptedReply:
        if message.has_error():
            raise Rejected(_error_text(message))
        content, run = message.content, limits.run
        given = records(content, ArrayRecord)
        expect = {**expect, **{name: like for name, like in self.optional.items() if name in given}}
        if extra := content.keys() - {*expect, METRICS, CONFIG}:
            raise Rejected(f"unexpected record {min(extra)[: wire.LONGEST_NAME]!r}")
        metrics = records(content, MetricRecord).get(METRICS)
        settings = records(content, ConfigRecord).get(CONFIG)
        if metrics is None:
            raise Rejected("the metrics are missing")
        if settings is None and CONFIG in content:
            raise Rejected(f"record {CONFIG!r} has no settings in it")
        settings = settings or ConfigRecord()
        check_sizes(given, metrics, settings, run)
        counted, lists = self.action.startswith("train"), self.action == "evaluate"
        check_metrics(metrics, counted=counted, lists=lists, most_examples=run.most_examples)
        most = limits.enrolled(message.metadata.src_node_id)
        if most is not None and NUM_EXAMPLES in metrics and metrics[NUM_EXAMPLES] > most:  # type: ignore[operator]
            count = metrics[NUM_EXAMPLES]
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, and {most} when the client enrolled")
        arrays = {name: accept(name, given.get(name), like, run.largest) for name, like in expect.items()}
        return AcceptedReply(client, arrays, metrics, settings)


class MetricMeans:
    """Sample-weighted means of the plain numbers in replies."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, int] = {}
        self._examples = 0

    def add(self, reply: AcceptedReply) -> None:
        """Take in a reply that counts its samples."""
        for name, value in reply.metrics.items():
            if name != NUM_EXAMPLES and not isinstance(value, list):
                self._sums[name] = self._sums.get(name, 0.0) + value * reply.num_examples
                self._weights[name] = self._weights.get(name, 0) + reply.num_examples
        self._examples += reply.num_examples

    def result(self) -> MetricRecord:
        """The means, each over the clients that report it, and the number of samples of all."""
        means: dict[str, float | int] = {name: total / self._weights[name] for name, total in self._sums.items()}
        return MetricRecord({**means, NUM_EXAMPLES: self._examples})


def _must_not_be_reserved(names: Container[str], of: str) -> None:
    """Raises `UserError` where one of a server half's records has the name of one of the protocol's."""
    for name in (CONFIG, METRICS):
        if name in names:
            raise UserError(
                f"the server half's {name!r} in {of} is a record of the protocol; give yours another name"
            )


def _raised(error: Exception) -> str:
    return f"its answer cannot be used ({type(error).__name__}: {str(error)[:LONGEST_REASON]})"


def _error_text(message: Message) -> str:
    # In a simulation it is Ray's, in colours.
    reason = " ".join(printable((message.error.reason or "")[:LONGEST_ERROR]).split()) or "no reason given"
    match message.error.code:
        case ErrorCode.MESSAGE_UNAVAILABLE:
            return "its answer broke off, or cannot be read"
        case ErrorCode.REPLY_MESSAGE_UNAVAILABLE:
            return reason
        case ErrorCode.NODE_UNAVAILABLE:
            return "is gone: it has left, or has sent no heartbeat for a minute"
    # Flower's form of an exception, perhaps cut. Each part of the expression ends where the next one begins.
    if not (raised := re.match(r"<class '([^']+)'>:<['\"]", reason)):
        return f"failed: {reason} (code {message.error.code})"
    text = reason[raised.end() :].removesuffix("'>").removesuffix('">')
    return f"failed: {text} ({raised[1].rpartition('.')[2]})"
