"""The client worker: one resident process per SuperExec that answers its messages; `relay.py` starts it.

    python -m client.node.worker PID-START

It ends with the SuperExec of that identity, and after the present message when it gets SIGTERM.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent import futures
from logging import ERROR
from threading import Event

import grpc
from flwr.app import Message
from flwr.common import log

from perennial.client.node.relay import CODE, UNLIMITED, lives, pack, socket_of, sweep, unpack
from perennial.client.node.worker_pb2 import Failure, HandleReply, HandleRequest, StatusReply, StatusRequest
from perennial.client.node.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from perennial.common.errors import UserError, printable
from perennial.common.tracebacks import Tracebacks

Answer = Callable[[Message, Mapping[str, str]], Message]
LOOK_EVERY = 0.5
"""Seconds between two looks if the SuperExec is still there."""


class Worker(WorkerServicer):  # type: ignore[misc]
    """Answers messages with `answer`, one at a time, all in one thread."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.handled = 0
        self.tracebacks = Tracebacks()
        self._last: tuple[int, str] = (0, "")
        """The node and the name of the request that was answered last: all nodes are asked by one name."""
        self._reply = HandleReply()
        self._thread = futures.ThreadPoolExecutor(max_workers=1)

    def Handle(self, request: HandleRequest, context: grpc.ServicerContext) -> HandleReply:  # noqa: N802
        """The reply to a message, or what went wrong."""
        return self._thread.submit(self._handle, request).result()

    def Status(self, request: StatusRequest, context: grpc.ServicerContext) -> StatusReply:  # noqa: N802
        """Who serves this socket; also while a message is being answered."""
        return StatusReply(pid=os.getpid(), code=CODE, handled=self.handled)

    def _handle(self, request: HandleRequest) -> HandleReply:
        # A message whose reply got lost comes again; it must not train twice.
        message = unpack(request.message)
        asked = (message.metadata.dst_node_id, request.id)
        if not request.id or asked != self._last:
            self._reply, self._last = self._outcome(message, request.settings), asked
            self.handled += 1
        return self._reply

    def _outcome(self, message: Message, settings: Mapping[str, str]) -> HandleReply:
        try:
            return HandleReply(message=pack(self.answer(message, settings)))
        except Exception as error:
            # The ClientApp raises it again; where it was raised is known only here.
            new = not isinstance(error, UserError) and self.tracebacks.first(error)
            log(ERROR, "perennial: %s", printable(str(error)), exc_info=error if new else None)
            kind = type(error)
            return HandleReply(failure=Failure(module=kind.__module__, name=kind.__qualname__, text=str(error)))


def serve(parent: str, answer: Answer) -> None:
    """Answer messages until SIGTERM, or until the SuperExec `parent` is gone; then at once."""
    terminated = Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    sweep()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=UNLIMITED)
    add_WorkerServicer_to_server(Worker(answer), server)
    server.add_insecure_port(f"unix:{socket_of(parent)}")
    server.start()
    while lives(parent) and not terminated.wait(LOOK_EVERY):
        pass
    finished = server.stop(grace=1e6)  # takes no new message
    while lives(parent) and not finished.wait(LOOK_EVERY):
        pass
    sweep()
    os._exit(0)  # a training for nobody is left where it is


def main() -> None:
    """Load what a message needs, then serve."""
    from perennial.client.node.answer import answer

    serve(sys.argv[1], answer)


if __name__ == "__main__":
    main()
