"""Many runs, several at a time: what has ended is not run again, what was broken off goes on."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from perennial.common.config import RunConfig
from perennial.common.tasks import HEADLINES, Measure
from perennial.common.tasks.base import Summed, added_sums, sums_of
from perennial.common.tasks.classes import ACCURACY
from perennial.common.utils.errors import PlugInError, RunStopped, UserError, from_outside, in_words, printable
from perennial.common.utils.files import write_text
from perennial.common.utils.suggestions import sentence
from perennial.common.utils.tracebacks import NAME, Tracebacks
from perennial.server.results.formatting import duration
from perennial.server.run.folder import PRUNED, RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.study.run_names import name_without_code, run_name

T = TypeVar("T")


class Scored(BaseModel):
    """What samples by score say (`common/measures/scores.py`); None where a class is missing."""

    samples: int
    positives: int
    sensitivity: float | None
    specificity: float | None
    auroc: float | None
    auroc_error: float | None
    calibration_error: float | None
    reliability: list[tuple[int, float, float]]
    """Of each group of scores: samples, their mean score, the share of positives."""


class Scores(BaseModel):
    """The same of all test samples, by environment and by client."""

    positive: str
    all: Scored
    environments: dict[str, Scored]
    clients: dict[str, Scored]


class Measured(BaseModel):
    """All measures of a task on all test samples, by environment, by client, and by part of the target where it
    has several; None where one has no value."""

    all: dict[str, float | None]
    environments: dict[str, dict[str, float | None]]
    clients: dict[str, dict[str, float | None]]
    targets: dict[str, dict[str, float | None]] = {}


class Selected(BaseModel):
    """How good a model is in the round that a selection picked."""

    round: int
    values: dict[str, float] = Field(validation_alias=AliasChoices("values", *HEADLINES))
    """The task's headline measure by test environment, mean over clients."""
    worst: float | None
    """This and the next two: None without test data."""
    average: float | None
    pooled: float | None
    """Share of all test samples, so that a client counts by its size."""
    validation: float | None
    """On held-out training-environment data."""
    loss: float | None = None
    """Mean test loss of a sample: over clients, then over environments."""
    areas: dict[str, dict[str, float]] = {}
    """By test environment: areas of a binary task, all clients' samples together."""
    clients: dict[str, dict[str, float]]
    measures: Measured | None = None
    """Of tasks that have more than one."""
    scores: Scores | None = None
    """Of test samples counted by score, where they were."""


class LeftOut(BaseModel):
    """Of a client: how many of its replies a run left out, and the round and reason of the last one."""

    replies: int
    last: str


class Summary(BaseModel):
    """What a study reads of `summary.json`; everything else in it is ignored."""

    rounds: int
    models: dict[str, dict[str, Selected]]
    left_out: dict[str, LeftOut] = {}


@dataclass(frozen=True)
class Pruned:
    """Why a search stopped a trial."""

    round: int
    """After which it was stopped."""
    rounds: int
    by: Select
    score: float
    median: float
    """Of all trials in that round."""
    measure: Measure = field(default=ACCURACY, repr=False)
    """What score and median are values of."""

    @property
    def sentence(self) -> str:
        """What a person is told of it."""
        return f"{self.where} ({self.by} {self.measure.text(self.score)}{self.measure.unit})"

    @property
    def where(self) -> str:
        """What all trials that were stopped with it share."""
        worse, median = "below" if self.measure.higher_is_better else "above", self.measure.text(self.median)
        return (
            f"after round {self.round} of {self.rounds}, {worse} the trials' median of {median}{self.measure.unit}"
        )


@dataclass(frozen=True)
class Outcome:
    """What is known of a run that has ended: its summary, what is the matter with it, or why it was stopped."""

    config: RunConfig
    path: Path
    summary: Summary | None = None
    trouble: str = ""
    pruned: Pruned | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Of its log. Raises `UserError` where that is not there, or damaged."""
        return RunFolder(self.path).rows()

    def sums(self, model: str, split: str, client: str | None = None) -> Summed:
        """Of a split's samples, all clients' or one's: how many there are, and the task's sums at the end.

        Raises `UserError` as `rows` does.
        """
        task = self.config.predicts
        if not self.summary:
            return added_sums(task, ())
        wanted = {"kind": "evaluation", "round": self.summary.rounds, "model": model, "split": split}
        wanted |= {"client": client} if client else {}
        own = [row for row in self.rows() if all(row.get(name) == value for name, value in wanted.items())]
        return added_sums(task, [one for row in own for one in sums_of(task, row).values()])

    @property
    def waits(self) -> bool:
        """Whether there are rounds to come, in a search that may yet stop it."""
        return not (self.summary or self.trouble or self.pruned)

    def selected(self, selection: str) -> Selected | None:
        """The headline model's accuracies."""
        return self.summary.models[self.config.method.evaluates[-1]].get(selection) if self.summary else None


