"""A SuperNode and its resident executor: what `perennial join` keeps running.

    python -m perennial.client.node.supernode [options of flower-supernode]

Both are of this process's group, and the executor ends with the SuperNode. It talks to it at a free port of this
machine, with a secret that only this user can read. What this process changes inside Flower is in
`common/flower/patches.py`.
"""

import fcntl
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from logging import ERROR, WARNING
from pathlib import Path
from threading import Thread
from typing import IO, NoReturn

from perennial.client.node.settings import SETTINGS, settings_in
from perennial.common.flower.names import log
from perennial.common.flower.patches import flower_supernode, parse_config_args, patch_supernode
from perennial.common.flower.processes import free_port, must_have_grpc
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import PRIVATE, private_folder, write_text

EXECUTOR = [sys.executable, "-P", "-m", "perennial.client.node.executor"]
LOCK = "lock"
"""A file beside the executors' folders of a state folder."""
LONGEST_REST, LONG_LIFE = 30.0, 60.0
"""Seconds before an executor is started again, at most; and those after which it has not just failed to start."""


def folder_of(settings: dict[str, str]) -> Path:
    """The executor's folder: one for each site that has kept its state in the same place, and each SuperLink."""
    who = [settings.get(key, "") for key in ("superlink", "name", "partition-id")]
    name = hashlib.sha256(json.dumps(who).encode()).hexdigest()[:12]
    return private_folder(Path(settings["state-dir"]) / ".executor" / name)


def alone(state: Path) -> IO[str]:
    """A lock on a state folder, held while it is open. Ends the program where another SuperNode has it.

    Two of one site would change each other's secret, and the executor that is started next could take no task. Two
    sites would write into one log, and count each other's files for `max_state`.
    """
    lock = os.fdopen(os.open(state / ".executor" / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(
            f"process {lock.read()} has joined with the state folder {state} already; give each site a --state of "
            "its own"
        )
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def keep_executor(address: str, folder: str) -> NoReturn:
    """Start an executor again whenever it ends."""
    rest = 0.0
    while True:
        begun = time.monotonic()
        command = [*EXECUTOR, str(os.getpid()), address, folder]
        try:
            code = subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
            log(WARNING, "perennial: the executor ended with exit code %d; it is started again", code)
        except OSError as error:  # there is no memory or no process left, for now
            log(WARNING, "perennial: the executor cannot be started: %s; trying again", error.strerror)
        rest = 0.0 if time.monotonic() - begun > LONG_LIFE else min(2 * rest + 1, LONGEST_REST)
        time.sleep(rest)


def main() -> None:
    """Run `flower-supernode`, changed as above, and its executor."""
    try:
        must_have_grpc()
    except UserError as error:
        sys.exit(str(error))
    from perennial.common.flower.executor import SECRET  # which needs it

    options = sys.argv[1:]
    config = options[options.index("--node-config") + 1] if "--node-config" in options else ""
    if "--superlink" in options:  # for the executor, too
        os.environ[SETTINGS["superlink"]] = options[options.index("--superlink") + 1]
    settings = settings_in(parse_config_args([config] if config else None))
    folder = folder_of(settings)
    lock = alone(folder.parents[1])
    secret = folder / SECRET
    write_text(secret, secrets.token_hex(32), PRIVATE)
    address = f"127.0.0.1:{free_port()}"
    own = ["--isolation", "process", "--clientappio-api-address", address]
    sys.argv = ["flower-supernode", *options, *own, "--superexec-auth-secret-file", str(secret)]
    patch_supernode()
    Thread(target=keep_executor, args=(address, str(folder)), daemon=True).start()
    flower_supernode()
    lock.close()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        log(ERROR, "perennial: %s: %s", error.filename, error.strerror)
        sys.exit(1)
