"""The command line's app, how a command is declared, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperArgument, TyperCommand
from typer.models import ArgumentInfo

from perennial.common.plugins import plugin
from perennial.common.utils.errors import UserError
from perennial.common.utils.events import VARIABLE, set_format
from perennial.server.cli.completion import methods, scenarios
from perennial.server.cli.console import Working, sentences
from perennial.server.runs import MOST, POOL
from perennial.server.selection.split_rule import WITHOUT_TEST_DATA, Select

if TYPE_CHECKING:
    from perennial.server.deployment.submission import Connection

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

LogFormat = Annotated[
    str,
    typer.Option(
        click_type=click.Choice(["text", "json"]),
        envvar=VARIABLE,
        is_eager=True,
        callback=set_format,
        help="What standard error has: sentences, or an event a line.",
    ),
]
PlugIns = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="Module of this folder, or installed, with a method, scenario or model. Repeatable.",
    ),
]


class Command(TyperCommand):
    """A command that refuses empty texts, and the name of an option where a value belongs."""

    def __init__(
        self, *arguments: Any, params: list[click.Parameter], helps: dict[str, str], **others: Any
    ) -> None:
        for option in params:
            if isinstance(option, TyperArgument):
                option.help = helps.get(option.name or "")  # Typer 0.20's is lost in Click 8.5
            if option.callback is None and option.default != "" and option.nargs == 1 and not option.multiple:
                option.callback = _not_empty
        super().__init__(*arguments, params=params, **others)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As Click does; where an option is none, but a setting is called so, the sentence says how it is set."""
        names = {name for option in self.params for name in option.opts if name.startswith("--")}
        with sentences():
            try:
                rest = super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                if "--set" in names and (how := _as_setting(error)):
                    raise UserError(f"{error.option_name} is no option; write {how}") from None
                raise
            for option in self.params:
                if str(value := ctx.params.get(option.name or "")) in names:
                    place = option.metavar or "value"
                    raise UserError(f"{option.opts[0]} {value}: the {place} of {option.opts[0]} is missing")
        return rest


def _as_setting(error: click.NoSuchOption) -> str:
    """How a setting is given that is written as an option; nothing where none is called so."""
    from perennial.common.config import RunConfig
    from perennial.common.methods.base import LocalTraining
    from perennial.common.utils.suggestions import ALSO_CALLED, setting_meant

    name = error.option_name.lstrip("-").replace("-", "_")
    known = {*RunConfig.model_fields, *LocalTraining.model_fields, "scenario.clients", "model.name"}
    if name not in {*known, *ALSO_CALLED} and error.possibilities:
        return ""
    first, *others = [name] if name in known else setting_meant(name, known, {}) or [""]
    return " ".join([f"--set {first}=VALUE", *(f"--set {more}" for more in others)]) if first else ""


def _not_empty(ctx: click.Context, option: click.Parameter, value: object) -> object:
    """The value; one sentence for an empty text, which would be the current folder, or nothing."""
    if value == "" and not ctx.resilient_parsing:
        with sentences():
            name = option.opts[0] if option.param_type_name == "option" else option.human_readable_name
            raise UserError(f"{name}: an empty text is not possible; name something, or leave it out")
    return value


