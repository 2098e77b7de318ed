"""The command line: `perennial run | resume | list | show | sweep | compare | reproduce | report | certs | …`."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from client.app import DEFAULTS
from common.config import RunConfig, load_config
from common.data.datasets import DATASETS
from common.data.own import LABEL
from common.data.scenario import Scenario, Spurious
from common.data.scenarios import SCENARIOS
from common.errors import RunStopped, UserError
from common.knobs import Search
from common.methods import METHODS, method_class
from common.methods.base import Method
from common.models import MODELS
from common.suggest import unknown
from server import loop
from server.app import default_out
from server.cli.tables import (
    cluster_table,
    left_out_lines,
    privacy_line,
    summary_table,
    traffic_line,
)
from server.deployment.remote import Connection, deployment, simulation
from server.folder import RunFolder
from server.local import LocalRuntime
from server.report.track import require, tracking
from server.study.compare import Plan, compare, comparison_lines, comparison_tables, entries_of, trouble_lines
from server.study.reproduce import (
    load_reproduction,
    remark_lines,
    reproduction_json,
    reproduction_table,
    reproductions,
)
from server.study.runs import Standing, cores, standing_line
from server.study.sweep import key_of, sweep, sweep_rows, sweep_table
from server.summary import summarise

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
    typer.Option(
        metavar="HOST:PORT",
        envvar="PERENNIAL_SUPERLINK",
        help="Control API of the deployment runtime's SuperLink, or its name in Flower's config.toml.",
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", envvar="PERENNIAL_CA", help="Certificate of the SuperLink's CA, for TLS."
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", envvar="PERENNIAL_INSECURE", help="Plaintext to another machine."),
]

LabelColumn = Annotated[str, typer.Option(metavar="NAME", help="A table's column of the class.")]
EnvironmentColumn = Annotated[str, typer.Option(metavar="NAME", help="A table's column of the environment.")]
Rounds = Annotated[int | None, typer.Option(help=r"Communication rounds.  \[default: the scenario's]")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A hyper-parameter or run setting; scenario.KEY, model.KEY, privacy.KEY for theirs. Repeatable.",
    ),
]
DataRoot = Annotated[
    str | None, typer.Option(metavar="PATH", help=r"Folder of the raw data sets.  \[env: PERENNIAL_DATA]")
]
Device = Annotated[str | None, typer.Option(help=r"auto, cpu, cuda or cuda:N.  \[default: auto]")]
Jobs = Annotated[int | None, typer.Option(min=1, help=r"Runs at a time.  \[default: one per core]")]
Pool = Annotated[Path, typer.Option("--out", help="Folder of the run folders; studies may share it.")]
POOL = Path("runs/studies")


class Kind(StrEnum):
    """What `perennial list` lists."""

    methods = "methods"
    scenarios = "scenarios"
    datasets = "datasets"
    models = "models"
    reproductions = "reproductions"


class Tracker(StrEnum):
    """What a run can also be written to."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"


class Format(StrEnum):
    """How `perennial report` writes."""

    html = "html"
    markdown = "markdown"
    csv = "csv"


class Thing(StrEnum):
    """What `perennial show` shows."""

    method = "method"
    scenario = "scenario"
    run = "run"


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
            _run_on_flower(complete, path, deployment(superlink, ca, insecure), as_json, track=track)
        _show_run(path, as_json, oracle)


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
            _run_on_flower(config, folder, deployment(superlink, ca, insecure), as_json, resume=True)
        _show_run(folder, as_json, oracle=False)


@app.command("list")
def list_things(kind: Annotated[Kind, typer.Argument(help="What to list.")], as_json: Json = False) -> None:
    """List what there is, one line each."""
    lines: dict[Kind, Mapping[str, str]] = {
        Kind.methods: {name: f"{method.title}: {method.summary}" for name, method in METHODS.items()},
        Kind.scenarios: {name: _scenario_line(scenario) for name, scenario in SCENARIOS.items()},
        Kind.datasets: {name: dataset.summary for name, dataset in DATASETS.items()},
        Kind.models: {name: model.summary for name, model in MODELS.items()},
        Kind.reproductions: {},
    }
    if kind is Kind.reproductions:  # files, so that one of them may be damaged
        with sentences():
            lines[kind] = {name: load_reproduction(name).title for name in reproductions()}
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


