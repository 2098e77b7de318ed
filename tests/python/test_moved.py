"""Plug-ins that were written for 0.1 import modules by the names that these had then."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from plugin_packages import unloaded

import perennial
from perennial.moved import MOVED

PLUGIN = '''
from typing import Literal

from perennial.client.objectives import squared_distance
from perennial.client.trainer import LocalTrainer
from perennial.common.knobs import between, knob
from perennial.common.methods.base import ONE_MODEL, LocalTraining
from perennial.common.model_settings import ModelSettings
from perennial.common.models import Model, Tensors, build
from perennial.common.wire import MODEL
from perennial.strategies.uniform import UniformStrategy
from torch import nn


class Old(LocalTraining):
    """FedProx as of 0.1."""

    title = "Old"
    summary = "FedProx"
    source = "Li et al. 2020"
    evaluates = ("global",)
    sums = ONE_MODEL

    name: Literal["old"] = "old"
    proximity: float = knob(0.01, "pull", symbol="μ", source="ours", ge=0, search=between(1e-3, 1.0, log=True))


class OldNet(ModelSettings):
    """A linear model as of 0.1."""

    summary = "a linear layer"
    source = "ours"
    name: Literal["old-net"] = "old-net"


@build.register
def _(settings: OldNet, input_shape: tuple[int, ...], classes: int) -> Model:
    width = 1
    for side in input_shape:
        width *= side
    return Model(nn.Flatten(), nn.Linear(width, classes))


class OldClient(LocalTrainer[Old]):
    def loss(self, params: Tensors, batch, received):
        risk, metrics = super().loss(params, batch, received)
        distance = squared_distance(params, received[MODEL], self.network.parameter_names)
        return risk + self.hparams.proximity / 2 * distance, metrics
'''


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_module_that_has_moved_is_found_under_both_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{name} is {MOVED[name]} now"):
        assert import_module(name) is import_module(MOVED[name])


def test_a_plug_in_written_for_0_1_runs_as_fedprox_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    with unloaded():
        perennial.plugin("old_plugin")
        small = {"model.name": "old-net", "evaluate_every": 2}
        old = perennial.run("old", rounds=2, settings=small, out=tmp_path / "old")
        ours = perennial.run("fedprox", rounds=2, settings=small, out=tmp_path / "ours")
    assert old.summary["models"] == ours.summary["models"]


def test_what_there_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("perennial.common.helpers")
    with pytest.raises(ModuleNotFoundError):
        import_module("perennial.strategies.helpers")
    with pytest.raises(ImportError, match="cannot import name 'helpers'"):
        exec("from perennial.common.models import helpers")
