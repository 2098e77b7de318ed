"""The app as Flower ships it, and what Flower's own environment for it gets."""

import tomllib
import zipfile
from io import BytesIO

from flwr.cli.build import build_fab_from_disk

from server.deployment.remote import APP


def test_flower_s_own_environment_gets_no_development_tools() -> None:
    """Flower runs `uv sync` in its copy of the app, which installs the default groups; uv's default is `dev`."""
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(APP))) as shipped:
        project = tomllib.loads(shipped.read("pyproject.toml").decode())
        assert not any(name.startswith("tests/") for name in shipped.namelist())
    assert project["tool"]["uv"]["default-groups"] == []
    assert not any(name.startswith("pytest") for name in project["project"]["dependencies"])
