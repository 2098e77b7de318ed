"""Flower's own programs, as both the server's side and a site start them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from perennial.common.utils.errors import printable

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker, RetryState

LOOK_EVERY = 0.1
"""Seconds between two looks of a process that waits for another one's work; Flower waits 0.5 to 3."""

PATIENCE = 60.0
"""Seconds for which a call is repeated that the SuperLink has failed by its own fault."""
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before a part of a message is sent again that the SuperLink did not store."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def program(name: str) -> str:
    """A program of the Flower that this Python has installed."""
    return str(Path(sys.executable).parent / name)


def environment() -> dict[str, str]:
    """This process's environment, for Flower's programs."""
    # Flower starts its other programs by name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET, "PATH": path}


def quote_in_line() -> None:
    """Have a line of Flower's log hold what it quotes: a server may call a round by several lines."""
    logging.getLogger("flwr").addFilter(_in_line)


def _in_line(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(printable(one) if isinstance(one, str) else one for one in record.args)
    return True


def hasten(module: ModuleType) -> None:
    """Have a module of Flower's that pulls a message's parts wait `LOOK_EVERY` for late ones, not 1 s."""
    vars(module)["pull_objects"] = partial(vars(module)["pull_objects"], initial_backoff=LOOK_EVERY)


def persist(invoker: RetryInvoker) -> RetryInvoker:
    """Have an invoker of Flower's repeat, for `PATIENCE` seconds, also what fails inside the SuperLink.

    On a busy machine SQLite's file can be locked for longer than the five seconds that Flower waits for it. Flower
    then drops the call, and a site's reply with it.
    """
    gives_up, on_success, since = invoker.should_giveup, invoker.on_success, list[float]()

    def should_giveup(error: Exception) -> bool:
        code = getattr(error, "code", None)
        if code and code().name == "INTERNAL":
            since.append(time.monotonic())
            return since[-1] - since[0] > PATIENCE
        return gives_up is not None and gives_up(error)

    def succeeded(state: RetryState) -> None:
        since.clear()
        if on_success:
            on_success(state)

    invoker.should_giveup, invoker.on_success = should_giveup, succeeded
    return invoker


def insist(module: ModuleType, name: str) -> None:
    """Have a module's function that pushes a message's parts send again those that the SuperLink did not store.

    It says so of a session that is over, for which another try does nothing, and where its database is locked.
    """
    push: Callable[..., None] = vars(module)[name]

    def pushing(parts: object, push_object_fn: Callable[[str, bytes], None], **options: object) -> None:
        push(parts, partial(_stored, push_object_fn), **options)

    vars(module)[name] = pushing


def _stored(push: Callable[[str, bytes], None], name: str, content: bytes) -> None:
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    for pause in PAUSES:
        try:
            return push(name, content)
        except ObjectPushError:
            time.sleep(pause)
    return push(name, content)
