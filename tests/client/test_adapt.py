"""A site that trains nothing makes a personal model of a few rows, tests it on the others, and keeps nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from safetensors.torch import load_file

from perennial.client.host import Host, client_half, site_data, site_of
from perennial.client.serving import models as serving
from perennial.client.state import FileStates
from perennial.client.trainer import Received
from perennial.common.config import RunConfig, load_config
from perennial.common.methods import METHODS
from perennial.common.models.network import network
from perennial.common.utils.errors import UserError
from perennial.common.wire import CONFIG, KEPT, METRICS, MODEL, PERSONAL, RESUMED, ROUND, RUN, TASK
from perennial.server.local import LocalRuntime
from perennial.server.results.trained import model_of
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.server.study.run_names import config_digest
from perennial.testing.tiny_federation import WireGrid

ROWS, FEW = 60, 12
CPU = torch.device("cpu")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three sites, of which `c` has the other labels."""
    for place, site in enumerate("abc"):
        rows = "".join(f"{n % 7},{n % 5},{int((n % 7 > 3) ^ (site == 'c'))}\n" for n in range(ROWS + place))
        (tmp_path / f"{site}.csv").write_text(f"x1,x2,label\n{rows}")
    monkeypatch.setenv("PERENNIAL_DATA", str(tmp_path))
    return tmp_path


def config_of(method: str, tables: Path, *settings: str, sites: str = "abc") -> RunConfig:
    scenario = {"name": "own-data", "sites": list(sites)}
    options: dict[str, Any] = {"method": method, "scenario": scenario, "rounds": 2, "data_root": str(tables)}
    few = {"local_steps": 2, "contexts": 2, "clusters": 2, "head_steps": 2}
    known = [f"{name}={value}" for name, value in few.items() if name in METHODS[method].model_fields]
    return load_config(options=options, settings=[*known, *settings])


ADAPTING = ("test_sites=['c']", f"adapt={FEW}")


def at(folder: RunFolder, site: str, model: str) -> dict[str, Any]:
    """The test counts of a model at a site after the last round."""
    rows = [row for row in folder.rows() if row["kind"] == "evaluation" and row["client"] == site]
    (row,) = (row for row in rows if (row["model"], row["split"], row["round"]) == (model, "test", 2))
    return row


def able() -> list[str]:
    return sorted(name for name, method in METHODS.items() if method.adapts)


@pytest.mark.parametrize("method", able())
def test_every_method_that_says_so_makes_a_personal_model_there(method: str, tables: Path, tmp_path: Path) -> None:
    config = config_of(method, tables, *ADAPTING)
    folder = RunFolder.create(tmp_path / "run", config)
    assert LocalRuntime(config).run(folder)["left_out"] == {}
    found = at(folder, "c", "personal")
    assert (found["environment"], found["count"]) == (["own"], [ROWS + 2 - FEW])
    kept = {place.rpartition("/")[2] for place in FileStates(folder.clients)}
    assert "c" not in kept
    # It had no part in what the others have made.
    two = config_of(method, tables, sites="ab")
    without = RunFolder.create(tmp_path / "two", two)
    LocalRuntime(two).run(without)
    for path in sorted((without.path / "models").iterdir()):
        one, other = load_file(path), load_file(folder.path / "models" / path.name)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_page_names_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"can do this: ([^.]*)\.", page)
    assert re.findall(r"`([^`]+)`", names) == able()


def test_a_method_without_a_personal_model_tests_its_common_one_on_the_same_rows(
    tables: Path, tmp_path: Path
) -> None:
    config = config_of("fedavg", tables, *ADAPTING)
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder)
    model = load_file(folder.path / "models" / "global.safetensors")
    (test,) = site_data(config_of("ditto", tables, *ADAPTING), 2, None, tables).test.values()
    right = network(config.model, (2,), 2).predict(model, test.x).argmax(dim=1) == test.y
    assert (at(folder, "c", "global")["correct"], len(test)) == ([int(right.sum())], ROWS + 2 - FEW)


