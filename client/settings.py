"""A node's own settings: their names, and what they are unless somebody says otherwise."""

import sys
from pathlib import Path

SETTINGS = {
    "state-dir": "PERENNIAL_STATE",
    "data-root": "PERENNIAL_DATA",
    "device": "PERENNIAL_DEVICE",
    "worker": "PERENNIAL_WORKER",
}
"""As `--node-config` knows them, and the environment's names for them."""
DEFAULTS = {
    "state-dir": str(Path.home() / ".perennial" / "state"),
    "data-root": "",
    "device": "auto",
    "worker": "on" if sys.platform == "linux" else "off",  # a worker watches its parent in /proc
}
