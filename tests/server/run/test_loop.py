import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from safetensors.torch import load_file

from perennial.client.app import OneHandlerApp
from perennial.client.host import Host
from perennial.client.state import FileStates, valid
from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.wire import METRICS, NUM_EXAMPLES
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.grid import LocalGrid
from perennial.server.run.loop import run_rounds, start
from perennial.server.run.progress import Progress
from perennial.testing.tiny_federation import SpoilingGrid, Toy, toy_config

CONFIG = load_config(
    options={
        "method": "local",
        "scenario": {"name": "colored-digits", "clients": 3, "train_per_class": 5, "test_per_class": 2},
        "model": "logistic",
        "rounds": 7,
        "participation": 0.7,
    },
    settings=["checkpoint_every=2", "evaluate_every=3", "local_steps=1", "wait=0.01"],
)


class Stop(Exception):  # noqa: N818
    pass


def sites(path: Path, config: RunConfig = CONFIG) -> LocalGrid:
    """Clients that keep their own state on their own disk, as at a deployment."""
    host = Host(FileStates(path))
    app = OneHandlerApp(lambda message, context: host.handle(message, int(context.node_config["partition-id"])))
    return LocalGrid(app, len(config.scenario.client_ids))


def go_on(folder: RunFolder, grid: Grid, stop: int = 0) -> None:
    """Start or resume the run; die in the round `stop`."""

    def watch(progress: Progress) -> None:
        if progress.round == stop:
            raise Stop

    if folder.checkpoints():
        origin = folder.load_checkpoint()
        folder.cut_log(origin.log_bytes)
    else:
        origin = start(CONFIG)
    run_rounds(CONFIG, folder, grid, origin, watch)


def personal_models(path: Path, resumed: list[int]) -> dict[str, Any]:
    """Of each client, the newest version of the run's present history."""
    newest = {place.split("/")[1]: valid(v, resumed)[-1] for place, v in FileStates(path).items()}
    return {client: (v.round, v.kept["personal"]["classifier.weight"].tolist()) for client, v in newest.items()}


