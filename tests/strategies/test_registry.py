"""Which server half a method has."""

from pathlib import Path
from typing import Any

import pytest

from perennial.common.config import load_config
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.methods import METHODS
from perennial.common.utils.errors import UserError
from perennial.common.wire import MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.study import run_names
from perennial.server.study.run_names import run_name
from perennial.strategies import methods as halves
from perennial.strategies import registry
from perennial.strategies.base import MethodStrategy
from perennial.strategies.methods.fedpin_gm import FedPINGMStrategy
from perennial.strategies.methods.groupdro import GroupDROStrategy
from perennial.strategies.methods.shortcut import ShortcutStrategy
from perennial.strategies.methods.uniform import UniformStrategy
from perennial.strategies.registry import strategy_for
from perennial.testing.tiny_federation import toy_config

SHARED = {"clustering", "shortcut", "simplex", "uniform"}
UNLISTED = {"references"}
"""A method that nobody chooses: it trains what the selection `split` needs."""


@pytest.mark.parametrize(
    ("method", "settings", "kind"),
    [
        ("fedavg", [], MethodStrategy),
        ("ditto", [], MethodStrategy),
        ("pfedme", [], UniformStrategy),
        ("irm-ft", [], UniformStrategy),
        ("fedsdr-fedavg", [], ShortcutStrategy),
        ("fedpin-gm-l2", [], FedPINGMStrategy),
        ("perinvfl", [], UniformStrategy),
        ("perinvfl", ["invariance=groupdro"], GroupDROStrategy),
    ],
)
def test_a_method_without_a_server_file_has_the_one_that_it_names(
    method: str, settings: list[str], kind: type[MethodStrategy[Any]]
) -> None:
    assert type(strategy_for(toy_config(method, *settings), "run")) is kind


def test_every_server_file_is_of_a_method_or_shared() -> None:
    """A file whose name is misspelt would be passed over for FedAvg's server without a word."""
    files = {path.stem for folder in halves.__path__ for path in Path(folder).glob("*.py")} - {"__init__"}
    methods = {method.module() for method in METHODS.values()}
    assert files - methods == SHARED | UNLISTED
    shared = {toy_config(method).method.server() for method in METHODS}
    assert shared <= files | {"base"}


def test_the_name_of_a_run_changes_with_the_server_half_that_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    run_names.code_version.cache_clear()
    monkeypatch.setattr(run_names, "imported", lambda *modules: asked.extend(modules) or {})
    run_name(toy_config("pfedme", "mixing=0.5"))
    assert "perennial.strategies.methods.uniform" in asked
    run_names.code_version.cache_clear()


class Past(MethodStrategy[Any]):
    """A method that makes something of the replies itself."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return None, None


class Behind(MethodStrategy[Any]):
    """A method that makes something of the mean."""

    def update(self, model: Any, means: Any) -> Any:
        return means[MODEL]


@pytest.mark.parametrize("mechanism", ["fixed", "adaptive", "secagg"])
def test_a_method_that_goes_past_a_mechanism_is_refused_before_anything_is_sent(
    mechanism: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = toy_config("fedavg", f"privacy.mechanism={mechanism}")
    here = LocalRuntime(config)
    asked: list[Any] = []
    monkeypatch.setattr(here.grid, "send_and_receive", lambda messages, **_: asked.extend(messages) or [])
    monkeypatch.setattr(registry, "strategy_class", lambda *_: Past)
    with pytest.raises(
        UserError, match=f"'{mechanism}' is not possible with method 'fedavg', whose .* aggregate_train"
    ):
        here.run(RunFolder.create(tmp_path / "run", config))
    assert asked == []
    monkeypatch.setattr(registry, "strategy_class", lambda *_: Behind)
    assert isinstance(strategy_for(config, "run"), Behind)


def test_all_methods_that_average_stand_behind_the_mechanisms() -> None:
    for name, method in METHODS.items():
        if method.sums:
            strategy_for(toy_config(name, "privacy.mechanism=fixed"), "run")


@pytest.mark.parametrize(
    ("method", "name"), [("f-fl-games", MODEL), ("v-fl-games", "others"), ("fedpac", "centroids")]
)
def test_a_site_that_has_the_name_of_a_methods_record_is_refused(method: str, name: str) -> None:
    scenario = OwnData(sites=("north", name), inputs=("age",))
    with pytest.raises(
        UserError, match=f"method.name: '{method}' has a record '{name}' of its own; give that site"
    ):
        load_config(options={"method": method, "scenario": scenario.model_dump()})
