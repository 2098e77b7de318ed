"""Standard output and standard error: sentences in place of tracebacks, progress, tables."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from perennial.server.run.progress import QUIET, Progress, Watched, progress_line

if TYPE_CHECKING:
    import rich.progress

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

        if word := plugins.blamed(error):
            _end(f"{word}; PERENNIAL_DEBUG=1 shows the traceback{kept}", 2)
        _end(
            f"this should not happen: {in_words(error)}. PERENNIAL_DEBUG=1 shows the traceback{kept}; please send "
            "it to whoever maintains this copy of perennial (CONTRIBUTING.md)",
            1,
        )
    finally:
        if working.at_end:
            working.at_end()


def _end_interrupted(working: Working, told: str = "") -> NoReturn:
    working.at_end = None
    what = working.hint()
    if working.deployed:
        what = f"; {told or '`perennial status` tells whether the run goes on at the SuperLink'}"
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


@contextmanager
def watching(config: RunConfig, doing: str, quiet: bool) -> Iterator[Watched]:
    """A progress bar on a terminal, plain lines otherwise, nothing when quiet."""
    if quiet or is_json():  # the run itself tells its events
        yield QUIET
    elif err.is_terminal:
        with _bar() as bar:
            task = bar.add_task(doing, total=None)

            def advance(progress: Progress) -> None:
                bar.update(task, description="rounds", total=progress.rounds, completed=progress.round)
                if line := progress_line(progress):
                    bar.console.print(line, highlight=False)

            yield Watched(lambda what: bar.update(task, description=what), advance)
    else:
        run = f"{config.method.name} on {config.scenario.name}, {config.rounds} rounds, seed {config.seed}"
        print(f"{run}: {doing}", file=sys.stderr, flush=True)

        def say(progress: Progress) -> None:
            if line := progress_line(progress):
                print(line, file=sys.stderr, flush=True)

        yield Watched(round=say)


@contextmanager
def watching_runs(quiet: bool) -> Iterator[Callable[[Standing], None]]:
    """The same for many runs; Ctrl-C and SIGTERM end them with a sentence."""
    from perennial.server.study.batch import standing_line

    try:
        if quiet:
            yield lambda _: None
        elif is_json():

            def event(standing: Standing) -> None:
                if line := standing_line(standing):
                    tell(line)

            yield event
        elif err.is_terminal:
            with _bar() as bar:
                task = bar.add_task("looking for runs that are done", total=None)

                def advance(standing: Standing) -> None:
                    text = f"{standing.ended}/{standing.runs} runs, rounds" if standing.runs else standing.doing
                    bar.update(
                        task, description=text, completed=standing.rounds_done, total=standing.rounds or None
                    )
                    if standing.runs and (line := standing_line(standing)):
                        bar.console.print(line, highlight=False)

                yield advance
        else:

            def say(standing: Standing) -> None:
                if line := standing_line(standing):
                    print(line, file=sys.stderr, flush=True)

            yield say
    except KeyboardInterrupt:
        err.print("perennial: interrupted; the same command continues", style="red")
        raise typer.Exit(_exit_code()) from None


def _bar() -> rich.progress.Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, transient=True)


def print_tables(*tables: Table) -> None:
    """Tables as wide as they are where no terminal sets a width."""
    if not out.is_terminal:
        out.width = max(out.width, *(out.measure(table).maximum for table in tables), 200)
    for table in tables:
        out.print(table)


def print_troubles(lines: Iterable[str]) -> None:
    """What is not in a table, and why."""
    for line in lines:
        out.print(line, style="yellow", soft_wrap=True)
