"""One send-and-receive: the requests that it makes, and which of the replies may be used."""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import mul
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from perennial.common import wire
from perennial.common.flower.names import ErrorCode
from perennial.common.stacks import Part, Requests, StackReply
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
    within,
)

Payload = Mapping[str, Tensors]
"""Named records of one request."""
PerClient = Callable[[str], Payload]
"""A payload of its own for each client id."""

LONGEST_ERROR = 1000
"""Letters of an error's reason that are looked at: an exception's class and the first of what it says."""


@dataclass
class AcceptedReply:
    """One client's reply, once it has been screened."""

    client: str
    arrays: Mapping[str, Tensors]
    metrics: Mapping[str, Any]
    settings: Mapping[str, Any]
    nbytes: int = 0
    """Of its tensors' values."""

    def __getitem__(self, record: str) -> Tensors:
        return self.arrays[record]

    @property
    def num_examples(self) -> int:
        """The client's training samples."""
        count = self.metrics[NUM_EXAMPLES]
        assert isinstance(count, int)  # screened
        return count


@dataclass(frozen=True)
class AcceptedStack:
    """The replies of a stack's clients, all of which can be used."""

    clients: list[str]
    arrays: Mapping[str, Tensors]
    """By record: tensors (clients, …)."""
    metrics: Mapping[str, Sequence[Any]]
    """The values of all clients, by name."""
    settings: Mapping[str, Any]
    nbytes: int
    """Of the values of each client's tensors."""

    def __len__(self) -> int:
        return len(self.clients)

    def reply(self, place: int) -> AcceptedReply:
        """One client's, with views of the tensors. Made in its turn: a thousand at a time keep Python's collector
        of garbage busy."""
        arrays: Any = {name: Part(tensors, place) for name, tensors in self.arrays.items()}
        metrics = {name: values[place] for name, values in self.metrics.items()}
        return AcceptedReply(self.clients[place], arrays, metrics, self.settings, self.nbytes)


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

    def requests(self, payload: PerClient, config: ConfigRecord) -> Requests:
        """One request per client, with the same `config` for all."""
        asked = []
        # The same tensors for several clients become one record, and the same records one content.
        encoded: dict[int, tuple[Tensors, ArrayRecord]] = {}
        contents: dict[tuple[tuple[str, int], ...], tuple[dict[str, ArrayRecord], int]] = {}
        before: Payload | None = None
        content: dict[str, ArrayRecord] = {}
        size = 0
        for node, client in self.clients.items():
            if (given := payload(client)) is before:
                self.bytes_down += size
                asked.append((node, content))
                continue
            before = given
            key = tuple((name, id(tensors)) for name, tensors in given.items())
            if key not in contents:
                _must_not_be_reserved(given, f"a request to {self.action!r}")
                for name, tensors in given.items():
                    if id(tensors) not in encoded:
                        encoded[id(tensors)] = tensors, wire.to_record(tensors)
                        sent = wire.from_record(encoded[id(tensors)][1])
                        self._sent.append((name, sent, change_marks(sent)))
                size = sum(map(wire.payload_bytes, given.values()))
                contents[key] = {name: encoded[id(tensors)][1] for name, tensors in given.items()}, size
            content, size = contents[key]
            self.bytes_down += size
            asked.append((node, content))
        return Requests(self.action, self.round, config, asked)

    def accepted(
        self,
        replies: Iterable[Message | StackReply],
        limits: Limits,
        quorum: float,
        check: Callable[[AcceptedReply], object] = lambda _: None,
    ) -> Iterator[AcceptedReply]:
        """The replies that may be used, in client-id order, one at a time.

        A reply that is an error, lacks a record, has another shape or type or a number that is not finite is left
        out and named in `left_out`; so is one for which `check` raises `Rejected`, or anything else. Raises
        `RunStopped` after the last reply when fewer than `quorum`, a share of those asked, could be used.
        """
        for reply in self._accepted(replies, limits, quorum, check):
            assert isinstance(reply, AcceptedReply)
            yield reply

    def accepted_together(
        self, replies: Iterable[Message | StackReply], limits: Limits, quorum: float
    ) -> Iterator[AcceptedReply | AcceptedStack]:
        """As `accepted`, but a stack of which every client's reply may be used comes as one."""
        return self._accepted(replies, limits, quorum)

    def _accepted(
        self,
        replies: Iterable[Message | StackReply],
        limits: Limits,
        quorum: float,
        check: Callable[[AcceptedReply], object] | None = None,
    ) -> Iterator[AcceptedReply | AcceptedStack]:
        """Without `check` whole stacks come as one."""
        asked = len(self.clients) + len(self.left_out)
        waiting = dict(self.clients)
        used = 0
        for client, reply in self._in_order(replies, limits, waiting, together=check is None):
            if isinstance(reply, str):
                self.left_out[client] = reply
                continue
            if isinstance(reply, AcceptedStack):
                self.bytes_up += reply.nbytes * len(reply)
                used += len(reply)
                self.samples |= zip(reply.clients, reply.metrics.get(NUM_EXAMPLES, ()), strict=False)
                yield reply
                continue
            try:
                if check:
                    check(reply)
            except Exception as error:
                self.left_out[client] = _reason(error)
                continue
            self.bytes_up += reply.nbytes
            used += 1
            if NUM_EXAMPLES in reply.metrics:
                self.samples[client] = reply.metrics[NUM_EXAMPLES]
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

    def _in_order(
        self,
        replies: Iterable[Message | StackReply],
        limits: Limits,
        waiting: dict[int, str],
        *,
        together: bool,
    ) -> Iterator[tuple[str, AcceptedReply | AcceptedStack | str]]:
        """Each client's reply, or why it cannot be used, in the order of the clients; those that have come are no
        longer `waiting`. With `together` whole stacks, as they come."""
        found: dict[str, AcceptedReply | str | tuple[AcceptedStack, int]] = {}
        come = iter(replies)
        for node, client in self.clients.items():
            while node in waiting and (reply := next(come, None)) is not None:
                if isinstance(reply, StackReply):
                    own = self._stack(reply, limits, waiting)
                    if together and (stack := _one_stack(own.values(), len(reply))):
                        yield "", stack
                    else:
                        found |= own
                elif sender := waiting.pop(reply.metadata.src_node_id, None):
                    found[sender] = self._alone(sender, reply, limits)
                # Else the SuperLink's word on a lost node: that client is named as one that did not answer.
            if client in found:
                one = found.pop(client)
                yield client, one[0].reply(one[1]) if isinstance(one, tuple) else one
        for _ in come:
            pass  # nobody was asked for it

    def _alone(self, client: str, message: Message, limits: Limits) -> AcceptedReply | str:
        expect = self._usable(self.expect(client))
        if message.has_error() and message.error.code in SILENT:
            self.silent.add(client)
        if message.has_error():
            return str(Rejected(_error_text(message)))
        node = message.metadata.src_node_id
        return _or_reason(partial(self._screened, client, node, message.content, expect, limits))

    def _stack(
        self, reply: StackReply, limits: Limits, waiting: dict[int, str]
    ) -> dict[str, str | tuple[AcceptedStack, int]]:
        """The replies of a stack's clients. They have one form, so the first one's is that of all; each one's
        numbers are looked at, and who has one that is not possible is screened alone, which has the reason."""
        size = sum(map(wire.payload_bytes, reply.arrays.values())) // len(reply)
        fine, clients = within(reply, limits), [self.clients.get(node, "") for node in reply.nodes]
        known: dict[tuple[int, ...], tuple[Mapping[str, Template], AcceptedStack]] = {}
        """What has been expected and found: held, so that an id is one object's."""
        found: dict[str, str | tuple[AcceptedStack, int]] = {}
        expect: Mapping[str, Template] = {}
        form: tuple[int, ...] = ()
        for place, node in enumerate(reply.nodes):
            if (client := waiting.pop(node, None)) is None:
                continue
            if (wanted := self.expect(client)) is not expect:
                expect, form = self._usable(wanted), tuple(map(id, wanted.values()))
            if not fine[place] or form not in known:
                alone = _or_reason(partial(self._screened, client, node, reply.content(place), expect, limits))
                if isinstance(alone, str):
                    found[client] = alone
                    continue
                names = [*expect, *(name for name in self.optional if name in reply.arrays)]
                arrays = {name: reply.arrays[name] for name in names}
                known[form] = expect, AcceptedStack(clients, arrays, reply.metrics, reply.settings, size)
            found[client] = known[form][1], place
        return found

    def _usable(self, expect: Mapping[str, Template]) -> Mapping[str, Template]:
        _must_not_be_reserved(expect, f"the reply that it expects to {self.action!r}")
        return expect

    def _screened(
        self, client: str, node: int, content: RecordDict, expect: Mapping[str, Template], limits: Limits
    ) -> AcceptedReply:
        run = limits.run
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
        most = limits.enrolled(node)
        if most is not None and NUM_EXAMPLES in metrics and metrics[NUM_EXAMPLES] > most:  # type: ignore[operator]
            count = metrics[NUM_EXAMPLES]
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, and {most} when the client enrolled")
        arrays = {name: accept(name, given.get(name), like, run.largest) for name, like in expect.items()}
        return AcceptedReply(client, arrays, metrics, settings, sum(map(wire.payload_bytes, arrays.values())))


