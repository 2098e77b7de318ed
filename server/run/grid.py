"""Grids: one that runs the clients in this process, and one that gives any other the same order of replies."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from logging import WARNING
from threading import Event, Thread
from typing import Any, NoReturn

import grpc
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from perennial.common.flower.grids import be_the_server, in_simulation, on_break
from perennial.common.flower.names import ErrorCode, ObjectPushError, Run, log
from perennial.common.flower.request_id import ask_again, give_name
from perennial.common.stacks import Requests, StackReply
from perennial.common.utils.errors import UserError
from perennial.common.utils.tracebacks import Tracebacks

SECONDS_TO_PULL = 30.0
"""For a reply that is there when the deadline has passed, which it has where an earlier client was waited for."""


class OrderedGrid(Grid):
    """Passes everything to another Grid, but replies come in the order of the requests, one for each.

    The next reply in that order is pulled as soon as it is there, and waits at the SuperLink until then, so this
    process never holds more than one. Where no reply comes in time, an error reply of the same node stands in.
    Polling every `poll` seconds instead of Flower's three shortens a round; but who polls in the moment between a
    reply and its last array waits a second for it, so not too often.

    When the connection to the SuperLink has broken, a request that a node was fetching and a reply that it was
    sending may be lost: Flower hands out a request once, and takes the repetition of a send for an error. So who
    has not answered yet is asked again, under the same name (`common/flower/request_id.py`).

    With a `timeout`, a request lives no longer than a reply to it may be looked for: a site that comes back after
    a while is not handed what nobody waits for any more.
    """

    def __init__(self, inner: Grid, poll: float = 0.25) -> None:
        self.inner, self.poll, self.broken = inner, poll, Event()
        on_break(inner, self.broken.set)

    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        return self.inner.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.inner.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        requests = list(messages)
        end = None if timeout is None else time.monotonic() + timeout
        give_name(requests)
        _let_live(requests, end)
        ids = [[message_id] for message_id in self._push(requests)]
        for number in range(len(requests)):
            yield self._reply(requests[number:], ids[number:], end)

    def _push(self, messages: Sequence[Message]) -> list[str]:
        """The ids of messages that have been sent; those of the others are empty."""
        while True:
            self.broken.clear()
            try:
                # When none could be sent, there are no ids at all.
                return [name or "" for name in self.push_messages(messages)] or [""] * len(messages)
            except ObjectPushError:
                if not self.broken.is_set():
                    raise

    def _reply(self, outstanding: list[Message], ids: list[list[str]], end: float | None) -> Message:
        """The reply to the first of the outstanding requests; `ids` are those under which each has been sent."""
        request = outstanding[0]
        error = Error(
            ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
            "did not answer in time" if any(ids[0]) else "the request could not be sent",
        )
        while any(ids[0]):
            if self.broken.is_set() and (end is None or time.monotonic() < end):
                log(WARNING, "perennial: the connection to the SuperLink broke; asking %d again", len(outstanding))
                again = list(map(ask_again, outstanding))
                _let_live(again, end)
                for known, message_id in zip(ids, self._push(again), strict=True):
                    known.append(message_id)
            try:
                found = self._pull(list(filter(None, ids[0])), end)
                if found:
                    # As the reply to this request, whoever it says it is from: the SuperLink answers for a lost
                    # node in its own name, and a hostile client might answer in another one's.
                    return Message(found[0].error if found[0].has_error() else found[0].content, reply_to=request)
            except grpc.RpcError:
                raise  # the SuperLink, not the client
            except TimeoutError:
                break
            except Exception as cause:  # a hostile client's bytes can make Flower raise nearly anything
                error = Error(ErrorCode.MESSAGE_UNAVAILABLE, repr(cause))
                break
            if end is not None and time.monotonic() >= end:
                break
            time.sleep(self.poll)
        return Message(error, reply_to=request)

    def _pull(self, ids: list[str], end: float | None) -> list[Message]:
        """The reply, if there is one, or one for each time that it was asked for.

        Raises `TimeoutError` when that takes too long.
        Flower waits three minutes for the rest of a reply whose sender has died in its midst.
        """
        if end is None or in_simulation(self.inner):
            return list(self.pull_messages(ids))
        future: Future[list[Message]] = Future()

        def pull() -> None:
            try:
                future.set_result(list(self.pull_messages(ids)))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=pull, daemon=True).start()
        return future.result(timeout=max(end - time.monotonic(), SECONDS_TO_PULL))


def _let_live(messages: Sequence[Message], end: float | None) -> None:
    """Until their replies may have been pulled, one after the other, should they come just before `end`."""
    if end is not None:
        for message in messages:
            message.metadata.ttl = end - time.monotonic() + SECONDS_TO_PULL * len(messages)


def _needs_superlink(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("the local runtime has no Flower run; replies are made by send_and_receive")


Ahead = Callable[[Requests, Sequence[Context]], Iterable[StackReply | int]]
"""Requests and their nodes' contexts, to the replies of stacks, and the places of requests that are none's."""


class LocalGrid(Grid):
    """Runs a ClientApp for each of `clients` nodes in this process, one after the other, as replies are asked for.

    Requests that `ahead` answers do not get there: those of clients whose work is done as one stack. Such a reply
    is of many nodes, and comes before those of who works alone.

    An exception in the app becomes an error reply, as at a SuperNode, except a `UserError`, which ends the run:
    here the site's owner and the operator are the same person, who also sees the traceback, once. There is no
    deadline inside one process.
    """

    def __init__(self, app: ClientApp, clients: int, ahead: Ahead | None = None) -> None:
        be_the_server()
        self.app, self.ahead = app, ahead
        self.tracebacks = Tracebacks()
        self.contexts = {
            number + 1: Context(
                run_id=1,
                node_id=number + 1,
                node_config={"partition-id": number, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for number in range(clients)
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def node_of(self, client: int) -> int:
        """The node that is client number `client` (from 0)."""
        return client + 1

    def send_and_receive(  # type: ignore[override]
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message | StackReply]:
        if self.ahead and isinstance(messages, Requests):
            contexts = [self.contexts[node] for node, _ in messages.asked]
            for reply in self.ahead(messages, contexts):
                yield self._answer(messages[reply]) if isinstance(reply, int) else reply
        else:
            yield from map(self._answer, messages)

    def _answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except UserError:
            raise
        except Exception as error:
            if text := self.tracebacks.first(error):
                print(text, file=sys.stderr, flush=True)
            return Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<{str(error)!r}>"), reply_to=message
            )

    @property
    def run(self) -> Run:
        _needs_superlink()

    create_message = push_messages = pull_messages = set_run = _needs_superlink
