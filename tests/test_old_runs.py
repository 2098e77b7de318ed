"""Run folders and checkpoints of 5f6c2e7 are opened, shown, reported and resumed by the code of today."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import perennial
from perennial.server.cli.main import app
from perennial.server.run.folder import RunFolder

RUNS = Path(__file__).parent / "data" / "runs-of-5f6c2e7"
EQUAL = 1e-6
"""Of numbers of another processor."""


@pytest.fixture(params=["fedavg", "fedsdr", "ditto"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folders of a method: `whole` ran to its end, `stopped` has a checkpoint of round 2 of 4."""
    return Path(shutil.copytree(RUNS / request.param, tmp_path / request.param))


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_an_ended_run_is_opened_shown_and_reported(runs: Path) -> None:
    whole = perennial.load(runs / "whole")
    assert whole.config.method.name == runs.name
    assert whole.config.rounds == 4
    found = {(row["model"], row["selection"]): row["average"] for row in whole.overall}
    summary = json.loads((runs / "whole" / "summary.json").read_text())
    for name, kinds in summary["models"].items():
        for selection in ("final", "validation"):
            assert found[name, selection] == kinds[selection]["average"]
    client = None if runs.name == "fedavg" else next(iter({row["client"] for row in whole.clients}))
    name = whole.overall[0]["model"]
    probabilities = whole.predict_proba(torch.zeros(2, 3 if runs.name == "ditto" else 12), name, client)
    assert probabilities.shape == (2, 2)
    shown = said("show", "run", str(runs / "whole"))
    assert f"{100 * summary['models'][name]['final']['average']:.2f}" in shown
    said("report", str(runs / "whole"))
    assert (runs / "whole" / "report.html").stat().st_size > 10_000


def test_a_stopped_run_ends_as_if_it_had_never_stopped(runs: Path) -> None:
    perennial.resume(runs / "stopped")
    models = {path.name: load_file(path) for path in sorted((runs / "whole" / "models").iterdir())}
    assert models.keys() == {path.name for path in (runs / "stopped" / "models").iterdir()}
    for file, expected in models.items():
        found = load_file(runs / "stopped" / "models" / file)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=EQUAL, atol=EQUAL)
    old, new = (RunFolder(runs / name).rows() for name in ("whole", "stopped"))
    changed = [set(row["settings"]) for row in new if row["kind"] == "changed"]
    assert changed == ([{"data_root"}] if runs.name == "ditto" else [])  # its arrays came here with its folder
    assert [places(row) for row in new if row["kind"] != "changed"] == [places(row) for row in old]
    old, new = (json.loads((runs / name / "summary.json").read_text())["models"] for name in ("whole", "stopped"))
    assert places(new) == places(old)


def places(found: object, where: str = "") -> list[str]:
    """Where numbers and texts are in a nest of tables: its names, without what may differ by a rounding."""
    if isinstance(found, dict):
        return [place for name in found for place in places(found[name], f"{where}/{name}")]
    return [where]