class MetricMeans:
    """Sample-weighted means of the plain numbers in replies."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, int] = {}
        self._examples = 0

    def add(self, reply: AcceptedReply | AcceptedStack) -> None:
        """Take in a reply that counts its samples, or those of a stack."""
        stack = isinstance(reply, AcceptedStack)
        columns: Mapping[str, Any] = reply.metrics if stack else {name: [v] for name, v in reply.metrics.items()}
        counts, sums, weights = columns[NUM_EXAMPLES], self._sums, self._weights
        for name, values in columns.items():
            if name != NUM_EXAMPLES and not isinstance(values[0], list):
                sums[name] = sum(map(mul, values, counts), start=sums.get(name, 0.0))
                weights[name] = weights.get(name, 0) + sum(counts)
        self._examples += sum(counts)

    def result(self) -> MetricRecord:
        """The means, each over the clients that report it, and the number of samples of all."""
        means: dict[str, float | int] = {name: total / self._weights[name] for name, total in self._sums.items()}
        return MetricRecord({**means, NUM_EXAMPLES: self._examples})


def _one_stack(found: Iterable[str | tuple[AcceptedStack, int]], count: int) -> AcceptedStack | None:
    """The stack of which all `count` replies are, where they all can be used."""
    places = [one for one in found if isinstance(one, tuple)]
    stack = places[0][0] if len(places) == count else None
    return stack if all(own is stack for own, _ in places) else None


def _must_not_be_reserved(names: Container[str], of: str) -> None:
    """Raises `UserError` where one of a server half's records has the name of one of the protocol's."""
    for name in (CONFIG, METRICS):
        if name in names:
            raise UserError(
                f"the server half's {name!r} in {of} is a record of the protocol; give yours another name"
            )


def _or_reason(screen: Callable[[], AcceptedReply]) -> AcceptedReply | str:
    """A reply that can be used, or why it cannot be: whatever it makes anything raise is its client's fault."""
    try:
        return screen()
    except Exception as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, Rejected):
        return str(error)
    words = f"{type(error).__name__}: {str(error)[:LONGEST_REASON]}"
    return str(Rejected(f"its answer cannot be used ({words})"))


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
