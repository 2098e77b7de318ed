"""Flower's own programs, as both the server's side and a site start them."""

from __future__ import annotations

import logging
import os
import socket
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from perennial.common.utils.errors import UserError, printable

LOOK_EVERY = 0.1
"""Seconds between two looks of a process that waits for another one's work; Flower waits 0.5 to 3."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


GRPC = "1.34.0"
"""The last release of Flower whose processes all speak gRPC."""


def has(module: str) -> bool:
    """Whether the installed Flower has a module, such as `superlink.grid.grpc_grid`. Imports nothing."""
    flower = find_spec("flwr")
    places = (flower and flower.submodule_search_locations) or ()
    return any((Path(place) / f"{module.replace('.', '/')}.py").exists() for place in places)


def must_have_grpc() -> None:
    """Raises `UserError` with a Flower whose processes do not all speak gRPC, as a deployment needs."""
    if not has("superlink.grid.grpc_grid"):
        raise UserError(
            f"a deployment of Perennial speaks gRPC, and Flower {version('flwr')} has HTTP in its place; "
            f'install the last release that has gRPC: uv pip install "flwr[simulation]=={GRPC}"'
        )


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
