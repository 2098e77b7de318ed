"""A deployment and its sites: from `perennial certs` and `join` to `stop` and `rollback`."""

import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from perennial.client.node.settings import DEFAULTS, Consent
from perennial.common.data.columns import LEAST
from perennial.common.data.dialect import Dialect
from perennial.common.data.site_files import LABEL
from perennial.common.data.texts import LONGEST_TEXT
from perennial.common.tasks import TaskName
from perennial.common.utils.errors import UserError, printable
from perennial.common.utils.files import write_text
from perennial.server.cli.console import counting, out, print_lines, print_tables, remark
from perennial.server.cli.options import (
    Ca,
    DataRoot,
    Device,
    EnvironmentColumn,
    Insecure,
    Json,
    LabelColumn,
    LinkOptions,
    Metrics,
    command,
)

if TYPE_CHECKING:
    from perennial.common.survey import Question
    from perennial.server.deployment.submission import Connection
    from perennial.server.survey.survey import Surveyed


@command("certs")
def make_certs(
    folder: Path = typer.Argument(..., metavar="DIR", help="Folder to make; nothing is overwritten."),
    sites: int | None = typer.Option(None, min=0, help="How many: site-1, site-2, …"),
    names: list[str] = typer.Option([], "--name", help="A site's name, in place of --sites."),
    hosts: list[str] = typer.Option(
        [],
        "--host",
        metavar="NAME_OR_IP",
        help="What sites dial, beside localhost, 127.0.0.1 and superlink. Repeatable.",
    ),
    days: int = typer.Option(365, min=1, help="Validity of the server certificate."),
    add: bool = typer.Option(
        False, "--add", help="Add sites to DIR; and a server certificate, where the old one was taken away."
    ),
) -> None:
    """Make a development CA, a server certificate and a key for each site."""
    from perennial.server.deployment import certs

    if (sites is None) == (not names):
        raise UserError("say how many sites with --sites N, or name each with --name NAME, one of the two")
    made = certs.make(folder, names or sites or 0, hosts, days, add)
    print_lines([certs.about(folder, made)])


KEYS: Any = typer.Argument(..., metavar="KEY.pub...", help="Public keys, as `certs` makes them, or folders.")


@command("register")
def register_sites(link: LinkOptions, keys: list[Path] = KEYS) -> None:
    """Let sites join a SuperLink that authenticates them, by their public keys."""
    from perennial.server.deployment.certs import public_keys
    from perennial.server.deployment.control import register

    with link.connected() as connection:
        let_in = public_keys(keys)
        nodes = zip(let_in, register(connection, let_in), strict=True)
        print_lines(f"{key.stem}: {f'node {node}' if node else 'registered already'}" for key, node in nodes)


@command("unregister")
def unregister_sites(link: LinkOptions, keys: list[Path] = KEYS) -> None:
    """Shut sites out of a SuperLink, by their public keys: now, and for good."""
    from perennial.server.deployment.certs import public_keys
    from perennial.server.deployment.control import unregister

    with link.connected() as connection:
        gone = public_keys(keys)
        nodes = zip(gone, unregister(connection, gone), strict=True)
        print_lines(f"{key.stem}: shut out, was node {node}" for key, node in nodes)


@command("status")
def show_status(
    link: LinkOptions,
    keys: list[Path] = typer.Argument(
        None, metavar="[KEY.pub...]", help="Public keys, or folders of them, that give sites their names."
    ),
    as_json: Json = False,
) -> None:
    """List the runs and the sites of a SuperLink."""
    with link.connected() as connection:
        if connection.ends_soon:
            remark(connection.ends_soon)
        found = _status(connection, keys or [])
    if as_json:
        out.print_json(data=found)
        return
    for shown in _status_tables(found):
        print_tables(shown) if isinstance(shown, Table) else out.print(shown)


def status_tables(connection: "Connection", keys: Iterable[Path]) -> list[Table | str]:
    """The runs and the sites of a SuperLink; keys name sites. Raises `UserError`."""
    return _status_tables(_status(connection, keys))


def _status(connection: "Connection", keys: Iterable[Path]) -> dict[str, list[dict[str, str]]]:
    from perennial.server.deployment.certs import public_keys
    from perennial.server.deployment.control import runs, sites

    joined: dict[str, Iterable[object]] = {
        "runs": runs(connection),
        "sites": sites(connection, public_keys([*keys])),
    }
    return {
        name: [{key: printable(value) for key, value in vars(row).items()} for row in rows]
        for name, rows in joined.items()
    }


