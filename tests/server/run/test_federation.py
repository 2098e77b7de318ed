"""What a round costs grows with its cohort, not with the federation, and none of its numbers depends on that."""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from perennial.client import host
from perennial.client.host import Host
from perennial.client.packs import Packs
from perennial.client.state import FileStates, SavedStates
from perennial.client.trainer import Site
from perennial.common.config import RunConfig, Task
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config

MANY = {"name": "toy", "clients": 30, "samples": 8}


def many(method: str, *settings: str, **options: Any) -> RunConfig:
    return toy_config(method, "participation=0.1", *settings, scenario=MANY, **{"rounds": 4, **options})


class Asked:
    """Runs a configuration and notes who was asked what."""

    def __init__(self, config: RunConfig, path: Path, most: int | None = None) -> None:
        self.config, self.folder = config, RunFolder.create(path, config)
        self.here = LocalRuntime(config)
        if most is not None:
            self.here.states.most = most
        self.asked: list[tuple[str, int]] = []
        inner = self.here.grid.app

        def noted(message: Message, context: Any) -> Message:
            self.asked.append((message.metadata.message_type, int(context.node_config["partition-id"])))
            return inner(message, context)

        self.here.grid.app = noted  # type: ignore[assignment]
        self.summary = self.here.run(self.folder)

    def who(self, action: str) -> set[int]:
        return {number for asked, number in self.asked if asked == action}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ditto", "drfa"])
def test_whom_no_round_needs_is_not_asked_and_the_model_is_the_same(method: str, tmp_path: Path) -> None:
    few = Asked(many(method, "evaluate_clients=5"), tmp_path / "few")
    every = Asked(many(method), tmp_path / "every")
    assert every.who("query") == set(range(30))
    trained = {number for action, number in few.asked if action.startswith("train")}
    assert few.who("query") == trained | few.who("evaluate") < set(range(30))
    assert {asked for asked in few.asked if asked[0].startswith("train")} == {
        asked for asked in every.asked if asked[0].startswith("train")
    }
    one, other = (own.folder.load_checkpoint().arrays for own in (few, every))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_clients_that_are_evaluated_are_drawn_once_and_named(tmp_path: Path) -> None:
    few = Asked(many("fedavg", "evaluate_clients=5"), tmp_path / "few")
    rows = [row for row in few.folder.rows() if row["kind"] == "evaluation"]
    by_round = {
        number: {row["client"] for row in rows if row["round"] == number}
        for number in {row["round"] for row in rows}
    }
    drawn = few.summary["evaluated"]
    assert drawn["of"] == 30
    assert len(drawn["clients"]) == 5
    assert by_round == {2: set(drawn["clients"]), 4: set(drawn["clients"])}
    assert set(few.summary["models"]["global"]["final"]["clients"]) == set(drawn["clients"])
    assert {name for name, _ in few.here.data()} == set(drawn["clients"])
    # Another seed draws others; the numbers are those of a run that evaluates all.
    assert many("fedavg", "evaluate_clients=5", seed=1).evaluated != few.config.evaluated
    other = next(client for client in few.config.scenario.client_ids if client not in few.config.evaluated)
    tested = many("fedavg", "evaluate_clients=5", f"test_sites=['{other}']").evaluated
    assert {*tested} == {*few.config.evaluated, other}
    assert tested == sorted(tested, key=few.config.scenario.client_ids.index)
    every = Asked(many("fedavg"), tmp_path / "every")
    assert "evaluated" not in every.summary
    known = every.summary["models"]["global"]["final"]["clients"]
    assert few.summary["models"]["global"]["final"]["clients"] == {name: known[name] for name in drawn["clients"]}


def test_data_of_a_bounded_number_of_clients_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Asked(many("fedavg"), tmp_path / "wide")
    assert len(wide.here.host._sites) == 30
    monkeypatch.setattr(host, "RESIDENT", 2)
    assert len(Asked(many("fedavg"), tmp_path / "small").here.host._sites) == 30  # all of them are small
    monkeypatch.setattr(host, "RESIDENT_BYTES", 1)
    narrow = Asked(many("fedavg"), tmp_path / "narrow")
    assert len(narrow.here.host._sites) == 2
    assert narrow.folder.rows() == wide.folder.rows()
    each = narrow.here.host._held // 2
    monkeypatch.setattr(host, "RESIDENT_BYTES", 5 * each)  # toy clients have the same sizes
    assert len(Asked(many("fedavg"), tmp_path / "some").here.host._sites) == 5


