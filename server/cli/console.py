"""Standard output and standard error: sentences in place of tracebacks, progress, tables."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from common.config import RunConfig
from common.errors import RunStopped, UserError
from server.progress import Progress, Watcher, progress_line
from server.study.runs import Standing, standing_line

if TYPE_CHECKING:
    import rich.progress

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


def remark(sentence: str) -> None:
    """A word on standard error."""
    err.print(f"perennial: {sentence}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Watched:
    """A run as a person sees it: what it is doing before its first round, and every round."""

    doing: Callable[[str], None]
    round: Watcher


@contextmanager
def watching(config: RunConfig, doing: str, quiet: bool) -> Iterator[Watched]:
    """A progress bar on a terminal, plain lines otherwise, nothing when quiet."""
    if quiet:
        yield Watched(lambda _: None, lambda _: None)
    elif err.is_terminal:
        with _bar() as bar:
            task = bar.add_task(doing, total=None)

            def advance(progress: Progress) -> None:
                bar.update(task, description="rounds", total=progress.rounds, completed=progress.round)
                if line := progress_line(progress):
                    bar.console.print(line, markup=False, highlight=False)

            yield Watched(lambda what: bar.update(task, description=what), advance)
    else:
        run = f"{config.method.name} on {config.scenario.name}, {config.rounds} rounds, seed {config.seed}"
        print(f"{run}: {doing}", file=sys.stderr, flush=True)

        def say(progress: Progress) -> None:
            if line := progress_line(progress):
                print(line, file=sys.stderr, flush=True)

        yield Watched(lambda _: None, say)


@contextmanager
def watching_runs(quiet: bool) -> Iterator[Callable[[Standing], None]]:
    """The same for many runs; Ctrl-C ends them with a sentence."""
    try:
        if quiet:
            yield lambda _: None
        elif err.is_terminal:
            with _bar() as bar:
                task = bar.add_task("looking for runs that are done", total=None)

                def advance(standing: Standing) -> None:
                    text = f"{standing.ended}/{standing.runs} runs, rounds" if standing.runs else standing.doing
                    bar.update(
                        task, description=text, completed=standing.rounds_done, total=standing.rounds or None
                    )
                    if standing.runs and (line := standing_line(standing)):
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


def _bar() -> "rich.progress.Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
        out.print(line, style="yellow", markup=False, soft_wrap=True)