def troubles_of(outcomes: Iterable[Outcome]) -> list[str]:
    """What is to be told of runs: why some have no numbers, and whose replies others did without."""
    found = list({id(outcome): outcome for outcome in outcomes}.values())
    sentences = [outcome.trouble for outcome in found if outcome.trouble]
    lacking: dict[str, list[tuple[Path, LeftOut]]] = {}
    for outcome in found:
        for client, left_out in outcome.summary.left_out.items() if outcome.summary else ():
            lacking.setdefault(client, []).append((outcome.path, left_out))
    for client, runs in sorted(lacking.items()):
        path, one = runs[0]
        sentences.append(
            f"{client}: replies left out in {len(runs)} of {len(found)} runs, such as {one.replies} in {path}, "
            f"the last in {one.last}"
        )
    return list(dict.fromkeys(sentences))


@dataclass(frozen=True)
class Standing:
    """How far the runs of a study are, those that it will only choose later among them."""

    ended: int = 0
    runs: int = 0
    rounds_done: int = 0
    rounds: int = 0
    """Of the runs that had not ended when the study was started."""
    latest: Outcome | None = None
    """The run that has just ended, if one has."""
    doing: str = ""
    """What is done before the first round."""
    seconds: float = 0.0
    """Since the study was started."""


Watch = Callable[[Standing], None]


