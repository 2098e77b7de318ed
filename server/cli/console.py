"""Standard output and standard error: sentences in place of tracebacks, progress, tables."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.errors import RunStopped, UserError
from server import loop
from server.study.runs import Standing, standing_line

out = Console()
err = Console(stderr=True)


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
