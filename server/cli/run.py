"""`perennial run` and `perennial resume`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perennial.common.errors import UserError
from perennial.common.logs import is_json
from perennial.server.cli.completion import methods, recipe_names, scenarios
from perennial.server.cli.console import Watched, Working, remark, sentences, watching
from perennial.server.cli.options import (
    Ca,
    DataRoot,
    Device,
    Insecure,
    Json,
    Metrics,
    MetricsClients,
    Rounds,
    Settings,
    SuperLink,
    app,
)
from perennial.server.progress import Progress

if TYPE_CHECKING:
    from perennial.common.config import RunConfig
    from perennial.server.deployment.remote import Connection
    from perennial.server.folder import Checkpoint, RunFolder
    from perennial.server.local import LocalRuntime

LAST_QUESTION = 60.0
"""Seconds for which a command that has ended waits for Prometheus, which asks every 15 to 60 seconds."""

LOADING = "loading PyTorch and the data"
FIRST = "demo/fedsdr"
"""The recipe of `perennial run` without a method, scenario, recipe or file."""


class Tracker(StrEnum):
    """What a run can also be written to."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"


@app.command()
def run(
    method: Annotated[
        str | None,
        typer.Option(help=r"Method, see `perennial list methods`.  \[default: fedsdr]", autocompletion=methods),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            help=r"Scenario, see `perennial list scenarios`.  \[default: colored-digits]", autocompletion=scenarios
        ),
    ] = None,
    rounds: Rounds = None,
    seed: Annotated[int | None, typer.Option(help=r"Keys every random draw.  \[default: 0]")] = None,
    settings: Settings = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; what is on the command line is stronger.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE[/ROW]",
            help="Method, settings, model, scenario and rounds of a paper's row; see `perennial list recipes`.",
            autocompletion=recipe_names,
        ),
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
    report: Annotated[
        bool, typer.Option("--report", help="Also write the page of the run, report.html in its folder.")
    ] = False,
    track: Annotated[
        Tracker | None, typer.Option(help="Also write to a tracker on this machine; needs its extra.")
    ] = None,
    metrics: Metrics = "",
    metrics_clients: MetricsClients = False,
    superlink: SuperLink = "deployment",
    ca: Ca = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Run a method on a scenario; ends in a table of accuracies.

    Without --method, --scenario, --config and --recipe, it is FedSDR with the settings of `--recipe demo/fedsdr`,
    and FedAvg is trained as well, to stand below the table.
    """
    from perennial.common.config import load_config

    chosen = {"config": config, "method": method, "scenario": scenario}
    first = not recipe and not any(chosen.values())
    options = {
        "rounds": rounds,
        "seed": seed,
        "runtime": runtime,
        "data_root": data_root,
        "device": device,
    }
    with sentences() as working:
        if first or recipe:
            for name, value in chosen.items():
                if value is not None:
                    raise UserError(
                        f"--recipe {recipe} is not possible with --{name} {value}; it has a method and a "
                        "scenario, and --set, --rounds and --seed change the rest"
                    )
            from perennial.server.study.recipes import recipe_config

            complete, caution = recipe_config(recipe or FIRST, options, settings or [])
            if caution:
                remark(caution)
        else:
            own = {"method": method, "scenario": scenario, **options}
            complete = load_config(config, own, settings or [], remark)
        # Later than a wrong setting is told.
        from perennial.server.cli.references import REFERENCE, fedavg_beside
        from perennial.server.cli.tables import print_run
        from perennial.server.deployment.remote import connected
        from perennial.server.folder import RunFolder, default_out
        from perennial.server.report.track import require

        require(track)
        path = folder or Path(default_out(complete))
        RunFolder(path).must_be_free()
        RunFolder(path).must_be_empty()
        _expose(metrics, path, metrics_clients, working)
        if complete.runtime == "local":
            _train(complete, path, working, as_json, track)
            if first and not folder and not as_json and not fedavg_beside(path, complete):
                reference = load_config(path / "config.toml", {"method": REFERENCE})
                _train(reference, Path(default_out(reference)), working, as_json)
        else:
            working.folder, working.deployed = RunFolder(path), complete.runtime == "deployment"
            _run_on_flower(complete, path, connected(superlink, ca, insecure), as_json, track=track)
        print_run(path, as_json, oracle, report)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder with a checkpoint.")],
    metrics: Metrics = "",
    metrics_clients: MetricsClients = False,
    superlink: SuperLink = "deployment",
    ca: Ca = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Continue a run from its last checkpoint, as if it had never stopped."""
    from perennial.server.cli.tables import print_run
    from perennial.server.deployment.remote import connected, place_of
    from perennial.server.folder import RunFolder, taken_over

    with sentences() as working:
        opened = working.folder = RunFolder.open(folder)
        config = opened.config()
        if (folder / "summary.json").exists() and max(opened.checkpoints(), default=0) >= config.rounds:
            raise UserError(
                f"{folder} has ended: all {config.rounds} rounds are done (perennial show run {folder})"
            )
        _expose(metrics, folder, metrics_clients, working)
        if config.runtime == "local":
            with opened.held() as died, watching(config, LOADING, as_json) as watch:
                if died:
                    remark(taken_over(died, folder))
                checkpoint = _origin(opened, config)
                here = _runtime(config, watch)
                opened.cut_log(checkpoint.log_bytes)
                watch.round(Progress(checkpoint.round, config.rounds, {}, {}))
                _add_constant(here, opened, here.run(opened, checkpoint, watch.round))
        else:
            opened.must_be_free()
            if place_of(folder) == folder.resolve():  # else the checkpoints are where the run is
                _origin(opened, config)
            for word in ("error.txt", "summary.json"):  # of its end before; whoever follows would take it for this
                (folder / word).unlink(missing_ok=True)
            working.deployed = config.runtime == "deployment"
            _run_on_flower(config, folder, connected(superlink, ca, insecure), as_json, resume=True)
        print_run(folder, as_json, oracle=False)


