"""The Flower ClientApp: one handler behind every action of every method."""

import sys
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from perennial.client.node.settings import settings_in

Handler = Callable[[Message, Context], Message]


class OneHandlerApp(ClientApp):
    """A ClientApp that answers every message with one function; the method says which actions there are."""

    def __init__(self, handle: Handler) -> None:
        super().__init__()
        self.handle = handle

    def __call__(self, message: Message, context: Context) -> Message:
        return self.handle(message, context)


def simulated() -> bool:
    """Whether this process is one of Ray's, as the nodes of Flower's simulation are; they share it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def handle(message: Message, context: Context) -> Message:
    """Answer a message in Flower's simulation, or at a site that runs the server's code (`join --code shipped`).

    In the simulation, where operator and sites are one, the run's settings come before the default. Raises
    `UserError`, and what answering raises.
    """
    from perennial.client.node.answer import answer  # imports PyTorch

    return answer(message, settings_in(context.node_config, context.run_config if simulated() else None))


app = OneHandlerApp(handle)
