"""Defaults < file < command line < --set, and back again through TOML and JSON."""

from pathlib import Path

import pytest

from common.config import load_config, parse_task
from common.data.scenarios.colored import CMNIST
from common.errors import UserError
from common.methods.ditto import Ditto


def test_defaults_are_complete() -> None:
    config = load_config()
    assert config.method == Ditto()
    assert config.scenario.name == "colored-digits"
    assert (config.rounds, config.participation) == (config.scenario.rounds, config.scenario.participation)
    assert config.model.model_dump() == {**config.model.model_dump(), **config.scenario.model}


def test_preset_gives_its_participation_and_a_setting_overrides_it() -> None:
    assert load_config(options={"scenario": "cmnist-80"}).participation == 0.1
    assert load_config(options={"scenario": "cmnist"}, settings=["scenario.clients=80"]).participation == 0.1
    assert load_config(options={"scenario": "cmnist-80"}, settings=["participation=0.5"]).participation == 0.5
    assert load_config(options={"scenario": "cmnist-oracle"}).scenario == CMNIST(oracle=True)


@pytest.mark.parametrize("scenario", ["colored-digits", "cmnist-80-oracle", "rc-fmnist"])
def test_toml_round_trip(scenario: str, tmp_path: Path) -> None:
    config = load_config(
        options={"scenario": scenario, "seed": 3}, settings=["proximity=0.7", "model.hidden=[5, 6]"]
    )
    path = tmp_path / "config.toml"
    path.write_text(config.toml())
    assert load_config(path) == config


def test_task_is_what_clients_need_and_no_more() -> None:
    config = load_config(options={"data_root": "/secret/place"})
    assert "/secret/place" not in config.task()
    task = parse_task(config.task())
    assert (task.method, task.scenario, task.model, task.seed) == (
        config.method,
        config.scenario,
        config.model,
        config.seed,
    )
    assert parse_task(config.task()) is task


def test_method_on_the_command_line_replaces_the_files_method_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[method]\nname = "ditto"\nproximity = 2.0\n')
    assert load_config(path, {"method": "fedavg"}).method.name == "fedavg"


def test_another_model_drops_the_scenarios_settings() -> None:
    for config in (load_config(options={"model": "logistic"}), load_config(settings=["model.name=logistic"])):
        assert config.model.model_dump() == {"name": "logistic"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["oracle=true"], ["unknown key 'oracle'"]),
        (["scenario.oracle=perhaps"], ["scenario.oracle", "perhaps"]),
        (["scenario.colour=1"], ["scenario.colour", "no such setting"]),
        (["participation=0"], ["participation", "greater than 0"]),
        (["learning_rate=-1", "momentum=2"], ["method.learning_rate", "and 1 more"]),
    ],
)
def test_sentences(settings: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config(settings=settings)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)