def _expose(metrics: str, folder: Path, clients: bool, working: Working) -> None:
    """Answer Prometheus, if it is wanted, as long as this command runs, and until it has heard of the end."""
    if not metrics:
        if clients:
            raise UserError("--metrics-clients goes with --metrics HOST:PORT")
        return
    from prometheus_client import CollectorRegistry

    from perennial.common.exposition import expose
    from perennial.common.superlink import Address
    from perennial.server.folder import RunFolder
    from perennial.server.metrics import RunMetrics

    registry = CollectorRegistry()
    run = RunMetrics(RunFolder(folder).events, clients=clients)
    registry.register(run)
    expose(registry, Address.parse(metrics, "--metrics", "127.0.0.1:9464"))
    working.at_end = partial(run.tell_end, LAST_QUESTION)


def _train(config: RunConfig, path: Path, working: Working, quiet: bool, track: Tracker | None = None) -> None:
    """A whole run in this process."""
    from perennial.common.model_settings import Pretrained
    from perennial.server.folder import RunFolder
    from perennial.server.loop import start
    from perennial.server.report.track import tracking

    with watching(config, LOADING, quiet) as watch:
        here = _runtime(config, watch)
        if isinstance(config.model, Pretrained) and config.model.weights:
            start(config)  # weights that do not fit are told before anything is written
        with RunFolder(path).held():
            made = working.folder = RunFolder.create(path, config)
            watch.round(Progress(0, config.rounds, {}, {}))
            with tracking(track, path, config, watch.round) as told:
                _add_constant(here, made, here.run(made, watch=told))


def _origin(folder: RunFolder, config: RunConfig) -> Checkpoint:
    """From where a run goes on; what was changed in its configuration is said."""
    from perennial.server.summary import changed_line

    origin = folder.origin(config)
    if changed := origin.changes(config):
        remark(changed_line(origin.round + 1, changed))
    return origin


def _run_on_flower(
    config: RunConfig,
    path: Path,
    deployed: AbstractContextManager[Connection],
    quiet: bool,
    resume: bool = False,
    track: Tracker | None = None,
) -> None:
    from perennial.common.files import Tail
    from perennial.server.folder import RunFolder
    from perennial.server.report.track import tracking
    from perennial.server.simulation import Simulation

    with ExitStack() as stack:
        simulated = config.runtime == "simulation"
        doing = "starting Flower's simulation" if simulated else "handing the run to the SuperLink"
        watch = stack.enter_context(watching(config, doing, quiet))
        told = stack.enter_context(tracking(track, path, config, watch.round))
        connection = Simulation(path / "flower") if simulated else stack.enter_context(deployed)
        events = Tail(RunFolder(path).events)
        if resume:
            events.lines()

        def show() -> None:
            for line in events.lines() if is_json() else ():
                print(line, file=sys.stderr, flush=True)

        for row in connection.execute(config, path, resume):
            show()
            if row["kind"] == "round":
                told(Progress(row["round"], config.rounds, row["metrics"], row["left_out"]))
        show()


def _add_constant(here: LocalRuntime, folder: RunFolder, summary: dict[str, Any]) -> None:
    """Write the constant predictor's accuracies into the summary; the data are in this process."""
    from perennial.server.study.constant import constant_summary

    found = constant_summary(here.data())
    if found["worst"] is not None:  # there are test data
        folder.write_summary({**summary, "constant": {name: found[name] for name in ("worst", "average")}})


def _runtime(config: RunConfig, watch: Watched) -> LocalRuntime:
    """The run's clients in this process. Raises `UserError` when the device or the data set is not there."""
    from perennial.server.local import LocalRuntime  # with PyTorch and Flower, in a few seconds

    made = {"generated": "generating the data", "own": "reading the sites' data"}
    watch.doing(made.get(config.scenario.dataset, f"reading {config.scenario.dataset}"))
    return LocalRuntime(config)
