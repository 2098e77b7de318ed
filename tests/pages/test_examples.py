"""The examples in Python run as they are, each in an empty folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def ran(folder: Path, *arguments: str) -> str:
    """What a program prints that is started where a user has a `common` and a `server` of their own."""
    for name in ("common", "server"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('a package of the user')\n")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_own_arrays(tmp_path: Path) -> None:
    printed = ran(tmp_path, str(EXAMPLES / "own-arrays" / "train.py"))
    assert re.search(r"global +code turned round +\d", printed)
    assert re.search(r"five new patients in the north: (well|ill)(, (well|ill)){4}\n", printed)
    assert (tmp_path / "runs" / "perinvfl" / "summary.json").is_file()


@pytest.mark.slow
def test_the_notebook_ends_in_figures(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "notebook" / "figures.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells += ["for number in plt.get_fignums(): plt.figure(number).savefig(f'{number}.png')", "print(type(model))"]
    (tmp_path / "cells.py").write_text("\n".join(cells), encoding="utf-8")
    assert "class 'perennial.common.models.architectures.Model'" in ran(tmp_path, "cells.py")
    for figure in ("1.png", "2.png"):
        assert (tmp_path / figure).stat().st_size > 10_000
    assert not any(cell.get("outputs") for cell in notebook["cells"])  # what it shows depends on the version


def test_a_table_in_the_readme_leads_to_every_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in sorted(path for path in EXAMPLES.iterdir() if path.is_dir()):
        assert f"](examples/{folder.name}/README.md)" in readme, folder.name
        assert (folder / "README.md").is_file(), folder.name