def _status_tables(found: dict[str, list[dict[str, str]]]) -> list[Table | str]:
    made: list[Table | str] = []
    for name, rows in found.items():
        if not rows:
            made.append(f"no {name}")
            continue
        columns = [column for column in rows[0] if any(row[column] for row in rows)]
        table = Table(title=name)
        for column in columns:  # an id that is cut is of no use
            table.add_column(column, no_wrap=column in ("run", "node"), overflow="fold")
        for row in rows:
            table.add_row(*(row[column] for column in columns))
        made.append(table)
    return made


@command("stop")
def stop_run(
    link: LinkOptions, run: str = typer.Argument(..., help="Its id; `perennial status` lists them.")
) -> None:
    """End a run on a SuperLink; `perennial resume` may go on from its last checkpoint."""
    from perennial.server.deployment.control import stop

    with link.connected() as connection:
        stop(connection, run)
        print_lines([f"run {run} is stopped"])


Least = Annotated[
    int, typer.Option("--at-least", min=1, metavar="ROWS", help="Of fewer rows of a site, nothing is told.")
]


@dataclass
class SurveyOptions:
    """What is asked about data, and where the answer goes."""

    impute: list[str] = typer.Option(
        [], metavar="[COLUMN=]RULE", help="An empty cell counts as median, mean or most-frequent. Repeatable."
    )
    category: list[str] = typer.Option([], metavar="COLUMN", help="Its numbers are names. Repeatable.")
    drop: list[str] = typer.Option([], metavar="COLUMN", help="Nobody uses it. Repeatable.")
    task: TaskName = typer.Option(
        "classes",
        help="What is predicted: a class, numbers, several labels that are 0 or 1 each, or the time to an event.",
    )
    label_column: LabelColumn = LABEL
    environment_column: EnvironmentColumn = ""
    least: Least = LEAST
    scope: Literal["all", "site"] = typer.Option(
        "all", help="Whose numbers columns are scaled and filled by: all sites', or each's own."
    )
    weights: Literal["none", "balanced"] = typer.Option(
        "none", "--class-weights", help="balanced: rare classes count more, until all count the same."
    )
    quantiles: bool = typer.Option(
        False, "--quantiles", help="Also tell those of columns of numbers, 5 to 95 %, as comments."
    )
    file: Path | None = typer.Option(
        None, "--out", "-o", metavar="FILE", help="File to write, once all is described."
    )
    as_json: Json = False

    def question(self, secure: bool = False) -> "Question":
        """What each site is asked. Raises `UserError`, also where a file of one's own would be written over."""
        from perennial.server.run.output_files import must_be_ours
        from perennial.server.survey.describe import question

        found = question(
            self.impute,
            self.category,
            self.drop,
            target=self.task,
            label_column=self.label_column,
            environment_column=self.environment_column,
            least=self.least,
            secure=secure,
        )
        if self.file:
            must_be_ours(self.file, (".json",) if self.as_json else (".toml",))
        return found

    def preparation(self) -> dict[str, bool]:
        """Arguments that say what is made of the answers."""
        balance = self.weights == "balanced"
        return {"per_site": self.scope == "site", "balance": balance, "quantiles": self.quantiles}


@dataclass
class TableOptions:
    """How .csv files are written."""

    separator: str = typer.Option("", metavar="CHARACTER", help='Of cells: ";", "|" or tab.  \\[default: a comma]')
    decimal: str = typer.Option("", metavar="CHARACTER", help='In numbers: "," as in 3,5.  \\[default: a point]')
    encoding: str = typer.Option("", metavar="NAME", help=r"Of letters, such as latin-1.  \[default: UTF-8]")

    def dialect(self) -> Dialect:
        """All of them. Raises `UserError`."""
        return Dialect.of(self)


