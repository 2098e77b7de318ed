"""What a model takes is known before it is built."""

import gc
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.host import Host
from perennial.common import plugins
from perennial.common.config import load_config, parse_task
from perennial.common.models import memory
from perennial.common.models.architectures import build
from perennial.common.models.memory import model_bytes, must_fit, set_aside
from perennial.common.models.settings import CnnLarge, ConvNet, Logistic, Mlp, ModelSettings, model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.free_memory import available
from perennial.server.local import LocalRuntime
from perennial.server.run.loop import start

SMALL: list[ModelSettings] = [
    *(Mlp(hidden=(9, 8), norm="batch", head_layers=1), Mlp(init="xavier"), CnnLarge(), ConvNet(), Logistic()),
]


@pytest.mark.parametrize("settings", SMALL, ids=lambda settings: settings.name)
def test_the_bytes_are_those_of_the_built_model(settings: ModelSettings) -> None:
    built = build(settings, (3, 32, 32), 5).state_dict().values()
    assert model_bytes(settings, (3, 32, 32), 5) == sum(t.numel() * t.element_size() for t in built)


def test_a_model_that_does_not_fit_is_one_sentence_and_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 8e9)
    settings = Mlp(hidden=(100_000, 100_000))
    with pytest.raises(UserError, match=r"'mlp' of this size takes about 161.3 GB .* and 8.0 GB are available"):
        must_fit(settings, (784,), 2)
    with pytest.raises(UserError, match="too many parameters"):
        must_fit(Mlp(hidden=(10**18, 100_000)), (784,), 2)
    must_fit(Mlp(), (784,), 2)
    assert 1e8 < available() < 1e15


@pytest.mark.parametrize("width", [32, 600_000])
def test_a_module_that_computes_its_own_sizes_is_not_drawn(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RegNets compute their widths with tensors, of which the "meta" device knows no values."""

    def kaiming_uniform_(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        assert tensor.is_meta or tensor.nbytes <= memory.SMALL

    monkeypatch.setattr("torch.nn.init.kaiming_uniform_", kaiming_uniform_)
    monkeypatch.setattr(memory, "available", lambda: 5e8)
    settings = model_settings({"name": "torchvision:regnet_x_400mf", "stem_width": width})
    if width == 32:
        must_fit(settings, (3, 64, 64), 10)
    else:
        with pytest.raises(UserError, match=r"regnet_x_400mf' of this size takes about 1.0 GB"):
            must_fit(settings, (3, 64, 64), 10)


LOOKING = """
import torch
from torch import nn

class Looks(nn.Module):
    def __init__(self, classes: int, width: int, lazy: bool = False) -> None:
        super().__init__()
        self.featurizer = nn.LazyLinear(width) if lazy else nn.Linear(2, width)
        self.classifier = nn.Linear(width, classes)
        assert self.classifier.weight.abs().max() <= width**-0.5  # as it is drawn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.featurizer(x))
"""


@pytest.mark.parametrize("lazy", [False, True])
def test_a_module_that_looks_at_what_it_has_drawn_is_made_if_it_fits(
    lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looking.py").write_text(LOOKING)
    monkeypatch.setenv(plugins.VARIABLE, str(tmp_path / "looking.py"))
    monkeypatch.setattr(memory, "available", lambda: 4e8)
    for width in (10, 1_000_000):
        settings = model_settings({"name": "looking:Looks", "width": width, "lazy": lazy})
        before = torch.get_rng_state()
        assert model_bytes(settings, (2,), 2) == 4 * (2 * width + width + 2 * width + 2)
        assert torch.equal(torch.get_rng_state(), before)
    settings = model_settings({"name": "looking:Looks", "width": 10**8, "lazy": lazy})
    with pytest.raises(UserError, match=r"looks at what it has drawn.* more than the 0.2 GB that there are"):
        must_fit(settings, (2,), 2)


@pytest.mark.parametrize("begin", [LocalRuntime, start])
def test_every_run_looks_first(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 8e9)
    config = load_config(settings=["model.hidden=[100000, 100000]"])
    with pytest.raises(UserError, match="'mlp' of this size takes about"):
        begin(config)


def test_personal_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        options={"scenario": "synthetic-scm", "method": "ditto"}, settings=["model.hidden=[1000]"]
    )
    one = model_bytes(config.model, (12,), 2)
    monkeypatch.setattr(memory, "available", lambda: 103.0 * one)
    with pytest.raises(UserError, match="104 copies"):
        LocalRuntime(config)
    LocalRuntime(
        load_config(options={"scenario": "synthetic-scm", "method": "fedavg"}, settings=["model.hidden=[1000]"])
    )


@pytest.mark.parametrize("name", ["synthetic-scm", "causes-and-shortcut"])
def test_samples_that_do_not_fit_are_one_sentence_and_are_not_drawn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["scenario.train_samples=2000", "scenario.test_samples=1000"]
    config = load_config(options={"method": "fedavg", "scenario": name}, settings=settings)
    data = config.scenario.client_data(0, 0, None)
    drawn = len(data.train) + len(data.validation) + sum(map(len, data.test.values()))
    assert drawn == config.scenario.drawn_samples
    needed = 3 * 4 * drawn * prod(config.scenario.input_shape)
    text = config.task()
    monkeypatch.setattr("perennial.common.models.memory.available", lambda: needed - 1)
    monkeypatch.setattr(type(config.scenario), "client_data", lambda *_: pytest.fail("samples were drawn"))
    with pytest.raises(UserError, match=f"{drawn:,} samples of a client take about .* are available; take fewer"):
        Host({}).site(text, parse_task(text), 0)


def test_what_a_run_has_set_aside_is_collected_again_after_it() -> None:
    with set_aside():
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
