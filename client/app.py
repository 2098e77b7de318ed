"""The Flower ClientApp: one handler behind every action of every method."""

import os
import sys
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from perennial.client.settings import DEFAULTS, SETTINGS
from perennial.common.errors import UserError

Handler = Callable[[Message, Context], Message]


class OneHandlerApp(ClientApp):
    """A ClientApp that answers every message with one function; the method says which actions there are."""

    def __init__(self, handle: Handler) -> None:
        super().__init__()
        self.handle = handle

    def __call__(self, message: Message, context: Context) -> Message:
        return self.handle(message, context)


def settings_of(context: Context) -> dict[str, str]:
    """A node's settings: SuperNode's `--node-config`, else the environment, else default.

    In Flower's simulation, where operator and sites are one, the run's own come before the default.
    """
    of_run = context.run_config if simulated() else {}
    found = {
        name: os.environ.get(variable) or of_run.get(name) or DEFAULTS[name] for name, variable in SETTINGS.items()
    }
    return {name: str(value) for name, value in {**found, **context.node_config}.items()}


def simulated() -> bool:
    """Whether this process is one of Ray's, as the nodes of Flower's simulation are; they share it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def handle(message: Message, context: Context) -> Message:
    """Answer a message at a SuperNode or in Flower's simulation. Raises `UserError`, and what answering raises.

    A simulated node has no worker: its process stays, and ends with the run.
    """
    settings = settings_of(context)
    if settings["worker"] not in ("on", "off"):
        raise UserError(f'worker: {settings["worker"]!r} is not possible; write worker="on" or worker="off"')
    if settings["worker"] == "on" and not simulated():
        from perennial.client.node.relay import relay

        return relay(message, settings)
    from perennial.client.node.answer import answer  # imports PyTorch

    return answer(message, settings)


app = OneHandlerApp(handle)