@command("describe")
def describe_data(
    options: SurveyOptions,
    tables: TableOptions,
    path: Path = typer.Argument(
        ..., help="Folder of pictures, .csv, .parquet or .npz file; or folder of the sites' tables."
    ),
    sites: list[str] = typer.Option(
        [],
        "--site",
        help=r"Of a folder of tables, a site whose table counts; of other data, a site's name. Repeatable.  "
        r"\[default: all of the folder]",
    ),
    text_column: str = typer.Option("", metavar="COLUMN", help="Of a table, texts, which are all of a sample."),
    tokenizer: Path | None = typer.Option(
        None, metavar="FILE", help=r"Of Hugging Face's tokenizers, for the texts.  \[default: hashes of words]"
    ),
    length: int = typer.Option(
        64, min=1, max=LONGEST_TEXT, help="Tokens of a text that count, from its beginning."
    ),
    image_column: str = typer.Option(
        "",
        metavar="COLUMN",
        help="Of a table, pictures beside the other columns: their paths from the table, or bytes.",
    ),
) -> None:
    """Describe data as the server announces them to sites: the scenario of a run's configuration, as TOML.

    Of a folder of tables it is what `perennial survey` would write if each were a site's.
    """
    from perennial.server.survey.describe import describe, describe_pictures, describe_texts

    if text_column and image_column:
        raise UserError("--image-column is not possible with --text-column; a text is all of a sample")
    if tokenizer and not text_column:
        raise UserError("--tokenizer is for texts; say their column with --text-column")
    dialect, question, preparation = tables.dialect(), options.question(), options.preparation()
    with counting(f"reading {path}"):
        if text_column:
            found = describe_texts(
                path,
                text_column,
                question,
                sites,
                length=length,
                tokenizer=tokenizer,
                balance=preparation["balance"],
                dialect=dialect,
            )
        elif image_column:
            found = describe_pictures(path, image_column, question, sites, **preparation, dialect=dialect)
        else:
            found = describe(path, sites, question, **preparation, dialect=dialect)
    _announce(found, options.file, options.as_json)


@command("survey")
def survey_sites(
    link: LinkOptions,
    options: SurveyOptions,
    sites: list[str] = typer.Option(
        [], "--site", help=r"Name of a site to ask. Repeatable.  \[default: all that are connected]"
    ),
    secure: bool = typer.Option(
        False, "--secure-aggregation", help="See sums over all sites alone; three sites or more."
    ),
    wait: float = typer.Option(30.0, min=0, help="Seconds for sites that are not connected yet."),
    image_column: str = typer.Option(
        "", metavar="COLUMN", help="Of pictures beside the other columns; of it sites tell nothing."
    ),
    image_shape: str = typer.Option(
        "", metavar="C,H,W", help="What each picture becomes: channels (1 or 3), height, width; such as 3,64,64."
    ),
) -> None:
    """Ask joined sites about their tables, and write what the server announces: a run's configuration, as TOML.

    Each site tells no more than its owner allows (`perennial join --survey`). docs/privacy.md says what is told.
    """
    from perennial.server.survey.describe import beside_pictures, with_pictures
    from perennial.server.survey.survey import Order, surveyed

    asked = options.question(secure)
    shape = _image_shape(image_column, image_shape)
    question = beside_pictures(asked, image_column) if image_column else asked
    order = Order(question=question, sites=tuple(sites), wait=wait, **options.preparation())
    with tempfile.TemporaryDirectory(prefix="perennial-") as folder, link.connected() as connection:
        answer = connection.survey(order.model_dump_json(), Path(folder) / "survey")
    found = surveyed(answer)
    if image_column:
        found = with_pictures(found, asked, image_column, shape)
    _announce(found, options.file, options.as_json)


def _image_shape(column: str, text: str) -> tuple[int, ...]:
    """Channels, height and width. Raises `UserError`, before any site is asked."""
    if bool(column) != bool(text):
        raise UserError(
            "--image-column and --image-shape go together: sites tell nothing of pictures, so say what each "
            "becomes, such as --image-shape 3,64,64"
        )
    if text and not re.fullmatch(r"[13],[1-9]\d{0,3},[1-9]\d{0,3}", text):
        raise UserError(f"--image-shape {text}: write channels (1 or 3), height and width, such as 3,64,64")
    return tuple(map(int, text.split(","))) if text else ()


def _announce(found: "Surveyed", file: Path | None, as_json: bool) -> None:
    """Write what was found, and say what should be looked at."""
    from perennial.server.survey.describe import announcement

    scenario = announcement(found.scenario)
    facts = [f"# {printable(fact)}" for fact in found.facts]  # of more than one line, the next would be a setting
    text = _text({"scenario": scenario}, indent=2) if as_json else _toml(scenario, facts)
    for site, told in sorted(found.sites.items()):
        remark(f"{site}: {told}")
    for site, reason in sorted(found.left_out.items()):
        remark(f"left out {site}: {reason}")
    for one in found.remarks:
        remark(one)
    if file:
        write_text(file, f"{text}\n")
    else:
        print(text)


