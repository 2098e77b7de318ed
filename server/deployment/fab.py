"""The Flower app that a SuperLink is sent: this package as it is installed, and what Flower asks of an app."""

import shutil
from pathlib import Path
from typing import Any

import tomli_w

from perennial.common.utils.version import PACKAGE, __version__, code_digest

APP: dict[str, Any] = {
    "publisher": "perennial",
    "components": {"serverapp": "perennial.server.app:app", "clientapp": "perennial.client.app:app"},
    # What `flwr run . -c 'key=value'` may override; `perennial run` fills `config`.
    "config": {
        "method": "fedsdr",
        "scenario": "colored-digits",
        **dict.fromkeys(("rounds", "seed"), 0),
        **dict.fromkeys(("set", "out", "config", "resume", "state-dir", "data-root", "device"), ""),
        **dict.fromkeys(("code", "desk", "survey"), ""),
    },
}
"""As in pyproject.toml, which `flwr run .` reads."""
CODE = ("perennial/**/*.py", "perennial/common/methods/presets.toml")


def make_app(folder: Path) -> Path:
    """Write the app into a new folder, with a copy of the package; the folder.

    Flower starts `uv sync` in its copy of an app where an operator lets it, so the app asks for nothing.
    """
    config = {**APP["config"], "code": code_digest()}
    shutil.copytree(PACKAGE, folder / "perennial", ignore=shutil.ignore_patterns("__pycache__"))
    project = {
        "name": "perennial",
        "version": __version__,
        "description": "Federated learning for clients whose data differ from each other and from later data",
        "license": "Apache-2.0",
        "dependencies": [],
    }
    tool = {"flwr": {"app": {**APP, "config": config, "fab-include": list(CODE)}}}
    (folder / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": tool}), encoding="utf-8")
    return folder
