"""Standard output and standard error: sentences in place of tracebacks, progress, tables."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perennial.common.utils.errors import RunStopped, UserError, in_words, out_of_memory, printable
from perennial.common.utils.events import is_json, tell
from perennial.common.utils.tracebacks import NAME, Tracebacks
from perennial.server.run.progress import Watched, progress_line

if TYPE_CHECKING:
    from perennial.common.config import RunConfig
    from perennial.server.run.folder import RunFolder
    from perennial.server.study.batch import Standing


class Screen(Console):
    """Shows texts, in tables too, that sites and servers may have written: they command no terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Of a text of several lines, each as `printable` has it."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


# Names of environments, classes and files are no markup.
out = Screen(markup=False, emoji=False)
err = Screen(markup=False, emoji=False, stderr=True)
_interrupted: int | None = None
"""The signal that came."""


def heed_interrupts() -> None:
    """Ctrl-C as ever, SIGTERM likewise; and remembered: what PyTorch imports may make another exception of it."""

    def heed(number: int, frame: FrameType | None) -> None:
        global _interrupted
        _interrupted = number
        signal.default_int_handler(number, frame)

    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is usual:  # not where it is ignored, as in a script's `&`
            signal.signal(number, heed)


def _exit_code() -> int:
    """As a shell counts it."""
    return 128 + (_interrupted or signal.SIGINT)


@dataclass
class Working:
    """What a command is at."""

    folder: RunFolder | None = None
    """The run folder that it writes."""
    deployed: bool = False
    """Whether this command only watches the run, which a SuperLink has."""
    at_end: Callable[[], None] | None = None
    """What is left to do when everything is said, unless Ctrl-C ended it."""

    def hint(self) -> str:
        """What to do with the run folder of a run that was broken off."""
        if not self.folder or not self.folder.path.is_dir():
            return ""
        if not self.folder.checkpoints():
            return f"; {self.folder.path} has no checkpoint yet, so start the run again with another --out"
        return f"; `{self.folder.resume_command}` continues from the last checkpoint"


