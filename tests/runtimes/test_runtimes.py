"""The same run on all three runtimes: same arrays, same metrics."""

import os
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_models
from rich.console import Console
from safetensors.torch import load_file
from simulated_superlink import superlink
from split_counts import own_tables
from target_tables import COLUMNS, dropped, hospitals

from perennial.common import plugins
from perennial.common.config import RunConfig, load_config
from perennial.common.flower import processes
from perennial.common.methods import METHODS
from perennial.common.methods.references import FILE
from perennial.common.privacy.secure_aggregation import STEPS
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.files import load_records
from perennial.server.cli.watch import watched_superlink
from perennial.server.deployment import control, submission
from perennial.server.deployment.fab import make_app
from perennial.server.deployment.submission import Connection
from perennial.server.deployment.testbed import Deployment, deployment
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.simulation import TRIES, Simulation
from perennial.server.study.batch import Outcome, Summary
from perennial.server.study.choose import choose, last_counts
from perennial.server.survey.describe import describe, question

pytestmark = [pytest.mark.runtimes, pytest.mark.slow]

LONG = ("rounds=30", "evaluate_every=30")
Elsewhere = tuple[str, Connection | Simulation]
PROJECT = Path(__file__).parents[2]
STOCK = [processes.program("flower-supernode")]


def config_for(method: str, runtime: str, *settings: str) -> RunConfig:
    return load_config(
        options={"method": method, "scenario": "colored-digits", "rounds": 2, "runtime": runtime},
        settings=["scenario.clients=2", "evaluate_every=2", "checkpoint_every=1", *settings],
    )


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    """The processes that the tests start have the tests' modules, as if they were installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plugins.VARIABLE, str(Path(user_models.__file__)))
        yield


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for method in ("fedavg", "ditto", "fedsdr"):
        path = tmp_path_factory.mktemp("local") / method
        config = config_for(method, "local")
        LocalRuntime(config).run(RunFolder.create(path, config))
        folders[method] = path
    return folders


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is still at work when somebody wants to end it."""
    path = tmp_path_factory.mktemp("local") / "long"
    config = config_for("ditto", "local", *LONG)
    LocalRuntime(config).run(RunFolder.create(path, config))
    return path


def finish(connection: Connection | Simulation, config: RunConfig, path: Path) -> None:
    assert [row["round"] for row in connection.execute(config, path) if row["kind"] == "round"] == [1, 2]


def assert_equal_runs(one: Path, other: Path) -> None:
    names = sorted(path.name for path in (one / "models").iterdir())
    assert names == sorted(path.name for path in (other / "models").iterdir())
    for file in names:
        left, right = (load_file(path / "models" / file) for path in (one, other))
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-6)
    assert evaluations(one) == evaluations(other)
    ours, theirs = RunFolder(one).summary(), RunFolder(other).summary()
    for key in ("models", "bytes_per_client_and_round", "left_out", "rounds", "seed"):
        assert ours[key] == theirs[key], key


def evaluations(path: Path) -> list[dict[str, Any]]:
    rows = [row for row in RunFolder(path).rows() if row["kind"] == "evaluation"]
    for row in rows:
        row["loss"] = [round(value, 3) for value in row["loss"]]
    return rows


def typed(command: str, environment: Mapping[str, str], out: Path) -> str:
    """What a command of docs/running.md prints that is typed in the project's folder, with `out` and two rounds.

    Flower gives Ray 30 seconds to start, which a busy machine misses now and then: then once more.
    """
    assert command in (PROJECT / "docs" / "running.md").read_text()
    settings = "scenario.clients=2 evaluate_every=2 checkpoint_every=1" if "clients=2" in command else ""
    command += f" --run-config \"out='{out}' state-dir='{out}-state' rounds=2 set='{settings}'\""
    printed = ""
    for _ in range(TRIES):
        printed = subprocess.run(
            command, shell=True, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=900, check=False,
        ).stdout  # fmt: skip
        if (out / "summary.json").exists() or (out / "error.txt").exists():
            break
    return printed


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with superlink(tmp_path_factory.mktemp("simulation") / "flower") as connection:
        yield connection


