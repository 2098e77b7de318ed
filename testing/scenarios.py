"""What every scenario must keep: it has what it announces, the same for the same seed, and a method trains on it.

Each test takes the name of a preset as `scenario`.
"""

import random
from pathlib import Path

import numpy as np
import torch

from perennial.common.config import load_config
from perennial.common.data.examples import ClientData, Examples, must_be_samples
from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios import scenario_class, scenario_preset
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.samples import blank, sample_dtype
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

MOST = 8
"""Clients that are looked at."""


def data(scenario: Scenario, seed: int = 0) -> list[ClientData]:
    return [scenario.client_data(client, seed, None) for client in range(min(MOST, scenario.clients))]


def parts(own: ClientData) -> list[Examples]:
    return [own.train, own.validation, *own.test.values()]


def test_a_preset_survives_json_and_its_model_fits(scenario: str) -> None:
    preset = scenario_preset(scenario)
    assert scenario_class(preset.name).model_validate_json(preset.model_dump_json()) == preset
    assert preset.title.count("\n") == 0
    assert preset.rounds >= 1
    assert 0 < preset.participation <= 1
    assert len(set(preset.client_ids)) == preset.clients
    settings = model_settings(preset.model)
    net = network(settings, preset.input_shape, preset.task.outputs)
    outputs = net.predict(net.initial(0), blank(preset.input_shape, 3))
    assert outputs.shape == (3, preset.task.outputs)


def test_every_client_has_what_the_scenario_announces(scenario: str) -> None:
    preset = scenario_preset(scenario)
    environments = len(preset.train_environments)
    assert environments
    assert preset.test_environments
    for names in (preset.train_environments, preset.test_environments):
        assert len(set(names)) == len(names), "two environments have one name"
    for own in data(preset):
        assert len(own.train)
        assert list(own.test) == list(preset.test_environments)
        for part in parts(own):
            must_be_samples(scenario, part, preset.input_shape, preset.task)
            assert part.x.dtype == sample_dtype(preset.input_shape)
            assert part.x.isfinite().all()
        for part in (own.train, own.validation):
            assert ((part.environment >= 0) & (part.environment < environments)).all()


def test_the_same_seed_gives_the_same_samples(scenario: str) -> None:
    preset = scenario_preset(scenario)
    state = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    again = [preset.client_data(client, 0, None) for client in reversed(range(min(MOST, preset.clients)))]
    for one, other in zip(data(preset), reversed(again), strict=True):
        for left, right in zip(parts(one), parts(other), strict=True):
            assert torch.equal(left.x, right.x)
            assert torch.equal(left.y.nan_to_num(), right.y.nan_to_num())
            assert torch.equal(left.y.isnan(), right.y.isnan())
            assert torch.equal(left.environment, right.environment)
    assert torch.equal(torch.get_rng_state(), state[0]), "a global generator was used"
    assert (str(np.random.get_state()), random.getstate()) == state[1:], "a global generator was used"


def test_nothing_is_tested_on_what_it_was_trained_on(scenario: str) -> None:
    for own in data(scenario_preset(scenario)):
        for name, part in own.test.items():
            for train in (own.train, own.validation):
                assert not (len(part) and torch.equal(part.x, train.x)), f"{name} has the samples of training"


def test_fedavg_trains_on_it(scenario: str, tmp_path: Path) -> None:
    preset = scenario_preset(scenario)
    config = load_config(options={"method": "fedavg", "scenario": scenario, "rounds": 1})
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"] == {}
    found = summary["models"]["global"]["final"][preset.task.headline.name]
    assert set(found) == set(config.scenario.test_environments)