@contextmanager
def sentences() -> Iterator[Working]:
    """Ends the program with one sentence: exit code 2 for what the user can put right, 3 for a stopped run.

    1 is for what nobody has foreseen. `PERENNIAL_DEBUG=1` shows the traceback of each.
    """
    working = Working()
    try:
        yield working
    except (typer.Exit, typer.Abort, click.ClickException):
        raise
    except KeyboardInterrupt as stop:
        _end_interrupted(working, str(stop))
    except Exception as error:
        if _interrupted:
            _end_interrupted(working)
        if os.environ.get("PERENNIAL_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        if isinstance(error, UserError):
            _end(str(error), 2)
        if isinstance(error, RunStopped):
            _end(f"the run stopped: {error}", 3)
        if isinstance(error, OSError) and error.strerror:
            # A full disk or a folder that is gone: the files written so far are whole.
            _end(f"{error.filename or 'a file'}: {error.strerror}{working.hint()}", 2)
        if out_of_memory(error):
            _end(f"there is not enough memory; take a smaller model, scenario or batch_size{working.hint()}", 2)
        kept = ""
        if working.folder and working.folder.path.is_dir():
            Tracebacks(working.folder.path / NAME).first(error)
            kept = f", in {working.folder.path / NAME}, too"
        from perennial.common import plugins

        if blame := plugins.blamed(error):
            _end(f"{blame}; PERENNIAL_DEBUG=1 shows the traceback{kept}", 2)
        _end(
            f"this should not happen: {in_words(error)}. PERENNIAL_DEBUG=1 shows the traceback{kept}; please send "
            "it to whoever maintains this copy of perennial (CONTRIBUTING.md)",
            1,
        )
    finally:
        if working.at_end:
            working.at_end()


def _end_interrupted(working: Working, message: str = "") -> NoReturn:
    working.at_end = None
    what = working.hint()
    if working.deployed:
        what = f"; {message or '`perennial status` tells whether the run goes on at the SuperLink'}"
    _end(f"interrupted{what}", _exit_code())


def _end(sentence: str, code: int) -> NoReturn:
    if is_json():
        tell(sentence, level=logging.ERROR, exit_code=code)
        raise typer.Exit(code) from None
    err.print(f"perennial: {printable(sentence)}", style="red", highlight=False, soft_wrap=True)
    raise typer.Exit(code) from None


def remark(sentence: str) -> None:
    """A word on standard error, on one line."""
    sentence = printable(sentence)
    if is_json():
        tell(sentence)
        return
    with suppress(OSError, SystemExit):  # nobody reads it, which ends rich, or its disk is full: the work goes on
        err.print(f"perennial: {sentence}", highlight=False, soft_wrap=True)


def _has_bar() -> bool:
    return err.is_terminal and not is_json()


MINUTE = 60.0


class Silence:
    """How long a log file has had no line of something that goes on, and the line that it then gets."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._first: tuple[float, int] | None = None

    def line(self, line: str, doing: str, done: int, total: int | None) -> str:
        """The line; in place of an empty one after a minute, how much is done, and the time left."""
        now = time.monotonic()
        began, before = self._first = self._first or (now, done)
        if not line and total and done > before and now - self._last >= MINUTE:
            left = timedelta(seconds=round((now - began) / (done - before) * (total - done)))
            line = f"{doing} {done}/{total}, about {left} left"
        if line:
            self._last = now
        return line


@contextmanager
def _progress(doing: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """Shows a line, if there is one, and what is being done, how much of it is done and of how much.

    With a progress bar on a terminal, as plain lines or events otherwise, nothing when quiet.
    """
    if quiet:
        yield lambda *_: None
    elif _has_bar():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task(doing, total=None)

            def advance(line: str, doing: str = "", done: int = 0, total: int | None = None) -> None:
                bar.update(task, description=doing, completed=done, total=total)
                if line:
                    bar.console.print(line, highlight=False)

            yield advance
    else:
        silent = Silence()

        def say(line: str, doing: str = "", done: int = 0, total: int | None = None) -> None:
            line = silent.line(line, doing, done, total)
            if line and is_json():
                tell(line)
            elif line:
                print(line, file=sys.stderr, flush=True)

        yield say


@contextmanager
def counting(doing: str) -> Iterator[Callable[[int, int], None]]:
    """On a terminal, shows what is being done; how many of how many are done, and the time left, as it is told."""
    with _progress(doing, quiet=not _has_bar()) as show:
        yield lambda done, total: show("", doing, done, total)


@contextmanager
def watching(config: RunConfig, doing: str, quiet: bool) -> Iterator[Watched]:
    """Shows a run's progress."""
    with _progress(doing, quiet or is_json()) as show:  # the run itself tells its events
        if not _has_bar():
            run = f"{config.method.name} on {config.scenario.name}, {config.rounds} rounds, seed {config.seed}"
            show(f"{run}: {doing}")
        yield Watched(
            lambda what: show("", what), lambda now: show(progress_line(now), "rounds", now.round, now.rounds)
        )


@contextmanager
def watching_runs(quiet: bool) -> Iterator[Callable[[Standing], None]]:
    """The same for many runs; Ctrl-C and SIGTERM end them with a sentence."""
    from perennial.server.study.batch import standing_line

    def advance(now: Standing) -> None:
        line = standing_line(now) if now.runs or not _has_bar() else ""
        doing = f"{now.ended}/{now.runs} runs, rounds" if now.runs else now.doing
        show(line, doing, now.rounds_done, now.rounds or None)

    try:
        with _progress("looking for runs that are done", quiet) as show:
            yield advance
    except KeyboardInterrupt:
        err.print("perennial: interrupted; the same command continues", style="red")
        raise typer.Exit(_exit_code()) from None


def print_tables(*tables: Table) -> None:
    """Tables as wide as they are where no terminal sets a width."""
    if not out.is_terminal:
        out.width = max(out.width, *(out.measure(table).maximum for table in tables), 200)
    for table in tables:
        out.print(table)


def print_lines(lines: Iterable[str], style: str = "") -> None:
    """Each on a line of its own, whatever the width."""
    for line in lines:
        out.print(line, style=style, highlight=False, soft_wrap=True)


def print_outcome(
    as_json: bool, data: object, tables: Iterable[Table], lines: Iterable[str] = (), troubles: Iterable[str] = ()
) -> None:
    """What came of a command: as data, or as tables with sentences below them; `troubles`: what is in no table."""
    if as_json:
        out.print_json(data=data)
        return
    print_tables(*tables)
    print_lines(lines)
    print_lines(troubles, "yellow")
