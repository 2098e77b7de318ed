"""Flower's own programs, as both the server's side and a site start them."""

import os
import sys
from pathlib import Path

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def program(name: str) -> str:
    """A program of the Flower that this Python has installed."""
    return str(Path(sys.executable).parent / name)


def environment() -> dict[str, str]:
    """This process's environment, for Flower's programs."""
    # Flower starts its other programs by name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET, "PATH": path}
