"""How the command line gets to a SuperLink, and what it says when it does not."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.common.serde import run_to_proto
from flwr.proto.control_pb2 import ListNodesResponse, ListRunsResponse
from flwr.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import TaskType
from flwr.supercore.run import Run
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from grpc_listener import listening
from typer.testing import CliRunner, Result

from perennial.common.config import load_config
from perennial.common.flower.processes import QUIET, free_port, program
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.deployment import control
from perennial.server.deployment.certs import make
from perennial.server.deployment.submission import Connection, await_port, connected


def call(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environment)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder / "ours", 2, [], days=1)
    make(folder / "other", 0, [], days=1)
    return folder


def home(environment: dict[str, str]) -> Path:
    return Path(environment["FLWR_HOME"])


def test_flower_is_told_by_a_home_of_its_own(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port, connected(f"127.0.0.1:{port}") as connection:
        settings = tomllib.loads((home(connection.environment) / "config.toml").read_text())
        assert settings["superlink"][connection.name] == {"address": f"127.0.0.1:{port}", "insecure": True}
    assert not home(connection.environment).exists()

    monkeypatch.chdir(certs)
    with listening(certs / "ours") as port, connected(f"localhost:{port}", Path("ours/ca.crt")) as connection:
        settings = tomllib.loads((home(connection.environment) / "config.toml").read_text())
        protection = {"root-certificates": str(certs / "ours" / "ca.crt")}
        assert settings["superlink"][connection.name] == {"address": f"localhost:{port}", **protection}


def test_a_name_is_looked_up_by_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLWR_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = call("run", "--runtime", "deployment", "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"perennial: --superlink 'deployment' is no name in Flower's {tmp_path}/.flwr/config.toml; "
        "say where the SuperLink is: --superlink HOST:PORT"
    )
    assert not list(tmp_path.iterdir())  # asked itself, Flower would have made its folder

    (tmp_path / ".flwr").mkdir()
    (tmp_path / ".flwr" / "config.toml").write_text('[superlink.mine]\naddress = "127.0.0.1:1"\ninsecure = true\n')
    with connected("mine") as connection:
        assert connection.name == "mine"
        assert connection.environment.get("FLWR_HOME") is None
    with pytest.raises(UserError, match=r"'mine' is but a name"), connected("mine", Path("ca.crt")):
        pass


def test_a_name_without_an_address_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    text = '[superlink]\ndefault = "mine"\n[superlink.bare]\ninsecure = true\n[superlink.odd]\naddress = 1\n'
    for name in ("default", "bare", "odd"):
        file.write_text(text)
        result = call("status", "--superlink", name, FLWR_HOME=str(tmp_path))
        assert result.exit_code == 2
        assert result.stderr == (
            f"perennial: --superlink '{name}' names no SuperLink in Flower's {file}: there is no "
            f'[superlink.{name}] with address = "HOST:PORT"; take a name that has one, or say --superlink '
            "HOST:PORT\n"
        )
    file.write_text('superlink = "mine"\n')
    result = call("status", "--superlink", "mine", FLWR_HOME=str(tmp_path))
    assert (result.exit_code, "'mine' is no name in Flower's" in result.stderr) == (2, True)


def test_no_run_folder_where_there_is_no_connection(certs: Path, tmp_path: Path) -> None:
    ours, other = (str(certs / name / "ca.crt") for name in ("ours", "other"))
    with listening(certs / "ours") as tls, listening() as plain:
        attempts = [
            (["--superlink", "127.0.0.1:1"], "cannot be reached"),
            (["--superlink", f"127.0.0.1:{tls}", "--ca", other], "does not vouch for"),
            (["--superlink", f"127.0.0.1:{tls}"], "--ca"),
            (["--superlink", f"127.0.0.1:{plain}", "--ca", ours], "does not speak TLS"),
            (["--superlink", "server.example:9093"], "another machine"),
            (["--superlink", "server.example:9093", "--ca", ours, "--insecure"], "leave out one"),
            (["--superlink", "server:x"], "HOST:PORT"),
        ]
        for arguments, word in attempts:
            result = call("run", "--runtime", "deployment", "--out", str(tmp_path / "run"), *arguments)
            assert result.exit_code == 2
            assert sum(line.startswith("perennial: ") for line in result.stderr.splitlines()) == 1
            assert word in result.stderr
            assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_whose_command_is_interrupted_keeps_its_place_and_says_how_it_is_ended(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ServerApp that has not begun finds the marker, and so writes into `--out`."""
    out, connection = tmp_path / "run", Connection("here", {}, " --superlink here:9093")
    submitted: dict[str, str] = {}

    def flwr(*arguments: str) -> "subprocess.CompletedProcess[str]":
        settings = Path(arguments[arguments.index("--run-config") + 1])
        submitted.update(tomllib.loads(settings.read_text()))
        return subprocess.CompletedProcess(arguments, 0, '{"success": true, "run-id": 12}', "")

    def follow(*_: object) -> Iterator[dict[str, Any]]:
        if begun:
            out.mkdir()
        raise KeyboardInterrupt
        yield {}

    monkeypatch.setattr(connection, "_call", flwr)
    monkeypatch.setattr(connection, "control", lambda: grpc.insecure_channel("127.0.0.1:1"))
    monkeypatch.setattr(connection, "follow", follow)
    with pytest.raises(KeyboardInterrupt) as stop:
        list(connection.execute(load_config(), out))
    where = f", in {out}" if begun else ""
    assert str(stop.value) == (
        f"run 12 goes on at the SuperLink{where}; `perennial stop 12 --superlink here:9093` ends it"
    )
    marker = Path(submitted["desk"])
    assert marker.exists() != begun

    monkeypatch.setattr(connection, "follow", lambda *_: iter([]))
    assert list(connection.execute(load_config(), out)) == []
    assert not marker.exists()


