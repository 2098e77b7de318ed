"""A node's own settings: their names, and what they are unless somebody says otherwise."""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

SETTINGS = {
    "state-dir": "PERENNIAL_STATE",
    "data-root": "PERENNIAL_DATA",
    "device": "PERENNIAL_DEVICE",
    "superlink": "PERENNIAL_SUPERLINK",
}
"""As `--node-config` knows them, and the environment's names for them."""
DEFAULTS = {
    "state-dir": str(Path.home() / ".perennial" / "state"),
    "data-root": "",
    "device": "auto",
    "superlink": "",
}


class Consent(StrEnum):
    """What a site tells a survey: nothing; names and counts; also sums, squares and bins of numbers."""

    none = "none"
    counts = "counts"
    full = "full"


def settings_in(node_config: Mapping[str, Any], of_run: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A node's settings: SuperNode's `--node-config`, else the environment, else the run's, else the default."""
    run = of_run or {}
    found = {
        name: os.environ.get(variable) or run.get(name) or DEFAULTS[name] for name, variable in SETTINGS.items()
    }
    return {name: str(value) for name, value in {**found, **node_config}.items()}
