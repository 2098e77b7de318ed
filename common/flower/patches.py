"""What a process of ours changes inside Flower, whose own files stay as they are.

- A SuperNode looks for a message after 0.1 s or a fifth of the time that it has waited (1 s at most), not 3 s,
- and for a reply, and for late parts of a message, every 0.1 s, not every 0.5 s and 1 s,
- and of the requests of a run that wait for it, it takes the newest alone, and the next one after its reply.
- What the SuperLink itself fails to do is asked again, for a minute, instead of dropping the message,
- and what a line of the log quotes from somebody else stays on that line.

`tests/client/node/test_supernode.py` fails when what is changed has moved.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from logging import INFO
from types import ModuleType
from typing import Any

from flwr.app import Message
from flwr.common.config import parse_config_args as parse_config_args
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode as flower_supernode

from perennial.common.flower.names import ObjectPushError, log
from perennial.common.flower.processes import LOOK_EVERY, has, quote_in_line
from perennial.common.flower.retries import persist

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before a part of a message is sent again that the SuperLink did not store."""

IDLE, LONGEST_PAUSE = 3.0, 1.0
"""Flower's pause where there is no message, and ours at most."""


def patch_supernode() -> None:
    """Change a SuperNode's loop in this process, as above."""
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


def patch_serverapp() -> None:
    """Have the ServerApp's Grid of this process wait less, and send again what was not stored."""
    name = "grpc_grid" if has("superlink.grid.grpc_grid") else "http_grid"
    grids = import_module(f"flwr.superlink.grid.{name}")
    hasten(grids)
    insist(grids, "push_objects")


def hasten(module: ModuleType) -> None:
    """Have a module of Flower's that pulls a message's parts wait `LOOK_EVERY` for late ones, not 1 s."""
    vars(module)["pull_objects"] = partial(vars(module)["pull_objects"], initial_backoff=LOOK_EVERY)


def insist(module: ModuleType, name: str) -> None:
    """Have a module's function that pushes a message's parts send again those that the SuperLink did not store.

    It says so of a session that is over, for which another try does nothing, and where its database is locked.
    """
    push: Callable[..., None] = vars(module)[name]

    def pushing(parts: object, push_object_fn: Callable[[str, bytes], None], **options: object) -> None:
        push(parts, partial(_stored, push_object_fn), **options)

    vars(module)[name] = pushing


def _stored(push: Callable[[str, bytes], None], name: str, content: bytes) -> None:
    for pause in PAUSES:
        try:
            return push(name, content)
        except ObjectPushError:
            time.sleep(pause)
    return push(name, content)


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