def test_the_environment_says_where_the_superlink_is(certs: Path) -> None:
    key = str(certs / "ours" / "sites" / "site-1.pub")
    settings = {"PERENNIAL_SUPERLINK": "server.example:9093", "PERENNIAL_CA": "nowhere.crt"}
    assert "nowhere.crt: No such file" in call("register", key, **settings).stderr
    settings = {"PERENNIAL_SUPERLINK": "nowhere.invalid:9093", "PERENNIAL_INSECURE": "1"}
    assert "nowhere.invalid:9093 cannot be reached" in call("register", key, **settings).stderr


@pytest.fixture
def superlink(certs: Path, tmp_path: Path) -> Iterator[str]:
    """The Control API of a real SuperLink that authenticates its nodes."""
    control, folder = free_port(), certs / "ours"
    command = [program("flower-superlink"), "--enable-supernode-auth", "--database", str(tmp_path / "state.db")]
    for api, port in (("control", control), ("fleet", free_port()), ("serverappio", free_port())):
        command += [f"--{api}-api-address", f"127.0.0.1:{port}"]
    for flag, name in (("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key")):
        command += [f"--ssl-{flag}", str(folder / name)]
    with (tmp_path / "superlink.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**QUIET, "PATH": str(Path(sys.executable).parent)}, stdout=log, stderr=log
        )
        try:
            await_port(control, process, tmp_path / "superlink.log")
            yield f"127.0.0.1:{control}"
        finally:
            process.kill()
            process.wait()


@pytest.mark.runtimes
def test_keys_are_registered_once(superlink: str, certs: Path) -> None:
    sites, reach = certs / "ours" / "sites", ["--superlink", superlink, "--ca", str(certs / "ours" / "ca.crt")]
    first = call("register", str(sites / "site-1.pub"), *reach)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("site-1: node ")
    both = call("register", str(sites), *reach)
    assert both.exit_code == 0, both.output
    assert both.stdout.splitlines()[0] == "site-1: registered already"
    assert both.stdout.splitlines()[1].startswith("site-2: node ")
    for name in ("ours/sites/site-1", "ours/sites/nobody.pub", "other/sites"):
        refused = call("register", str(certs / name), *reach)
        assert refused.exit_code == 2
        assert len(refused.stderr.splitlines()) == 1
        assert name in refused.stderr


@pytest.mark.slow
@pytest.mark.runtimes
def test_a_site_that_is_shut_out_stays_out(superlink: str, certs: Path) -> None:
    first, second = (str(certs / "ours" / "sites" / f"site-{i}.pub") for i in (1, 2))
    reach = ["--superlink", superlink, "--ca", str(certs / "ours" / "ca.crt")]
    node = call("register", first, *reach).stdout.split()[-1]
    refused = call("unregister", first, second, *reach)
    assert refused.exit_code == 2
    assert f"{second} is not registered, so nobody was shut out" in refused.stderr
    gone = call("unregister", first, *reach)
    assert gone.exit_code == 0, gone.output
    assert gone.stdout == f"site-1: shut out, was node {node}\n"
    assert json.loads(call("status", "--json", *reach).stdout)["sites"] == []
    again = call("register", first, *reach)
    assert again.exit_code == 2
    assert f"{first} was shut out, and a SuperLink never takes a key again" in again.stderr


