"""The app as Flower ships it: the installed package, and what Flower's own environment for it gets."""

import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

import perennial
from perennial.server.deployment.fab import APP, make_app

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def files(app: Path) -> tuple[set[str], dict[str, object]]:
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(app))) as shipped:
        return set(shipped.namelist()), tomllib.loads(shipped.read("pyproject.toml").decode())


def test_the_app_is_the_package_and_asks_for_nothing(tmp_path: Path) -> None:
    """Flower runs `uv sync` in its copy of the app where an operator lets it."""
    names, project = files(make_app(tmp_path / "app"))
    assert {"perennial/__init__.py", "perennial/server/app.py", "perennial/common/methods/presets.toml"} <= names
    assert all(name.startswith(("perennial/", ".info/", "pyproject.toml")) for name in names)
    assert project["project"]["dependencies"] == []


@pytest.mark.slow
def test_the_app_of_the_repository_has_no_code_and_no_development_tools() -> None:
    """uv's default group is `dev`, and the code is what is installed."""
    names, project = files(Path(__file__).parents[2])
    assert names == {"pyproject.toml", ".info/CONTENT", "LICENSE"}
    assert project["tool"]["uv"]["default-groups"] == []


def test_both_apps_are_asked_for_in_the_same_words() -> None:
    of_the_repository = PROJECT["tool"]["flwr"]["app"]
    assert {**of_the_repository, "fab-include": None} == {**APP, "fab-include": None}
    assert PROJECT["project"]["version"] == perennial.__version__
