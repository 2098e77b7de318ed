"""`perennial watch`: what a run is doing, drawn anew as its log grows; or what a SuperLink has."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perennial.common.config import RunConfig
from perennial.common.utils.errors import UserError, printable
from perennial.common.utils.parsing import from_json
from perennial.server.cli.console import out
from perennial.server.cli.options import Ca, Insecure, command
from perennial.server.results.formatting import size

if TYPE_CHECKING:
    from perennial.common.flower.names import Run
    from perennial.server.deployment.submission import Connection

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 30
"""Evaluations that a line shows."""
MOST_CLIENTS = 30
RECENT = 20
"""Rounds whose mean length says how long the others will take."""
SECONDS = 1.0
"""Between two looks."""


class Event(BaseModel):
    """What is read of a line of a log, which a stranger may have written."""

    model_config = ConfigDict(strict=True)

    event: str
    round: int = Field(0, ge=0, le=10**9)
    client: str = ""
    reason: str = ""
    time: str = ""
    seconds: float = Field(0.0, ge=0, le=1e7)
    bytes_down: int = Field(0, ge=0, le=2**63)
    bytes_up: int = Field(0, ge=0, le=2**63)


MEASURED = TypeAdapter(dict[str, dict[str, float]], config=ConfigDict(strict=True))
"""The headline measure by model and test environment."""


@dataclass
class Seen:
    """What the log of a run has said so far."""

    config: RunConfig
    round: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each round."""
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By model and test environment, the headline measure at each evaluation."""
    answered: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By client, the last round in which it was not left out, and when that ended."""
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By client, the last round in which it was left out, and why."""
    lost: int = 0
    """Replies left out in all rounds."""
    down: int = 0
    up: int = 0
    end: str = ""

    def take(self, line: Any) -> None:
        """One line of the log more. Raises `ValueError` for one that no run writes."""
        event = Event.model_validate(line)
        kind, number = event.event, event.round
        if kind == "run":
            self.end = ""
        elif kind == "left out":
            self.left_out[event.client] = number, event.reason
            self.lost += 1
        elif kind == "evaluated":
            for model, own in MEASURED.validate_python(line.get(self.config.predicts.headline.name)).items():
                for environment, value in own.items():
                    self.values.setdefault((model, environment), []).append(value)
        elif kind == "round":
            self.round = number
            self.seconds.append(event.seconds)
            self.down += event.bytes_down
            self.up += event.bytes_up
            if self.config.cohort == len(self.config.scenario.client_ids):  # else nobody knows who was asked
                for client in self.config.scenario.client_ids:
                    if self.left_out.get(client, (0, ""))[0] != number:
                        self.answered[client] = number, event.time
        elif kind in ("ended", "stopped"):
            self.end = "ended" if kind == "ended" else f"stopped: {event.reason}"

    @property
    def left(self) -> str:
        """The time that the other rounds will take; empty where nobody knows."""
        recent = self.seconds[-RECENT:]
        if not recent or self.end:
            return ""
        seconds = sum(recent) / len(recent) * (self.config.rounds - self.round)
        return f"{timedelta(seconds=round(seconds))} left"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """A bar for each of the last values, from `low` to `high`; a blank where there is no number."""
    span = (high / 2 - low / 2) or 0.5  # of the largest numbers there is no whole difference
    return "".join(
        BARS[min(len(BARS) - 1, int((value / 2 - low / 2) / span * len(BARS)))] if isfinite(value) else " "
        for value in values[-WIDTH:]
    )


def told(text: str) -> Text:
    """Foreign text as it is: neither a terminal's commands nor rich's marks do anything."""
    return Text(printable(text))


def picture(seen: Seen) -> RenderableType:
    """Rounds, the measure by environment, sites with their last reply, and what was left out."""
    config, measure = seen.config, seen.config.predicts.headline
    title = f"{config.method.title} on {config.scenario.name}, seed {config.seed}"
    traffic = f"{size(seen.down)} down, {size(seen.up)} up"
    state = [
        f"round {seen.round} of {config.rounds}",
        seen.end or seen.left,
        f"{seen.lost} replies left out",
        traffic,
    ]
    bar = Table.grid()
    bar.add_row(ProgressBar(total=config.rounds, completed=seen.round, width=2 * WIDTH))
    shown: list[RenderableType] = [told(f"{title}: {', '.join(filter(None, state))}"), bar]
    if seen.values:
        every = [value for own in seen.values.values() for value in own if isfinite(value)]
        low, high = min(every, default=0.0), max(every, default=1.0)
        table = Table("model", "test environment", measure.title, "now")
        for (model, environment), values in seen.values.items():
            now = f"{measure.text(values[-1])}{measure.unit and f' {measure.unit.strip()}'}"
            table.add_row(*map(told, (model, environment, sparkline(values, low, high), now)))
        shown.append(table)
    clients = [client for client in config.scenario.client_ids if client in {*seen.answered, *seen.left_out}]
    table = Table("site" if config.sites_with_data else "client", "last reply", "last left out")
    for client in sorted(clients, key=lambda own: seen.answered.get(own, (0, ""))[0])[:MOST_CLIENTS]:
        number, when = seen.answered.get(client, (0, ""))
        missed = seen.left_out.get(client)
        last = f"round {number}, {when[11:19]}" if number else "none"
        row = last, f"round {missed[0]}: {missed[1]}" if missed else ""
        table.add_row(*map(told, (client, *row)), style="yellow" if missed and missed[0] >= seen.round else "")
    if clients:
        shown.append(table)
    if (more := len(clients) - MOST_CLIENTS) > 0:
        shown.append(f"and {more} more")
    return Group(*shown)


Look = Callable[[], tuple[RenderableType, bool]]
"""Tells what there is to see now, and whether nothing more will come."""


def watched_log(config: RunConfig, log: Path) -> Look:
    """Looks at the log of a run. A look raises `UserError` where the log is damaged."""
    from perennial.common.utils.files import Tail
    from perennial.server.run.folder import reason

    seen, tail = Seen(config), Tail(log)

    def look() -> tuple[RenderableType, bool]:
        for line in tail.lines():
            try:
                seen.take(from_json(line))
            except ValueError as error:
                raise UserError(f"{log} is damaged ({printable(reason(error))})") from None
        return picture(seen), bool(seen.end)

    return look


def watched_run(folder: Path) -> Look:
    """Looks at a run folder. Raises `UserError`."""
    from perennial.server.run.folder import RunFolder

    run = RunFolder.open(folder)
    return watched_log(run.config(), run.events)


@contextmanager
def watched_superlink(connection: "Connection", keys: Sequence[Path]) -> Iterator[Look]:
    """Looks at the runs and sites of a SuperLink, and its newest run that goes on. A look raises `UserError`."""
    from perennial.server.cli.sites import status_tables
    from perennial.server.deployment.control import going_on

    with ExitStack() as received:
        followed, drawn = 0, None

        def look() -> tuple[RenderableType, bool]:
            nonlocal followed, drawn
            shown: list[RenderableType] = [*status_tables(connection, keys)]
            newest = going_on(connection)
            if newest and newest.run_id != followed:
                received.close()
                followed, drawn = newest.run_id, _followed(connection, newest, received)
            if drawn:
                shown.append(drawn()[0])
            return Group(*shown), False

        yield look


def _followed(connection: "Connection", run: "Run", received: ExitStack) -> Look | None:
    """Looks at the log of a run that a SuperLink has: the file itself where the run writes it on this machine, or
    what its server sends. None where the run is no training, or names code that is not installed here."""
    from perennial.server.deployment.remote_folder import Receiver
    from perennial.server.run.folder import RunFolder

    try:
        config = RunConfig.model_validate_json(str(run.override_config.get("config", "")))
    except (ValueError, UserError):
        return None
    here = RunFolder(Path(str(run.override_config.get("out", "")))).events
    if here.exists():
        return watched_log(config, here)
    folder = Path(received.enter_context(tempfile.TemporaryDirectory(prefix="perennial-")))
    received.enter_context(Receiver(connection.control(), str(run.run_id), folder))
    return watched_log(config, RunFolder(folder).events)


@command("watch")
def watch(
    place: str = typer.Argument(
        ..., metavar="FOLDER|HOST:PORT", help="A run folder, or a SuperLink's Control API."
    ),
    keys: list[Path] = typer.Option(
        [],
        "--key",
        metavar="KEY.pub",
        help="Public keys, or folders of them, that give sites their names.",
    ),
    ca: Ca = None,
    insecure: Insecure = False,
) -> None:
    """Watch a run until it ends: rounds, accuracy, sites, what was left out, time left. Ctrl-C ends the watching.

    Of a SuperLink, its runs and sites, and the newest run that goes on. Without a terminal, what there is now.
    """
    if Path(place).is_dir():
        _show(watched_run(Path(place)))
        return
    from perennial.common.utils.addresses import Address
    from perennial.server.deployment.submission import connected

    if ":" in place:
        Address.parse(place, "FOLDER|HOST:PORT")
    elif "/" in place or Path(place).exists():
        raise UserError(f"{place} is no run folder")
    try:
        with connected(place, ca, insecure) as connection, watched_superlink(connection, keys) as look:
            _show(look)
    except UserError as error:
        if ":" in place:
            raise
        raise UserError(f"there is no run folder {place}; and as a SuperLink: {error}") from None


def _show(look: Look) -> None:
    shown, ended = look()
    if not out.is_terminal:
        out.print(shown)
        return
    with Live(shown, console=out, auto_refresh=False) as live:
        try:
            while not ended:
                time.sleep(SECONDS)
                shown, ended = look()
                live.update(shown, refresh=True)
        except KeyboardInterrupt:  # it only watched
            return
