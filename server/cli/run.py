"""`perennial run` and `perennial resume`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.common.utils.errors import UserError, printable
from perennial.common.utils.events import is_json
from perennial.server.cli.completion import methods, recipe_names, scenarios
from perennial.server.cli.console import Working, remark, sentences, watching
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
from perennial.server.run.progress import Progress, Watched
from perennial.server.runs import begin, configured, connection, go_on, unfinished, vacant

if TYPE_CHECKING:
    from perennial.common.config import RunConfig

LAST_QUESTION = 60.0
"""Seconds for which a command that has ended waits for Prometheus, which asks every 15 to 60 seconds."""

LOADING = "loading PyTorch and the data"


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
    first = recipe is None and method is None and scenario is None and config is None
    with sentences() as working:
        complete = configured(
            method,
            scenario,
            config=config,
            recipe=recipe,
            settings=settings or (),
            say=remark,
            rounds=rounds,
            seed=seed,
            runtime=runtime,
            data_root=data_root,
            device=device,
        )
        # Later than a wrong setting is told.
        from perennial.server.cli.reference_lines import fedavg_beside, reference_config
        from perennial.server.cli.tables import print_run
        from perennial.server.run.folder import RunFolder
        from perennial.server.run.trackers import require

        require(track)
        path = vacant(complete, folder)
        _expose(metrics, path, metrics_clients, working)

        def carry_out(config: RunConfig, path: Path, track: Tracker | None) -> None:
            working.folder, working.deployed = RunFolder(path), config.runtime == "deployment"
            with _watching(config, path, as_json) as watch:
                begin(config, path, connection(config, path, superlink, ca, insecure), watch, track)

        carry_out(complete, path, track)
        alone = first and complete.runtime == "local" and not folder and not as_json
        if alone and not fedavg_beside(path, complete):
            reference = reference_config(path)
            carry_out(reference, vacant(reference, None), None)
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

    with sentences() as working:
        opened = working.folder = unfinished(folder)
        config = opened.config()
        _expose(metrics, folder, metrics_clients, working)
        working.deployed = config.runtime == "deployment"
        with _watching(config, folder, as_json, resume=True) as watch:
            go_on(opened, connection(config, folder, superlink, ca, insecure), watch, remark)
        print_run(folder, as_json, oracle=False)


def _expose(metrics: str, folder: Path, clients: bool, working: Working) -> None:
    """Answer Prometheus, if it is wanted, as long as this command runs, and until it has heard of the end."""
    if not metrics:
        if clients:
            raise UserError("--metrics-clients goes with --metrics HOST:PORT")
        return
    from prometheus_client import CollectorRegistry

    from perennial.common.utils.addresses import Address
    from perennial.common.utils.prometheus import expose
    from perennial.server.run.folder import RunFolder
    from perennial.server.run.prometheus import RunMetrics

    registry = CollectorRegistry()
    run = RunMetrics(RunFolder(folder).events, clients=clients)
    registry.register(run)
    expose(registry, Address.parse(metrics, "--metrics", "127.0.0.1:9464"))
    working.at_end = partial(run.tell_end, LAST_QUESTION)


@contextmanager
def _watching(config: RunConfig, path: Path, quiet: bool, resume: bool = False) -> Iterator[Watched]:
    """What the command shows of a run; with `--log-format json` also the events that Flower's processes log."""
    from perennial.common.utils.files import Tail
    from perennial.server.run.folder import RunFolder

    words = {"simulation": "starting Flower's simulation", "deployment": "handing the run to the SuperLink"}
    with watching(config, words.get(config.runtime, LOADING), quiet) as watch:
        if config.runtime == "local" or not is_json():
            yield watch
            return
        events = Tail(RunFolder(path).events)
        if resume:
            events.lines()

        def show() -> None:
            for line in events.lines():
                print(printable(line), file=sys.stderr, flush=True)

        def told(progress: Progress) -> None:
            show()
            watch.round(progress)

        yield Watched(watch.doing, told)
        show()
