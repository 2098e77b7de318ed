"""A federation of real processes to which faults are done, what its operator sees, and what must come of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from perennial.common.config import RunConfig, load_config
from perennial.server.deployment.testbed import SUPERNODE, Deployment, arrange
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import SpoilingGrid

MISCHIEF = Path(__file__).with_name("misbehaving_site.py")


@contextmanager
def federation(folder: Path, clients: int) -> Iterator[Deployment]:
    """A SuperLink with a database, its SuperExec, and `clients` SuperNodes, all below `folder`, not started yet.

    What SuperNode i does wrong is in `mischief-i.json` (`misbehaving_site.py`). Whatever still runs is killed.
    """
    made = arrange(folder, clients, database=True)
    for number in range(clients):
        arguments = made.commands[f"supernode-{number}"][len(SUPERNODE) :]
        mischief = ["env", f"MISCHIEF={folder}/mischief-{number}.json", sys.executable, str(MISCHIEF)]
        made.commands[f"supernode-{number}"] = mischief + arguments
    with made:
        yield made


def plan(site: Deployment, number: int, **deeds: str) -> Path:
    """Tell a site what to do wrong; the path of its files but for their endings."""
    path = site.folder / f"mischief-{number}.json"
    path.write_text(json.dumps({key.replace("_", "-"): deed for key, deed in deeds.items()}))
    return path


@dataclass
class Command:
    """A `perennial` command that runs, and what it says."""

    process: subprocess.Popen[str]
    said: Path

    def until(self, holds: Callable[[], object]) -> None:
        """Wait for something to hold while the command runs."""
        while not holds():
            if self.process.poll() is not None:
                pytest.fail(f"ended too early: {self.said.read_text()}")
            time.sleep(0.1)

    def ends(self, code: int, within: float = 600.0) -> str:
        """What it has said when it has ended, which it must do with this exit code."""
        found = self.process.wait(timeout=within)
        text = self.said.read_text()
        assert found == code, text
        assert "Traceback" not in text
        return text


def perennial(site: Deployment, *arguments: str) -> Command:
    """Start a command as the operator of the federation."""
    said = site.folder / f"said-{time.monotonic_ns()}.txt"
    command = [sys.executable, "-c", "from perennial.server.cli.main import main; main()", *arguments]
    environment = {**site.connection.environment, "COLUMNS": "200"}
    with said.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True)
    return Command(process, said)


def start_run(site: Deployment, config: RunConfig, out: Path) -> Command:
    """`perennial run` of a configuration on the federation."""
    file = out.with_suffix(".toml")
    file.write_text(replace_runtime(config, "deployment").toml())
    return perennial(site, "run", "--config", str(file), "--out", str(out))


def config_for(clients: int, *settings: str, method: str = "fedavg", **options: object) -> RunConfig:
    """A run of a few short rounds."""
    size = [f"scenario.clients={clients}", "scenario.train_per_class=20", "scenario.test_per_class=5"]
    every = ["evaluate_every=100", "checkpoint_every=1", "wait=300"]
    return load_config(
        options={"method": method, "scenario": "colored-digits", **options}, settings=[*size, *every, *settings]
    )


def replace_runtime(config: RunConfig, runtime: str) -> RunConfig:
    """The same run on another runtime."""
    return config.model_copy(update={"runtime": runtime})


def until(holds: Callable[[], object], within: float = 400.0) -> None:
    """Wait for something to hold."""
    end = time.monotonic() + within
    while not holds():
        if time.monotonic() > end:
            pytest.fail("waited too long")
        time.sleep(0.1)


def rounds_of(out: Path) -> dict[int, dict[str, str]]:
    """Who was left out and why, by round, so far."""
    rows, _ = RunFolder(out).rows_after(0)
    return {row["round"]: row["left_out"] for row in rows if row["kind"] == "round"}


def without(config: RunConfig, left_out: dict[int, dict[str, str]], out: Path) -> Path:
    """The folder of a local run in which these clients' training was not used in these rounds."""
    here = LocalRuntime(replace_runtime(config, "local"))
    names = config.scenario.client_ids

    def withhold(request: Message, reply: Message) -> Message | None:
        asked = request.metadata
        absent = asked.message_type == "train" and names[asked.dst_node_id - 1] in left_out[int(asked.group_id)]
        return None if absent else reply

    here.grid = SpoilingGrid(here.grid, withhold)  # type: ignore[assignment]
    here.run(RunFolder.create(out, replace_runtime(config, "local")))
    return out


def assert_same_model(one: Path, other: Path) -> None:
    """The final arrays of two runs are the same."""
    left, right = (load_file(path / "models" / "global.safetensors") for path in (one, other))
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-6)


def children(pid: int, name: str) -> list[int]:
    """The process ids below `pid` whose command line has `name` in it."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            waiting += [int(child) for child in path.read_text().split()]
        if parent != pid and name in Path(f"/proc/{parent}/cmdline").read_text():
            found.append(parent)
    return found


def signal_group(site: Deployment, name: str, number: int) -> None:
    """Send a signal to a process and all its children."""
    os.killpg(site.processes[name].pid, number)
