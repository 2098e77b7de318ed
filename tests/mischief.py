"""A site that does not do as it should.

`MISCHIEF` names a JSON file that says what it does with a message: {"train-3": "nan"} is a NaN in round 3. It
stands in for `client/node/launcher.py`: `python mischief.py flower-supernode …`.
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
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from perennial.client.node import launcher

sys.path.append(str(Path(__file__).parent))
from spoiled import spoiled

PLAN = Path(os.environ.get("MISCHIEF", "/nowhere"))
App = Callable[[Message, Context], Message]


def deed(message: Message) -> str:
    """What the plan says about a message; empty: nothing."""
    plan: dict[str, str] = json.loads(PLAN.read_text()) if PLAN.exists() else {}
    return plan.get(f"{message.metadata.message_type}-{message.metadata.group_id}", "")


def misbehave(honest: App, message: Message, context: Context) -> Message:
    """Answer a message as the plan says."""
    what = deed(message)
    if not what:
        return honest(message, context)
    if what == "die":
        os._exit(1)
    if what == "wait":  # until somebody removes the file
        (waiting := PLAN.with_name(f"{PLAN.stem}.waiting")).touch()
        while waiting.exists():
            time.sleep(0.1)
        return honest(message, context)
    if what.startswith("late "):
        time.sleep(float(what.removeprefix("late ")))
        return honest(message, context)
    reply = honest(message, context)
    if what == "cut":  # what the SuperNode is to do
        PLAN.with_name(f"{PLAN.stem}.cut").touch()
        return reply
    return spoiled(what, message, reply, PLAN.with_name(f"{PLAN.stem}.hatched"))


def clientapp() -> None:
    """`flwr-clientapp`, whose app misbehaves."""
    load = run_clientapp.get_load_client_app_fn

    def loader(**where: Any) -> Callable[..., App]:
        def found(*fab: Any) -> App:
            honest = load(**where)(*fab)
            return lambda message, context: misbehave(honest, message, context)

        return found

    vars(run_clientapp).update(get_load_client_app_fn=loader)
    flwr_clientapp()


def push(contents: Iterable[tuple[str, bytes]], push_object_fn: Callable[[str, bytes], None]) -> None:
    """Send a reply's objects to the SuperLink; or one of them, and die with -9, when the ClientApp says `cut`."""
    if (flag := PLAN.with_name(f"{PLAN.stem}.cut")).exists():
        flag.unlink()
        push_object_fn(*next(iter(contents)))
        os.killpg(0, 9)
    push_object_contents_from_iterable(contents, push_object_fn)


if __name__ == "__main__":
    vars(start_client_internal).update(push_object_contents_from_iterable=push)
    vars(launcher).update(flwr_clientapp=clientapp, __file__=__file__)
    launcher.main()
