"""The Flower ClientApp: one handler behind every action of every method."""

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.host import Host, pick_device
from client.state import FileStates
from common.errors import UserError
from common.methods import METHODS

Handler = Callable[[Message, Context], Message]


def make_app(handle: Handler) -> ClientApp:
    """A ClientApp that answers every message type of every method with `handle`."""
    app = ClientApp()
    app.query()(handle)
    for message_type in sorted({action for method in METHODS.values() for action in method.actions}):
        kind, _, action = message_type.partition(".")
        register = {"train": app.train, "evaluate": app.evaluate, "query": app.query}[kind]
        (register(action) if action else register())(handle)
    return app


@lru_cache
def _host(states: str, data_root: str, device: str) -> Host:
    torch.set_num_threads(1)
    return Host(FileStates(Path(states)), Path(data_root) if data_root else None, pick_device(device))


def _setting(context: Context, name: str, variable: str, default: str) -> str:
    """A site's setting: SuperNode's `--node-config`, else the environment, else the run's own, else default."""
    found = context.node_config.get(name) or os.environ.get(variable) or context.run_config.get(name) or default
    return str(found)


def handle(message: Message, context: Context) -> Message:
    """Answer a message at a SuperNode or in Flower's simulation."""
    host = _host(
        _setting(context, "state-dir", "PERENNIAL_STATE", str(Path.home() / ".perennial" / "state")),
        _setting(context, "data-root", "PERENNIAL_DATA", ""),
        _setting(context, "device", "PERENNIAL_DEVICE", "auto"),
    )
    if "partition-id" not in context.node_config:
        raise UserError('this SuperNode has no partition-id; start it with --node-config "partition-id=0"')
    return host.handle(message, int(context.node_config["partition-id"]))


app = make_app(handle)