@pytest.fixture
def newcomer(simulated: Connection, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has never used Flower.

    Flower's local SuperLink is there already: Flower gives it 15 seconds to start, which a busy machine misses.
    """
    known = tomllib.loads((Path(simulated.environment["FLWR_HOME"]) / "config.toml").read_text())
    port = known["superlink"][simulated.name]["address"].rpartition(":")[2]
    return {**processes.environment(), "FLWR_HOME": str(tmp_path / "empty"), "FLWR_LOCAL_CONTROL_API_PORT": port}


def test_flwr_run_in_simulation_equals_local(
    local: dict[str, Path], newcomer: dict[str, str], tmp_path: Path
) -> None:
    command = """flwr run . --stream --run-config 'set="scenario.clients=2"'"""
    printed = typed(command, newcomer, tmp_path / "fedsdr")
    assert (tmp_path / "fedsdr" / "summary.json").exists(), printed
    assert_equal_runs(local["fedsdr"], tmp_path / "fedsdr")
    assert RunFolder(tmp_path / "fedsdr").config() == config_for("fedsdr", "simulation")


@pytest.mark.parity
def test_flwr_run_with_too_few_simulated_nodes_says_so(newcomer: dict[str, str], tmp_path: Path) -> None:
    printed = typed("flwr run . --stream", newcomer, tmp_path / "run")
    assert (tmp_path / "run" / "error.txt").exists(), printed
    word = (tmp_path / "run" / "error.txt").read_text()
    assert word.startswith("Flower simulates 2 SuperNodes and scenario colored-digits has 8 clients; ")
    assert f"perennial: {word}" in printed


@pytest.mark.parity
def test_simulation_with_two_actors_equals_local(local: dict[str, Path], tmp_path: Path) -> None:
    """And so it does where it was ended after its first checkpoint, and goes on."""
    config = config_for("ditto", "simulation", f"client_cpus={(os.cpu_count() or 1) / 2}")
    here, path = Simulation(tmp_path), tmp_path / "ditto"
    rows = here.execute(config, path)
    for row in rows:
        if row["kind"] == "round":
            break
    while not RunFolder(path).checkpoints():
        time.sleep(0.05)
    rows.close()  # type: ignore[attr-defined]
    assert not (path / "summary.json").exists()
    again = [row["round"] for row in here.execute(config, path, resume=True) if row["kind"] == "round"]
    assert again == [2]
    assert_equal_runs(local["ditto"], path)


@pytest.fixture
def cluster() -> Iterator[tuple[str, list[Path]]]:
    """The address of two Ray nodes with a core each, on this machine, and their temporary folders."""
    port = processes.free_port()
    # Ray's sockets lie there, and a path to one has 107 letters at most.
    folders = [Path(f"/tmp/perennial-ray-{port}-{number}") for number in range(2)]
    places = [["--head", f"--port={port}", "--include-dashboard=false"], [f"--address=127.0.0.1:{port}"]]
    nodes = []
    try:
        for folder, place in zip(folders, places, strict=True):
            own = [f"--temp-dir={folder}", f"--dashboard-agent-listen-port={processes.free_port()}"]
            more = ["--num-cpus=1", "--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
            node = subprocess.Popen(
                [processes.program("ray"), "start", *place, *own, *more], start_new_session=True,
                env={"RAY_worker_niceness": "0", **processes.environment()},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            nodes.append(node)
            while not list(folder.glob("session_2*/logs/raylet.out")):
                assert not [own for own in nodes if own.poll() is not None], "a node of Ray's has ended"
                time.sleep(0.2)
        yield f"127.0.0.1:{port}", folders
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(timeout=60)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parity
def test_a_simulation_on_two_ray_nodes_equals_local(
    local: dict[str, Path], cluster: tuple[str, list[Path]], tmp_path: Path
) -> None:
    address, folders = cluster
    finish(Simulation(tmp_path), config_for("ditto", "simulation", f"ray_address={address}"), tmp_path / "ditto")
    assert_equal_runs(local["ditto"], tmp_path / "ditto")
    # A client takes a core, and a node has one: so each of the two processes that answered is on its own.
    assert all(list(folder.glob("session_2*/logs/worker-*-01000000-*.out")) for folder in folders)


def test_a_simulation_without_room_for_a_client_says_so(tmp_path: Path) -> None:
    config = config_for("fedavg", "simulation", "client_gpus=1000")
    with pytest.raises(
        RunStopped, match=r"takes client_cpus=1 and client_gpus=1000, and Ray finds less than that"
    ):
        list(Simulation(tmp_path).execute(config, tmp_path / "run"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:70000", "nowhere.invalid:6379"])
def test_a_ray_cluster_that_does_not_answer_is_said_at_once(address: str, tmp_path: Path) -> None:
    config = config_for("fedavg", "simulation", f"ray_address={address}")
    with pytest.raises(UserError, match=rf"ray_address: {address} is not possible; no Ray cluster answers there"):
        list(Simulation(tmp_path).execute(config, tmp_path / "run"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("deployment"), clients=2) as site:
        yield site


@pytest.mark.parity
@pytest.mark.parametrize("runtime", ["simulation", "deployment"])
def test_a_module_of_ones_own_with_weights_equals_local(
    runtime: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With dropout, whose draws are keyed, and BatchNorm; sites have the module and not the weights."""
    torch.save(user_models.Picture(2, (2, 8, 8)).state_dict(), tmp_path / "weights.pt")
    settings = ["model.name=user_models:Picture", f"model.weights={tmp_path / 'weights.pt'}"]
    config = config_for("fedavg", "local", *settings)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    simulated = runtime == "simulation"
    elsewhere: Elsewhere = Simulation(tmp_path) if simulated else request.getfixturevalue("site").connection
    finish(elsewhere, config_for("fedavg", runtime, *settings), tmp_path / runtime)
    assert_equal_runs(tmp_path / "local", tmp_path / runtime)
    assert RunFolder(tmp_path / runtime).config().model == config.model


def test_flwr_run_equals_local(local: dict[str, Path], site: Deployment, tmp_path: Path) -> None:
    command = """flwr run . deployment --stream --run-config 'set="scenario.clients=2"'"""
    printed = typed(command, site.connection.environment, tmp_path / "fedsdr")
    assert (tmp_path / "fedsdr" / "summary.json").exists(), printed
    assert_equal_runs(local["fedsdr"], tmp_path / "fedsdr")


def masked_fedsdr(runtime: str, *settings: str) -> RunConfig:
    """A round of three clients, under the masks of secure aggregation unless told otherwise."""
    own = ("scenario.clients=3", "rounds=1", "evaluate_every=1", "privacy.mechanism=secagg", *settings)
    return config_for("fedsdr", runtime, *own)


@pytest.mark.parity
@pytest.mark.parametrize("runtime", ["simulation", "deployment"])
def test_masked_fedsdr_gives_the_unmasked_arrays_to_half_a_step(runtime: str, tmp_path: Path) -> None:
    """And the counts for `split`, which are masked, too, are those of a local run."""
    made = config_for("references", "local", "scenario.clients=3", "rounds=1", "evaluate_every=1")
    LocalRuntime(made).run(RunFolder.create(tmp_path / "made", made))
    references = f"references='{tmp_path / 'made' / FILE}'"
    for name, settings in (("plain", ("privacy.mechanism=none",)), ("local", ())):
        here = masked_fedsdr("local", references, *settings)
        LocalRuntime(here).run(RunFolder.create(tmp_path / name, here))
    run, path = masked_fedsdr(runtime, references), tmp_path / "masked"
    if runtime == "simulation":
        list(Simulation(tmp_path).execute(run, path))
    else:
        with deployment(tmp_path / "sites", clients=3) as sites:
            list(sites.connection.execute(run, path))
    for file in sorted((tmp_path / "plain" / "models").iterdir()):
        left, right = load_file(file), load_file(path / "models" / file.name)
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=0, atol=8 / STEPS / 2 + 1e-6)
    counts = [
        [row for row in RunFolder(own).rows() if row["kind"] == "split"] for own in (tmp_path / "local", path)
    ]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 1


