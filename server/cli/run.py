"""`perennial run` and `perennial resume`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from perennial.common.utils.errors import UserError, printable
from perennial.common.utils.events import is_json
from perennial.server.cli.completion import methods, recipe_names, scenarios
from perennial.server.cli.console import Working, remark, watching
from perennial.server.cli.options import SETTINGS, DataRoot, Device, Json, LinkOptions, Metrics, Rounds, command
from perennial.server.run.progress import Progress, Watched
from perennial.server.runs import begin, configured, connection, go_on, unfinished, vacant

if TYPE_CHECKING:
    from perennial.common.config import RunConfig

LAST_QUESTION = 60.0
"""Seconds for which a command that has ended waits for Prometheus, which asks every 15 to 60 seconds."""


Tracker = Literal["tensorboard", "mlflow", "wandb"]


@dataclass
class RunOptions:
    """What determines a run."""

    name: str | None = typer.Argument(
        None,
        metavar="[METHOD]",
        help=r"Method, see `perennial list methods`.  \[default: fedsdr]",
        autocompletion=methods,
    )
    method: str | None = typer.Option(None, help="The same.", autocompletion=methods)
    scenario: str | None = typer.Option(
        None,
        help=r"Scenario, see `perennial list scenarios`.  \[default: colored-digits]",
        autocompletion=scenarios,
    )
    rounds: Rounds = None
    seed: int | None = typer.Option(None, help=r"Keys every random draw.  \[default: 0]")
    settings: list[str] = SETTINGS
    config: Path | None = typer.Option(None, help="TOML file; what is on the command line is stronger.")
    recipe: str | None = typer.Option(
        None,
        metavar="TABLE[/ROW]",
        help="Method, settings, model, scenario and rounds of a paper's row; see `perennial list recipes`.",
        autocompletion=recipe_names,
    )
    runtime: str | None = typer.Option(None, help=r"local, simulation or deployment.  \[default: local]")
    data_root: DataRoot = None
    device: Device = None

    def arguments(self) -> dict[str, Any]:
        """Those of `configured`. Raises `UserError` for two methods."""
        if self.name and self.method:
            raise UserError(f"METHOD: {self.name} is given, and --method {self.method}; give one of them")
        values = {**vars(self), "method": self.name or self.method}
        del values["name"]
        return values


@dataclass
class MetricsOptions:
    """Whether Prometheus is answered."""

    metrics: Metrics = ""
    metrics_clients: bool = typer.Option(
        False,
        "--metrics-clients",
        help="Name clients in these numbers; else they are only counted.",
        rich_help_panel="Monitoring with Prometheus",
    )

    def expose(self, folder: Path, working: Working) -> None:
        """Answer Prometheus as long as the command runs, and until it has heard of the end."""
        if not self.metrics:
            if self.metrics_clients:
                raise UserError("--metrics-clients goes with --metrics HOST:PORT")
            return
        from prometheus_client import CollectorRegistry

        from perennial.common.utils.addresses import Address
        from perennial.common.utils.prometheus import expose
        from perennial.server.run.folder import RunFolder
        from perennial.server.run.prometheus import RunMetrics

        registry = CollectorRegistry()
        run = RunMetrics(RunFolder(folder).events, clients=self.metrics_clients)
        registry.register(run)
        expose(registry, Address.parse(self.metrics, "--metrics", "127.0.0.1:9464"))
        working.at_end = partial(run.tell_end, LAST_QUESTION)


@command("run", plugins=True)
def run(
    working: Working,
    wanted: RunOptions,
    link: LinkOptions,
    metrics: MetricsOptions,
    folder: Path | None = typer.Option(
        None, "--out", help=r"Run folder.  \[default: runs/TIME-METHOD-SCENARIO-sSEED]"
    ),
    oracle: bool = typer.Option(
        False, "--oracle", help="Also print the round that is best on test data, labelled so."
    ),
    report: bool = typer.Option(
        False, "--report", help="Also write the page of the run, report.html in its folder."
    ),
    track: Tracker | None = typer.Option(None, help="Also write to a tracker on this machine; needs its extra."),
    as_json: Json = False,
) -> None:
    """Run a method on a scenario; ends in a table of accuracies.

    Without METHOD, --scenario, --config and --recipe, it is FedSDR with the settings of `--recipe demo/fedsdr`,
    and FedAvg is trained as well, to stand below the table.
    """
    given = wanted.arguments()
    complete = configured(**given, say=remark)
    # Later than a wrong setting is told.
    from perennial.server.cli.reference_lines import fedavg_beside, reference_config
    from perennial.server.cli.tables import print_run
    from perennial.server.run.folder import RunFolder
    from perennial.server.run.trackers import require

    require(track)
    path = vacant(complete, folder)
    metrics.expose(path, working)

    def carry_out(config: "RunConfig", path: Path, track: Tracker | None) -> None:
        working.folder, working.deployed = RunFolder(path), config.runtime == "deployment"
        with _watching(config, path, as_json) as watch:
            begin(config, path, connection(config, path, **vars(link)), watch, track)

    carry_out(complete, path, track)
    first = not any(given[choice] for choice in ("recipe", "method", "scenario", "config"))
    alone = first and complete.runtime == "local" and not folder and not as_json
    if alone and not fedavg_beside(path, complete):
        reference = reference_config(path)
        carry_out(reference, vacant(reference, None), None)
    print_run(path, as_json, oracle, report)


@command("resume")
def resume(
    working: Working,
    link: LinkOptions,
    metrics: MetricsOptions,
    folder: Path = typer.Argument(..., help="Run folder with a checkpoint."),
    as_json: Json = False,
) -> None:
    """Continue a run from its last checkpoint, as if it had never stopped."""
    from perennial.server.cli.tables import print_run

    opened = working.folder = unfinished(folder)
    config = opened.config()
    metrics.expose(folder, working)
    working.deployed = config.runtime == "deployment"
    with _watching(config, folder, as_json, resume=True) as watch:
        go_on(opened, connection(config, folder, **vars(link)), watch, remark)
    print_run(folder, as_json, oracle=False)


@contextmanager
def _watching(config: "RunConfig", path: Path, quiet: bool, resume: bool = False) -> Iterator[Watched]:
    """What the command shows of a run; with `--log-format json` also the events that Flower's processes log."""
    from perennial.common.utils.files import Tail
    from perennial.server.run.folder import RunFolder

    beginnings = {"simulation": "starting Flower's simulation", "deployment": "handing the run to the SuperLink"}
    doing = beginnings.get(config.runtime, "loading PyTorch and the data")
    with watching(config, doing, quiet) as watch:
        if config.runtime == "local" or not is_json():
            yield watch
            return
        events = Tail(RunFolder(path).events)
        if resume:
            events.lines()

        def show(progress: Progress | None = None) -> None:
            for line in events.lines():
                print(printable(line), file=sys.stderr, flush=True)
            if progress:
                watch.round(progress)

        yield Watched(watch.doing, show)
        show()