RUN_SETTINGS = "# Settings of the run, such as rounds = 100, go here: above the first [table]."


def _toml(announced: dict[str, Any], facts: list[str]) -> str:
    """One line for each setting, and one for each column. A list in JSON is one in TOML, too."""
    parts = {"columns": announced.pop("columns", {})}
    parts |= {f"own_columns.{_text(site)}": own for site, own in announced.pop("own_columns", {}).items()}
    lines = [*facts, RUN_SETTINGS, "[scenario]", *(f"{key} = {_text(value)}" for key, value in announced.items())]
    for part, columns in parts.items():
        lines += ["", f"[scenario.{part}]"] if columns else []
        lines += [
            f"{_text(name)} = {{ {', '.join(f'{key} = {_text(value)}' for key, value in column.items())} }}"
            for name, column in columns.items()
        ]
    return "\n".join(lines)


def _text(value: object, indent: int | None = None) -> str:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if text.replace("\n", "").isprintable() else json.dumps(value, indent=indent)


@dataclass
class JoinOptions:
    """What a site brings to a SuperLink's runs; `vars` of it are arguments of `prepare`."""

    superlink: str = typer.Option(
        ..., metavar="HOST:PORT", envvar="PERENNIAL_SUPERLINK", help="The SuperLink's Fleet API."
    )
    data: Path | None = typer.Option(
        None, help="This site's data: folder of pictures, or .csv, .parquet or .npz file."
    )
    partition: int | None = typer.Option(
        None, min=0, metavar="N", help="In place of data: client N of a run's scenario."
    )
    name: str = typer.Option("", help=r"This site's.  \[default: that of the key, or of the data]")
    label_column: LabelColumn = ""
    environment_column: EnvironmentColumn = ""
    device: str = typer.Option("auto", envvar="PERENNIAL_DEVICE", help="auto, cpu, cuda or cuda:N.")
    state: Path = typer.Option(
        Path(DEFAULTS["state-dir"]),
        metavar="DIR",
        envvar="PERENNIAL_STATE",
        help="Where the personal model is kept.",
    )
    ca: Ca = None
    key: Path | None = typer.Option(
        None, metavar="FILE", envvar="PERENNIAL_KEY", help="This site's private key, if sites are registered."
    )
    insecure: Insecure = False
    health: str = typer.Option(
        "", metavar="HOST:PORT", envvar="PERENNIAL_HEALTH", help="Where to serve the SuperNode's health."
    )
    metrics: Metrics = ""
    policy: Path | None = typer.Option(
        None, metavar="FILE", envvar="PERENNIAL_POLICY", help="What this site allows, as TOML."
    )
    code: str = typer.Option(
        "installed", help="installed: this site's own code alone. shipped: what the server sends."
    )
    survey: Consent = typer.Option(
        Consent.none, help="What a survey is told: nothing; names and counts; or also sums of numbers."
    )
    least: Least = LEAST


@command("join")
def join_runs(options: JoinOptions, tables: TableOptions) -> None:
    """Take part in a SuperLink's runs, until Ctrl-C or SIGTERM.

    Columns are those that the server announces, unless named here.
    """
    from perennial.client.node.join import become, prepare

    plan = prepare(**vars(options), dialect=tables.dialect())
    _warn_of_readers("--key", options.key)
    become(plan)


def _warn_of_readers(option: str, file: Path | None) -> None:
    """A remark on a file with a secret that other users of this machine can read."""
    if file and (mode := file.expanduser().stat().st_mode & 0o777) & 0o044:
        remark(f"{option} {file} can be read by others (mode {mode:04o}); say `chmod 600 {file}`")


State = Annotated[Path, typer.Option(metavar="DIR", envvar="PERENNIAL_STATE", help="The site's state folder.")]
RunId = Annotated[str | None, typer.Option("--run", help=r"Id of a run, a folder in DIR.  \[default: the newest]")]
ClientId = Annotated[
    str | None, typer.Option(help=r"A client's id, a folder in the run's.  \[default: the only one]")
]


