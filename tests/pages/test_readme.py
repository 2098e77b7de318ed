"""The README: one screen, whose example runs and whose numbers are those of the pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_its_count_of_claims_is_that_of_their_page() -> None:
    (counts,) = re.findall(r"Of \d+ claims: [^.]+\.", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert counts in " ".join(README.split())


def test_its_lines_of_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.splitlines()) <= 10
    assert "rounds=20" in code
    exec(code.replace("rounds=20", "rounds=1, seeds=1"), {})
    printed = capsys.readouterr().out
    for row in ("Ditto (personal)", "FedIIR (global)", "FedAvg (global)", "Local (personal)", "Constant"):
        assert row in printed
        assert row in README


def test_the_table_on_the_first_page_is_made_of_its_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the page on one's own table, with fewer rounds."""
    from typer.testing import CliRunner

    from perennial.server.cli.main import app

    pytest.importorskip("pandas")
    page = (ROOT / "docs" / "start" / "own-table.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    make, ask = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(make, {})
    for command in re.findall(r"^perennial (.*)$", page, re.M):
        words = command.replace("--rounds 20", "--rounds 1").split() + ["--seeds", "1"] * command.startswith(
            "compare"
        )
        told = CliRunner().invoke(app, words)
        assert told.exit_code == 0, told.output
    shown: dict[str, object] = {}
    exec(ask.replace("print(", "answers = ("), shown)
    answers: list[str] = list(shown["answers"])  # type: ignore[call-overload]
    assert len(answers) == 3
    assert {*answers} <= {"benign", "malignant"}
