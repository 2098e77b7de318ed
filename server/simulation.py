"""The runtime `simulation`: a run on Flower's simulation engine, in a process of its own.

That process is this file. It gets what is asked on its standard input, and ends when that is closed. So it does
not outlive the command that started it.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from perennial.common.config import RunConfig
from perennial.common.data.datasets import resolve_root
from perennial.common.flower import processes
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.files import write_text
from perennial.common.utils.tracebacks import NAME
from perennial.server.run.folder import RunFolder

LOOK_EVERY = 0.01
"""Seconds between two looks for a reply, which is in this process's memory."""
FOLLOW_EVERY = 0.1
TRIES = 3
"""Ray gives its own servers 30 seconds to start, which a busy machine misses now and then."""
LOG = "simulation.log"


class Simulation:
    """Flower's simulation engine as a run is handed to it.

    `home` is the folder of its log; `command` is what does the run, by default this file.
    """

    def __init__(self, home: Path, command: Sequence[str] = ()) -> None:
        self.log = home / LOG
        # By -P the folder that the command is typed in is none that modules are looked for in.
        self.command = [*command] or [sys.executable, "-P", "-m", __spec__.name]

    def execute(self, config: RunConfig, out: Path, resume: bool = False) -> Iterator[dict[str, Any]]:
        """Start or resume a run and follow it; the rows of its log. Raises `RunStopped` or `UserError`.

        What fails before its first row and leaves no word is tried again, `TRIES` times in all.
        """
        _must_know_what_clients_keep(config, out, resume)
        _must_answer(config.ray_address)
        _warm_ray()
        for left in reversed(range(TRIES)):
            begun, folder, seen = False, RunFolder(out), 0
            if resume:
                seen = folder.load_checkpoint().log_bytes
            try:
                with self._started(config, out, resume) as process:
                    running = True
                    while running:
                        running = process.poll() is None
                        rows, seen = folder.rows_after(seen)
                        begun = begun or bool(rows)
                        yield from rows
                        time.sleep(FOLLOW_EVERY if running and not rows else 0)
            finally:
                _show_tracebacks(out)
            if (out / "summary.json").exists():
                return
            if (word := out / "error.txt").exists():
                raise RunStopped(word.read_text(encoding="utf-8").strip())
            if begun or not left:
                break
        hint = f"; `{folder.resume_command}` goes on from the last checkpoint" if folder.checkpoints() else ""
        raise RunStopped(f"Flower's simulation ended without a word; its log is {self.log}{hint}")

    @contextmanager
    def _started(self, config: RunConfig, out: Path, resume: bool) -> Iterator["subprocess.Popen[str]"]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        asked = {"config": config.model_dump(mode="json"), "out": str(out.resolve()), "resume": resume}
        environment = {
            "RAY_worker_niceness": "0",  # else 15, where its workers starve beside anything else
            "RAY_preload_python_modules": "perennial.client.node.answer",  # PyTorch too, before there is a message
            **processes.environment(),
        }
        with self.log.open("a") as log:
            process = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                start_new_session=True,  # Ctrl-C is for the command, which then ends this
            )  # fmt: skip
        assert process.stdin
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with Ray's servers
                process.wait()


def backend(config: RunConfig) -> dict[str, Any]:
    """What Flower is to ask of Ray: a simulated client's share of the machine, and whose machines."""
    resources = {"num_cpus": config.client_cpus, "num_gpus": config.client_gpus}
    cluster = {"address": config.ray_address} if config.ray_address else {}
    return {"client_resources": resources, "init_args": cluster}


def _must_know_what_clients_keep(config: RunConfig, out: Path, resume: bool) -> None:
    if resume and not (out / "clients").exists():
        nodes = f'--federation-config "num-supernodes={len(config.scenario.client_ids)}"'
        raise UserError(
            f"{out} was begun by Flower's own command, and what its clients keep is not in its folder; "
            f"go on with flwr run . --run-config 'resume=\"{out.resolve()}\"' {nodes}"
        )


def _must_answer(address: str) -> None:
    # Ray itself would try for twelve minutes.
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"ray_address: {address} is not possible; no Ray cluster answers there ({error})"
        ) from None


def _warm_ray() -> None:
    # From a cold disk alone, Ray's servers can take longer than the 30 seconds that Ray allows them.
    if spec := find_spec("ray"):
        for name in ("gcs/gcs_server", "raylet/raylet"):
            for place in spec.submodule_search_locations or ():
                (Path(place) / "core" / "src" / "ray" / name).read_bytes()


def _show_tracebacks(out: Path) -> None:
    """What clients left in their state folder, to standard error and beside `error.txt`, once."""
    left, shown = out / "clients" / NAME, out / NAME
    text, before = (file.read_text(encoding="utf-8") if file.exists() else "" for file in (left, shown))
    if text not in before:
        print(text, file=sys.stderr, flush=True)
        write_text(shown, text if text.startswith(before) else before + text)  # beside what the server left


# ---------------------------------------------------------------------- the process


def main(answer: Callable[..., Any] | None = None) -> None:
    """Do the run that standard input describes. `answer` is what clients do, by default `answer.simulated`."""
    asked = json.loads(sys.stdin.readline())
    Thread(target=_end_with_the_command, daemon=True).start()
    importing = Thread(target=_import_the_rest)  # takes as long as Ray's servers do to start
    importing.start()
    if not asked["config"]["ray_address"]:
        _start_ray()
    importing.join()
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from perennial.client.app import OneHandlerApp
    from perennial.client.node.answer import simulated
    from perennial.common.config import load_config
    from perennial.server.app import leave_word, serve
    from perennial.server.run.grid import OrderedGrid

    config, out = load_config(options=asked["config"]), Path(asked["out"])
    (out / "clients").mkdir(parents=True, exist_ok=True)
    clients = {
        "state-dir": str(out / "clients"),
        "data-root": str(resolve_root(config.data_folder) or ""),
        "device": config.device,
    }
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < len(config.scenario.client_ids):
            time.sleep(LOOK_EVERY)  # Flower is registering them
        resume = asked["out"] if asked["resume"] else ""
        settings = {"config": json.dumps(asked["config"]), "out": asked["out"], "resume": resume, "desk": ""}
        serve(OrderedGrid(grid, poll=LOOK_EVERY), settings)

    try:
        run_simulation(
            app,
            OneHandlerApp(partial(answer or simulated, clients)),
            num_supernodes=len(config.scenario.client_ids),
            backend_config=backend(config),
        )
    except RuntimeError as error:
        cause = error.__cause__
        while cause and cause.__cause__:
            cause = cause.__cause__
        if isinstance(cause, ValueError) and str(cause).startswith("ActorPool is empty"):
            share = f"client_cpus={config.client_cpus:g} and client_gpus={config.client_gpus:g}"
            leave_word(out, f"a simulated client takes {share}, and Ray finds less than that here")
        elif isinstance(cause, ConnectionError):
            leave_word(out, f"ray_address: {config.ray_address} is not possible; no Ray cluster answers there")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the ServerApp's thread would wait for replies until the deadline


def _import_the_rest() -> None:
    for module in ("flwr.simulation", "perennial.client.node.answer", "perennial.server.app"):
        import_module(module)


def _start_ray() -> None:
    # Flower, which would do it last of all, has Ray make an environment for each worker: this one is theirs, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    import ray

    # Its dashboard, which nobody sees here, would take seconds to start, and open a port.
    ray.init(include_dashboard=False, logging_level=logging.WARNING)


def _end_with_the_command() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)  # upon which Ray ends its servers


if __name__ == "__main__":
    main()