def command(
    name: str, *, plugins: bool = False, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command of the app; what its function raises ends in one sentence.

    A parameter whose type is a dataclass stands for an option for each of its fields; one of type `Working` is the
    command's own. With `plugins` there is `--plugin`, for commands that take names.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        parameters, groups = list[Parameter](), dict[str, Any]()
        for parameter in signature(function, eval_str=True).parameters.values():
            group = parameter.annotation
            if is_dataclass(group) and group is not Working:
                groups[parameter.name] = group
                parameters += signature(groups[parameter.name], eval_str=True).parameters.values()
            elif group is not Working:
                parameters.append(parameter)
        shared = {"log_format": (LogFormat, "text"), **({"plugin": (PlugIns, None)} if plugins else {})}
        parameters += [
            Parameter(option, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, (annotation, default) in shared.items()
        ]

        def call(**values: Any) -> None:
            with sentences() as working:
                del values["log_format"]
                for module in values.pop("plugin", None) or ():
                    plugin(module)
                for argument, group in groups.items():
                    values[argument] = group(**{field: values.pop(field) for field in signature(group).parameters})
                if "working" in signature(function).parameters:
                    values["working"] = working
                function(**values)

        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
        call.__signature__ = Signature(own)  # type: ignore[attr-defined] # which Typer reads
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
        call.__doc__ = function.__doc__
        helps = {
            parameter.name: parameter.default.help
            for parameter in own
            if isinstance(parameter.default, ArgumentInfo) and parameter.default.help
        }
        app.command(name, cls=partial(Command, helps=helps), **settings)(call)  # type: ignore[arg-type]
        return function

    return register


def _tell_versions(wanted: bool) -> None:
    if wanted:
        from perennial.server.selection.summary import versions

        typer.echo(", ".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def whole(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_tell_versions, help="Print what is installed."
    ),
) -> None:
    """Federated learning for clients whose data differ from each other and from what they will meet later."""


Json = Annotated[bool, typer.Option("--json", help="Print data as JSON.")]
LINK = "Deployment: where the SuperLink is"
"""Panel of the help."""
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        envvar="PERENNIAL_CA",
        help="Certificate of the SuperLink's CA, for TLS.",
        rich_help_panel=LINK,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", envvar="PERENNIAL_INSECURE", help="Plaintext to another machine.", rich_help_panel=LINK
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="PERENNIAL_METRICS",
        help="For Prometheus: where it may ask for numbers of this process, at /metrics.",
        rich_help_panel="Monitoring with Prometheus",
    ),
]
LabelColumn = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A table's column of the class, or with commas between them the columns of other targets.",
    ),
]
EnvironmentColumn = Annotated[str, typer.Option(metavar="NAME", help="A table's column of the environment.")]
Rounds = Annotated[int | None, typer.Option(help=r"Communication rounds.  \[default: the scenario's]")]
SETTINGS: Any = typer.Option(
    [],
    "--set",
    metavar="KEY=VALUE",
    show_default=False,
    help="A hyper-parameter or run setting; scenario.KEY, model.KEY, privacy.KEY, aggregation.KEY for theirs. "
    "Repeatable.",
)
DataRoot = Annotated[
    str | None, typer.Option(metavar="PATH", help=r"Folder of the raw data sets.  \[env: PERENNIAL_DATA]")
]
Device = Annotated[str | None, typer.Option(help=r"auto, cpu, cuda or cuda:N.  \[default: auto]")]
Selected = Annotated[
    str,
    typer.Option(
        "--select",
        click_type=click.Choice([own.value for own in WITHOUT_TEST_DATA]),
        help="What a trial is chosen by, on training data alone (docs/selection.md).",
    ),
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


@dataclass
class LinkOptions:
    """Where a deployment's SuperLink is."""

    superlink: str = typer.Option(
        "deployment",
        metavar="HOST:PORT",
        envvar="PERENNIAL_SUPERLINK",
        help="Control API of the deployment runtime's SuperLink, or its name in Flower's config.toml.",
        rich_help_panel=LINK,
    )
    ca: Ca = None
    insecure: Insecure = False

    def connected(self) -> AbstractContextManager[Connection]:
        """A connection to it. Raises `UserError`."""
        from perennial.server.deployment.submission import connected

        return connected(self.superlink, self.ca, self.insecure)


@dataclass
class StudyOptions:
    """What all studies take; `vars` of it are arguments of `perennial.sweep` and of the others."""

    scenario: str | None = typer.Option(
        None, help="Scenario, see `perennial list scenarios`.", autocompletion=scenarios
    )
    config: Path | None = typer.Option(
        None, help="In its place: TOML file that has one, such as `describe` writes."
    )
    rounds: Rounds = None
    settings: list[str] = SETTINGS
    jobs: Jobs = None
    out: Pool = POOL
    data_root: DataRoot = None
    device: Device = None

    def __post_init__(self) -> None:
        from perennial.server.study.batch import cores

        self.jobs = self.jobs or cores()


@dataclass
class SearchOptions(StudyOptions):
    """What searches for one method's settings take."""

    name: str | None = typer.Argument(
        None, metavar="METHOD", help="Method, see `perennial list methods`.", autocompletion=methods
    )
    method: str | None = typer.Option(None, help="The same.", autocompletion=methods)
    select: Selected = Select.by_split.value
    seed: int = typer.Option(0, help="Keys the draws and the runs.")
    optimizers: str = typer.Option(
        "", metavar="NAME,NAME", help="Optimizers of which each trial draws one, such as sgd,adamw."
    )

    def arguments(self) -> dict[str, Any]:
        """Those of `perennial.sweep` and `perennial.tune`. Raises `UserError` unless there is one method."""
        if (self.name is None) == (self.method is None):
            raise UserError(
                "METHOD: name one method, as in `perennial tune fedsdr --scenario colored-digits --trials 6`"
            )
        values = {**vars(self), "method": self.name or self.method}
        del values["name"]
        values["optimizers"] = [name.strip() for name in self.optimizers.split(",") if name.strip()]
        return values