def test_the_data_of_who_is_evaluated_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though more clients train between two evaluations than there is room for."""
    load, made = Host._load, Counter[int]()

    def seen(self: Host, task: Task, number: int) -> Site:
        made[number] += 1
        return load(self, task, number)

    monkeypatch.setattr(Host, "_load", seen)
    monkeypatch.setattr(host, "RESIDENT", 6)
    monkeypatch.setattr(host, "RESIDENT_BYTES", 1)
    config = toy_config(
        "fedavg", "evaluate_clients=5", participation=0.2, rounds=6, scenario={"name": "toy", "clients": 20}
    )
    LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    evaluated = {config.scenario.client_ids.index(client) for client in config.evaluated}
    assert {made[number] for number in evaluated} == {1}
    assert max(made.values()) > 1


def test_stacks_of_clients_whose_data_are_let_go_are_of_the_right_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of a stack are held under its clients' names; memory that was freed may be another client's now."""
    settings = ("cohort_engine=stack", "participation=0.3")
    wide = Asked(many("fedavg", *settings), tmp_path / "wide")
    monkeypatch.setattr(host, "RESIDENT", 2)
    monkeypatch.setattr(host, "RESIDENT_BYTES", 1)
    narrow = Asked(many("fedavg", *settings), tmp_path / "narrow")
    assert narrow.folder.rows() == wide.folder.rows()


def test_a_checkpoint_writes_what_clients_keep_anew_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = [[]]
    store, save = Packs.write, SavedStates.save

    def noted(self: Packs, wanted: Mapping[str, Any]) -> None:
        written[-1] += [place.rpartition("/")[2] for place in wanted]
        store(self, wanted)

    def saved(self: SavedStates, folder: Path) -> None:
        save(self, folder)
        written.append([])

    monkeypatch.setattr(Packs, "write", noted)
    monkeypatch.setattr(SavedStates, "save", saved)
    found = Asked(many("ditto", "evaluate_clients=5", rounds=6), tmp_path / "run", most=0)
    ids = found.config.scenario.client_ids
    trained = [number for action, number in found.asked if action == "train"]
    pairs = [{ids[number] for number in trained[start : start + 6]} for start in (0, 6, 12)]  # 3 in each round
    assert [set(own) for own in written[:3]] == pairs
    assert all(len(own) == len(set(own)) for own in written)
    assert not found.here.states._in_memory  # all of it is on disk
    kept = {place.rpartition("/")[2] for place in found.here.states}
    assert kept == set().union(*pairs)
    files = [path for path in found.folder.clients.rglob("*") if path.is_file()]
    assert 0 < len(files) <= 3 < len(kept)  # none for each client


@pytest.mark.slow
def test_what_clients_keep_is_the_same_from_memory_and_from_disk(tmp_path: Path) -> None:
    config = many("ditto", "participation=0.3", rounds=7)
    held, let_go = (Asked(config, tmp_path / str(most), most=most) for most in (1024, 0))
    assert held.folder.rows() == let_go.folder.rows()
    for place, versions in held.here.states.items():
        other = let_go.here.states[place.replace(*(own.folder.load_checkpoint().run_id for own in (held, let_go)))]
        for name, tensor in versions[-1].kept["personal"].items():
            assert torch.equal(tensor, other[-1].kept["personal"][name])


@pytest.mark.slow
def test_a_run_goes_on_whose_checkpoint_holds_what_clients_keep(tmp_path: Path) -> None:
    """As checkpoints did before: a folder `clients` in each."""
    config = many("ditto", "participation=0.3", rounds=4)
    whole = Asked(config, tmp_path / "whole")
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder, until=2)
    folder.clients.rename(folder.checkpoint_path(2) / "clients")
    LocalRuntime(config).run(folder, folder.load_checkpoint())
    assert folder.rows() == whole.folder.rows()


def test_a_run_goes_on_whose_checkpoint_has_a_file_for_each_client(tmp_path: Path) -> None:
    """As those of 0.2 and before. What is saved from then on is in packs."""
    config = many("ditto", "participation=0.3", rounds=4)
    whole = Asked(config, tmp_path / "whole")
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder, until=2)
    before = FileStates(tmp_path / "before")
    before.update(FileStates(folder.clients))
    assert len(list(before.folder.rglob("round-*"))) >= 9
    shutil.rmtree(folder.clients)
    before.folder.rename(folder.clients)
    LocalRuntime(config).run(folder, folder.load_checkpoint())
    assert folder.rows() == whole.folder.rows()
    packs = FileStates(folder.clients).packs
    assert len([*packs]) >= 9
    alone = {path.parent.relative_to(folder.clients).as_posix() for path in folder.clients.rglob("round-*")}
    assert not alone & set(packs)


@pytest.mark.slow
def test_what_a_broken_off_attempt_has_saved_is_not_read(tmp_path: Path) -> None:
    """Files of a checkpoint that was never finished lie beside those of the one before it."""
    config = many("ditto", "participation=0.3", rounds=6)
    whole = Asked(config, tmp_path / "whole")
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder, until=4)
    folder.checkpoint_path(4).rename(folder.path / "checkpoint" / "damaged")
    origin = folder.load_checkpoint()
    assert origin.round == 2
    folder.cut_log(origin.log_bytes)
    LocalRuntime(config).run(folder, origin)
    one, other = folder.load_checkpoint().arrays, whole.folder.load_checkpoint().arrays
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert folder.rows() == whole.folder.rows()
