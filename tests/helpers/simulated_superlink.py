"""A SuperLink in simulation mode, as Flower's own command `flwr run` starts one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perennial.common.flower.processes import free_port, program
from perennial.server.deployment.submission import Connection, _connection, await_port


@contextmanager
def superlink(home: Path) -> Iterator[Connection]:
    """One for the time of the block, with a Flower home of its own."""
    port = free_port()
    home.mkdir(parents=True, exist_ok=True)
    connection = _connection(home, {"address": f"127.0.0.1:{port}", "insecure": True})
    command = [program("flower-superlink"), "--insecure", "--simulation"]
    command += ["--control-api-address", f"127.0.0.1:{port}"]
    command += ["--serverappio-api-address", f"127.0.0.1:{free_port()}"]
    with (home / "superlink.log").open("w") as log:
        link = subprocess.Popen(command, env=connection.environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            await_port(port, link, home / "superlink.log")
            yield connection
        finally:
            link.terminate()
            try:
                link.wait(timeout=20)
            except subprocess.TimeoutExpired:
                link.kill()
