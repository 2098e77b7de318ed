"""The warm launcher: a SuperNode that does not sleep long, and whose ClientApps start with Flower already loaded.

    perennial-launcher flower-supernode …
    perennial-launcher flower-superexec --plugin-type clientapp …

The command behind it is Flower's, with all its options. Where the SuperNode starts its SuperExec itself
(subprocess isolation), the first is enough; with process isolation, each of the two gets the prefix. `perennial
join` does so where PERENNIAL_LAUNCHER is "on", and a ServerApp, where it is, its own part (`hasten_serverapp`).
What changes:

- A ClientApp is forked from a process that has imported Flower and done nothing else: there is no channel, no
  thread and no CUDA before the fork. Every message still has a process of its own.
- The run's app is unpacked and checked once; Flower does so for every message.
- Flower sleeps 3 s between two looks for a message (SuperNode), 1 s for a task (SuperExec), 0.5 s for a reply, and
  1 s and more when a message is announced and its arrays are not there yet; here it begins with 0.1 s.

It is off unless asked for, since it leans on names inside Flower 1.34.0. They are all in this file, and
`tests/client/node/test_launcher.py` fails when they move.
"""

import gc
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from logging import WARNING
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from flwr.cli.install import install_from_fab
from flwr.common import log
from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION
from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.utils import get_flwr_home
from flwr.supercore.version import package_version
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode, flwr_clientapp
from flwr.supernode.runtime import run_clientapp

FLOWER = "1.34.0"
LOOK_EVERY = 0.1
LONGEST_ORDER = 1 << 16


def main() -> None:
    """Run one of the two programs, changed as above."""
    name = Path(sys.argv[1]).name if len(sys.argv) > 1 else ""
    if name not in ("flower-supernode", "flower-superexec"):
        sys.exit("perennial-launcher: write flower-supernode or flower-superexec behind it, with its options")
    if package_version != FLOWER:
        sys.exit(f"perennial-launcher is made for Flower {FLOWER}, not {package_version}; start {name} itself")
    sys.argv = sys.argv[1:]
    short = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LOOK_EVERY)))
    if name == "flower-supernode":
        starter = SimpleNamespace(Popen=start_superexec)
        vars(start_client_internal).update(time=short, subprocess=starter)
        hasten(start_client_internal, "pull_objects")
        flower_supernode()
    else:
        starter = SimpleNamespace(Popen=partial(start_clientapp, fork_server()), DEVNULL=subprocess.DEVNULL)
        vars(run_superexec).update(time=short)
        vars(subprocess_executor).update(subprocess=starter)
        flower_superexec()


def start_superexec(command: list[str]) -> None:
    """Start the SuperExec that a SuperNode asks for, with this launcher."""
    subprocess.Popen([sys.executable, "-P", __file__, *command])


def start_clientapp(orders: socket.socket, command: list[str], **options: Any) -> None:
    """Have a ClientApp forked. Any other program is started as ever, and so is a ClientApp if need be."""
    if command[0] == "flwr-clientapp":
        try:
            orders.send(json.dumps(command).encode())
            return
        except OSError as error:
            log(WARNING, "perennial: a ClientApp starts from nothing, since the warm process is gone (%s)", error)
    subprocess.Popen(command, **options)


def fork_server() -> socket.socket:
    """Fork the process that forks ClientApps; one whole command on the returned socket is one ClientApp.

    It ends when the other end of the socket is closed, so with this process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    gc.freeze()  # what is there now is shared, as long as nobody writes to it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the SuperExec
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a ClientApp ended
    while order := theirs.recv(LONGEST_ORDER):
        if os.fork() == 0:
            theirs.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for name in [name for name in sys.modules if name.startswith("perennial")]:  # the app brings its own
                sys.modules.pop(name, None)
            vars(run_clientapp).update(install_from_fab=install_once)
            hasten(run_clientapp, "pull_and_inflate_object_from_tree")
            sys.argv = json.loads(order)
            with suppress(SystemExit):
                flwr_clientapp()
            # Taking down all that Flower has loaded would cost three times what the ClientApp did.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os._exit(0)


def hasten(module: ModuleType, name: str) -> None:
    """Have a module's function that pulls a message's parts wait `LOOK_EVERY` for those that are late, not 1 s."""
    vars(module)[name] = partial(vars(module)[name], initial_backoff=LOOK_EVERY)


def hasten_serverapp() -> None:
    """The same for the replies that a ServerApp pulls."""
    from flwr.superlink.grid import grpc_grid  # the sites have no use for it

    hasten(grpc_grid, "pull_objects")


def install_once(fab: bytes, **options: Any) -> None:
    """Install a run's app where Flower would leave one that is there as it is."""
    digest = hashlib.sha256(fab).hexdigest()[:FAB_HASH_TRUNCATION]
    if not any((get_flwr_home() / APP_DIR).glob(f"*.{digest}")):
        install_from_fab(fab, **options)


if __name__ == "__main__":
    main()
