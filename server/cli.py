"""The command line: `perennial run | list | show | resume`."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.config import RunConfig, load_config
from common.data.datasets import DATASETS
from common.data.scenario import Scenario
from common.data.scenarios import SCENARIOS
from common.errors import RunStopped, UserError
from common.methods import METHODS, Method, method_class
from common.models import MODELS
from common.suggest import unknown
from server import loop
from server.app import default_out
from server.folder import RunFolder
from server.local import LocalRuntime
from server.remote import Connection, simulation
from server.summary import summarise
from server.tables import left_out_lines, progress_line, summary_table, traffic_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Federated learning for clients whose data differ from each other and from what they will meet later.",
)
out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print data as JSON.")]
SuperLink = Annotated[
    str,
    typer.Option("--superlink", help="Connection of the deployment runtime, a name in Flower's config.toml."),
]


class Kind(StrEnum):
    """What `perennial list` lists."""

    methods = "methods"
    scenarios = "scenarios"
    datasets = "datasets"
    models = "models"


class Thing(StrEnum):
    """What `perennial show` shows."""

    method = "method"
    scenario = "scenario"
    run = "run"


@app.command()
def run(
    method: Annotated[
        str | None, typer.Option(help="Method, see `perennial list methods`.  [default: ditto]")
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help="Scenario, see `perennial list scenarios`.  [default: colored-digits]")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.  [default: the scenario's]")] = None,
    seed: Annotated[int | None, typer.Option(help="Keys every random draw.  [default: 0]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A hyper-parameter or run setting; scenario.KEY and model.KEY for theirs. Repeatable.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; what is on the command line is stronger.")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="local, simulation or deployment.  [default: local]")] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder of the raw data sets.  [env: PERENNIAL_DATA]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.  [default: auto]")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Run folder.  [default: runs/TIME-METHOD-SCENARIO-sSEED]")
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also print the round that is best on test data, labelled so.")
    ] = False,
    superlink: SuperLink = "deployment",
    as_json: Json = False,
) -> None:
    """Run a method on a scenario; ends in a table of accuracies."""
    options = {
        "method": method,
        "scenario": scenario,
        "rounds": rounds,
        "seed": seed,
        "runtime": runtime,
        "data_root": str(data_root) if data_root else None,
        "device": device,
    }
    with sentences():
        complete = load_config(config, options, settings or [])
        path = folder or Path(default_out(complete))
        if complete.runtime == "local":
            here = LocalRuntime(complete)
            made = RunFolder.create(path, complete)
            with watching(complete.rounds, as_json) as watch:
                here.run(made, watch=watch)
        else:
            RunFolder(path).must_be_empty()
            _run_on_flower(complete, path, superlink, as_json)
        _show_run(path, as_json, oracle)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder with a checkpoint.")],
    superlink: SuperLink = "deployment",
    as_json: Json = False,
) -> None:
    """Continue a run from its last checkpoint, as if it had never stopped."""
    with sentences():
        opened = RunFolder.open(folder)
        config, checkpoint = opened.config(), opened.load_checkpoint()
        if checkpoint.round >= config.rounds:
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
            _run_on_flower(config, folder, superlink, as_json, resume=True)
        _show_run(folder, as_json, oracle=False)


@app.command("list")
def list_things(kind: Annotated[Kind, typer.Argument(help="What to list.")], as_json: Json = False) -> None:
    """List what there is, one line each."""
    lines: dict[Kind, Mapping[str, str]] = {
        Kind.methods: {name: f"{method.title}: {method.summary}" for name, method in METHODS.items()},
        Kind.scenarios: {name: _scenario_line(scenario) for name, scenario in SCENARIOS.items()},
        Kind.datasets: {name: dataset.summary for name, dataset in DATASETS.items()},
        Kind.models: {name: model.summary for name, model in MODELS.items()},
    }
    if as_json:
        out.print_json(data=dict(lines[kind]))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, line in lines[kind].items():
        table.add_row(f"[bold]{name}[/bold]", line)
    out.print(table)


@app.command()
def show(
    thing: Annotated[Thing, typer.Argument(help="What to show.")],
    name: Annotated[str, typer.Argument(help="Its name, or the run folder.")],
    oracle: Annotated[
        bool,
        typer.Option("--oracle", help="For a run: also the round that is best on test data, labelled so."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a method's hyper-parameters, a scenario, or a run."""
    with sentences():
        if thing is Thing.run:
            _show_run(Path(name), as_json, oracle)
        elif thing is Thing.method:
            _show_method(method_class(name), as_json)
        else:
            if name not in SCENARIOS:
                raise UserError(unknown("scenario", name, SCENARIOS))
            _show_scenario(SCENARIOS[name], as_json)


# ---------------------------------------------------------------------- inside


