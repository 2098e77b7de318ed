"""The Flower ServerApp: a run on Flower's simulation or on a SuperLink."""

import json
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from perennial.common import plugins
from perennial.common.config import RunConfig, load_config
from perennial.common.flower.grids import in_simulation, runtime_stub
from perennial.common.flower.names import log
from perennial.common.flower.patches import patch_serverapp
from perennial.common.flower.processes import LOOK_EVERY
from perennial.common.utils.errors import RunStopped, UserError, in_words, printable
from perennial.common.utils.events import is_json, set_format
from perennial.common.utils.files import write_text
from perennial.common.utils.parsing import from_json
from perennial.common.utils.tracebacks import NAME as TRACEBACK
from perennial.common.utils.tracebacks import Tracebacks
from perennial.server.deployment.remote_folder import sending
from perennial.server.run.folder import InUse, RunFolder, default_out, taken_over
from perennial.server.run.grid import OrderedGrid
from perennial.server.run.loop import run_rounds, start
from perennial.server.run.progress import Progress, progress_line
from perennial.server.survey.survey import carried_out

INFO, ERROR = 20, 40
NODES_SETTLE = 1.0
"""Seconds without a new node after which Flower's simulation has registered them all."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Start or resume the run that the run configuration describes."""
    patch_serverapp()
    settings = {key: str(value) for key, value in context.run_config.items()}
    serve(OrderedGrid(grid, poll=LOOK_EVERY), settings)


def serve(grid: OrderedGrid, settings: dict[str, str]) -> None:
    """Carry out the run or the survey that these settings describe."""
    torch.set_num_threads(1)
    if is_json():
        set_format("json")
    if settings.get("survey"):
        _survey(grid, settings)
    else:
        _run(grid, settings)


def _run(grid: OrderedGrid, settings: dict[str, str]) -> None:
    """Start or resume the run that these settings describe. What it ends with is also left in its folder."""
    simulated = in_simulation(grid.inner)
    here = not settings["desk"] or os.path.exists(settings["desk"])  # not where it may not look
    path = None  # the folder of this run, once it is known to be no other's
    sent = ExitStack()  # after a word of the end, if there is to be one, was left
    try:
        if resumed := settings["resume"]:
            folder = RunFolder.open(Path(resumed))
            path = folder.path
            config = folder.config()
        else:
            if settings["out"] and here:
                path = _empty(Path(settings["out"]))
            config = config_of(settings, "simulation" if simulated else "deployment")
            folder = RunFolder(path or _empty(Path(default_out(config))))
            path = folder.path
        with folder.held() as died:
            if died:
                log(INFO, "perennial: %s", taken_over(died, path))
            if resumed:
                origin = folder.origin(config)
                folder.cut_log(origin.log_bytes)
            else:
                RunFolder.create(path, config)
                origin = start(config)
            log(INFO, "perennial: run folder %s", path.resolve())
            if not here:
                sent.enter_context(sending(runtime_stub(grid.inner), path))
                if resumed:
                    _must_be_alike(config_of(settings, "deployment"), config, path)
            (path / "error.txt").unlink(missing_ok=True)  # of a run that was tried here before
            if simulated:
                must_have_nodes(grid, config)
            run_rounds(config, folder, grid, origin, _watch)
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("grpc", "flwr"):  # of a run that was stopped: Flower says so
            raise
        word = str(error)
        if isinstance(error, OSError):
            word = f"{error.filename or 'a file'}: {error.strerror}"
        elif not isinstance(error, (UserError, RunStopped)):
            word = plugins.blamed(error) or f"this should not happen: {in_words(error)} (CONTRIBUTING.md)"
            if path:
                word += f"; {path / TRACEBACK} has its traceback"
                Tracebacks(path / TRACEBACK).first(error)
        log(ERROR, "perennial: %s", printable(word))
        if path and not isinstance(error, InUse):  # the folder is another run's
            leave_word(path, word)
        raise
    finally:
        sent.close()


def _survey(grid: OrderedGrid, settings: dict[str, str]) -> None:
    """Carry out the survey that these settings describe; what came of it is the run's summary."""
    here = os.path.exists(settings["desk"])
    with tempfile.TemporaryDirectory(prefix="perennial-") as folder, ExitStack() as sent:
        path = Path(settings["out"]) if here else Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if not here:
            sent.enter_context(sending(runtime_stub(grid.inner), path))
        try:
            found = carried_out(grid, settings["survey"])
        except RunStopped as error:
            leave_word(path, str(error))
            raise
        write_text(path / "summary.json", json.dumps(found, ensure_ascii=False))


def _must_be_alike(there: RunConfig, here: RunConfig, path: Path) -> None:
    """Sites were asked about the configuration where the run is followed, and it goes on with its own."""
    if changed := there.changed(here):
        key, (wanted, own) = next(iter(changed.items()))
        raise UserError(
            f"config.toml: {key} is {wanted} where the run is followed, and {own} in {path.resolve()} at the "
            "server; write the same in both"
        )


def _empty(path: Path) -> Path:
    """Raises `UserError` if the folder holds a run."""
    RunFolder(path).must_be_empty()
    return path


def config_of(settings: dict[str, str], runtime: str) -> RunConfig:
    """The configuration from `flwr run`'s settings: a whole one as JSON, or method, scenario, rounds and so on."""
    if settings["config"]:
        try:
            options = from_json(settings["config"])
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise UserError(f"config: {settings['config']:.80} is no configuration as JSON")
        return load_config(options=options)
    options = {"method": settings["method"], "scenario": settings["scenario"], "seed": _whole("seed", settings)}
    if rounds := _whole("rounds", settings):
        options["rounds"] = rounds
    return load_config(options={**options, "runtime": runtime}, settings=settings["set"].split())


def _whole(name: str, settings: dict[str, str]) -> int:
    try:
        return int(settings[name])
    except ValueError:
        raise UserError(f"{name}: {settings[name]:.80} is not possible; write a whole number") from None


def must_have_nodes(grid: Grid, config: RunConfig) -> None:
    """Raises `UserError` when Flower simulates fewer nodes than the run has clients: none will ever join."""
    wanted, found = len(config.scenario.client_ids), -1
    while (there := len(list(grid.get_node_ids()))) < wanted:
        if there == found:
            raise UserError(
                f"Flower simulates {there} SuperNodes and scenario {config.scenario.name} has {wanted} clients; "
                f'say flwr run . --federation-config "num-supernodes={wanted}"'
            )
        found = there
        time.sleep(NODES_SETTLE)  # Flower registers its nodes while this app starts


def _watch(progress: Progress) -> None:
    if line := progress_line(progress):
        log(INFO, "perennial: %s", line)


def leave_word(path: Path, word: str) -> None:
    """Say beside a run's files why it ended: who started it through Flower sees only a failed run."""
    if path.is_dir():
        with suppress(OSError):  # the disk may be full
            write_text(path / "error.txt", f"{word}\n")
