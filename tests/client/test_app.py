"""The thin ClientApp: its settings, and what it does not import."""

import subprocess
import sys

import pytest
from flwr.app import Context, RecordDict

from client.app import settings_of


def test_a_node_s_own_settings_are_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = settings_of(context)
    assert found == {"partition-id": "3", "device": "cpu", "state-dir": "/run", "data-root": "/site-data"}


def test_the_app_does_not_import_pytorch() -> None:
    code = "import sys, client.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