@app.command("sweep")
def sweep_method(
    method: Annotated[str, typer.Option(help="Method, see `perennial list methods`.")],
    scenario: Annotated[str, typer.Option(help="Scenario, see `perennial list scenarios`.")],
    count: Annotated[int, typer.Option("--trials", min=1, help="How many; trial 0 is the defaults.")],
    seed: Annotated[int, typer.Option(help="Keys the draws and the runs.")] = 0,
    rounds: Rounds = None,
    settings: Settings = None,
    jobs: Jobs = None,
    folder: Pool = POOL,
    data_root: DataRoot = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Random search over a method's search ranges. Started again, it continues."""
    options = {
        "method": method,
        "scenario": scenario,
        "rounds": rounds,
        "seed": seed,
        "data_root": data_root,
        "device": device,
    }
    fixed = [key_of(setting) for setting in settings or ()]
    with sentences(), watching_runs(as_json) as watch:
        base = load_config(None, options, settings or [])
        outcomes = sweep(base, count, fixed, folder, jobs or cores(), watch)
    if as_json:
        out.print_json(data=sweep_rows(outcomes))
    else:
        print_tables(sweep_table(outcomes))
        print_troubles(outcome.trouble for outcome in outcomes if outcome.trouble)


@app.command("compare")
def compare_methods(
    methods: Annotated[
        str, typer.Option(help="Methods, with commas between them; FedAvg, Local and a constant are always in.")
    ],
    scenario: Annotated[str, typer.Option(help="Scenario, see `perennial list scenarios`.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, …")] = 3,
    count: Annotated[
        int, typer.Option("--trials", min=1, help="Search budget of every method, with seed 0; 1 is the defaults.")
    ] = 1,
    rounds: Rounds = None,
    settings: Settings = None,
    jobs: Jobs = None,
    folder: Pool = POOL,
    data_root: DataRoot = None,
    device: Device = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also the round that is best on test data, labelled so.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Methods side by side, tuned alike. Started again, it continues."""
    with sentences(), watching_runs(as_json) as watch:
        plan = Plan(
            entries=entries_of(name.strip() for name in methods.split(",")),
            scenario=scenario,
            seeds=seeds,
            trials=count,
            rounds=rounds,
            settings=tuple(settings or ()),
            data_root=data_root,
            device=device,
            oracle=oracle,
        )
        comparison = compare(plan, folder, jobs or cores(), watch)
    if as_json:
        out.print_json(data=comparison.json())
    else:
        print_tables(*comparison_tables(comparison))
        out.print("\n".join(comparison_lines(comparison)), markup=False, highlight=False, soft_wrap=True)
        print_troubles(trouble_lines(comparison))


@app.command("reproduce")
def reproduce_table(
    name: Annotated[str, typer.Argument(help="A table of a paper, see `perennial list reproductions`.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version in minutes, not comparable with the paper.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in place of the table's.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds in place of the table's.")] = None,
    count: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Search budget in place of the table's; 1 is its settings."),
    ] = None,
    jobs: Jobs = None,
    folder: Pool = POOL,
    figures: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also write figures there.")] = None,
    data_root: DataRoot = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """A table of a paper beside ours; runs what is missing. Started again, it continues."""
    with sentences(), watching_runs(as_json) as watch:
        table = load_reproduction(name)
        plan = table.plan(quick, data_root, device, rounds=rounds, seeds=seeds, trials=count)
        comparison = compare(plan, folder, jobs or cores(), watch)
        if figures:
            from server.report.pictures import pictures  # matplotlib takes its time

            figures.mkdir(parents=True, exist_ok=True)
            for kind, svg in pictures(comparison, table.drawn).items():
                (figures / f"{name}-{kind}.svg").write_text(svg, encoding="utf-8")
    if as_json:
        out.print_json(data=reproduction_json(table, comparison))
    else:
        print_tables(reproduction_table(table, comparison))
        lines = [*remark_lines(table), *comparison_lines(comparison)]
        out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        print_troubles(trouble_lines(comparison))


@app.command("report")
def report_runs(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    file: Annotated[
        Path | None,
        typer.Option("--out", help=r"File to write.  \[default: report.html in the first folder; others print]"),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.html,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also the round that is best on test data, labelled so.")
    ] = False,
) -> None:
    """Write a page about runs: tables, figures, configurations; or its tables alone."""
    from server.report.report import report  # matplotlib takes its time, and no other command draws

    with sentences():
        text, skipped = report(folders, form.value, oracle)
        if file is None and form is Format.html:
            file = folders[0] / "report.html"
        if file:
            file.write_text(text, encoding="utf-8")
        else:
            print(text, end="")
        for line in skipped:
            err.print(f"skipped: {line}", style="yellow", markup=False, soft_wrap=True)
        if file:
            err.print(f"report: {file}", highlight=False, soft_wrap=True)


@app.command("certs")
def make_certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make; nothing is overwritten.")],
    sites: Annotated[int | None, typer.Option(min=0, help="How many: site-1, site-2, …")] = None,
    names: Annotated[list[str] | None, typer.Option("--name", help="A site's name, in place of --sites.")] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME_OR_IP",
            help="What sites dial, beside localhost, 127.0.0.1 and superlink. Repeatable.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Validity of the server certificate.")] = 365,
    add: Annotated[
        bool,
        typer.Option(
            "--add", help="Add sites to DIR; and a server certificate, where the old one was taken away."
        ),
    ] = False,
) -> None:
    """Make a development CA, a server certificate and a key for each site."""
    from server.deployment import certs

    with sentences():
        if (sites is None) == (not names):
            raise UserError("say how many sites with --sites N, or name each with --name NAME, one of the two")
        made = certs.make(folder, names or sites or 0, hosts or [], days, add)
        out.print(certs.about(folder, made), markup=False, highlight=False, soft_wrap=True)


@app.command("register")
def register_sites(
    keys: Annotated[
        list[Path], typer.Argument(metavar="KEY.pub...", help="Public keys, as `certs` makes them, or folders.")
    ],
    superlink: SuperLink = "deployment",
    ca: Ca = None,
    insecure: Insecure = False,
) -> None:
    """Let sites join a SuperLink that authenticates them, by their public keys."""
    from server.deployment.certs import public_keys

    with sentences(), deployment(superlink, ca, insecure) as connection:
        for key in public_keys(keys):
            node = connection.register(key)
            out.print(f"{key.stem}: {f'node {node}' if node else 'registered already'}", highlight=False)


@app.command("describe")
def describe_data(
    path: Annotated[Path, typer.Argument(help="Folder of pictures, or .csv, .parquet or .npz file.")],
    sites: Annotated[list[str] | None, typer.Option("--site", help="Name of a site. Repeatable.")] = None,
    label_column: LabelColumn = LABEL,
    environment_column: EnvironmentColumn = "",
    as_json: Json = False,
) -> None:
    """Describe data as the server announces them to sites: the scenario of a run's configuration, as TOML."""
    from client.node.describe import announcement, describe

    with sentences():
        found = announcement(describe(path, sites or [], label_column, environment_column))
    if as_json:
        out.print_json(data={"scenario": found})
    else:  # a list in JSON is one in TOML, too, and on one line
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in found.items()]
        print("\n".join(["[scenario]", *lines]))


@app.command("join")
def join_runs(
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="PERENNIAL_SUPERLINK", help="The SuperLink's Fleet API.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="This site's data: folder of pictures, or .csv, .parquet or .npz file.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="In place of data: client N of a run's scenario.")
    ] = None,
    name: Annotated[str, typer.Option(help=r"This site's.  \[default: that of the key, or of the data]")] = "",
    label_column: LabelColumn = "",
    environment_column: EnvironmentColumn = "",
    device: Annotated[str, typer.Option(envvar="PERENNIAL_DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    state: Annotated[
        Path, typer.Option(metavar="DIR", envvar="PERENNIAL_STATE", help="Where the personal model is kept.")
    ] = Path(DEFAULTS["state-dir"]),
    ca: Ca = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="PERENNIAL_KEY", help="This site's private key, if sites are registered."
        ),
    ] = None,
    insecure: Insecure = False,
    health: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", envvar="PERENNIAL_HEALTH", help="Where to serve the SuperNode's health."
        ),
    ] = "",
) -> None:
    """Take part in a SuperLink's runs, until Ctrl-C or SIGTERM.

    Columns are those that the server announces, unless named here.
    """
    from client.node.join import become, prepare

    with sentences():
        plan = prepare(
            superlink,
            data=data,
            partition=partition,
            name=name,
            label_column=label_column,
            environment_column=environment_column,
            device=device,
            state=state,
            ca=ca,
            key=key,
            insecure=insecure,
            health=health,
        )
    become(plan)


