"""The way from the ClientApp's process, which lasts for one message, to the site's worker, which stays.

Flower starts a ClientApp anew for every message. What takes long, PyTorch and the data, is kept by one worker per
SuperExec (`client/node/worker.py`), reached over a Unix socket that only this user can open. Nothing here imports
PyTorch.
"""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from logging import INFO, WARNING
from pathlib import Path

import grpc
from flwr.app import Message
from flwr.common import log
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from perennial.client.node.worker_pb2 import Failure, HandleReply, HandleRequest, StatusReply, StatusRequest
from perennial.client.node.worker_pb2_grpc import WorkerStub
from perennial.common.asked import name_of
from perennial.common.errors import UserError

CODE = str(Path(__file__).parents[3])
"""The folder that this code is from: at a SuperNode, the run's app as Flower has installed it."""
WORKER = [sys.executable, "-P", "-m", "perennial.client.node.worker"]
SECONDS_TO_START, SECONDS_TO_STOP = 300.0, 10.0
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
CHANNEL = [*UNLIMITED, ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
TMP = Path("/tmp")
LONGEST_FOLDER = 70
"""Letters; the system allows a socket's whole path about 100."""


class WorkerFailed(Exception):  # noqa: N818 - the name goes to the server's operator
    """The site's worker could not answer a message."""


def relay(message: Message, settings: Mapping[str, str]) -> Message:
    """Have the site's worker answer a message; one is started where there is none.

    Should it die over the message, a new one gets the message again, once. Raises `WorkerFailed`, and what
    answering raised: a `UserError`, or an exception of the same name and text.
    """
    request = HandleRequest(id=name_of(message), message=pack(message), settings=settings)
    parent = identity(os.getppid())
    for _ in range(2):
        with grpc.insecure_channel(f"unix:{socket_of(parent)}", CHANNEL) as channel:
            stub = WorkerStub(channel)
            pid = _ready(stub, parent)
            try:
                # Once the message's time to live is over, nobody takes the reply.
                reply: HandleReply = stub.Handle(request, timeout=message.metadata.ttl)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    log(WARNING, "perennial: client worker %d died over message %s", pid, request.id)
                    continue
                _stop(pid)
                raise WorkerFailed(
                    f"the client worker did not answer: {error.code().name}, {error.details()}"
                ) from None
        if reply.HasField("failure"):
            raise exception(reply.failure)
        answer = unpack(reply.message)
        if answer.metadata.reply_to_message_id != message.metadata.message_id:  # it had been asked before
            return Message(answer.content, reply_to=message)
        return answer
    raise WorkerFailed("the client worker died twice over this message; the SuperNode's log has its last words")


def pack(message: Message) -> bytes:
    """A message as bytes, in Flower's own form."""
    data: bytes = message_to_proto(message).SerializeToString()
    return data


def unpack(data: bytes) -> Message:
    """The message that `pack` was given."""
    return message_from_proto(ProtoMessage.FromString(data))


def exception(failure: Failure) -> Exception:
    """An exception that Flower tells the server in the same words as the one that was raised in the worker."""
    if failure.name == UserError.__qualname__ and failure.module == UserError.__module__:
        return UserError(failure.text)
    kind: type[Exception] = type(failure.name, (Exception,), {"__module__": failure.module})
    return kind(failure.text)


# ---------------------------------------------------------------------- who serves whom


def identity(pid: int) -> str:
    """A process as `PID-START`, which no later process has; empty when it has ended. Reads `/proc`: Linux only."""
    try:
        # After the name, which may hold anything: 3rd field the state, 22nd the start in clock ticks since boot.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid}-{fields[19]}"


def lives(process: str) -> bool:
    """If the process of this identity has not ended."""
    return identity(int(process.partition("-")[0])) == process


def folder() -> Path:
    """The folder of this user's sockets: the first that nobody else can enter. Raises `UserError` without one.

    In a sticky /tmp somebody else may have made a folder of the name, which then only they can remove.
    """
    name, runtime = f"perennial-{os.getuid()}", os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(tempfile.gettempdir()) / name, TMP / name]
    places += [Path(runtime) / "perennial"] if runtime.startswith("/") else []
    places.append(Path.home() / ".perennial" / "sockets")
    places = [place for place in places if len(str(place)) <= LONGEST_FOLDER]
    for place in places:
        with suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = place.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return place
    raise UserError(
        f"one of {', '.join(map(str, places))} must be a folder of yours that nobody else can enter; remove what "
        "is there, or set TMPDIR to a folder of yours with a short path"
    )


def socket_of(parent: str) -> Path:
    """Where the worker of this SuperExec listens."""
    return folder() / f"{parent}.socket"


def sweep() -> None:
    """Remove the files of SuperExecs that have ended."""
    for path in folder().glob("*-*.*"):
        if not lives(path.stem):
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- one worker, of the right code


def _ready(stub: WorkerStub, parent: str) -> int:
    """The process id of the SuperExec's worker, started if need be. Raises `WorkerFailed`."""
    # Two messages at once must not start two.
    with socket_of(parent).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = _status(stub)
        if status and status.code != CODE:  # another run's app
            _stop(status.pid)
            status = None
        return int(status.pid) if status else _start(stub, parent)


def _status(stub: WorkerStub) -> StatusReply | None:
    """What the worker says of itself; None where there is none."""
    try:
        status: StatusReply = stub.Status(StatusRequest(), timeout=SECONDS_TO_START)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return None
        raise WorkerFailed(f"the client worker says nothing: {error.code().name}, {error.details()}") from None
    return status


def _start(stub: WorkerStub, parent: str) -> int:
    """Start a worker that outlives this process, and wait until it listens."""
    path = os.pathsep.join(filter(None, [CODE, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [*WORKER, parent],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    log(INFO, "perennial: started client worker %d", process.pid)
    end = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < end:
        if _status(stub):
            return process.pid
        time.sleep(0.05)
    process.kill()
    raise WorkerFailed(
        f"the client worker did not start (exit code {process.wait()}); the SuperNode's log has its last words"
    )


def _stop(pid: int) -> None:
    """End a worker after its present message, or after `SECONDS_TO_STOP` in any case."""
    process = identity(pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + SECONDS_TO_STOP
        if process and lives(process):
            os.kill(pid, sign)
        while process and lives(process) and time.monotonic() < end:
            time.sleep(0.05)
