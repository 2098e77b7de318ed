"""The ServerApp as Flower's own command starts it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.superlink.grid import InMemoryGrid

from perennial.common.config import load_config
from perennial.common.utils.errors import UserError
from perennial.server import app
from perennial.server.run.folder import RunFolder
from perennial.server.simulation import Simulation

PROJECT = Path(__file__).parents[2]


class SimulatedNodes(InMemoryGrid):
    """The Grid of Flower's simulation, with nodes that do not answer; their number at each look."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def get_node_ids(self) -> list[int]:
        return list(range(self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "NODES_SETTLE", 0.0)


def typed(**settings: Any) -> Context:
    """What `flwr run . --run-config …` makes of the project's settings."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    return Context(1, 1, {}, RecordDict(), {**project["tool"]["flwr"]["app"]["config"], **settings})


def test_too_few_simulated_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower simulates two unless it is told otherwise; they are not waited for, though `wait` is 120 seconds."""
    monkeypatch.chdir(tmp_path)
    sentence = (
        "Flower simulates 2 SuperNodes and scenario colored-digits has 8 clients; "
        'say flwr run . --federation-config "num-supernodes=8"'
    )
    with pytest.raises(UserError) as caught:
        app.main(SimulatedNodes(0, 1, 2), typed(rounds="2"))
    assert str(caught.value) == sentence
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "error.txt").read_text() == f"{sentence}\n"
    assert load_config(folder / "config.toml").runtime == "simulation"


def test_simulated_nodes_that_are_still_being_registered() -> None:
    config = load_config(options={"method": "fedavg"})
    app.must_have_nodes(SimulatedNodes(0, 3, 8), config)
    app.must_have_nodes(SimulatedNodes(9), config)


def test_the_word_on_an_earlier_try_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = {"out": str(tmp_path / "run"), "rounds": "1"}
    with pytest.raises(UserError):
        app.main(SimulatedNodes(2), typed(**out))
    assert (tmp_path / "run" / "error.txt").exists()
    monkeypatch.setattr(app, "run_rounds", lambda *_: None)
    app.main(SimulatedNodes(8), typed(**out))
    assert not (tmp_path / "run" / "error.txt").exists()


def test_the_folder_of_another_run_is_left_as_it_is(tmp_path: Path) -> None:
    """Whatever else is wrong: its own reason to have ended, or the lack of one, stays."""
    finished = RunFolder.create(tmp_path / "run", load_config())
    finished.append([{"kind": "round", "round": 1}])
    before = {path.name: path.stat().st_mtime_ns for path in finished.path.iterdir()}
    for settings in ({}, {"rounds": "x"}):
        with pytest.raises(UserError, match="already holds a run"):
            app.main(SimulatedNodes(8), typed(out=str(finished.path), **settings))
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="is not a run folder"):
        app.main(SimulatedNodes(8), typed(resume=str(tmp_path / "other")))
    assert {path.name: path.stat().st_mtime_ns for path in finished.path.iterdir()} == before
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rounds": "x"}, "rounds: x is not possible; write a whole number"),
        ({"rounds": True}, "rounds: True is not possible; write a whole number"),
        ({"seed": "9" * 5000}, f"seed: {'9' * 80} is not possible; write a whole number"),
        ({"rounds": "-1"}, "rounds: -1 is not possible; input should be greater than or equal to 1"),
        ({"config": "{"}, "config: { is no configuration as JSON"),
        ({"config": "[" * 100_000}, f"config: {'[' * 80} is no configuration as JSON"),
        ({"config": "[]"}, "config: [] is no configuration as JSON"),
        ({"set": "rounds"}, "--set 'rounds' is not possible; write key=value"),
    ],
)
def test_a_wrong_setting_of_flwr_run_is_one_sentence(
    settings: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        app.main(SimulatedNodes(8), typed(**settings))
    assert str(caught.value) == sentence
    assert not any(tmp_path.iterdir())


def test_what_simulated_clients_keep_is_not_lost_by_a_resume_that_does_not_know_where_it_is(
    tmp_path: Path,
) -> None:
    config = load_config(options={"method": "ditto", "runtime": "simulation"})
    folder = tmp_path / "run"
    with pytest.raises(UserError) as caught:
        next(Simulation(tmp_path).execute(config, folder, resume=True))
    command = f'flwr run . --run-config \'resume="{folder}"\' --federation-config "num-supernodes=8"'
    assert str(caught.value).endswith(f"go on with {command}")