@app.command("serve")
def serve_models(
    state: Annotated[
        Path,
        typer.Option(metavar="DIR", envvar="PERENNIAL_STATE", help="The site's state folder."),
    ] = Path(DEFAULTS["state-dir"]),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8001,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    run_id: Annotated[
        str | None, typer.Option("--run", help=r"Id of a run, a folder in DIR.  \[default: the newest]")
    ] = None,
    client: Annotated[
        str | None, typer.Option(help=r"A client's id, a folder in the run's.  \[default: the only one]")
    ] = None,
    data_root: DataRoot = None,
    device: Device = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most samples in a request.")] = 1024,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file, for TLS.")] = None,
    key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key, PEM.")] = None,
) -> None:
    """Serve a site's models over the Open Inference Protocol (gRPC); follows the training."""
    from client.serving import server as serving  # gRPC and PyTorch

    def say(sentence: str) -> None:
        err.print(f"perennial: {sentence}", markup=False, highlight=False, soft_wrap=True)

    with sentences():
        root = Path(data_root) if data_root else None
        models = serving.Models(state, say, run=run_id, client=client, data_root=root, device=device or "auto")
        tls = serving.credentials(certificate, key_file)
        server = serving.Server(models, host, port, max_batch=max_batch, tls=tls)
        say(f"listening on {host}, port {server.port}, {'with TLS' if tls else 'without TLS'}")
        serving.serve(server)


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
        err.print(
            "perennial: interrupted; `perennial resume RUN-FOLDER` continues from the last checkpoint",
            markup=False,
        )
        raise typer.Exit(130) from None
    except OSError as error:
        # A full disk or a folder that is gone: the files written so far are whole, so the run can be resumed.
        text = f"perennial: {error.filename or 'a file'}: {error.strerror}"
        err.print(text, style="red", markup=False, soft_wrap=True)
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
                if line := loop.progress_line(progress):
                    bar.console.print(line, markup=False, highlight=False)

            yield advance
    else:

        def say(progress: loop.Progress) -> None:
            if line := loop.progress_line(progress):
                print(line, file=sys.stderr, flush=True)

        yield say


