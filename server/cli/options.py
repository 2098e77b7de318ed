"""The command line's app, and the options that several commands share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import click
import typer
from typer.core import TyperGroup, TyperOption

from perennial.common.plugins import plugin
from perennial.common.utils.errors import UserError
from perennial.common.utils.events import VARIABLE, set_format
from perennial.server.cli.completion import methods, scenarios
from perennial.server.cli.console import sentences
from perennial.server.runs import MOST
from perennial.server.selection.split_rule import Select

T = TypeVar("T")
WITH_PLUGINS = {"run", "list", "show", "sweep", "tune", "compare", "check"}


class Commands(TyperGroup):
    """The commands, each with `--log-format`, and those that take names with `--plugin`."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name."""
        command = super().get_command(ctx, cmd_name)
        if (
            command
            and not isinstance(command, click.Group)
            and all(p.name != "log_format" for p in command.params)
        ):
            command.params.append(
                TyperOption(
                    param_decls=["--log-format"],
                    type=click.Choice(["text", "json"]),
                    envvar=VARIABLE,
                    default="text",
                    show_default=True,
                    expose_value=False,
                    is_eager=True,
                    callback=lambda _, __, name: set_format(name),
                    help="What standard error has: sentences, or an event a line.",
                )
            )
        if command and not isinstance(command, click.Group):
            for option in command.params:
                if option.callback is None and option.default != "" and option.nargs == 1 and not option.multiple:
                    option.callback = _not_empty
        if command and cmd_name in WITH_PLUGINS and all(p.name != "plugin" for p in command.params):
            command.params.append(
                TyperOption(
                    param_decls=["--plugin"],
                    metavar="MODULE",
                    multiple=True,
                    expose_value=False,
                    is_eager=True,
                    callback=lambda _, __, modules: _load(modules),
                    help="Module of this folder, or installed, with a method, scenario or model. Repeatable.",
                )
            )
        return command


def _not_empty(ctx: click.Context, option: click.Parameter, value: T) -> T:
    """What was said; with one sentence for an empty text, which would be the current folder, or nothing."""
    if value == "" and not ctx.resilient_parsing:
        with sentences():
            name = option.opts[0] if option.param_type_name == "option" else option.human_readable_name
            raise UserError(f"{name}: an empty text is not possible; name something, or leave it out")
    return value


def _load(modules: Iterable[str]) -> None:
    with sentences():
        for module in modules:
            plugin(module)


app = typer.Typer(cls=Commands, no_args_is_help=True)


def _tell_versions(asked: bool) -> None:
    if asked:
        from perennial.server.selection.summary import versions

        typer.echo(", ".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_versions, help="Print what is installed.")
    ] = False,
) -> None:
    """Federated learning for clients whose data differ from each other and from what they will meet later."""


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

Metrics = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", envvar="PERENNIAL_METRICS", help="Where to answer Prometheus at /metrics."),
]

MetricsClients = Annotated[
    bool, typer.Option("--metrics-clients", help="Name clients in the metrics; else they are only counted.")
]
MethodArgument = Annotated[
    str | None,
    typer.Argument(metavar="METHOD", help="Method, see `perennial list methods`.", autocompletion=methods),
]
MethodOption = Annotated[str | None, typer.Option("--method", help="The same.", autocompletion=methods)]
ScenarioName = Annotated[
    str | None, typer.Option(help="Scenario, see `perennial list scenarios`.", autocompletion=scenarios)
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="In its place: TOML file that has one, such as `describe` writes.")
]
LabelColumn = Annotated[str, typer.Option(metavar="NAME", help="A table's column of the class.")]
EnvironmentColumn = Annotated[str, typer.Option(metavar="NAME", help="A table's column of the environment.")]
Rounds = Annotated[int | None, typer.Option(help=r"Communication rounds.  \[default: the scenario's]")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A hyper-parameter or run setting; scenario.KEY, model.KEY, privacy.KEY, aggregation.KEY for theirs. "
        "Repeatable.",
    ),
]
DataRoot = Annotated[
    str | None, typer.Option(metavar="PATH", help=r"Folder of the raw data sets.  \[env: PERENNIAL_DATA]")
]
Device = Annotated[str | None, typer.Option(help=r"auto, cpu, cuda or cuda:N.  \[default: auto]")]
Selected = Annotated[
    Select,
    typer.Option("--select", help="What a trial is chosen by, on training data alone (docs/selection.md)."),
]
Prune = Annotated[
    bool,
    typer.Option(
        "--prune/--no-prune",
        help="Stop trials whose score is below the median after a third of the rounds (docs/selection.md).",
    ),
]
TrialRounds = Annotated[
    int | None,
    typer.Option(min=1, help="Rounds of each trial of a search, if fewer; what it chooses runs them all."),
]
Jobs = Annotated[int | None, typer.Option(min=1, max=MOST, help=r"Runs at a time.  \[default: one per core]")]
Pool = Annotated[Path, typer.Option("--out", help="Folder of the run folders; studies may share it.")]