@command("serve", context_settings={"allow_extra_args": True})  # a run folder, most likely
def serve_models(
    ctx: typer.Context,
    state: State = Path(DEFAULTS["state-dir"]),
    port: int = typer.Option(8001, min=0, max=65535, help="Of gRPC. 0: any free one."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0: all of this machine's."),
    http: str = typer.Option(
        "", metavar="HOST:PORT", help="Where to answer HTTP, too; a page to try the models is at /."
    ),
    run_id: RunId = None,
    client: ClientId = None,
    named: list[str] = typer.Option(
        [],
        "--model",
        metavar="NAME=RUN/CLIENT[@ROUND]",
        help="A model by a name of its own, in place of --run and --client; @: that round. Repeatable.",
    ),
    data_root: DataRoot = None,
    device: Device = None,
    max_batch: int = typer.Option(1024, min=1, help="Most samples in a request."),
    max_waiting: int = typer.Option(64, min=1, help="Most requests that wait; what comes beyond them is refused."),
    timeout: float = typer.Option(30.0, min=0.001, help="Seconds that a request waits for the model."),
    certificate: Path | None = typer.Option(None, metavar="FILE", help="PEM file, for TLS."),
    key_file: Path | None = typer.Option(None, metavar="FILE", help="The certificate's key, PEM."),
    client_ca: Path | None = typer.Option(
        None, metavar="FILE", help="PEM file: who connects must show a certificate of this CA."
    ),
    token_file: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Lines NAME TOKEN: who asks must show one of these tokens. Read anew when it changes.",
    ),
    health: str = typer.Option("", metavar="HOST:PORT", help="Where to answer health checks in plaintext, too."),
    metrics: Metrics = "",
) -> None:
    """Serve a site's models over the Open Inference Protocol (gRPC, HTTP); follows the training."""
    if ctx.args:
        raise UserError(
            f"serve: {ctx.args[0]!r} is not possible; name a site's state folder with --state, or take a run "
            "folder's model out with `perennial export`"
        )
    from perennial.client.serving.access import Callers  # imports PyTorch
    from perennial.client.serving.inference import Limits
    from perennial.client.serving.models import Catalogue, Choice, Models, named_choice
    from perennial.client.serving.server import Server, credentials, serve
    from perennial.common.utils.addresses import Address

    addresses = {
        option: Address.parse(text, f"--{option}", "127.0.0.1:8000") if text else None
        for option, text in {"http": http, "health": health, "metrics": metrics}.items()
    }
    if named and (run_id or client):
        raise UserError("--model names run and client itself; leave out --run and --client")
    if (state / "metrics.jsonl").exists() and (state / "config.toml").exists():
        raise UserError(
            f"--state {state} is a run folder, and no site's state folder; `perennial export {state}` writes "
            "a model of it to a file"
        )
    choices = [named_choice(text, state) for text in named or []] or [("", Choice(state, run_id, client))]
    names = [name for name, _ in choices]
    if double := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--model {double[0]} is there twice; each has a name of its own")
    root = Path(data_root) if data_root else None
    entries = [
        Models(choice, remark, name=name, data_root=root, device=device or "auto") for name, choice in choices
    ]
    tls = credentials(certificate, key_file, client_ca)
    callers = Callers(token_file, remark)
    _warn_of_readers("--token-file", token_file)
    _warn_of_readers("--key-file", key_file)
    server = Server(
        Catalogue(entries),
        Address(host, port),
        limits=Limits(max_batch, max_waiting, timeout),
        tls=tls,
        callers=callers,
        **addresses,
    )
    protection = "with TLS" if tls else "without TLS"
    remark(f"listening on {host}, port {server.port}, {protection}")
    if address := addresses["http"]:
        remark(f"listening on {address.host}, port {server.http_port} for HTTP, {protection}")
    open_to_others = [one for one in (Address(host, port), addresses["http"]) if one and not one.loopback]
    if token_file and not tls and open_to_others:
        remark("tokens travel in plaintext from other machines; give --certificate and --key-file")
    serve(server)


@command("rollback")
def go_back(
    state: State = Path(DEFAULTS["state-dir"]),
    run_id: RunId = None,
    client: ClientId = None,
    to: int | None = typer.Option(None, min=0, metavar="ROUND", help="The round to serve."),
    newest: bool = typer.Option(False, "--newest", help="Follow the training again."),
) -> None:
    """Serve the model before the present one, until told otherwise; a running `serve` follows within a second."""
    from perennial.client.serving.models import Choice, round_of  # imports PyTorch

    choice = Choice(state, run_id, client)
    if newest:
        if to is not None:
            raise UserError("--to ROUND and --newest exclude each other")
        print("the newest model is served again" if choice.go_on() else "the newest model is served already")
        return
    path = choice.go_back(to)
    print(
        f"round {round_of(path)} of {path.parent} is served from now on; "
        "`perennial rollback --newest` follows the training again"
    )
