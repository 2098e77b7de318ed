"""What a site's executor says to its SuperNode, over the Runtime API (gRPC) that Flower's own processes use.

It does what Flower's SuperExec and `flwr-clientapp` do, but stays, and never looks into the app that the server
has sent. In its folder, which nobody else enters:

- `secret`: proves to the SuperNode that it is its executor;
- `task`: the task at hand, so that the next executor goes on with it, should this one be killed;
- `reply`: the last reply. A request that comes again, as the same message or as another, gets it again, and
  nothing is trained twice.

Nothing here imports PyTorch before it answers.
"""

import base64
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from logging import ERROR, WARNING
from pathlib import Path
from typing import IO, cast

import grpc
from flwr.app import Context, Error, Message
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto import runtime_pb2 as pb
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2_grpc import RuntimeStub
from flwr.supercore.grpc import create_channel
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_and_inflate_object_from_tree,
)
from flwr.supercore.interceptors import (
    RuntimeTokenClientInterceptor,
    RuntimeVersionClientInterceptor,
    SuperExecAuthClientInterceptor,
)
from flwr.supercore.interceptors.superexec_auth_interceptor import RUNTIME_SUPEREXEC_METHODS
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output
from google.protobuf.message import DecodeError

from perennial.common.flower.names import ErrorCode, Run, SubStatus, log
from perennial.common.flower.processes import LOOK_EVERY
from perennial.common.flower.request_id import name_of
from perennial.common.utils.errors import LONGEST, UserError, printable
from perennial.common.utils.files import PRIVATE
from perennial.common.utils.parsing import from_json
from perennial.common.utils.tracebacks import Tracebacks

Answer = Callable[[Message, Context, Run], Message]
Audit = Callable[[Message, Context, Run, Message, float, bool], None]
"""Writes down that a reply is to leave, after so many seconds, and whether it has before. Raises `OSError`."""
SECRET, TASK, REPLY = "secret", "task", "reply"
"""Files of an executor's folder."""
TRIES = 2
"""Executors that a message may cost."""
LONGEST_LOOK = 1.0
"""Seconds between two looks for a part of a message that the SuperNode is still fetching."""
SECONDS_TO_LOAD = 1800.0
"""That a message may take at least, however short its time to live: the first one has the site's data loaded."""
SECONDS_TO_ARRIVE = 30.0
"""For a message whose task is there already."""


class ExecutorFailed(Exception):  # noqa: N818 - the name goes to the server's operator
    """The site's executor could not answer a message."""


@dataclass
class Work:
    """A task and what is known of it so far: all that another executor needs to go on with it."""

    token: str
    input: pb.PullTaskInputResponse = field(default_factory=pb.PullTaskInputResponse)
    messages: pb.PullAppMessagesResponse = field(default_factory=pb.PullAppMessagesResponse)
    tries: int = 0
    """How often answering has begun."""

    def text(self) -> str:
        parts = {name: base64.b64encode(part.SerializeToString()).decode() for name, part in self._parts.items()}
        return json.dumps({"token": self.token, "tries": self.tries, **parts})

    @classmethod
    def read(cls, text: bytes) -> "Work":
        """Raises `ValueError`, `KeyError`, `TypeError` or `DecodeError` for what `text` has not made."""
        known = from_json(text)
        work = cls(known["token"], tries=known["tries"])
        for name, part in work._parts.items():
            part.ParseFromString(base64.b64decode(known[name]))
        return work

    @property
    def _parts(self) -> dict[str, pb.PullTaskInputResponse | pb.PullAppMessagesResponse]:
        return {"input": self.input, "messages": self.messages}


