"""`perennial run` and `perennial resume`."""

from contextlib import AbstractContextManager, ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from common.config import RunConfig, load_config
from common.errors import UserError
from server import loop
from server.app import default_out
from server.cli.console import sentences, watching
from server.cli.options import Ca, DataRoot, Device, Insecure, Json, Rounds, Settings, SuperLink, app
from server.cli.tables import print_run
from server.deployment.remote import Connection, connected, simulation
from server.folder import RunFolder
from server.local import LocalRuntime
from server.report.track import require, tracking


class Tracker(StrEnum):
    """What a run can also be written to."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"


@app.command()
def run(
    method: Annotated[
        str | None, typer.Option(help=r"Method, see `perennial list methods`.  \[default: ditto]")
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help=r"Scenario, see `perennial list scenarios`.  \[default: colored-digits]")
    ] = None,
    rounds: Rounds = None,
    seed: Annotated[int | None, typer.Option(help=r"Keys every random draw.  \[default: 0]")] = None,
    settings: Settings = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; what is on the command line is stronger.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option(help=r"local, simulation or deployment.  \[default: local]")
    ] = None,
    data_root: DataRoot = None,
    device: Device = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help=r"Run folder.  \[default: runs/TIME-METHOD-SCENARIO-sSEED]")
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also print the round that is best on test data, labelled so.")
    ] = False,
    track: Annotated[
        Tracker | None, typer.Option(help="Also write to a tracker on this machine; needs its extra.")
    ] = None,
    superlink: SuperLink = "deployment",
    ca: Ca = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Run a method on a scenario; ends in a table of accuracies."""
    options = {
        "method": method,
        "scenario": scenario,
        "rounds": rounds,
        "seed": seed,
        "runtime": runtime,
        "data_root": data_root,
        "device": device,
    }
    with sentences():
        complete = load_config(config, options, settings or [])
        path = folder or Path(default_out(complete))
        require(track)
        if complete.runtime == "local":
            here = LocalRuntime(complete)
            made = RunFolder.create(path, complete)
            with watching(complete.rounds, as_json) as watch, tracking(track, path, complete, watch) as watch:
                here.run(made, watch=watch)
        else:
            RunFolder(path).must_be_empty()
            _run_on_flower(complete, path, connected(superlink, ca, insecure), as_json, track=track)
        print_run(path, as_json, oracle)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder with a checkpoint.")],
    superlink: SuperLink = "deployment",
    ca: Ca = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Continue a run from its last checkpoint, as if it had never stopped."""
    with sentences():
        opened = RunFolder.open(folder)
        config, checkpoint = opened.config(), opened.load_checkpoint()
        if checkpoint.round >= config.rounds and (folder / "summary.json").exists():
            raise UserError(
                f"{folder} has ended: all {config.rounds} rounds are done (perennial show run {folder})"
            )
        if config.runtime == "local":
            here = LocalRuntime(config)
            opened.cut_log(checkpoint.log_bytes)
            with watching(config.rounds, as_json) as watch:
                here.run(opened, checkpoint, watch)
        else:
            (folder / "error.txt").unlink(missing_ok=True)
            _run_on_flower(config, folder, connected(superlink, ca, insecure), as_json, resume=True)
        print_run(folder, as_json, oracle=False)


def _run_on_flower(
    config: RunConfig,
    path: Path,
    deployed: AbstractContextManager[Connection],
    quiet: bool,
    resume: bool = False,
    track: Tracker | None = None,
) -> None:
    with ExitStack() as stack:
        watch = stack.enter_context(watching(config.rounds, quiet))
        watch = stack.enter_context(tracking(track, path, config, watch))
        connection = stack.enter_context(
            simulation(path / "flower") if config.runtime == "simulation" else deployed
        )
        for row in connection.execute(config, path, resume):
            if row["kind"] == "round":
                watch(loop.Progress(row["round"], config.rounds, row["metrics"], row["left_out"]))