def spying(spy: Path) -> Callable[[Path], Path]:
    """Make the app that is sent, whose client half leaves a file where it is run."""

    def make(folder: Path) -> Path:
        app = make_app(folder)
        code = app / "perennial" / "client" / "app.py"
        here = "    from perennial.client.node.answer"
        assert here in code.read_text()
        code.write_text(code.read_text().replace(here, f"    open({str(spy)!r}, 'w')\n{here}"))
        return app

    return make


def test_sites_run_the_code_that_is_installed_there_whatever_the_server_sends(
    local: dict[str, Path], site: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "make_app", spying(tmp_path / "spy"))
    finish(site.connection, config_for("fedavg", "deployment"), tmp_path / "fedavg")
    assert_equal_runs(local["fedavg"], tmp_path / "fedavg")
    assert not (tmp_path / "spy").exists()


def watched(connection: Connection, title: str) -> str:
    """What `perennial watch` draws of a SuperLink, once this is in it."""
    console, end = Console(width=150), time.monotonic() + 60
    with watched_superlink(connection, []) as look:
        while True:
            with console.capture() as drawn:
                console.print(look()[0])
            if title in drawn.get() and "round 0 of" not in drawn.get():
                return drawn.get()
            assert time.monotonic() < end, drawn.get()
            time.sleep(0.1)


