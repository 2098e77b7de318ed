"""The warm launcher: what it takes from inside Flower, and how it starts what Flower starts."""

import inspect
import json
import os
import random
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import flwr
import pytest
from flwr.cli.build import build_fab_from_files
from flwr.cli.install import validate_and_install
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    pull_and_inflate_object_from_tree,
    pull_objects,
)
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.superlink.grid import grpc_grid
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp

from perennial.client.node import launcher, relay

ROOT = Path(__file__).parents[3]


def test_the_pin_has_not_moved() -> None:
    """What the launcher replaces is used in Flower as it was when the launcher was written."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"flwr[simulation]=={launcher.FLOWER}" in project["dependencies"]
    assert flwr.__version__ == launcher.package_version == launcher.FLOWER

    def uses(module: object, name: str) -> list[str]:
        source = inspect.getsource(module)  # type: ignore[arg-type]
        return [
            line.strip() for line in source.splitlines() if f"{name}." in line and not line.strip().startswith("#")
        ]

    sleeps = ["time.sleep(3)", "time.sleep(0.5)", "time.sleep(0.5)"]
    assert [line for line in uses(start_client_internal, "time") if "total time." not in line] == sleeps
    assert uses(start_client_internal, "subprocess") == ["subprocess.Popen(command)"]
    assert uses(run_superexec, "time") == ["time.sleep(1)"]
    assert uses(subprocess_executor, "subprocess") == [
        "subprocess.Popen(  # pylint: disable=consider-using-with",
        "stdout=subprocess.DEVNULL,",
        "stderr=subprocess.DEVNULL,",
        "subprocess.Popen(args)  # pylint: disable=consider-using-with",
    ]
    for module in (start_client_internal, run_superexec, subprocess_executor):
        imported = inspect.getsource(module)
        assert ("\nimport time\n" in imported) == (module is not subprocess_executor)
    assert 'command = ["flower-superexec"]' in inspect.getsource(start_client_internal)
    assert "    install_from_fab(fab.content, skip_prompt=True)\n" in inspect.getsource(run_clientapp)
    pulls = {start_client_internal: pull_objects, grpc_grid: pull_objects}
    for module, pull in {**pulls, run_clientapp: pull_and_inflate_object_from_tree}.items():
        assert vars(module)[pull.__name__] is pull
        assert inspect.signature(pull).parameters["initial_backoff"].default == 1
    installed = "install_path.exists():\n        if skip_prompt:\n            return install_path"
    assert installed in inspect.getsource(validate_and_install)


@pytest.mark.parametrize("command", [[], ["flower-superlink"], ["--insecure"]])
def test_it_starts_two_programs_only(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["perennial-launcher", *command])
    with pytest.raises(SystemExit, match="write flower-supernode or flower-superexec behind it"):
        launcher.main()


def test_it_refuses_another_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["perennial-launcher", "/bin/flower-supernode", "--insecure"])
    monkeypatch.setattr(launcher, "package_version", "1.39.0")
    with pytest.raises(SystemExit, match=r"made for Flower 1.34.0, not 1.39.0; start flower-supernode itself"):
        launcher.main()


def test_the_supernode_sleeps_less_and_starts_a_warm_superexec(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, slept, started = list[list[str]](), list[float](), list[list[str]]()

    def supernode() -> None:
        seen.append(sys.argv)
        vars(start_client_internal)["time"].sleep(3)
        vars(start_client_internal)["time"].sleep(0.01)
        vars(start_client_internal)["subprocess"].Popen(["flower-superexec", "--insecure"])

    for name in ("time", "subprocess", "pull_objects"):  # to be put back
        monkeypatch.setattr(start_client_internal, name, vars(start_client_internal)[name])
    monkeypatch.setattr(sys, "argv", ["perennial-launcher", "/bin/flower-supernode", "--insecure"])
    monkeypatch.setattr(launcher, "flower_supernode", supernode)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(subprocess, "Popen", started.append)
    launcher.main()
    assert seen == [["/bin/flower-supernode", "--insecure"]]
    assert slept == [0.1, 0.01]
    assert vars(start_client_internal)["pull_objects"].keywords == {"initial_backoff": 0.1}
    assert started == [[sys.executable, "-P", launcher.__file__, "flower-superexec", "--insecure"]]


def test_the_serverapp_waits_less_for_late_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_grid, "pull_objects", grpc_grid.pull_objects)  # to be put back
    launcher.hasten_serverapp()
    tries = []

    def pull(name: str) -> bytes:
        tries.append(name)
        if len(tries) < 3:
            raise ObjectUnavailableError(name)
        return b"here"

    waits = list[float]()
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds=None: waits.append(seconds))
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)
    assert grpc_grid.pull_objects(["a"], pull) == {"a": b"here"}
    assert [wait for wait in waits if wait] == [0.1, 0.2]


def test_an_app_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    files = {
        "pyproject.toml": b'[project]\nname = "a"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n[tool.flwr.app]\n'
        b'publisher = "me"\n[tool.flwr.app.components]\nserverapp = "a:app"\nclientapp = "a:app"\n',
        "a.py": b"app = 1\n",
    }
    fab, _ = build_fab_from_files(files)
    launcher.install_once(fab, skip_prompt=True)
    (place,) = (tmp_path / "apps").iterdir()
    assert (place / "a.py").read_text() == "app = 1\n"
    monkeypatch.setattr(launcher, "install_from_fab", None)
    launcher.install_once(fab, skip_prompt=True)


# A SuperExec whose ClientApps write down what they are, and which is asked what the test wants.
SUPEREXEC = """
import json, os, subprocess, sys, threading, time
from pathlib import Path
from perennial.client.node import launcher
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supercore.constant import TaskType

