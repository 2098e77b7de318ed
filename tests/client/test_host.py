"""Requests that no server of this project sends: a clear error, and nothing is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from toys import toy_config

from client.host import Host
from client.state import FileStates
from common.config import parse_task
from common.errors import UserError
from common.wire import CONFIG, KEPT, MODEL, RESUMED, ROUND, RUN, TASK, to_record

TASK_TEXT = toy_config("ditto").task()
GOOD: dict[str, Any] = {TASK: TASK_TEXT, RUN: "0123456789ab", ROUND: 1, KEPT: [], RESUMED: []}


def ask(folder: Path, action: str = "train", config: dict[str, Any] | None = None, **records: Any) -> Message:
    if config is not None:
        records[CONFIG] = ConfigRecord(config)
    content = RecordDict({name: record for name, record in records.items()})
    return Host(FileStates(folder / "state")).handle(Message(content, 1, action), 0)


@pytest.mark.parametrize(
    ("config", "action", "word"),
    [
        (None, "train", "the request's record 'config' lacks kept, resumed, round, run, task"),
        ({key: value for key, value in GOOD.items() if key != RUN}, "train", "'config' lacks run"),
        (GOOD, "train.everything", "ditto has no action 'train.everything', only train, evaluate"),
        (GOOD, "train.__init__", "ditto has no action 'train.__init__'"),
        (GOOD, "train", "the request has no record 'model'"),
        ({**GOOD, ROUND: "next"}, "train", "invalid literal"),
    ],
)
def test_a_request_that_cannot_be_is_an_error_that_says_why(
    config: dict[str, Any] | None, action: str, word: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=word):
        ask(tmp_path, action, config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("task", "word"),
    [
        ("{}", "the server's task cannot be read: method: a value is missing"),
        ("no JSON", "the server's task cannot be read: Task: 'no JSON' is not possible; invalid JSON"),
        (TASK_TEXT.replace('"ditto"', '"magic"'), "unknown method 'magic'"),
        (TASK_TEXT.replace('"toy"', '"../../etc"'), "unknown scenario '../../etc'"),
        (TASK_TEXT.replace('"proximity"', '"closeness"'), "method.closeness: there is no such setting"),
    ],
)
def test_a_task_that_cannot_be_is_one_sentence(task: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=word):
        ask(tmp_path, config={**GOOD, TASK: task})


@pytest.mark.parametrize("run", ["../../elsewhere", "/elsewhere", "..", "a/b", "", "a\nb"])
def test_a_run_id_cannot_lead_out_of_the_sites_folder(run: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no name for a folder"):
        ask(tmp_path, config={**GOOD, RUN: run}, **{MODEL: to_record({"w": torch.zeros(1)})})
    assert not list(tmp_path.iterdir())


def test_a_hosts_sites_are_those_of_one_run_and_grow_in_place() -> None:
    host = Host({})
    text, other = TASK_TEXT, toy_config("ditto", seed=9).task()
    first = host.site(text, parse_task(text), 0)
    held = host._sites
    assert host.site(text, parse_task(text), 1) is not first
    assert host.site(text, parse_task(text), 0) is first
    assert host._sites is held  # no copy for each new client
    host.site(other, parse_task(other), 1)
    assert len(host._sites) == 1
    assert host.site(text, parse_task(text), 0) is not first