def test_methods_that_cannot_say_why(tables: Path) -> None:
    for name, method in METHODS.items():
        if "personal" in method.evaluates and not method.adapts:
            with pytest.raises(
                UserError, match=f"^adapt: 12 is not possible with the method {name}, whose personal"
            ):
                config_of(name, tables, *ADAPTING)
    for name in ("fedsdr", "fedsdr-fedavg", "fedsdr-pfedme", "fedpac"):
        assert METHODS[name](name=name).cannot_adapt()
    with pytest.raises(UserError, match="whose ensemble has a part of every client"):
        config_of("f-fl-games", tables, *ADAPTING)
    with pytest.raises(
        UserError, match=r"^adapt: 12 is not possible with the method perinvfl, whose invariance=gr"
    ):
        config_of("perinvfl", tables, *ADAPTING, "invariance=groupdro")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("adapt=5",), "adapt: 5 is for sites that train nothing; name some in test_sites"),
        (("test_sites=['c']", "adapt=-1"), "adapt: -1 is not possible"),
    ],
)
def test_wrong_numbers_are_one_sentence(settings: tuple[str, ...], sentence: str, tables: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        config_of("ditto", tables, *settings)


def test_more_rows_than_there_are(tables: Path) -> None:
    """A fifth of the 62 rows is for testing, and is not learnt from."""
    said = "adapt: 50 is not possible at c; it must be less than its 50 samples that are not for testing anyway"
    with pytest.raises(UserError, match=f"^{said}$"):
        site_data(config_of("ditto", tables, "test_sites=['c']", "adapt=50"), 2, None, tables)
    tests = site_data(config_of("ditto", tables), 2, None, tables).test["own"]
    most = site_data(config_of("ditto", tables, "test_sites=['c']", "adapt=49"), 2, None, tables)
    assert (len(most.train), len(most.test["own"])) == (49, len(tests) + 1)
    assert torch.equal(most.test["own"].x[: len(tests)], tests.x)


def test_the_rows_are_drawn_by_the_seed_and_more_of_them_have_the_fewer_ones(tables: Path) -> None:
    def drawn(few: int, seed: int = 0) -> set[tuple[float, ...]]:
        config = config_of("ditto", tables, "test_sites=['c']", f"adapt={few}", f"seed={seed}")
        data = site_data(config, 2, None, tables)
        assert (len(data.train), len(data.validation)) == (few, 0)
        assert sum(len(part) for part in data.test.values()) == ROWS + 2 - few
        return {tuple(row) for row in data.train.x.tolist()}

    assert drawn(5) == drawn(5)
    assert drawn(5) < drawn(20)
    assert drawn(5) != drawn(5, seed=1)
    digests = {config_digest(config_of("ditto", tables, "test_sites=['c']", f"adapt={few}")) for few in (0, 5, 6)}
    assert len(digests) == 3


def test_dittos_personal_model_is_one_visit_from_the_common_one(tables: Path, tmp_path: Path) -> None:
    """By hand; on the wire as here, and as the site serves it. Nobody asks it to train."""
    config = config_of("ditto", tables, *ADAPTING)
    folder, grid = RunFolder.create(tmp_path / "run", config), WireGrid(config, tmp_path / "sites")
    run_rounds(config, folder, grid, start(config))
    assert {sent.client for sent in grid.sent} == {0, 1}

    data, net = site_data(config, 2, None, tables), network(config.model, (2,), 2)
    common = load_file(folder.path / "models" / "global.safetensors")
    whole = site_of(config, "c", data, net)
    client = client_half(config, whole, {})
    client.train(Received(2, {MODEL: common}))
    (test,) = data.test.values()
    logits = net.predict(client.kept[PERSONAL], test.x)
    assert at(folder, "c", "personal")["correct"] == [int((logits.argmax(dim=1) == test.y).sum())]

    before = client_half(config, whole, {})
    assert torch.equal(before.evaluated(Received(2, {MODEL: common}))["personal"](test.x), logits)
    assert before.kept == {}

    local = RunFolder.create(tmp_path / "local", config)
    LocalRuntime(config).run(local)
    assert local.rows() == folder.rows()
    (snapshot,) = (tmp_path / "sites").rglob("c/serving.safetensors")
    served = serving.load(snapshot, tables, CPU)
    assert torch.equal(served.models["personal"](test.x), logits)


def test_a_site_that_only_tests_serves_the_common_model_and_trains_for_nobody(
    tables: Path, tmp_path: Path
) -> None:
    config = config_of("ditto", tables, "test_sites=['c']")
    folder, grid = RunFolder.create(tmp_path / "run", config), WireGrid(config, tmp_path / "sites")
    run_rounds(config, folder, grid, start(config))
    (snapshot,) = (tmp_path / "sites").rglob("c/serving.safetensors")
    served = serving.load(snapshot, tables, CPU)
    assert (list(served.models), served.headline) == (["global"], "global")
    with pytest.raises(UserError, match="c only tests in this run, and has no personal model"):
        model_of(folder, config, PERSONAL, "c")

    for settings in (("test_sites=['c']",), ADAPTING):
        task = config_of("ditto", tables, *settings).task()
        facts = {TASK: task, RUN: "r", ROUND: 1, KEPT: [], RESUMED: []}
        for kind, refused in (("train", True), ("query", False)):
            message = Message(RecordDict({CONFIG: ConfigRecord(dict(facts))}), 3, kind)
            message.metadata._message_id = "m"
            host = Host({}, tables)
            if refused:
                with pytest.raises(ValueError, match="c trains nothing in this run, and 'train' is asked for"):
                    host.handle(message, 2)
            else:
                assert dict(host.handle(message, 2).content[METRICS]) == {}  # not even how many rows it has