@pytest.mark.parity
def test_a_run_from_another_desk_comes_back_on_the_connection_and_can_be_stopped_and_taken_up_again(
    long: Path, site: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The desk sees nothing of the server's disk, and the server nothing of the desk's."""
    monkeypatch.setattr(submission, "_marker", lambda out: tmp_path / "not on this machine")
    config, desk = config_for("ditto", "deployment", *LONG), tmp_path / "desk" / "run"
    run = site.connection.submit(config, desk)
    with submission.Receiver(site.connection.control(), run, desk, config.toml()) as receiver:
        rows = site.connection.follow(run, desk, receiver)
        assert next(rows)["round"] == 1
        assert run in [one.run for one in control.runs(site.connection)]
        assert "running" in watched(site.connection, "Ditto on colored-digits, seed 0: round ")
        control.stop(site.connection, run)
        with pytest.raises(RunStopped, match=f"run {run} was stopped; `perennial resume"):
            list(rows)
    there = submission.place_of(desk)
    assert there.parent != desk.parent
    assert RunFolder(there).checkpoints()
    assert not RunFolder(desk).checkpoints()
    assert (desk / "config.toml").read_text() == (there / "config.toml").read_text()
    list(site.connection.execute(config, desk, resume=True))
    assert_equal_runs(long, desk)
    assert (desk / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="the SuperLink says: Run is already finished"):
        control.stop(site.connection, run)
    shutil.rmtree(there)


@pytest.mark.parity
def test_sites_that_run_the_code_that_is_sent_equal_local(
    local: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own SuperNodes, as after `perennial join --code shipped`."""
    monkeypatch.setattr(submission, "make_app", spying(tmp_path / "spy"))
    with deployment(tmp_path / "deployment", clients=2, supernode=STOCK) as site:
        finish(site.connection, config_for("ditto", "deployment"), tmp_path / "ditto")
        assert_equal_runs(local["ditto"], tmp_path / "ditto")
    assert (tmp_path / "spy").exists()


def test_killed_deployment_resumes_to_the_same_arrays(long: Path, site: Deployment, tmp_path: Path) -> None:
    """Everything dies with -9 after the first checkpoint and is started again; a resume does the rest."""
    config, path = config_for("ditto", "deployment", *LONG), tmp_path / "killed"
    run = site.connection.submit(config, path)
    for row in site.connection.follow(run, path):
        if row["kind"] == "round":
            break
    while not RunFolder(path).checkpoints():
        time.sleep(0.05)
    for name in list(site.processes):
        site.kill(name)
    assert not (path / "summary.json").exists()
    site.start_all()
    list(site.connection.execute(config, path, resume=True))
    assert_equal_runs(long, path)


@pytest.fixture(scope="module", params=("simulation", "deployment"))
def elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """Another runtime than the local one, with four clients, whose data of their own are in PERENNIAL_DATA."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERENNIAL_DATA", str(folder / "tables"))
        if request.param == "simulation":
            yield request.param, Simulation(folder)
        else:
            with deployment(folder, clients=4) as site:
                yield request.param, site.connection


@pytest.mark.parity
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_equals_local(method: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    runtime, connection = elsewhere
    size = ["scenario.clients=4", "scenario.train_per_class=20", "scenario.test_per_class=5"]
    config = config_for(method, "local", *size)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    finish(connection, config_for(method, runtime, *size), tmp_path / runtime)
    assert_equal_runs(tmp_path / "local", tmp_path / runtime)


@pytest.mark.parity
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_habits_of_training_equal_local(method: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    """A schedule, a kept optimizer, augmentation, mixed samples and bfloat16, all together."""
    runtime, connection = elsewhere
    habits = ["schedule=cosine", "optimizer=adamw", "optimizer.keep=true", "mix=MixUp(0.2)", "precision=bf16"]
    habits += ["scenario.clients=4", 'augment=["RandomCrop(8, padding=1)", "RandomErasing()", "Noise(0.1)"]']
    config = config_for(method, "local", *habits)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    finish(connection, config_for(method, runtime, *habits), tmp_path / runtime)
    assert_equal_runs(tmp_path / "local", tmp_path / runtime)


@pytest.mark.parity
@pytest.mark.parametrize("method", ["fedsdr", "perinvfl", "fediir", "ditto"])
def test_a_model_of_tokens_with_lora_equals_local(method: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    """Of sentences of different lengths; what is frozen is each process's own, and compared at enrolment."""
    runtime, connection = elsewhere
    settings = [
        "evaluate_every=2",
        "local_steps=2",
        "batch_size=8",
        *("scenario.clients=4", "scenario.train_samples=30", "scenario.test_samples=10"),
        *("model.name=text-transformer", "model.width=8", "model.heads=2"),
        'model.lora={rank = 2, layers = "query|value"}',
    ]
    local, there = (
        load_config(
            options={"method": method, "scenario": "planted-word", "rounds": 2, "runtime": name}, settings=settings
        )
        for name in ("local", runtime)
    )
    LocalRuntime(local).run(RunFolder.create(tmp_path / "local", local))
    finish(connection, there, tmp_path / runtime)
    assert_equal_runs(tmp_path / "local", tmp_path / runtime)


@pytest.mark.parity
@pytest.mark.parametrize("data", ["colored-digits", "own"])
def test_split_counts_and_chooses_as_locally(data: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    """References, counts of two trials, and the choice between them."""
    runtime, connection = elsewhere
    size = ["scenario.clients=4"] if data == "colored-digits" else []
    tables = Path(os.environ["PERENNIAL_DATA"])
    scenario = own_tables(tables) if data == "own" else "colored-digits"

    def finished(method: str, here: str, path: Path, *settings: str) -> Outcome:
        own = {"runtime": here, "data_root": str(tables) if data == "own" else None}
        options = {"method": method, "scenario": scenario, "rounds": 2, **own}
        config = load_config(options=options, settings=["evaluate_every=2", *size, *settings])
        if here == "local":
            LocalRuntime(config).run(RunFolder.create(path, config))
        else:
            finish(connection, config, path)
        return Outcome(config, path, Summary.model_validate(RunFolder(path).summary()))

    verdicts, counts, models = [], [], []
    for here in ("local", runtime):
        made = finished("references", here, tmp_path / here / "references").path / FILE
        models.append(load_records(made))
        trials = [
            finished("fedsdr", here, tmp_path / here / str(removal), f"references='{made}'", f"removal={removal}")
            for removal in (0.0, 4.0)
        ]
        verdicts.append(choose(trials, Select.by_split))
        counts.append([last_counts(outcome) or {} for outcome in trials])
        # Its own references, to the last bit, which another runtime may round otherwise.
        named = {count.pop("references") for count in counts[-1]}
        assert named == {sha256(made.read_bytes()).hexdigest()[:12]}
    for name, tensors in models[0].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(models[1][name][key], tensor, rtol=0, atol=1e-6)
    assert counts[0] == counts[1]
    assert all(counts[0])
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].trial is not None


@pytest.mark.parity
@pytest.mark.parametrize("task", COLUMNS)
def test_each_task_equals_local(task: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    """Of own tables, with a personal model that sites keep: sums, measures and models."""
    runtime, connection = elsewhere
    tables = Path(os.environ["PERENNIAL_DATA"])
    hospitals(tables)
    asked = question(target=task, label_column=COLUMNS[task], drop=dropped(task))
    options = {"method": "ditto", "scenario": describe(tables, asked=asked).scenario, "rounds": 2}
    local, there = (
        load_config(options={**options, "runtime": name, "data_root": str(tables)}, settings=["evaluate_every=1"])
        for name in ("local", runtime)
    )
    LocalRuntime(local).run(RunFolder.create(tmp_path / "local", local))
    finish(connection, there, tmp_path / "there")
    found = [RunFolder(tmp_path / name) for name in ("local", "there")]
    models = [load_file(folder.path / "models" / "global.safetensors") for folder in found]
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=0, atol=1e-6)
    rows = [
        {
            tuple(row[name] for name in ("round", "client", "model", "split")): row
            for row in evaluations(folder.path)
        }
        for folder in found
    ]
    assert rows[0].keys() == rows[1].keys()
    for key, row in rows[0].items():
        for column in ("count", *local.scenario.task.columns):
            np.testing.assert_allclose(row[column], rows[1][key][column], rtol=1e-4, atol=1e-4)
