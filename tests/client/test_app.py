"""The ClientApp of Flower's simulation and of sites that run the server's code; and a node's settings."""

import sys
from types import SimpleNamespace

import pytest
from flwr.app import Context, Message, RecordDict

from perennial.client.app import handle
from perennial.client.node.settings import DEFAULTS


@pytest.mark.parametrize(("in_simulation", "state"), [(True, "/run"), (False, DEFAULTS["state-dir"])])
def test_a_node_s_own_settings_are_stronger_and_a_server_has_none(
    in_simulation: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except in Flower's simulation, where operator and sites are one."""
    asked = []
    monkeypatch.setattr("perennial.client.node.answer.answer", lambda *call: asked.append(call) or call[0])
    if in_simulation:
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    context = Context(
        run_id=1,
        node_id=1,
        node_config={"partition-id": 3, "device": "cpu"},
        state=RecordDict(),
        run_config={"state-dir": "/run", "data-root": "/run-data"},
    )
    monkeypatch.setenv("PERENNIAL_DATA", "/site-data")
    monkeypatch.setenv("PERENNIAL_DEVICE", "cuda:1")
    for variable in ("PERENNIAL_STATE", "PERENNIAL_SUPERLINK"):
        monkeypatch.delenv(variable, raising=False)
    message = Message(RecordDict(), 1, "train")
    assert handle(message, context) is message
    node = {"partition-id": "3", "device": "cpu", "state-dir": state, "data-root": "/site-data", "superlink": ""}
    assert asked == [(message, node)]
