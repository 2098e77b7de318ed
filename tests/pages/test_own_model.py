"""The example of one's own model, as its page says it is run."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from perennial.common import plugins
from perennial.server.cli.main import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-model"


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("leafnet.py", "run.toml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    lines = (EXAMPLE / "README.md").read_text().splitlines()
    printed = []
    for line in (line for line in lines if line.startswith("perennial ")):
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        printed.append(result.stdout)
    assert len(printed) == 3
    assert "head (its last linear layer)" in printed[0]
    first, second = (load_file(tmp_path / name / "models" / "global.safetensors") for name in ("first", "second"))
    assert second.keys() == {"classifier.weight", "classifier.bias"}  # what is frozen is in no run's models
    assert not any(torch.equal(first[name], second[name]) for name in second)
