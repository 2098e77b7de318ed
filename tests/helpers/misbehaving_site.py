"""A site that does not do as it should.

`MISCHIEF` names a JSON file that says what it does with a message: {"train-3": "nan"} is a NaN in round 3. It
stands in for `client/node/supernode.py` and, as `python misbehaving_site.py executor …`, for the executor.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal

from perennial.client.node import executor, supernode
from perennial.common.flower.executor import Answer

sys.path.append(str(Path(__file__).parent))
from perennial.testing.bad_replies import with_fault

PUSH_MESSAGES = start_client_internal._push_messages
PLAN = Path(os.environ.get("MISCHIEF", "/nowhere"))


def deed(message: Message) -> str:
    """What the plan says about a message; empty: nothing."""
    plan: dict[str, str] = json.loads(PLAN.read_text()) if PLAN.exists() else {}
    return plan.get(f"{message.metadata.message_type}-{message.metadata.group_id}", "")


def misbehave(honest: Answer, message: Message, context: Context, run: Run) -> Message:
    """Answer a message as the plan says."""
    what = deed(message)
    if not what:
        return honest(message, context, run)
    if what == "die":
        os._exit(1)
    if what == "wait":  # until somebody removes the file
        (waiting := PLAN.with_name(f"{PLAN.stem}.waiting")).touch()
        while waiting.exists():
            time.sleep(0.1)
        return honest(message, context, run)
    if what.startswith("late "):
        time.sleep(float(what.removeprefix("late ")))
        return honest(message, context, run)
    reply = honest(message, context, run)
    if what in ("cut", "twice"):  # what the SuperNode is to do
        PLAN.with_name(f"{PLAN.stem}.{what}").touch()
        return reply
    return with_fault(what, message, reply, PLAN.with_name(f"{PLAN.stem}.hatched"))


def execute() -> None:
    """An executor that misbehaves."""
    from perennial.client.node import installed

    honest = installed.answer
    vars(installed).update(answer=lambda *asked: misbehave(honest, *asked))
    executor.main()


def push(contents: Iterable[tuple[str, bytes]], push_object_fn: Callable[[str, bytes], None]) -> None:
    """Send a reply's objects to the SuperLink; or one of them, and die with -9, when the ClientApp says `cut`."""
    if (flag := PLAN.with_name(f"{PLAN.stem}.cut")).exists():
        flag.unlink()
        push_object_fn(*next(iter(contents)))
        os.killpg(0, 9)
    push_object_contents_from_iterable(contents, push_object_fn)


def push_messages(*, send: Callable[..., Any], **others: Any) -> None:
    """Flower's own, but a reply is sent twice when the ClientApp says `twice`."""

    def sending(*reply: Any) -> Any:
        if (flag := PLAN.with_name(f"{PLAN.stem}.twice")).exists():
            flag.rename(flag.with_suffix(".sent"))
            send(*reply)
        return send(*reply)

    PUSH_MESSAGES(send=sending, **others)


if __name__ == "__main__":
    if sys.argv[1] == "executor":
        del sys.argv[1]
        execute()
    else:
        vars(start_client_internal).update(push_object_contents_from_iterable=push, _push_messages=push_messages)
        vars(supernode).update(EXECUTOR=[sys.executable, __file__, "executor"])
        supernode.main()
