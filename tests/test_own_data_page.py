"""docs/own-data.md: each of its commands runs, in order, on four tables with empty cells and text."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from perennial.server.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "own-data.md"
SITES = ("cleveland", "hungary", "switzerland", "va")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """15 % of the cells empty, two columns of text, other shares of the classes at each site."""
    random = np.random.default_rng(0)
    (tmp_path / "hospitals").mkdir()
    for place, site in enumerate(SITES):
        ill = random.random(40) < 0.3 + 0.1 * place
        columns = {
            "age": (50 + 6 * ill + random.normal(0, 8, 40)).round(),
            "pressure": (130 + 12 * ill + random.normal(0, 15, 40)).round(),
            "pain": np.where(random.random(40) < 0.3 + 0.4 * ill, "typical", "none"),
            "thal": random.choice(["fixed", "normal"], 40),
        }
        cells = [["" if random.random() < 0.15 else str(value) for value in values] for values in columns.values()]
        rows = zip(*cells, np.where(ill, "ill", "well"), strict=True)
        text = "\n".join(",".join(row) for row in [(*columns, "label"), *rows])
        (tmp_path / "hospitals" / f"{site}.csv").write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_runs(here: Path) -> None:
    commands = re.findall(r"^perennial (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["describe", "run", "compare", "run", "tune"]
    said = {}
    for command in commands:
        words = shlex.split(command.replace('["va"]', "'[\"va\"]'"))
        words += [] if words[0] == "describe" else ["--device", "cpu", "--set", "local_steps=2"]
        words += ["--jobs", "1"] if words[0] in ("compare", "tune") else []
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{command}: {result.output}"
        said[words[0]] = result.stdout
    assert all(site in said["compare"] for site in SITES)
    assert "Constant" in said["compare"]
    assert (here / "runs" / "without-va" / "summary.json").is_file()