class StudyProgress:
    """How a study stands, over parts of it that are run one after the other; tells `watch` of every change."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self._begun = watch, time.monotonic()
        self.ended = self.runs = self.rounds_done = self.rounds = 0
        self.announced = False
        """Whether anybody knows of it yet."""

    def __call__(self, latest: Outcome | None = None, doing: str = "") -> None:
        self.announced, seconds = True, time.monotonic() - self._begun
        self.watch(Standing(self.ended, self.runs, self.rounds_done, self.rounds, latest, doing, seconds))


def progress_of(watch: Watch | StudyProgress) -> StudyProgress:
    """What is told so far: of a study that goes on, or of one that begins."""
    return watch if isinstance(watch, StudyProgress) else StudyProgress(watch)


def standing_line(standing: Standing) -> str:
    """One line at the start and for each run that has ended; else empty."""
    if not (latest := standing.latest):
        return standing.doing
    line = f"{standing.ended}/{standing.runs} runs  {latest.path.name}"
    found = latest.selected("final")
    result = "waits for the other trials" if latest.waits else latest.trouble
    if found:
        measure = latest.config.predicts.headline
        average = f"average {measure.text(found.average, 1)}{measure.unit}"
        result = "no test data" if found.average is None else average
    line += f"  {result}"
    if standing.rounds_done and (left := standing.rounds - standing.rounds_done):
        line += f"  about {duration(standing.seconds / standing.rounds_done * left)} to go"
    return line


def run_all(
    configs: Sequence[RunConfig],
    out: Path,
    jobs: int,
    watch: Watch | StudyProgress = lambda _: None,
    later: Sequence[int] = (),
    until: int | None = None,
) -> list[Outcome]:
    """The outcome of every configuration, from its folder in `out` or by running it, `jobs` at a time.

    `watch` is told of the whole study where these are a part of it: what its `StudyProgress` knows so far, and the
    rounds of each run that will come `later`. It is told nothing where there is nothing to run. With `until` runs
    stop after that round and wait; half of them, say, will go on. Raises `UserError` for what the user can put
    right (a missing data set), `RunStopped` if a worker dies. A run that stops by itself, a server half that
    raises an exception, and a damaged folder are outcomes like any other.
    """
    for config in configs:
        if config.runtime != "local":
            raise UserError(f"runtime: {config.runtime!r} is not possible here; studies run in local processes")
    names = list(map(run_name, configs))
    named = dict(zip(names, configs, strict=True))
    outcomes = {name: ended for name, config in named.items() if (ended := outcome_in(config, out / name, until))}
    missing = {name: config for name, config in named.items() if name not in outcomes}
    done = {name: max(RunFolder(out / name).checkpoints(), default=0) for name in missing}
    progress = progress_of(watch)
    before, rounds_before = progress.ended, progress.rounds_done
    progress.runs = before + len(named) + len(later)
    progress.rounds = rounds_before + sum(later)
    progress.rounds += sum((until or config.rounds) - done[name] for name, config in missing.items())
    if until:
        waiting = [config for name, config in named.items() if name in missing or outcomes[name].waits]
        progress.rounds += sum(config.rounds - until for config in waiting[::2])

    def tell(rounds: int, latest: Outcome | None = None, doing: str = "") -> None:
        progress.ended = before + sum(not outcome.waits for outcome in outcomes.values())
        progress.rounds_done = rounds_before + rounds
        progress(latest, doing)

    if not progress.announced and (missing or not (later or until)):  # what comes later may have been run as well
        runs, bad = progress.runs, sum(bool(outcome.trouble) for outcome in outcomes.values())
        ready = before + sum(not outcome.waits for outcome in outcomes.values()) - bad
        also = f"{bad} stopped or damaged, " if bad else ""
        begin = f"{runs} run{'s' * (runs != 1)}: {ready} done already, {also}{sum(map(bool, done.values()))} go on"
        come = f"{'about ' if until else ''}{progress.rounds} rounds to come"
        tell(0, doing=f"{begin} where they were interrupted; {come}. If interrupted, the same command goes on.")
    if jobs == 1:
        rounds_run = 0
        for name, config in missing.items():

            def advance(count: int) -> None:
                nonlocal rounds_run
                rounds_run += count
                tell(rounds_run)

            outcomes[name] = run_one(config, out / name, advance, until)
            tell(rounds_run, outcomes[name])
    elif missing:
        with _workers(min(jobs, len(missing))) as (pool, counter):
            work = {pool.submit(_work, config, out / name, until): name for name, config in missing.items()}
            while work:
                done_now, _ = wait(work, timeout=0.2, return_when=FIRST_COMPLETED)
                tell(counter.value)
                for future in done_now:
                    name = work.pop(future)
                    outcomes[name] = future.result()
                    tell(counter.value, outcomes[name])
    return [outcomes[name] for name in names]


def outcome_in(config: RunConfig, path: Path, until: int | None = None) -> Outcome | None:
    """The outcome that a run's folder holds; None while there is still something to run, up to round `until`."""
    if not (path / "config.toml").exists():
        return None
    folder = RunFolder.open(path)
    try:
        if name_without_code(folder.config()) != name_without_code(config):
            raise UserError(f"{path / 'config.toml'} is not the configuration that the folder is named after")
        if (path / "summary.json").exists():
            return Outcome(config, path, _parse(folder.summary(), path))
    except UserError as error:
        return _damaged(config, path, error)
    if (path / "error.txt").exists():
        return _stopped(config, path, (path / "error.txt").read_text(encoding="utf-8", errors="replace").strip())
    if until and max(folder.checkpoints(), default=0) >= until:
        return Outcome(config, path)
    return None


def readable(outcome: Outcome) -> Outcome:
    """The outcome as far as its log can be read; where it cannot, that is its trouble, and nothing judges it."""
    try:
        if outcome.summary:
            outcome.rows()
    except UserError as error:
        return _damaged(outcome.config, outcome.path, error)
    return outcome


def read_lines(file: Path, kind: type[T]) -> list[T]:
    """What a file of kept numbers has, line by line; nothing where there is none.

    Raises `UserError` for a line that does not fit.
    """
    found, line = [], TypeAdapter(kind)
    for number, text in enumerate(file.read_bytes().splitlines() if file.is_file() else (), 1):
        try:
            found.append(line.validate_json(text))
        except ValidationError as error:
            raise UserError(f"{file}, line {number}: {sentence(error)}") from None
    return found


def other_versions(configs: Sequence[RunConfig], out: Path) -> list[Path]:
    """Folders of the same configurations that another version of the code made; they are never read."""
    found: set[Path] = set()
    for config in configs:
        same = set(out.glob(f"{name_without_code(config)}-*"))
        found |= same - {out / run_name(config)}
    return sorted(found)


