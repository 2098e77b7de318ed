"""The warm launcher: what it takes from inside Flower, and how it starts what Flower starts."""

import inspect
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import flwr
import pytest
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp

from client import launcher, relay

ROOT = Path(__file__).parents[2]


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
    assert "sys.argv" not in inspect.getsource(run_clientapp)  # what it is told comes through its own command line


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
        vars(start_client_internal)["time"].sleep(0.05)
        vars(start_client_internal)["subprocess"].Popen(["flower-superexec", "--insecure"])

    for name in ("time", "subprocess"):  # to be put back
        monkeypatch.setattr(start_client_internal, name, vars(start_client_internal)[name])
    monkeypatch.setattr(sys, "argv", ["perennial-launcher", "/bin/flower-supernode", "--insecure"])
    monkeypatch.setattr(launcher, "flower_supernode", supernode)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(subprocess, "Popen", started.append)
    launcher.main()
    assert seen == [["/bin/flower-supernode", "--insecure"]]
    assert slept == [0.1, 0.05]
    assert started == [[sys.executable, "-P", launcher.__file__, "flower-superexec", "--insecure"]]


# A SuperExec whose ClientApps write down what they are, and which is asked what the test wants.
SUPEREXEC = """
import json, os, subprocess, sys, threading, time
from pathlib import Path
from client import launcher
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supercore.constant import TaskType

folder, wish = Path(sys.argv[1]), sys.argv[2]

def clientapp():
    child = subprocess.run(["true"])  # as where the worker is started
    facts = {"argv": sys.argv, "parent": os.getppid(), "threads": threading.active_count()}
    facts |= {"code": child.returncode, "client": "client" in sys.modules, "torch": "torch" in sys.modules}
    (folder / "new").write_text(json.dumps(facts))
    (folder / "new").rename(folder / str(os.getpid()))
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
