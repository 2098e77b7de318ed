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
    lists = re.findall(r"cannot\*\*\n\n((?:- .*\n(?:  .*\n)+)+)", PAGE)
    assert len(lists) == 6
    promises = re.findall(r"^- (.*\n(?:  .*\n)+)", "".join(lists), re.MULTILINE)
    assert len(promises) > 30
    for promise in promises:
        assert re.search(r"::test_|the same test|not tested here", promise), promise
