"""The examples of texts with LoRA, and of a picture with a row of a table, made small."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from perennial.common import plugins

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), EXAMPLES / name / "train.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_texts_with_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example("text-lora").main(tmp_path, rounds=3)
    assert after < before / 10
    assert f"a clinic sends {before:,} bytes in a round with all weights, and {after:,} with LoRA" in (
        capsys.readouterr().out
    )


def test_a_picture_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")
    assert example("picture-and-table").main(tmp_path, rounds=4) > 0.8