def run_one(config: RunConfig, path: Path, advance: Callable[[int], None], until: int | None = None) -> Outcome:
    """Start or continue a run in its folder, up to round `until`. `advance` is told the rounds that have come.

    The checkpoints go once the run has ended: those of a study would fill a disk (clients' personal models, twice
    for every trial), and the same command makes them again.
    """
    with RunFolder(path).held(wait=True):
        if ended := outcome_in(config, path, until):  # somebody else was here meanwhile
            return ended
        from perennial.common.models.torch_state import plain_torch

        with plain_torch(threads=1):  # the checkpoint's tensors, too
            return _trained(config, path, advance, until)


def cores() -> int:
    """How many runs go on at a time unless told otherwise."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------- inside


def _trained(config: RunConfig, path: Path, advance: Callable[[int], None], until: int | None) -> Outcome:
    from perennial.server.local import LocalRuntime  # with PyTorch and Flower

    def count_round(_: object) -> None:
        try:
            advance(1)
        except Exception as error:  # of whoever watches the study, and not the run's
            watchers.append(error)
            raise

    here = LocalRuntime(config)  # a missing data set ends the study, not just this run
    watchers: list[Exception] = []
    try:
        folder, origin = RunFolder(path), None
        (path / PRUNED).unlink(missing_ok=True)
        if folder.checkpoints():
            origin = folder.origin(config)
            folder.cut_log(origin.log_bytes)
        else:
            if folder.log.exists():
                folder.cut_log(0)
            RunFolder.create(path, config)
        summary = here.run(folder, origin, count_round, until)
        if not summary:
            return Outcome(config, path)
        outcome = Outcome(config, path, _parse(summary, path))
    except (PlugInError, RunStopped) as error:
        why = str(error)
    except UserError as error:
        return _damaged(config, path, error)
    except Exception as error:
        if error in watchers or from_outside(error):
            raise
        why = _raised(error, path)
    else:
        rmtree(path / "checkpoint", ignore_errors=True)
        return outcome
    # The same numbers would stop again, so it is noted and not repeated.
    write_text(path / "error.txt", f"{why}\n")
    return _stopped(config, path, why)


def _raised(error: Exception, path: Path) -> str:
    """An exception of our own code in words, with its last line; its traceback stays in the run folder."""
    Tracebacks(path / NAME).first(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return printable(f"{in_words(error)} ({last.filename}, line {last.lineno}); {path / NAME} has its traceback")


def _damaged(config: RunConfig, path: Path, error: UserError) -> Outcome:
    return Outcome(config, path, trouble=f"skipped: {error}; delete {path} to run it again")


def _stopped(config: RunConfig, path: Path, reason: str) -> Outcome:
    return Outcome(config, path, trouble=f"{path} stopped: {reason}; delete it to run it again")


def _parse(summary: dict[str, Any], path: Path) -> Summary:
    try:
        return Summary.model_validate(summary)
    except ValidationError as error:
        raise UserError(f"{path / 'summary.json'} is damaged ({sentence(error)})") from None


SCRIPT = "out of memory? or, in a script with jobs above 1, no line `if __name__ == '__main__':` around the call?"
"""Why a process may die before its first round: it imports the script, and begins the study once more."""


@contextmanager
def _workers(jobs: int) -> "Iterator[tuple[ProcessPoolExecutor, Synchronized[int]]]":
    """Processes that run one thing at a time, and a counter of the rounds that they did.

    They are gone when the block is left, at once if it is left by an exception (Ctrl-C too).
    """
    context = multiprocessing.get_context("spawn")  # torch and gRPC do not survive a fork
    counter: Synchronized[int] = context.Value("q", 0)
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(counter,))
    try:
        yield pool, counter
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            why = "out of memory?" if counter.value else SCRIPT
            raise RunStopped(f"a worker process died ({why}); the same command continues") from None
        raise
    pool.shutdown()


_counter: "Synchronized[int]"


def _begin(counter: "Synchronized[int]") -> None:
    """Make this process a worker that dies with its parent, even when that is killed with -9."""
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it as well, and ends its workers
    parent = multiprocessing.parent_process()
    assert parent

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(config: RunConfig, path: Path, until: int | None) -> Outcome:
    def advance(count: int) -> None:
        with _counter.get_lock():
            _counter.value += count

    return run_one(config, path, advance, until)
