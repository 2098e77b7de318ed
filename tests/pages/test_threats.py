"""The page of threats promises only what a test shows."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_promise_names_a_test() -> None:
    tables = re.findall(r"\| .*cannot \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    assert len(tables) == 6
    for row in "".join(tables).splitlines():
        assert "::test_" in row or "the same" in row or "not tested here" in row, row