@pytest.mark.parametrize("stops", [(3, 3), (3, 5, 5)])
def test_where_sites_keep_their_own_state_a_resumed_run_equals_the_unbroken_one(
    stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Also one that dies twice after one checkpoint: the second resume must not read what the first one left."""
    unbroken, broken = (RunFolder.create(tmp_path / name, CONFIG) for name in ("unbroken", "broken"))
    go_on(unbroken, sites(tmp_path / "a"))
    for stop in stops:
        with pytest.raises(Stop):
            go_on(broken, sites(tmp_path / "b"), stop)
    go_on(broken, sites(tmp_path / "b"))
    assert broken.rows() == unbroken.rows()
    assert personal_models(tmp_path / "b", broken.resumes()) == personal_models(tmp_path / "a", [])
    assert broken.resumes() == [stop - 1 for stop in stops]


def test_a_resumed_run_counts_the_seconds_of_before(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    with pytest.raises(Stop):
        go_on(folder, sites(tmp_path / "sites"), 3)
    origin = folder.load_checkpoint()
    folder.cut_log(origin.log_bytes)
    run_rounds(CONFIG, folder, sites(tmp_path / "sites"), replace(origin, seconds=1000.0))
    assert 1000 < folder.summary()["wall_seconds"] < 1600
    assert folder.load_checkpoint().seconds > 1000


def test_the_log_and_the_checkpoints_are_at_the_rounds_they_should_be(tmp_path: Path) -> None:
    folder, seen = RunFolder.create(tmp_path / "run", CONFIG), list[Progress]()
    summary = run_rounds(CONFIG, folder, sites(tmp_path / "a"), start(CONFIG), seen.append)
    rows = folder.rows()
    assert [row["round"] for row in rows if row["kind"] == "round"] == list(range(1, 8))
    assert sorted({row["round"] for row in rows if row["kind"] == "evaluation"}) == [3, 6, 7]
    assert folder.checkpoints() == [6, 7]
    assert [progress.round for progress in seen] == list(range(1, 8))
    assert "personal/accuracy" in seen[2].metrics
    assert "personal/accuracy" not in seen[1].metrics
    asked = {row["asked"] for row in rows if row["kind"] == "round"}
    assert asked == {max(1, round(0.7 * len(CONFIG.scenario.client_ids)))}
    assert folder.summary() == summary
    assert torch.equal(
        folder.load_checkpoint().arrays["classifier.weight"], start(CONFIG).arrays["classifier.weight"]
    )  # nothing is aggregated


def test_too_few_clients_stop_the_run_before_it_begins(tmp_path: Path) -> None:
    grid = sites(tmp_path / "a")
    for node in list(grid.contexts)[1:]:
        del grid.contexts[node]
    config = CONFIG.model_copy(update={"quorum": 0.9})
    with pytest.raises(RunStopped, match=rf"only 1 of {len(config.scenario.client_ids)} clients were there"):
        run_rounds(config, RunFolder.create(tmp_path / "run", config), grid, start(config))


def test_what_keeps_a_client_away_is_said(tmp_path: Path) -> None:
    grid = sites(tmp_path / "a")
    for context in grid.contexts.values():
        context.node_config["partition-id"] = "many"
    with pytest.raises(RunStopped, match=r"client-\d: failed: invalid literal for int\(\) .* \(ValueError\)"):
        run_rounds(CONFIG, RunFolder.create(tmp_path / "run", CONFIG), grid, start(CONFIG))


def test_a_client_that_cannot_say_who_it_is_is_in_the_log_of_every_round_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.server.run.loop.time.sleep", lambda seconds: pytest.fail("it waited"))
    grid = sites(tmp_path / "a")
    grid.contexts[2].node_config["partition-id"] = "many"
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    run_rounds(CONFIG, folder, grid, start(CONFIG))
    left_out = [row["left_out"] for row in folder.rows() if row["kind"] == "round"]
    assert all("invalid literal" in names["client-1"] for names in left_out)
    assert {client for names in left_out for client in names} == {"client-1"}


@pytest.mark.parametrize(("method", "part"), [("ifca", "cluster"), ("cgpfl", "context")])
def test_the_run_folder_holds_every_model_of_the_server(method: str, part: str, tmp_path: Path) -> None:
    config = toy_config(method, "rounds=1")
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder)
    kept = folder.load_checkpoint().strategy
    found = {path.stem: load_file(path) for path in (folder.path / "models").iterdir()}
    assert found.keys() == {"global", *(f"{part}-{number}" for number in range(4))}
    for name in found.keys() - {"global"}:
        assert all(torch.equal(tensor, found[name][key]) for key, tensor in kept[name].items())


def test_a_finished_run_holds_no_data(tmp_path: Path) -> None:
    """Of runs one after the other in a process, the first one's tensors go without waiting for the collector."""
    gc.disable()
    try:
        config = toy_config("fedavg", rounds=1)
        runtime = LocalRuntime(config)
        runtime.run(RunFolder.create(tmp_path / "run", config))
        host = weakref.ref(runtime.host)
        del runtime
        assert host() is None
    finally:
        gc.enable()


def test_a_client_that_claims_most_of_the_samples_is_in_the_summary(tmp_path: Path) -> None:
    """From its enrolment on, so that nothing of it contradicts itself."""
    config = toy_config("fedavg", rounds=2)
    here = LocalRuntime(config)

    def spoil(request: Message, reply: Message) -> Message:
        metrics = reply.content.metric_records[METRICS]
        if request.metadata.dst_node_id == 2 and NUM_EXAMPLES in metrics:
            metrics[NUM_EXAMPLES] = 10**6
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"] == {}
    ((client, share),) = summary["majority"]["training"].items()
    assert client == "client-1"
    assert share > 0.99
    honest = LocalRuntime(config).run(RunFolder.create(tmp_path / "honest", config))
    assert "majority" not in honest


@pytest.mark.parametrize("method", ["local", "fedsdr"])
def test_a_client_whose_model_diverges_stays_in_every_mean(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over the others would make settings that ruin some clients look good."""
    plain = Toy.client_data

    def hard(self: Toy, client: int, seed: int, root: Path | None) -> ClientData:
        data = plain(self, client, seed, root)
        if client >= 2:
            return data

        def far(part: Examples) -> Examples:
            noise = torch.rand(len(part.y), generator=torch.Generator().manual_seed(client)) < 0.4
            return Examples(1e3 * part.x, torch.where(noise, 1 - part.y, part.y), part.environment)

        tests = {name: far(part) for name, part in data.test.items()}
        return ClientData(far(data.train), far(data.validation), tests)

    monkeypatch.setattr(Toy, "client_data", hard)
    config = toy_config(method, "learning_rate=3", "rounds=6")
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    assert summary
    final = summary["models"]["personal"]["final"]
    assert [name for name, own in final["clients"].items() if max(own.values()) == 0] == ["client-0", "client-1"]
    assert len(final["clients"]) == 4
    assert {*summary["left_out"]} == {"client-0", "client-1"}  # of the training


def test_two_environments_of_one_name_are_told_before_the_first_round() -> None:
    config = load_config(
        options={"method": "fedavg", "scenario": "cmnist"}, settings=["scenario.train_agreement=[0.9, 0.9]"]
    )
    with pytest.raises(UserError) as error:
        start(config)
    assert str(error.value) == (
        "scenario 'cmnist': train_environments: 'p=0.9' is there 2 times; give each a name of its own"
    )


def test_no_scenario_of_ours_has_two_environments_of_one_name() -> None:
    for name, scenario in SCENARIOS.items():
        for names in (scenario.train_environments, scenario.test_environments):
            assert len(set(names)) == len(names), name
