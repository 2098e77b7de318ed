"""The thin ClientApp: its settings, and what it does not import."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from flwr.app import Context, Message, RecordDict

from perennial.client.app import DEFAULTS, handle, settings_of
from perennial.common.errors import UserError


@pytest.mark.parametrize(("in_simulation", "state"), [(True, "/run"), (False, DEFAULTS["state-dir"])])
def test_a_node_s_own_settings_are_stronger_and_a_server_has_none(
    in_simulation: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.client.app.simulated", lambda: in_simulation)
    context = Context(
        run_id=1,
        node_id=1,
        node_config={"partition-id": 3, "device": "cpu"},
        state=RecordDict(),
        run_config={"state-dir": "/run", "data-root": "/run-data"},
    )
    monkeypatch.setenv("PERENNIAL_DATA", "/site-data")
    monkeypatch.setenv("PERENNIAL_DEVICE", "cuda:1")
    monkeypatch.delenv("PERENNIAL_STATE", raising=False)
    monkeypatch.setenv("PERENNIAL_WORKER", "off")
    found = settings_of(context)
    own = {"partition-id": "3", "device": "cpu", "state-dir": state, "data-root": "/site-data", "worker": "off"}
    assert found == own


def test_the_app_does_not_import_pytorch() -> None:
    code = "import sys, client.app, client.node.relay, client.node.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("worker", "module"),
    [("on", "perennial.client.node.relay.relay"), ("off", "perennial.client.node.answer.answer")],
)
def test_a_node_may_do_without_the_worker(worker: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(1, 1, {"worker": worker, "partition-id": 0}, RecordDict(), {})
    asked = []
    monkeypatch.setattr(module, lambda message, settings: asked.append((message, settings["worker"])) or message)
    message = Message(RecordDict(), 1, "train")
    assert handle(message, context) is message
    assert asked == [(message, worker)]


def test_a_simulated_node_has_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of Flower's simulation share Ray's processes; the default is a worker."""
    monkeypatch.setattr("perennial.client.node.answer.answer", lambda message, _: message)
    monkeypatch.setattr("perennial.client.node.relay.relay", lambda *_: pytest.fail("a worker was asked"))
    context = Context(1, 1, {"worker": "on", "partition-id": 0}, RecordDict(), {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    message = Message(RecordDict(), 1, "train")
    assert handle(message, context) is message


def test_anything_else_is_an_error() -> None:
    context = Context(1, 1, {"worker": False}, RecordDict(), {})
    with pytest.raises(UserError, match='worker: \'False\' is not possible; write worker="on" or worker="off"'):
        handle(Message(RecordDict(), 1, "train"), context)
