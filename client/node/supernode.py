"""A SuperNode and its resident executor: what `perennial join` keeps running.

    python -m perennial.client.node.supernode [options of flower-supernode]

Both are of this process's group, and the executor ends with the SuperNode. It talks to it at a free port of this
machine, with a secret that only this user can read. Flower's own files stay as they are, but in this process

- the SuperNode looks for a message after 0.1 s or a fifth of the time that it has waited (1 s at most), not 3 s,
- and for a reply, and for late parts of a message, every 0.1 s, not every 0.5 s and 1 s,
- and of the requests of a run that wait for it, it takes the newest alone, and the next one after its reply,
- and what the SuperLink itself fails to do is asked again, for a minute, instead of dropping the message,
- and what a line of its log quotes from a server stays on that line.

That leans on names inside Flower 1.34.0; `tests/client/node/test_supernode.py` fails when they move.
"""

import fcntl
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from logging import ERROR, INFO, WARNING
from pathlib import Path
from threading import Thread
from typing import IO, Any, NoReturn

from flwr.app import Message
from flwr.common import log
from flwr.common.config import parse_config_args
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.supercore.version import package_version
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

from perennial.client.node.executor import SECRET
from perennial.client.node.settings import SETTINGS, settings_in
from perennial.common.flower.processes import LOOK_EVERY, free_port, hasten, insist, persist, quote_in_line
from perennial.common.utils.files import PRIVATE, private_folder

FLOWER = "1.34.0"
EXECUTOR = [sys.executable, "-P", "-m", "perennial.client.node.executor"]
LOCK = "lock"
"""A file of an executor's folder, beside the executor's own."""
IDLE, LONGEST_PAUSE = 3.0, 1.0
"""Flower's pause where there is no message, and ours at most."""
LONGEST_REST, LONG_LIFE = 30.0, 60.0
"""Seconds before an executor is started again, at most; and those after which it has not just failed to start."""


class Pauses:
    """What stands in for `time` in the SuperNode's loop."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds without a message."""

    def sleep(self, seconds: float) -> None:
        """Pause for less than Flower asks."""
        pause = min(seconds, LOOK_EVERY)
        if seconds >= IDLE:  # every look is a transaction of the SuperLink's database
            pause = min(max(pause, self.waited / 5), LONGEST_PAUSE)
        self.waited = self.waited + pause if seconds >= IDLE else 0.0
        time.sleep(pause)


Found = tuple[Message, Any]
"""A message and its object tree."""


def newest_first(pull_and_store: Callable[..., int | None]) -> Callable[..., int | None]:
    """Have Flower's `_pull_and_store_message` drop requests that a newer one of their run has overtaken.

    A run's server asks a node for one thing at a time, so it does not wait for them any more: this site was
    hanging, or is slower than the run's `deadline`.
    """
    waiting: dict[int, Found] = {}  # by run, the one that has waited longest first

    def pull(*, receive: Callable[[], Found | None], **others: Any) -> int | None:
        def newest() -> Found | None:
            while found := receive():
                run = found[0].metadata.run_id
                if overtaken := waiting.get(run):
                    of = overtaken[0].metadata
                    log(INFO, "perennial: nobody waits any more for %s of round %s", of.message_type, of.group_id)
                waiting[run] = found
            return waiting.pop(next(iter(waiting))) if waiting else None

        return pull_and_store(receive=newest, **others)

    return pull


def in_step(
    pull_and_store: Callable[..., int | None], push_replies: Callable[..., None]
) -> tuple[Callable[..., int | None], Callable[..., None]]:
    """Have Flower's `_push_messages` end with the reply to what its `_pull_and_store_message` took.

    It ends with any reply. Where a run is stopped while its request comes in, Flower forgets the request, but the
    executor has it and replies; after which each reply would lie here until the next request, for all runs.
    """
    taken = ""

    def pull(*, receive: Callable[[], Found | None], **others: Any) -> int | None:
        def received() -> Found | None:
            nonlocal taken
            if found := receive():
                taken = found[0].metadata.message_id
            return found

        return pull_and_store(receive=received, **others)

    def push(*, state: Any, **others: Any) -> None:
        push_replies(state=state, **others)
        while taken in state.msg_store:  # until its reply has been sent, or could not be
            push_replies(state=state, **others)

    return pull, push


def folder_of(settings: dict[str, str]) -> Path:
    """The executor's folder: one for each site that keeps its state in the same place, and each SuperLink."""
    who = [settings.get(key, "") for key in ("superlink", "name", "partition-id")]
    name = hashlib.sha256(json.dumps(who).encode()).hexdigest()[:12]
    return private_folder(Path(settings["state-dir"]) / ".executor" / name)


def alone(folder: Path) -> IO[str]:
    """A lock on an executor's folder, held while it is open. Ends the program where another SuperNode has it.

    Two would change each other's secret, and the executor that is started next could take no task.
    """
    lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"process {lock.read()} has joined with the state folder {folder.parents[1]} already")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def keep_executor(address: str, folder: str) -> NoReturn:
    """Start an executor again whenever it ends."""
    rest = 0.0
    while True:
        begun = time.monotonic()
        command = [*EXECUTOR, str(os.getpid()), address, folder]
        try:
            code = subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
            log(WARNING, "perennial: the executor ended with exit code %d; it is started again", code)
        except OSError as error:  # there is no memory or no process left, for now
            log(WARNING, "perennial: the executor cannot be started: %s; trying again", error.strerror)
        rest = 0.0 if time.monotonic() - begun > LONG_LIFE else min(2 * rest + 1, LONGEST_REST)
        time.sleep(rest)


def main() -> None:
    """Run `flower-supernode`, changed as above, and its executor."""
    if package_version != FLOWER:
        sys.exit(f"perennial is made for Flower {FLOWER}, not {package_version}; install that release")
    options = sys.argv[1:]
    config = options[options.index("--node-config") + 1] if "--node-config" in options else ""
    if "--superlink" in options:  # for the executor, too
        os.environ[SETTINGS["superlink"]] = options[options.index("--superlink") + 1]
    settings = settings_in(parse_config_args([config] if config else None))
    folder = folder_of(settings)
    lock = alone(folder)
    secret = folder / SECRET
    secret.unlink(missing_ok=True)
    with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    address = f"127.0.0.1:{free_port()}"
    own = ["--isolation", "process", "--clientappio-api-address", address]
    sys.argv = ["flower-supernode", *options, *own, "--superexec-auth-secret-file", str(secret)]
    pull, push = in_step(start_client_internal._pull_and_store_message, start_client_internal._push_messages)
    vars(start_client_internal).update(
        time=Pauses(),
        make_simple_grpc_retry_invoker=lambda: persist(make_simple_grpc_retry_invoker()),
        _pull_and_store_message=newest_first(pull),
        _push_messages=push,
    )
    quote_in_line()
    hasten(start_client_internal)
    insist(start_client_internal, "push_object_contents_from_iterable")
    Thread(target=keep_executor, args=(address, str(folder)), daemon=True).start()
    flower_supernode()
    lock.close()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        log(ERROR, "perennial: %s: %s", error.filename, error.strerror)
        sys.exit(1)
