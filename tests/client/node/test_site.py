"""A site with its own data, from a node's settings to its replies, and what it says when it cannot take part."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from perennial.client.host import site_data
from perennial.client.node import answer as node
from perennial.client.site_data import OwnSite
from perennial.client.snapshot import FILE as SERVED
from perennial.client.snapshot import Snapshot
from perennial.client.state import FileStates
from perennial.common.config import RunConfig, load_config
from perennial.common.utils.errors import UserError
from perennial.common.wire import (
    CLIENT,
    CONFIG,
    KEPT,
    METRICS,
    MODEL,
    NUM_EXAMPLES,
    REFUSED,
    RESUMED,
    ROUND,
    RUN,
    TASK,
    from_record,
    to_record,
)
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import start
from perennial.testing.tiny_federation import toy_config

SITES = ("north", "south")


def table(path: Path, rows: int = 60, columns: str = "age,bmi,ill", shift: int = 0) -> Path:
    """Who is older than 40 is ill."""
    names = columns.split(",")
    lines = [{"age": n % 80, "bmi": (7 * n + shift) % 30, "ill": int(n % 80 > 40)} for n in range(rows)]
    path.write_text("\n".join([columns, *(",".join(str(line.get(name, 0)) for name in names) for line in lines)]))
    return path


def config(method: str = "ditto", *settings: str, **scenario: Any) -> RunConfig:
    announced = {"name": "own-data", "sites": SITES, "inputs": ("bmi", "age"), "label_column": "ill"}
    options = {"method": method, "scenario": {**announced, **scenario}, "rounds": 2}
    return load_config(options=options, settings=["evaluate_every=2", "checkpoint_every=2", *settings])


def message(
    run: RunConfig, action: str = "query", *, number: int = 1, run_id: str = "run", **arrays: Any
) -> Message:
    facts = {TASK: run.task(), RUN: run_id, ROUND: number, KEPT: [0], RESUMED: [0][:0]}
    records = {name: to_record(tensors) for name, tensors in arrays.items()}
    return Message(RecordDict({CONFIG: ConfigRecord(facts), **records}), 1, action)  # type: ignore[arg-type]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Of the site "south"."""
    table(tmp_path / "south.csv")
    states = str(tmp_path / "state")
    return {
        "state-dir": states,
        "data-root": "",
        "device": "cpu",
        "data": str(tmp_path / "south.csv"),
        "name": "south",
    }


def told(reply: Message) -> ConfigRecord:
    return reply.content.config_records[CONFIG]


def test_a_site_says_who_it_is_trains_and_keeps_its_model(settings: dict[str, str], tmp_path: Path) -> None:
    run = config()
    reply = node.answer(message(run), settings)
    assert told(reply)[CLIENT] == "south"
    assert reply.content.metric_records[METRICS][NUM_EXAMPLES] == 42  # 60, less 12 and 6
    model = start(run).arrays
    trained = node.answer(message(run, "train", **{MODEL: model}), settings)
    assert from_record(trained.content.array_records[MODEL]).keys() == model.keys()
    assert list(FileStates(tmp_path / "state")) == ["run/south"]


def test_its_replies_are_those_of_the_rehearsal(settings: dict[str, str], tmp_path: Path) -> None:
    """The same data, the same steps: what a site sends is what the local runtime's client of that name sends."""
    run = config()
    table(tmp_path / "north.csv", shift=3)
    here = LocalRuntime(run.model_copy(update={"data_root": str(tmp_path)}))
    request = message(run, "train", **{MODEL: start(run).arrays})
    one, other = node.answer(request, settings), here.host.handle(request, SITES.index("south"))
    for name, tensor in from_record(one.content.array_records[MODEL]).items():
        assert torch.equal(tensor, from_record(other.content.array_records[MODEL])[name])


def test_columns_of_its_own_are_stronger_than_those_announced(settings: dict[str, str], tmp_path: Path) -> None:
    run = config(environments=("x", "y"))
    (tmp_path / "south.csv").write_text("age,bmi,sick,ward\n1,2,0,x\n3,4,1,y\n5,6,1,y\n")
    assert "no column 'ill'" in str(told(node.answer(message(run), settings))[REFUSED])
    own = {**settings, "label-column": "sick", "environment-column": "ward"}
    assert told(node.answer(message(run), own))[CLIENT] == "south"
    (tmp_path / "south.csv").write_bytes("age;bmi;sick;ward\n1,5;2;0;x\n3;4;1;y\n5;6;1;y\n".encode("latin-1"))
    assert "--separator" in str(told(node.answer(message(run), own))[REFUSED])
    own |= {"separator": ";", "decimal": ",", "encoding": "latin-1"}
    assert told(node.answer(message(run), own))[CLIENT] == "south"


Change = Callable[[Path, dict[str, str]], dict[str, str]]