@contextmanager
def sentences() -> Iterator[None]:
    """Ends the program with one sentence: exit code 2 for what the user can put right, 3 for a stopped run."""
    try:
        yield
    except UserError as error:
        err.print(f"perennial: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except RunStopped as error:
        err.print(f"perennial: the run stopped: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        err.print("perennial: interrupted; `perennial resume` continues a run from its last checkpoint")
        raise typer.Exit(130) from None
    except OSError as error:
        # A full disk or a folder that is gone: the files written so far are whole, so the run can be resumed.
        err.print(f"perennial: {error.filename or 'a file'}: {error.strerror}", style="red", markup=False)
        raise typer.Exit(2) from None


@contextmanager
def watching(rounds: int, quiet: bool) -> Iterator[Callable[[loop.Progress], None]]:
    """A progress bar on a terminal, plain lines otherwise, nothing when quiet."""
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task("rounds", total=rounds)

            def advance(progress: loop.Progress) -> None:
                bar.update(task, completed=progress.round)
                if line := progress_line(progress):
                    bar.console.print(line, markup=False, highlight=False)

            yield advance
    else:

        def say(progress: loop.Progress) -> None:
            if line := progress_line(progress):
                print(line, file=sys.stderr, flush=True)

        yield say


def _run_on_flower(config: RunConfig, path: Path, superlink: str, quiet: bool, resume: bool = False) -> None:
    with ExitStack() as stack:
        watch = stack.enter_context(watching(config.rounds, quiet))
        if config.runtime == "simulation":
            connection = stack.enter_context(simulation(path / "flower"))
        else:
            connection = Connection(superlink, {})
        for row in connection.execute(config, path, resume):
            if row["kind"] == "round":
                watch(loop.Progress(row["round"], config.rounds, row["metrics"], row["left_out"]))


def _show_run(path: Path, as_json: bool, oracle: bool) -> None:
    folder = RunFolder.open(path)
    summary = folder.summary()
    if oracle:
        summary = summarise(folder.config(), folder.rows(), seconds=summary["wall_seconds"], oracle=True)
    if as_json:
        out.print_json(data=summary)
        return
    out.print(summary_table(summary))
    out.print(f"{traffic_line(summary)}; {summary['wall_seconds']:.1f} s", highlight=False)
    for line in left_out_lines(summary):
        out.print(line, style="yellow", markup=False)
    out.print(f"run folder: {path}", highlight=False, soft_wrap=True)


def _show_method(method: type[Method], as_json: bool) -> None:
    fields = _fields(method)
    if as_json:
        about = {"title": method.title, "summary": method.summary, "source": method.source}
        out.print_json(data={**about, "evaluates": method.evaluates, "hyper-parameters": fields})
        return
    out.print(f"[bold]{method.title}[/bold]: {method.summary}\n{method.source}\n")
    out.print(_field_table(fields))


def _show_scenario(scenario: Scenario, as_json: bool) -> None:
    facts: dict[str, Any] = {
        "title": scenario.title,
        "source": scenario.source,
        "data set": scenario.dataset,
        "clients": scenario.clients,
        "input shape": list(scenario.input_shape),
        "classes": scenario.classes,
        "training environments": list(scenario.train_environments),
        "test environments": list(scenario.test_environments),
        "rounds": scenario.rounds,
        "participation": scenario.participation,
        "model": scenario.model,
    }
    fields = _fields(type(scenario))
    for name, field in fields.items():
        field["default"] = json.loads(scenario.model_dump_json())[name]
    if as_json:
        out.print_json(data={**facts, "settings": fields})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        table.add_row(f"[bold]{name}[/bold]", str(value))
    out.print(table)
    out.print()
    out.print(_field_table(fields))


def _scenario_line(scenario: Scenario) -> str:
    return f"{scenario.title} ({scenario.clients} clients, {len(scenario.test_environments)} test environments)"


def _fields(settings: type[Method] | type[Scenario]) -> dict[str, dict[str, Any]]:
    """Every field but the name, as plain data: default, bounds, text, symbol, source, search range."""
    properties = settings.model_json_schema()["properties"]
    hidden = ("title", "type", "anyOf", "items", "prefixItems")
    return {
        name: {key: value for key, value in facts.items() if key not in hidden and value not in ("", None)}
        for name, facts in properties.items()
        if name != "name"
    }


def _field_table(fields: dict[str, dict[str, Any]]) -> Table:
    table = Table("setting", "default", "what", "symbol", "bounds", "search", "source")
    for name, facts in fields.items():
        signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
        bounds = " ".join(f"{sign}{facts[key]:g}" for key, sign in signs.items() if key in facts)
        bounds = bounds or "|".join(map(str, facts.get("enum", ())))
        search = facts.get("search")
        table.add_row(
            name,
            str(facts.get("default", "")),
            facts.get("description", ""),
            facts.get("symbol", ""),
            bounds,
            f"{search['kind']} {list(search['values'])}" if search else "",
            facts.get("source", ""),
        )
    return table


def main() -> None:
    """Entry point of the `perennial` command."""
    app()