@pytest.mark.slow
@pytest.mark.runtimes
def test_the_status_of_a_superlink_and_runs_that_cannot_be_stopped(superlink: str, certs: Path) -> None:
    reach = ["--superlink", superlink, "--ca", str(certs / "ours" / "ca.crt")]
    told = call("status", *reach)
    assert told.stdout.split("\n")[:2] == ["no runs", "no sites"]
    assert f"perennial: the certificate of the SuperLink at {superlink} ends on " in told.stderr  # after a day
    node = call("register", str(certs / "ours" / "sites" / "site-1.pub"), *reach).stdout.split()[-1]
    found = json.loads(call("status", "--json", *reach).stdout)
    site = {"site": "", "node": node, "status": "registered", "since": ""}
    assert found == {"runs": [], "sites": [site]}
    assert node in call("status", *reach, COLUMNS="60").stdout, "half an id is of no use"
    found = json.loads(call("status", str(certs / "ours" / "sites"), "--json", *reach).stdout)
    assert found["sites"] == [{**site, "site": "site-1"}]
    for run, sentence in (
        ("7", "the SuperLink says: Run ID not found."),
        ("x", "'x' is no run; `perennial status`"),
    ):
        refused = call("stop", run, *reach)
        assert refused.exit_code == 2
        assert sentence in refused.stderr


def test_a_run_folder_that_cannot_be_made_is_named_and_no_file_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "runs" / "first"
    with listening() as port:
        reach = ["--runtime", "deployment", "--superlink", f"127.0.0.1:{port}", "--out", str(out)]
        result = call("run", "--method", "fedavg", *reach)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"perennial: {out} cannot be made: Not a directory; give another --out"
    )


def test_a_port_that_is_not_the_control_api_is_told_apart(certs: Path) -> None:
    """A SuperLink has three ports, and all of them speak gRPC."""
    server = grpc.server(ThreadPoolExecutor(1))
    reach = ["--superlink", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"]
    key = str(certs / "ours" / "sites" / "site-1.pub")
    server.start()
    try:
        for command in (["status"], ["stop", "7"], ["register", key], ["unregister", key]):
            refused = call(*command, *reach)
            assert refused.exit_code == 2
            assert "no Control API answers at this port; the SuperLink has it at 9093 unless" in refused.stderr
    finally:
        server.stop(0)


class Hostile(ControlServicer):  # type: ignore[misc]
    """A run whose submitter has written a terminal's commands, and a node with such a status."""

    def ListRuns(self, *_: object) -> ListRunsResponse:  # noqa: N802
        run = Run.create_empty(7)
        config = {"method": {"name": f"fed{EVIL}avg"}, "scenario": {"name": "x"}, "rounds": 1, "seed": 0}
        run.override_config = {"config": json.dumps(config)}
        return ListRunsResponse(run_dict={7: run_to_proto(run)})

    def ListNodes(self, *_: object) -> ListNodesResponse:  # noqa: N802
        return ListNodesResponse(nodes_info=[NodeInfo(node_id=5, status=f"on{EVIL}line")])


EVIL = "\x1b[2J\x1b]0;owned\x07\x9b1m\r\n"


def test_the_status_has_no_commands_of_a_terminal() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    add_ControlServicer_to_server(Hostile(), server)
    reach = ("--superlink", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        told, as_json = call("status", *reach), call("status", "--json", *reach)
    finally:
        server.stop(0)
    assert (told.exit_code, as_json.exit_code) == (0, 0), told.output
    for text in (told.output, as_json.output):
        assert text.replace("\n", "").isprintable()
        assert "fed 1m  avg on x, 1 rounds, seed 0" in text
        assert "on 1m  line" in text


def test_of_a_survey_the_status_says_that_it_is_one() -> None:
    run = Run.create_empty(7)
    run.fab_id, run.fab_version = "perennial/perennial", "0.2.0"
    assert control._what(run) == "perennial/perennial 0.2.0"
    run.override_config = {"survey": '{"question": {}}'}
    assert control._what(run) == "survey"


def test_flower_puts_the_token_of_an_app_on_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/deployment.md warns of it; when this fails, the warning can go."""
    started = list[list[str]]()
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    for kind in (TaskType.SERVER_APP, TaskType.CLIENT_APP):
        spec = ExecutionSpec(kind, "127.0.0.1:9091", "s3cret", True, None, False, None, False, 1)
        SubprocessExecutor().launch(spec)
    assert [command[command.index("--token") + 1] for command in started] == ["s3cret"] * 2
