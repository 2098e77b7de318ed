"""docs/own-data.md: each of its commands runs, in order, on four tables with empty cells and text."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from messy_tables import SITES, hospitals
from PIL import Image
from typer.testing import CliRunner

from perennial.server.cli.main import app
from perennial.server.run.folder import RunFolder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-data.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the page begins with."""
    hospitals(tmp_path / "hospitals")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_command_of_the_page_runs(here: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra perennial[onnx]")
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^perennial (.+)$", text, re.MULTILINE)
    # Those of joined sites run in test_survey_deployed.py.
    commands = [command for command in commands if command.split()[0] not in ("join", "survey")]
    assert [command.split()[0] for command in commands] == [
        "describe", *["describe", "run"] * 2,
        "run", "describe", "compare", "compare", "run", "run", "tune", "export",
        *["describe", "run"] * 3,
    ]  # fmt: skip
    exec(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1], {})  # the page's three folders
    Path("notes").mkdir()
    for site in ("north", "south"):
        kinds = enumerate(("well", "worse"))
        lines = [f'"patient {word} after {n} days",{label}' for label, word in kinds for n in range(30)]
        Path(f"notes/{site}.csv").write_text("\n".join(["note,label", *lines]) + "\n")
    shutil.copy(ROOT / "examples" / "picture-and-table" / "both_net.py", ".")
    for site in ("north", "south"):
        Path(f"clinics/scans-{site}").mkdir(parents=True)
        rows = ["age,scan,label"]
        for n in range(60):
            place = f"scans-{site}/{n}.png"
            Image.new("L", (12, 12), 100 + 100 * (n % 2)).save(f"clinics/{place}")
            rows.append(f"{40 + n % 7},{place},{'ill' if n % 2 else 'well'}")
        Path(f"clinics/{site}.csv").write_text("\n".join(rows) + "\n")
    said = {}
    for command in commands:
        words = shlex.split(command)
        words += [] if words[0] in ("describe", "export") else ["--device", "cpu", "--set", "local_steps=2"]
        words += ["--jobs", "1"] if words[0] in ("compare", "tune") else []
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{command}: {result.output}"
        said[words[0]] = result.stdout
    assert all(site in said["compare"] for site in SITES)
    assert "Constant" in said["compare"]
    assert "→" in said["compare"]  # the second, with --adapt
    page = (here / "sites.html").read_text()
    assert all(f">{site}<" in page for site in (*SITES, "Constant"))
    assert "→" in page
    for folder in ("stays", "findings", "survival"):
        summary = RunFolder(here / "runs" / folder).summary()
        task = RunFolder(here / "runs" / folder).config().scenario.task
        found = summary["models"][[*summary["models"]][-1]]["final"]
        ours, constant = (task.headline.goodness(own["average"]) for own in (found, summary["constant"]))
        assert ours > constant, folder
    rows = RunFolder(here / "runs" / "adapted").rows()
    at_va = [
        row for row in rows if row["kind"] == "evaluation" and row["client"] == "va" and row["split"] == "test"
    ]
    assert {(row["model"], sum(row["count"])) for row in at_va} == {("global", 28), ("personal", 28)}
    assert "class_weights" in (here / "weighted.toml").read_text()
    assert (here / "runs" / "without-va" / "summary.json").is_file()
