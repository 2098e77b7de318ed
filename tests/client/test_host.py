"""Requests that no server of this project sends: a clear error, and nothing is written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from perennial.client.host import Host, _without_a_model, client_class, site_data
from perennial.client.state import FileStates
from perennial.common.config import load_config, parse_task
from perennial.common.data.examples import ClientData
from perennial.common.data.scenario import Scenario
from perennial.common.methods import METHODS
from perennial.common.models.network import network
from perennial.common.utils.discovery import named_subclasses
from perennial.common.utils.errors import UserError
from perennial.common.wire import CONFIG, KEPT, MODEL, RESUMED, ROUND, RUN, TASK, to_record
from perennial.testing.tiny_federation import Toy, toy_config

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
        ({**GOOD, ROUND: "next"}, "train", "'round': 'next' is no round from 0 to 1000000"),
        ({**GOOD, ROUND: -5}, "train", "'round': -5 is no round"),
        ({**GOOD, ROUND: 10**9}, "train", "'round': 1000000000 is no round"),
        ({**GOOD, ROUND: 1.0}, "train", "'round': 1.0 is no round"),
        ({**GOOD, ROUND: [1]}, "train", r"'round': \[1\] is no round"),
        ({**GOOD, KEPT: "all"}, "train", "'kept' is no list of at most 1000 rounds"),
        ({**GOOD, KEPT: list(range(1001))}, "train", "'kept' is no list of at most 1000 rounds"),
        ({**GOOD, RESUMED: [2, -1]}, "train", "'resumed': -1 is no round"),
        ({**GOOD, TASK: 7}, "train", "the request's task is no text"),
        ({**GOOD, "more": "x" * 3_000_000}, "train", "more than 2097152 bytes"),
        (
            {**GOOD, **{f"s{number}": 1 for number in range(101)}},
            "train",
            "more than 20000 records or 100 settings",
        ),
        ({**GOOD, "more": b""}, "train", "the request's setting 'more' has bytes in place of numbers or text"),
        ({**GOOD, "more": [b"x"]}, "evaluate", "the request's setting 'more' has bytes"),
        ({**GOOD, "x" * 101: 1}, "train", "'x{100}' is no name of at most 100 letters"),
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


def test_our_own_halves_have_the_models_that_they_evaluate() -> None:
    """By the rule that plug-ins are held to."""
    assert not [name for name, kind in METHODS.items() if _without_a_model(kind, client_class(kind))]


@pytest.mark.parametrize("run", ["../../elsewhere", "/elsewhere", "..", "a/b", "", "a\nb", "x" * 65, "ü", 7])
def test_a_run_id_cannot_lead_out_of_the_sites_folder(run: Any, tmp_path: Path) -> None:
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


def test_a_round_that_has_passed_undoes_nothing(tmp_path: Path) -> None:
    """A request that comes late or from nobody's server: what the site kept since stays."""
    run = parse_task(TASK_TEXT)
    start = network(run.model, run.scenario.input_shape, run.scenario.classes).initial(0)

    def train(round_: int, resumed: list[int]) -> list[str]:
        ask(tmp_path, config={**GOOD, ROUND: round_, RESUMED: resumed, KEPT: [2]}, **{MODEL: to_record(start)})
        return sorted(path.name for path in tmp_path.rglob("round-*"))

    for number in (2, 3, 7):
        before = train(number, [])
    assert len(before) == 2
    for number in (-5, 0, 1, 6):
        with pytest.raises(ValueError, match=r"is no round|has done 7"):
            train(number, [])
        assert sorted(path.name for path in tmp_path.rglob("round-*")) == before
    assert train(3, [2])[-1].startswith("round-3.1")


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('"clients":4', '"clients":1000000000000', "scenario.clients"),
        ('"clients":4', '"clients":-1', "scenario.clients"),
        ('"train_samples":1000', '"train_samples":1000000000000', "scenario.train_samples"),
        ('"hidden":[6]', f'"hidden":[{"1," * 200_000}1]', "hidden"),
        ('"hidden":[6]', '"hidden":[100000000,100000000]', "model: 'mlp' of this size"),
    ],
)
def test_sizes_of_a_task_have_bounds(old: str, new: str, word: str, tmp_path: Path) -> None:
    options = {"method": "fedavg", "scenario": "synthetic-scm"}
    text = load_config(options=options, settings=["scenario.clients=4"]).task()
    assert old in text
    with pytest.raises(UserError, match=word):
        ask(tmp_path, config={**GOOD, TASK: text.replace(old, new)})


def test_no_scenario_takes_any_number_of_clients_or_of_generated_samples() -> None:
    """What a server announces is what a site makes room for."""
    for name, scenario in named_subclasses(Scenario).items():  # type: ignore[type-abstract]
        if not scenario.__module__.startswith("common.") or name == "own-data":  # its clients have names
            continue
        for field, info in scenario.model_fields.items():
            drawn = scenario.dataset == "generated" and field.endswith("samples")
            if info.annotation is int and (field == "clients" or drawn):
                assert any(hasattr(bound, "le") for bound in info.metadata), (name, field)


def changed(part: str, **how: Any) -> Callable[[ClientData], ClientData]:
    """One part of a client's data with other tensors."""

    def change(data: ClientData) -> ClientData:
        own = getattr(data, part)
        return replace(
            data, **{part: replace(own, **{name: make(getattr(own, name)) for name, make in how.items()})}
        )

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("train", y=lambda y: y[:-1]), "train: y has shape [39]; it must be [40]"),
        (changed("train", x=lambda x: x[:, :1]), "train: x has shape [40, 1]; it must be [40, 2]"),
        (
            changed("validation", x=lambda x: x.long()),
            "validation: x is torch.int64; it must be torch.float32",
        ),
        (changed("train", y=lambda y: y.int()), "train: y is torch.int32; it must be torch.int64"),
        (changed("train", y=lambda y: y.tolist()), "train: y is of type list; it must be a tensor"),
        (changed("train", environment=lambda e: e + 2), "train: environment has 2 to 2; it must be 0 to 1"),
        (
            lambda data: replace(data, test={**data.test, "elsewhere": data.train}),
            "unknown test environment 'elsewhere' (there are: p=0.1, p=0.9)",
        ),
        (
            lambda data: replace(data, test={"p=0.1": data.test["p=0.1"]}),
            "test environment 'p=0.9' is missing; give it, if need be without samples",
        ),
        (
            lambda data: replace(data, test={**data.test, "p=0.9": replace(data.train, y=data.train.x)}),
            "test 'p=0.9': y is torch.float32; it must be torch.int64",
        ),
    ],
)
def test_a_scenario_s_data_must_be_what_it_announces(
    change: Callable[[ClientData], ClientData], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, drawn = parse_task(TASK_TEXT), Toy.client_data
    monkeypatch.setattr(Toy, "client_data", lambda *given: change(drawn(*given)))
    with pytest.raises(UserError) as error:
        site_data(task, 0, None, None)
    assert str(error.value).removeprefix("scenario 'toy', data of client-0") in (f", {words}", f": {words}")
