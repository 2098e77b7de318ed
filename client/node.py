"""What a node does with a message: from its settings to a host, which answers."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Message

from client.host import Host, pick_device
from client.state import FileStates
from common.errors import UserError


@lru_cache
def _host(states: str, data_root: str, device: str) -> Host:
    torch.set_num_threads(1)
    return Host(FileStates(Path(states)), Path(data_root) if data_root else None, pick_device(device))


def answer(message: Message, settings: Mapping[str, str]) -> Message:
    """Answer a message at a node with these settings (`client.app.settings_of`). Raises `UserError`."""
    if "partition-id" not in settings:
        raise UserError('this SuperNode has no partition-id; start it with --node-config "partition-id=0"')
    host = _host(settings["state-dir"], settings["data-root"], settings["device"])
    return host.handle(message, int(settings["partition-id"]))
