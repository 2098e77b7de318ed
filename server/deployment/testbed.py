"""A real deployment on this machine, for tests and benchmarks: a SuperLink and SuperNodes, over gRPC."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import tomli_w

from perennial.common.flower.processes import free_port, program
from perennial.server.deployment.submission import Connection, await_port

Command = list[str]
SUPERNODE = [sys.executable, "-P", "-m", "perennial.client.node.supernode"]


@dataclass
class Deployment:
    """Handles on the processes, to be killed and started again."""

    connection: Connection
    commands: dict[str, Command]
    folder: Path
    control_port: int
    fleet_port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start one of `superlink`, `supernode-0`, …"""
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                self.commands[name],
                env=self.connection.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_all(self) -> None:
        """Start the SuperLink, wait until it takes runs, then start the SuperNodes."""
        self.start("superlink")
        await_port(self.control_port, self.processes["superlink"], self.folder / "superlink.log")
        for name in self.commands:
            if name != "superlink":
                self.start(name)
                time.sleep(0.2)

    def kill(self, name: str) -> None:
        """Kill a process and all its children with -9."""
        process = self.processes.pop(name)
        os.killpg(process.pid, 9)
        process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)


def arrange(
    folder: Path, clients: int, supernode: Command = SUPERNODE, *, database: bool = False, **environment: str
) -> Deployment:
    """A SuperLink with `clients` SuperNodes below `folder`, not started yet; its `with` block ends what runs.

    With `database` a SuperLink that was killed goes on where it was; its SuperExec is a process of its own.
    """
    control, fleet, runtime = free_port(), free_port(), free_port()
    home = folder / "flower"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"deployment": {"address": f"127.0.0.1:{control}", "insecure": True}}})
    )
    connection = Connection("deployment", {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1", **environment})
    link = [program("flower-superlink"), "--insecure"]
    for api, port in (("control", control), ("fleet", fleet), ("serverappio", runtime)):
        link += [f"--{api}-api-address", f"127.0.0.1:{port}"]
    commands = {"superlink": link}
    if database:
        link += ["--isolation", "process", "--database", f"{folder}/state.db"]
        commands["superexec"] = [
            program("flower-superexec"), "--insecure", "--plugin-type", "serverapp",
            "--appio-api-address", f"127.0.0.1:{runtime}",
        ]  # fmt: skip
    for number in range(clients):
        node = f'partition-id={number} num-partitions={clients} state-dir="{folder}/site-{number}"'
        # Ours takes a free port itself; of Flower's own, two would take the same.
        own = () if supernode == SUPERNODE else ("--clientappio-api-address", f"127.0.0.1:{free_port()}")
        commands[f"supernode-{number}"] = [
            *supernode, *own, "--insecure", "--superlink", f"127.0.0.1:{fleet}", "--node-config", node,
        ]  # fmt: skip
    return Deployment(connection, commands, folder, control, fleet)


@contextmanager
def deployment(
    folder: Path, clients: int, supernode: Command = SUPERNODE, **environment: str
) -> Iterator[Deployment]:
    """A SuperLink with `clients` SuperNodes for the time of the block, everything below `folder`."""
    with arrange(folder, clients, supernode, database=False, **environment) as found:
        found.start_all()
        yield found
