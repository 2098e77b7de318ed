"""Plug-ins for tests: a method of one's own in a few lines, and a way to be rid of what was loaded."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perennial.client.host import client_class
from perennial.common import plugins
from perennial.common.config import parse_task
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.methods import METHODS
from perennial.common.models.settings import MODELS

SETTINGS = '''
from typing import Literal

from perennial.common.utils.knobs import between, knob
from perennial.common.methods.base import ONE_MODEL, LocalTraining


class MyProx(LocalTraining):
    """FedProx under another name."""

    title, summary, source, evaluates, sums = "MyProx", "FedProx again", "tests", ("global",), ONE_MODEL

    name: Literal["my-prox"] = "my-prox"
    proximity: float = knob(0.01, "the pull", source="tests", ge=0, le=10, search=between(1e-3, 1.0, log=True))
'''
CLIENT = '''
from perennial.client.methods.fedprox import FedProxClient


class MyClient(FedProxClient):
    """As FedProx's."""
'''
SERVER = '''
from perennial.strategies.base import MethodStrategy


class MyServer(MethodStrategy):
    """One for all."""

    def weight(self, reply):
        return 1.0
'''
METHOD = SETTINGS + CLIENT
SCENARIO = '''
from typing import Literal

from perennial.common.data.scenarios.colored import ColoredDigits


class MyDigits(ColoredDigits):
    """Half of the colours."""

    name: Literal["my-digits"] = "my-digits"
    clients: int = 2
'''
MODEL = '''
from typing import Literal

from torch import nn

from perennial.common.models.settings import ModelSettings
from perennial.common.models.architectures import Model, build


class MyNet(ModelSettings):
    """Two layers."""

    summary, source = "two layers", "tests"

    name: Literal["my-net"] = "my-net"


@build.register
def _my_net(settings: MyNet, input_shape, classes):
    size = 1
    for length in input_shape:
        size *= length
    return Model(nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.ReLU()), nn.Linear(8, classes))
'''


@contextmanager
def unloaded() -> Iterator[None]:
    """For a block; what was loaded in it is forgotten afterwards, modules included."""
    rooms = [METHODS, MODELS, SCENARIOS, plugins._loaded, sys.modules]
    before, path = [dict(room) for room in rooms], list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - before[-1].keys():
            if not name.startswith(("my_", "own_")):
                before[-1][name] = sys.modules[name]  # a library's stays
        for room, names in zip(rooms, before, strict=True):
            for name in room.keys() - names.keys():
                del room[name]
        client_class.cache_clear()
        parse_task.cache_clear()


def write(folder: Path, name: str, text: str) -> Path:
    """A file with a text, in a package if the name has a dot."""
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def install(monkeypatch: pytest.MonkeyPatch, site: Path, package: str, **groups: dict[str, str]) -> None:
    """As pip would: a folder of Python's with a package's facts; its modules are written there, too."""
    facts = site / f"{package.replace('-', '_')}-1.2.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    lines = [
        line
        for group, names in groups.items()
        for line in (f"[perennial.{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
