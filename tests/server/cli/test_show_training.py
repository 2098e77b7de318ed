"""The shared settings of training in `perennial show method`, and in searches."""

import json
import os

import pytest
from typer.testing import CliRunner

from perennial.common.config import load_config
from perennial.common.methods import METHODS
from perennial.common.training import Training
from perennial.server.cli.main import app
from perennial.server.study.sweep import trials


def shown(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["show", "method", *arguments], env={**os.environ, "COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    return found.output


def test_the_settings_are_there_once_in_a_group_of_their_own() -> None:
    text = shown("fedavg")
    group = text.partition("Of the run, and the same for all methods that take them")[2]
    for name in ("optimizer.name", "optimizer.keep", "schedule.warm_up", "clip_norm", "augment", "precision"):
        assert group.count(f"│ {name} ") == text.count(f"│ {name} ") == 1, name
    assert "Not " not in group


def test_what_a_method_refuses_is_named_with_the_reason() -> None:
    text = " ".join(shown("pfedme").split())
    assert " optimizer.name " not in text
    assert "Not optimizer, schedule, clip_norm, clip_value, accumulate: a method whose steps towards a" in text


@pytest.mark.parametrize("method", METHODS)
def test_the_same_as_data(method: str) -> None:
    data, kind = json.loads(shown(method, "--json")), METHODS[method]
    assert data["refuses"] == dict(kind.refuses)
    tables = {name.partition(".")[0] for name in data["training"]}
    assert tables == Training.model_fields.keys() - kind.refuses.keys()


def test_a_refusal_is_of_a_setting_that_there_is() -> None:
    for kind in METHODS.values():
        assert kind.refuses.keys() <= {*Training.model_fields, "server_optimizer"}, kind


def test_a_search_with_adam_has_its_step_sizes_and_no_momentum() -> None:
    config = load_config(options={"method": "fedsdr"}, settings=["optimizer=adamw"])
    found = trials(config, 20)
    rates = [own.method.learning_rate for own in found]  # type: ignore[attr-defined]
    personal = [own.method.personal_learning_rate for own in found]  # type: ignore[attr-defined]
    assert rates[0] == personal[0] == 1e-3
    assert all(1e-4 <= rate <= 1e-2 for rate in [*rates, *personal])
    assert len({*rates}) == 20
    assert {own.method.momentum for own in found} == {0.0}  # type: ignore[attr-defined]
    usual = trials(load_config(options={"method": "fedsdr"}), 20)
    assert max(own.method.learning_rate for own in usual) > 1e-2  # type: ignore[attr-defined]
    assert {own.optimizer.name for own in found} == {"adamw"}