class Executor:
    """Answers a SuperNode's messages with `answer`, one at a time; none leaves that `audit` cannot write down."""

    def __init__(self, channel: grpc.Channel, folder: Path, answer: Answer, audit: Audit) -> None:
        self.channel, self.folder, self.answer, self.audit = channel, folder, answer, audit
        self.stub = RuntimeStub(channel)
        self.tracebacks = Tracebacks()

    def step(self) -> bool:
        """Go on with the task at hand, or take a new one; whether there was any. Raises `grpc.RpcError`."""
        work = self._left() or self._claimed()
        if work is None:
            return False
        try:
            self._do(work)
        except BaseException:
            self._note(None)  # the SuperNode answers for it, once it misses the heartbeats
            raise
        self._note(None)
        return True

    def _left(self) -> Work | None:
        """The task that an executor had which is no more."""
        path = self.folder / TASK
        if not path.exists():
            return None
        try:
            return Work.read(path.read_bytes())
        except (ValueError, KeyError, TypeError, DecodeError):  # as a power cut may leave it
            log(WARNING, "perennial: %s is damaged; the task in it is not gone on with", path)
            self._note(None)
            return None

    def _claimed(self) -> Work | None:
        for task in self.stub.PullPendingTasks(pb.PullPendingTasksRequest()).tasks:
            if token := self.stub.ClaimTask(pb.ClaimTaskRequest(task_id=task.task_id)).token:
                work = Work(token)
                self._note(work)
                return work
        return None

    def _note(self, work: Work | None) -> None:
        if work:
            self._put(TASK, [work.text().encode()])
        else:
            (self.folder / TASK).unlink(missing_ok=True)

    def _put(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file, for whoever comes after this process. A full disk costs that alone."""
        beside = self.folder / f"{name}.new"
        try:
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "wb") as file:
                file.writelines(parts)
            beside.replace(self.folder / name)
        except OSError as error:
            log(WARNING, "perennial: %s: %s", beside, error.strerror)

    def _do(self, work: Work) -> None:
        stub = RuntimeStub(grpc.intercept_channel(self.channel, RuntimeTokenClientInterceptor(work.token)))
        heart = HeartbeatSender(lambda: _beat(stub))
        heart.start()
        try:
            if not work.input.HasField("context"):
                work.input.CopyFrom(stub.PullTaskInput(pb.PullTaskInputRequest()))
                work.input.ClearField("fab")  # the server's code, which is not looked at
                self._note(work)
            context, run = context_from_proto(work.input.context), run_from_proto(work.input.run)
            if not work.messages.messages_list:
                work.messages.CopyFrom(_arrived(stub))
                self._note(work)  # the SuperNode announces it once, and its content may take long to arrive
            tree, node = work.messages.message_object_trees[0], Node(node_id=context.node_id)
            pull = self._unless_left(make_pull_object_fn_protobuf(stub.PullObject, node, run.run_id))
            # Confirmed, and so forgotten by the SuperNode, once it is answered: the next executor may need it.
            try:
                message = pull_and_inflate_object_from_tree(
                    tree,
                    pull,
                    lambda _: None,
                    return_type=Message,
                    max_time=None,
                    max_tries_per_object=None,
                    initial_backoff=LOOK_EVERY,
                    backoff_cap=LONGEST_LOOK,
                )
            except ExecutorFailed as gone:
                push_task_output(stub, None, SubStatus.FAILED, str(gone))
                raise
            message.metadata.__dict__["_message_id"] = tree.object_id
            work.tries += 1
            self._note(work)
            reply = self.reply(message, context, run, work)
            # In the server's time: by a clock that is ahead of it, the reply would be too late.
            reply.metadata.created_at, reply.metadata.ttl = message.metadata.created_at, message.metadata.ttl
            push_message(stub, reply, context)
            stub.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=node, run_id=run.run_id, message_object_id=tree.object_id)
            )
            error = (reply.error.reason or "failed") if reply.has_error() else ""
            push_task_output(stub, None, SubStatus.FAILED if error else SubStatus.COMPLETED, error)
        finally:
            if heart.is_running:
                heart.stop()

    def _unless_left(self, pull: Callable[[str], bytes]) -> Callable[[str], bytes]:
        """Pull an object; raises `ExecutorFailed` if it will never be there.

        When a run is stopped while the SuperNode fetches a message of it, the task stays without the message. The
        SuperNode works on one message at a time, so it has let go of this one once there is another task.
        """

        def pulled(object_id: str) -> bytes:
            try:
                return pull(object_id)
            except ObjectUnavailableError:
                if self.stub.PullPendingTasks(pb.PullPendingTasksRequest()).tasks:
                    raise ExecutorFailed("the SuperNode has let go of this message") from None
                raise

        return pulled

    def reply(self, message: Message, context: Context, run: Run, work: Work) -> Message:
        """The reply to a message: the one of before where it has been asked before."""
        asked, begun = f"{message.metadata.dst_node_id} {name_of(message)!r}\n".encode(), time.monotonic()
        before = self._before(message, asked)
        reply = before or self._new(message, context, run, work)
        try:
            self.audit(message, context, run, reply, time.monotonic() - begun, bool(before))
        except OSError as error:
            sentence = f"this site cannot write its audit file, and sends nothing: {error.strerror}"
            return _failure(message, UserError(sentence))
        if not before:
            with no_object_id_recompute():  # or each tensor is hashed for each of its parents
                self._put(REPLY, chain([asked], written(reply)))
        return reply

    def _before(self, message: Message, asked: bytes) -> Message | None:
        path = self.folder / REPLY
        if not path.exists():
            return None
        with path.open("rb") as file:
            if file.readline() != asked:
                return None
            try:
                return _again(read(file), message)
            except (ValueError, KeyError, TypeError, DecodeError, MemoryError, OverflowError):  # after a power cut
                log(WARNING, "perennial: %s is damaged; the request is answered anew", path)
                return None

    def _new(self, message: Message, context: Context, run: Run, work: Work) -> Message:
        if work.tries > TRIES:
            log(ERROR, "perennial: %d executors have died over message %s", TRIES, message.metadata.message_id)
            died = "the site's executor died twice over this message; the site's log has its last words"
            return _failure(message, ExecutorFailed(died))
        watch = threading.Timer(max(message.metadata.ttl, SECONDS_TO_LOAD), self._give_up, (message, work))
        watch.daemon = True
        watch.start()
        try:
            return self.answer(message, context, run)
        except Exception as error:
            new = not isinstance(error, UserError) and self.tracebacks.first(error)
            log(ERROR, "perennial: %s", printable(str(error)), exc_info=error if new else None)
            return _failure(message, error)
        finally:
            watch.cancel()

    def _give_up(self, message: Message, work: Work) -> None:
        """End with a message that nobody waits for any more: its time to live is over."""
        log(ERROR, "perennial: message %s is not answered in its time to live", message.metadata.message_id)
        work.tries = TRIES
        self._note(work)
        os._exit(1)


def _beat(stub: RuntimeStub) -> bool:
    try:
        stub.SendTaskHeartbeat(pb.SendTaskHeartbeatRequest())
    except grpc.RpcError as error:
        return bool(error.code() != grpc.StatusCode.UNAVAILABLE)  # else it is tried again
    return True


def _arrived(stub: RuntimeStub) -> pb.PullAppMessagesResponse:
    """The task's message. The SuperNode announces a task a moment before it has the message."""
    end = time.monotonic() + SECONDS_TO_ARRIVE
    while time.monotonic() < end:
        found: pb.PullAppMessagesResponse = stub.PullMessages(pb.PullAppMessagesRequest())
        if found.messages_list:
            return found
        time.sleep(LOOK_EVERY / 5)
    raise ExecutorFailed("the SuperNode has a task and no message")


def written(reply: Message) -> Iterator[bytes]:
    """A reply's parts, as they travel, each after its length: so keeping it takes the room of one tensor."""
    for part in get_all_nested_objects(reply).values():
        content = part.deflate()
        yield len(content).to_bytes(8, "little")
        yield content


def read(file: IO[bytes]) -> Message:
    """What `written` has made. Raises what a wrong length or wrong bytes raise for anything else."""
    parts, last = dict[str, bytes](), ""
    while length := file.read(8):
        content = file.read(int.from_bytes(length, "little"))
        last = get_object_id(content)
        parts[last] = content
    return cast(Message, inflate_object_from_contents(last, parts))  # parents come after their children


def _again(reply: Message, message: Message) -> Message:
    """A reply that was made before, as one to this message. To the same message it is the same reply."""
    if reply.metadata.reply_to_message_id == message.metadata.message_id:
        return reply
    if reply.has_error():
        return Message(reply.error, reply_to=message)
    return Message(reply.content, reply_to=message)


def _failure(message: Message, error: Exception) -> Message:
    """An error reply in Flower's own words."""
    told = error.told if isinstance(error, UserError) else str(error)[:LONGEST]
    told = told.encode(errors="replace").decode()  # as of a file whose name is no UTF-8
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{told}'>"), reply_to=message)


def serve(address: str, folder: Path, answer: Answer, audit: Audit) -> None:
    """Answer the messages of the SuperNode at an address, without end."""
    os.environ.update(no_grpc_proxy="127.0.0.1")  # the SuperNode's; this process connects to nobody else
    secret = (folder / SECRET).read_bytes()
    guard = SuperExecAuthClientInterceptor(master_secret=secret, protected_methods=RUNTIME_SUPEREXEC_METHODS)
    channel = create_channel(
        address, insecure=True, interceptors=[RuntimeVersionClientInterceptor("flwr-clientapp"), guard]
    )
    executor = Executor(channel, folder, answer, audit)
    while True:
        try:
            busy = executor.step()
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:  # its time was over, or the run's
                log(WARNING, "perennial: the SuperNode does not wait for this task any more")
            busy = False
        except ExecutorFailed as gone:  # its run has ended, most likely
            log(WARNING, "perennial: a task was dropped: %s", gone)
            busy = False
        except Exception as error:
            log(ERROR, "perennial: a task could not be done: %s", printable(repr(error)))
            busy = False
        if not busy:
            time.sleep(LOOK_EVERY / 2)