@pytest.mark.parametrize(
    ("change", "client", "sentence"),
    [
        (lambda path, s: {**s, "data": str(table(path / "s.csv", columns="age,ill"))}, "south",
         "s.csv lacks column 'bmi', which the server announces"),
        (lambda path, s: {**s, "data": str(path / "gone.csv")}, "south", "there is no "),
        (lambda _, s: {**s, "name": "sout"}, "sout",
         "unknown site 'sout'; did you mean 'south'? (there are: north, south)"),
        (lambda _, s: {**s, "device": "cuda:99"}, "south", "device 'cuda:99' cannot be used here"),
        (lambda _, s: {**s, "partition-id": "0"}, "south", "a site has either data of its own"),
        (lambda _, s: {**s, "data": ""}, "south", "a site has either data of its own"),
        (lambda _, s: {**s, "name": ""}, "", "a site with data of its own needs a name"),
    ],
)  # fmt: skip
def test_a_site_that_cannot_take_part_says_who_it_is_and_why_there_and_here(
    change: Change,
    client: str,
    sentence: str,
    settings: dict[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    reply = told(node.answer(message(config()), change(tmp_path, settings)))
    assert reply[CLIENT] == client
    assert str(reply[REFUSED]).startswith(sentence)
    assert f"perennial: this site takes no part in the run: {reply[REFUSED]}" in caplog.messages


def test_which_row_is_of_no_class_stays_at_the_site(
    settings: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that says which column has the labels, and which labels there are, could read it cell by cell."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    (tmp_path / "south.csv").write_text("age,bmi,ill\n1,2,0\n3,4,Meier\n")
    reply = told(node.answer(message(config()), settings))
    assert str(reply[REFUSED]).startswith("south.csv: a sample is of no class that the server announces")
    assert any("south.csv: row 2 is of no class that the server announces" in line for line in caplog.messages)


def test_a_part_of_a_scenario_that_cannot_take_part_does_so_too(tmp_path: Path) -> None:
    settings = {"state-dir": str(tmp_path), "data-root": str(tmp_path), "device": "cpu", "partition-id": "2"}
    far = node.answer(message(config()), settings)
    assert (told(far)[CLIENT], "partition-id 2 is not possible" in str(told(far)[REFUSED])) == ("", True)
    mnist = load_config(options={"scenario": "cmnist"})
    missing = told(node.answer(message(mnist), settings))
    assert (missing[CLIENT], "data set 'mnist'" in str(missing[REFUSED])) == ("client-2", True)
    many = told(node.answer(message(mnist), {**settings, "partition-id": "many"}))
    assert many[REFUSED] == "partition-id 'many' is not possible; write a whole number from 0"


def test_own_data_are_of_no_use_in_a_run_on_parts_of_a_scenario(settings: dict[str, str]) -> None:
    reply = told(node.answer(message(toy_config("fedavg")), settings))
    assert reply[CLIENT] == "south"
    assert "has data of its own, but the run is on parts of 'toy'" in str(reply[REFUSED])


def test_a_site_that_only_tests_says_so_and_not_how_many_rows_it_has(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for adapt in (0, 12):
        run = config("ditto", "test_sites=['south']", f"adapt={adapt}")
        reply = node.answer(message(run), settings)
        assert told(reply) == {CLIENT: "south"}
        assert dict(reply.content.metric_records[METRICS]) == {}
        with pytest.raises(ValueError, match="south trains nothing in this run, and 'train' is asked for"):
            node.answer(message(run, "train", **{MODEL: start(run).arrays}), settings)
        answers = node.answer(message(run, "evaluate", **{MODEL: start(run).arrays}), settings)
        found = answers.content.metric_records[METRICS]
        counts = {name: found[name] for name in found if name.endswith("test/count")}
        assert counts == {f"{name}/test/count": [60 - adapt] for name in ("global", "personal")[: 1 + (adapt > 0)]}
    assert caplog.messages.count("perennial: south is in run run, ditto on own-data, and only tests") == 2
    assert not [name for name in FileStates(Path(settings["state-dir"])).values() if name]


def test_a_site_reads_its_data_anew_for_every_run(settings: dict[str, str], tmp_path: Path) -> None:
    first = node.answer(message(config()), settings)
    table(tmp_path / "south.csv", rows=80)
    node.answer(message(config(), "train", **{MODEL: start(config()).arrays}), settings)
    second = node.answer(message(config(), run_id="next"), settings)
    counts = [reply.content.metric_records[METRICS][NUM_EXAMPLES] for reply in (first, second)]
    assert counts == [42, 56]


def test_what_is_served_knows_where_the_sites_data_are(settings: dict[str, str], tmp_path: Path) -> None:
    run = config()
    for action in ("train", "evaluate"):
        node.answer(message(run, action, **{MODEL: start(run).arrays}), settings)
    snapshot = Snapshot.load(tmp_path / "state" / "run" / "south" / SERVED, torch.device("cpu"))
    assert snapshot.own == OwnSite(tmp_path / "south.csv", "south")
    assert len(site_data(run, SITES.index("south"), snapshot.own, None).train) == 42


def test_a_rehearsal_in_one_process_names_the_site_whose_data_are_wrong(tmp_path: Path) -> None:
    table(tmp_path / "north.csv")
    table(tmp_path / "south.csv", columns="age,ill")
    run = config().model_copy(update={"data_root": str(tmp_path)})
    with pytest.raises(UserError, match=r"south\.csv lacks column 'bmi'"):
        LocalRuntime(run).run(RunFolder.create(tmp_path / "run", run))