folder, wish = Path(sys.argv[1]), sys.argv[2]

def clientapp():
    child = subprocess.run(["true"])  # as where the worker is started
    facts = {"argv": sys.argv, "parent": os.getppid(), "threads": threading.active_count()}
    facts |= {"code": child.returncode, "client": "client" in sys.modules, "torch": "torch" in sys.modules}
    new = folder / f"new-{os.getpid()}"
    new.write_text(json.dumps(facts))
    new.rename(folder / str(os.getpid()))
    raise SystemExit(1)

def superexec():
    for token in ("one", "two"):
        spec = {"task_type": TaskType.CLIENT_APP, "runtime_api_address": "127.0.0.1:9", "token": token}
        spec |= {"insecure": True, "root_certificates_path": None, "runtime_dependency_install": False}
        spec |= {"parent_pid": os.getpid(), "suppress_output": False, "task_id": 1}
        SubprocessExecutor().launch(ExecutionSpec(**spec))
        if wish == "kill":
            while len(list(folder.glob("[0-9]*"))) < 1:
                time.sleep(0.01)
            server = json.loads(next(folder.glob("[0-9]*")).read_text())["parent"]
            os.kill(server, 9)
            os.waitpid(server, 0)
    time.sleep(600)

launcher.flwr_clientapp, launcher.flower_superexec = clientapp, superexec
sys.argv = ["perennial-launcher", "flower-superexec", "--plugin-type", "clientapp"]
launcher.main()
"""


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def superexec(folder: Path, wish: str, path: str = "") -> "subprocess.Popen[bytes]":
    (folder / "script.py").write_text(SUPEREXEC)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen([sys.executable, "-P", str(folder / "script.py"), str(folder), wish], env=environment)


def test_every_clientapp_is_a_fresh_fork_of_one_warm_process(tmp_path: Path) -> None:
    process = superexec(tmp_path, "fork")
    try:
        until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2)
        apps = sorted(
            (json.loads(file.read_text()) for file in tmp_path.glob("[0-9]*")), key=lambda app: app["argv"]
        )
        server = apps[0]["parent"]
        for token, app in zip(("one", "two"), apps, strict=True):
            command = [
                "flwr-clientapp",
                "--clientappio-api-address",
                "127.0.0.1:9",
                "--token",
                token,
                "--insecure",
            ]
            assert app == {
                "argv": [*command, "--parent-pid", str(process.pid)],
                "parent": server,  # and so is the SuperExec's end the worker's
                "threads": 1,
                "code": 0,
                "client": False,
                "torch": False,
            }
        assert server != process.pid
        for file in tmp_path.glob("[0-9]*"):  # buried by the kernel
            until(lambda file=file: not Path(f"/proc/{file.name}").exists())
        alive = relay.identity(server)
        assert alive
    finally:
        process.kill()
        process.wait()
    until(lambda: not relay.lives(alive))


def test_without_the_warm_process_a_clientapp_starts_as_ever(tmp_path: Path) -> None:
    stock = tmp_path / "bin" / "flwr-clientapp"
    stock.parent.mkdir()
    stock.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/stock\n')
    stock.chmod(0o755)
    process = superexec(tmp_path, "kill", str(stock.parent))
    try:
        until(lambda: (tmp_path / "stock").exists() and "two" in (tmp_path / "stock").read_text())
        assert len(list(tmp_path.glob("[0-9]*"))) == 1
    finally:
        process.kill()
        process.wait()
