"""What may stand in a sentence."""

import json
from pathlib import Path

import pytest

from perennial.common.config import load_config, parse_task
from perennial.common.methods import METHODS
from perennial.common.utils.errors import RunStopped, UserError, printable
from perennial.common.utils.suggestions import unknown

RED, CLEAR, TITLE, LINK = "\x1b[31m", "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x1b]8;;http://x\x1b\\"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{RED}red\x1b[39m", "red"),
        (f"a{CLEAR}b{TITLE}c{LINK}d", "abcd"),
        ("\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7)", "ray::ClientAppActor.run() (pid=7)"),
        ("a\x1b", "a"),
        ("a\r\nb\u2028c\u202ed\0e\x9b2Jf", "a  b c d e 2Jf"),
        ("süd ≥ 2 – ε", "süd ≥ 2 – ε"),
    ],
)
def test_nothing_that_a_terminal_obeys_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(UserError(text)) == str(RunStopped(text)) == shown


@pytest.mark.parametrize(
    "text", ["\x1b[" * 200_000, "\x1b]" * 200_000, "\x1b[" + "0" * 400_000, "\x1b]" + "a" * 400_000]
)
def test_a_crafted_text_is_read_once(text: str) -> None:
    """A pattern that begins anew at every letter would take an hour."""
    assert len(printable(text)) < len(text)


def test_names_in_a_configuration_or_a_server_s_task_are_shown_without_commands(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('"\\u001b[2J" = 1\n')
    with pytest.raises(UserError, match=r"^: there is no such setting"):
        load_config(file)
    task = json.loads(load_config(options={"method": "fedavg"}).task())
    with pytest.raises(UserError) as caught:
        parse_task(json.dumps({**task, f"{CLEAR}all is well": 1}))
    assert str(caught.value).isprintable()
    with pytest.raises(UserError) as caught:
        parse_task(json.dumps({**task, "x" * 100_000: 1}))
    assert len(str(caught.value)) < 500


def test_an_unknown_name_is_cut() -> None:
    assert len(unknown("method", "ab" * 100_000, METHODS)) < 1000
