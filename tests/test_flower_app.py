"""The app as Flower ships it, and what Flower's own environment for it gets."""

import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

from flwr.cli.build import build_fab_from_disk

from server.deployment.remote import APP


def needed(app: Path, work: Path) -> list[str]:
    """What the package of development tools depends on, in a copy of the app, or in the project's folder."""
    work.mkdir()
    command = [sys.executable, str(app / "development" / "setup.py"), "-q", "egg_info", "--egg-base", str(work)]
    subprocess.run(command, cwd=work, capture_output=True, check=True)
    requires = next(work.glob("*.egg-info")) / "requires.txt"
    return requires.read_text().splitlines() if requires.exists() else []


def test_flower_s_own_environment_gets_no_development_tools(tmp_path: Path) -> None:
    """Flower runs `uv sync` in its copy of the app, and the group `dev` is part of that."""
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(APP))) as shipped:
        shipped.extractall(tmp_path / "app")
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["dependency-groups"] == {"dev": ["perennial-development"]}
    assert project["tool"]["uv"]["sources"]["perennial-development"]["path"] == "development"
    assert needed(tmp_path / "app", tmp_path / "there") == []
    assert any(name.startswith("pytest") for name in needed(APP, tmp_path / "here"))