@contextmanager
def watching_runs(quiet: bool) -> Iterator[Callable[[Standing], None]]:
    """The same for many runs; Ctrl-C ends them with a sentence."""
    try:
        if quiet:
            yield lambda _: None
        elif err.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=err, transient=True) as bar:
                task = bar.add_task("rounds")

                def advance(standing: Standing) -> None:
                    text = f"{standing.ended}/{standing.runs} runs, rounds"
                    bar.update(task, description=text, completed=standing.rounds_done, total=standing.rounds)
                    if line := standing_line(standing):
                        bar.console.print(line, markup=False, highlight=False)

                yield advance
        else:

            def say(standing: Standing) -> None:
                if line := standing_line(standing):
                    print(line, file=sys.stderr, flush=True)

            yield say
    except KeyboardInterrupt:
        err.print("perennial: interrupted; the same command continues", style="red", markup=False)
        raise typer.Exit(130) from None


def print_tables(*tables: Table) -> None:
    """Tables as wide as they are where no terminal sets a width."""
    if not out.is_terminal:
        out.width = max(out.width, *(out.measure(table).maximum for table in tables), 200)
    for table in tables:
        out.print(table)


def print_troubles(lines: Iterable[str]) -> None:
    """What is not in a table, and why."""
    for line in lines:
        out.print(line, style="yellow", markup=False, soft_wrap=True)


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


def _show_run(path: Path, as_json: bool, oracle: bool) -> None:
    folder = RunFolder.open(path)
    config, summary = folder.config(), folder.summary()
    if oracle:
        summary |= summarise(config, folder.rows(), seconds=summary["wall_seconds"], oracle=True)
    if as_json:
        out.print_json(data=summary)
        return
    out.print(summary_table(summary))
    if clusters := cluster_table(folder.rows()):
        out.print(clusters)
    out.print(f"{traffic_line(summary)}; {summary['wall_seconds']:.1f} s", highlight=False)
    if line := privacy_line(summary):
        out.print(line, highlight=False, soft_wrap=True)
    for line in left_out_lines(summary):
        out.print(line, style="yellow", markup=False)
    for caution in (config.method.caution(config.scenario), config.method.model_caution(config.model)):
        if caution:
            out.print(f"caution: {caution}", style="yellow", markup=False)
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
    values, every = json.loads(scenario.model_dump_json()), _fields(type(scenario))
    fields = {name: {**field, "default": values[name]} for name, field in every.items() if name in values}
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
    removed = "; the shortcut removed" if isinstance(scenario, Spurious) and scenario.oracle else ""
    size = f"{scenario.clients} clients, {len(scenario.test_environments)} test environments"
    return f"{scenario.title}{removed} ({size})"


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
    table = Table("setting", "default", "what it is")
    for name, facts in fields.items():
        signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
        bounds = " ".join(f"{sign}{facts[key]:g}" for key, sign in signs.items() if key in facts)
        more = {
            "symbol": facts.get("symbol"),
            "bounds": bounds or " | ".join(map(str, facts.get("enum", ()))),
            "search": str(Search(**facts["search"])) if "search" in facts else "",
            "source": facts.get("source"),
        }
        lines = [facts.get("description", ""), *(f"{key}: {value}" for key, value in more.items() if value)]
        table.add_row(name, str(facts.get("default", "")), Text("\n".join(lines)), end_section=True)
    return table


def main() -> None:
    """Entry point of the `perennial` command."""
    app()
