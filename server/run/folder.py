"""A run folder: complete configuration, log of rows, summary, checkpoints, final models."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError
from safetensors import SafetensorError

from perennial.common.config import RunConfig, load_config
from perennial.common.data.scenarios.arrays import Arrays
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.privacy.mechanisms import Clipping
from perennial.common.utils.errors import UserError
from perennial.common.utils.events import logged_to
from perennial.common.utils.files import (
    UNFINISHED,
    added,
    clear,
    load_records,
    load_tensors,
    save_records,
    save_tensors,
    sync,
    write_text,
    writing,
)
from perennial.common.utils.locks import lock
from perennial.common.utils.parsing import from_json
from perennial.common.utils.suggestions import sentence
from perennial.server.run.input_files import digests, must_be_as_imported
from perennial.server.selection.summary import summarise

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors

HELD_CHECKPOINTS = 2
STOP = "stop.txt"
"""In which a run that goes on in another process is asked to end."""
TensorFile = Literal["arrays.safetensors", "strategy.safetensors"]
RESUMES, RELEASES = TypeAdapter(list[NonNegativeInt]), TypeAdapter(NonNegativeInt)
SUMMARY, DIGESTS = TypeAdapter(dict[str, Any]), TypeAdapter(dict[str, str])
T = TypeVar("T")

INPUTS = "inputs.json"
LOCK = ".lock"
"""Locked by the process that works in a run folder; holds its name, and after its proper end nothing."""


PRUNED = "pruned.txt"
"""Why a search stopped a run that has not ended."""


class InUse(UserError):  # noqa: N818 - what is the matter with a folder
    """Another process works in the run folder."""


CHANGEABLE = {
    *("rounds", "quorum", "deadline", "wait", "nodes", "checkpoint_every", "device", "data_root"),
    *("client_cpus", "client_gpus", "ray_address"),
}
"""Settings that a run may go on with others of: they say how long, where and how patiently it runs."""


class State(BaseModel):
    """`state.json` of a checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid")

    round: NonNegativeInt
    run_id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")  # a folder's name at the sites
    seconds: FiniteFloat = Field(ge=0)
    log_bytes: NonNegativeInt
    config: dict[str, Any] | None = None
    sha256: dict[TensorFile, str] = Field(min_length=2)


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the rounds after `round` depend on, apart from what clients keep themselves."""

    round: int
    run_id: str
    arrays: Tensors
    strategy: Mapping[str, Tensors]
    seconds: float = 0.0
    """Wall time of the rounds so far."""
    log_bytes: int = 0
    """Length of `metrics.jsonl` at this point."""
    config: RunConfig | None = None
    """With which the run came here; None before the first round."""

    def changes(self, config: RunConfig) -> dict[str, list[str]]:
        """By dotted name, the settings that are others now: what they were and what they are.

        Raises `UserError` where the rounds up to this checkpoint would not be those of a run with these settings.
        """
        if not self.config:
            return {}
        changed = self.config.changed(config)
        remedy = "put it back, or start a run of its own with another --out"
        for name, (old, new) in changed.items():
            if name.split(".")[0] not in CHANGEABLE:
                done = f"in the {self.round} rounds that are done"
                raise UserError(f"config.toml: {name} was {old} {done}, and is {new} now; {remedy}")
        if config.rounds < self.round:
            raise UserError(f"config.toml: rounds: {config.rounds} is not possible; {self.round} of them are done")
        schedules = {"schedule": config.schedule, "server_schedule": config.server_schedule}
        for name, schedule in schedules.items():
            if self.round and schedule.whole_run and config.rounds != self.config.rounds:
                why = f"{name}=cosine comes down by the last round, and was another in the {self.round} so far"
                raise UserError(
                    f"config.toml: rounds was {self.config.rounds}, and is {config.rounds} now: {why}; {remedy}"
                )
        for name in config.method.fractions:
            share = getattr(config.method, name)
            if len({min(self.round, int(share * run.rounds)) for run in (self.config, config)}) > 1:
                why = f"{name}={share:g} of all rounds would have ended elsewhere in the {self.round} so far"
                raise UserError(
                    f"config.toml: rounds was {self.config.rounds}, and is {config.rounds} now: {why}; {remedy}"
                )
        return changed


def default_out(config: RunConfig) -> str:
    """Where a run goes when nobody says: `runs/TIME-METHOD-SCENARIO-sSEED`."""
    scenario = config.scenario.name.replace(":", "-")
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.method.name}-{scenario}-s{config.seed}"


class RunFolder:
    """The files of one run. Every file is complete or absent, except the log, which is cut to whole rounds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "metrics.jsonl"
        self.events = path / "log.jsonl"
        """What happened and when, an event a line; for whoever watches. Nothing is computed from it."""

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """A new run folder with its configuration. Raises `UserError` if it cannot be made or holds a run."""
        folder = cls(path)
        try:
            folder.must_be_empty()
            path.mkdir(parents=True, exist_ok=True)
            folder.note_inputs(config)
            write_text(path / "config.toml", config.toml())
            folder.log.touch()
        except OSError as error:
            raise _unwritable(path, error) from None
        return folder

    def must_be_empty(self) -> None:
        """Raises `UserError` if the folder holds a run that has written anything."""
        if self.log.exists() and self.log.stat().st_size:
            or_else = f", or continue it: {self.resume_command}" if self.checkpoints() else ""
            raise UserError(f"{self.path} already holds a run; give another --out{or_else}")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run folder. Raises `UserError` if it is none, or has a pipe or a device, which never end."""
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        for file in path.rglob("*"):
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise UserError(f"{file} is a pipe or a device, or a link to one; remove it")
        return cls(path)

    @contextmanager
    def held(self, wait: bool = False) -> Iterator[str]:
        """Have the folder, which is made if need be, to oneself; who had it last and died in it, else "".

        The lock goes with the process, however that ends. Raises `InUse` where another one has it, unless that is
        to be waited for; `UserError` if the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._must_have_no_links()
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            try:
                lock(handle, wait)
            except BlockingIOError:
                raise InUse(f"{self.path} is in use by {_owner(handle)}") from None
            died = _text_of(handle)
            with writing(self.path / LOCK):
                os.ftruncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            try:
                yield died
            finally:
                os.ftruncate(handle, 0)
        finally:
            os.close(handle)

    def _must_have_no_links(self) -> None:
        """What is written here would be written where a link in somebody else's folder leads."""
        for file in self.path.rglob("*"):
            if file.is_symlink():
                raise UserError(
                    f"{file} is a link, and a run writes into its own folder alone; "
                    "put what it leads to in its place, or remove it"
                )

    def must_be_free(self) -> None:
        """Raises `InUse` while somebody holds the folder."""
        if owner := self.owner():
            raise InUse(f"{self.path} is in use by {owner}")

    def owner(self) -> str:
        """The process that holds the folder now; empty if none does."""
        try:
            handle = os.open(self.path / LOCK, os.O_RDONLY)
        except OSError:
            return ""
        try:
            lock(handle, wait=False, shared=True)
        except BlockingIOError:
            return _owner(handle)
        finally:
            os.close(handle)
        return ""

    def config(self) -> RunConfig:
        """The run's configuration; arrays and tables that moved with the folder are found where they lie now.

        Raises `UserError` if the file was damaged.
        """
        config = load_config(self.path / "config.toml")
        root, here = config.data_folder, self.path.resolve()
        there = None
        if isinstance(config.scenario, Arrays):
            places = [root, here, here.parent]
            there = next((place for place in places if place and config.scenario.lie_in(place)), None)
        elif isinstance(config.scenario, OwnData) and root and not root.exists():  # of from_frames
            places = [own / root.parent.name / root.name for own in (here, here.parent)]
            there = next((place for place in places if place and place.is_dir()), None)
        return config.model_copy(update={"data_root": str(there)}) if there else config

    def note_inputs(self, config: RunConfig) -> None:
        """Keep the digests of what of somebody's own the run reads (`server/run/input_files.py`).

        Raises `UserError` where this process has other code of theirs than their files hold by now.
        """
        if found := digests(config):
            must_be_as_imported(found)
            write_text(self.path / INPUTS, json.dumps(found, indent=2) + "\n")

    def inputs(self) -> dict[str, str]:
        """What `note_inputs` kept. Raises `UserError` if the file was damaged."""
        return self._kept(INPUTS, DIGESTS, {})

    def other_inputs(self, config: RunConfig) -> dict[str, list[str]]:
        """What `note_inputs` kept and is other now: the beginnings of both digests."""
        before, now = self.inputs(), digests(config)
        return {name: [was[:8], now[name][:8]] for name, was in before.items() if now.get(name, was) != was}

    def logging(self) -> AbstractContextManager[None]:
        """Events are written into the folder."""
        return logged_to(self.events)

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows to the log."""
        with writing(self.log), self.log.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the log. Raises `UserError` naming the line that cannot be read."""
        return self._rows_up_to(None)

    def rows_after(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Whole rows that were written after a byte offset of the log, and the offset after them.

        Raises `UserError` as `rows` does.
        """
        with self._reading():
            whole, end = added(self.log, offset)
        return self._decoded(whole, offset), end

    def _rows_up_to(self, length: int | None) -> list[dict[str, Any]]:
        with self._reading():
            text = self.log.read_bytes()
        return self._decoded(text[:length])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.log} cannot be read ({error.strerror})") from None

    def _decoded(self, text: bytes, offset: int = 0) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for line in text.splitlines():
            try:
                if not isinstance(row := from_json(line), dict):
                    raise ValueError("it is no table of names and values")
            except ValueError as error:
                after = f" after byte {offset}" if offset else ""
                raise UserError(f"{self.log} line {len(rows) + 1}{after} is damaged ({error})") from None
            rows.append(row)
        return rows

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """Read `summary.json`. Raises `UserError` when the run has not ended, or the file is damaged."""
        path = self.path / "summary.json"
        try:
            return SUMMARY.validate_json(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self.path} has no summary yet: {self._unfinished()}") from None
        except (OSError, ValidationError) as error:
            raise UserError(f"{path} is damaged ({reason(error)})") from None

    def so_far(self) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        """The summary and the rows; of a run at work what its rows say, and a sentence that tells so.

        Raises `UserError` as `summary` and `rows` do, and where nothing has been evaluated yet.
        """
        if (self.path / "summary.json").exists() or not (owner := self.owner()):
            return self.summary(), self.rows(), ""
        config, rows = self.config(), self.rows_after(0)[0]
        seconds = time.time() - (self.path / "config.toml").stat().st_mtime
        summary = summarise(config, rows, seconds=seconds)
        now = f"{summary['rounds']} of {config.rounds} rounds are done, and {owner} is at work on it"
        if not any(summary["models"].values()):
            raise UserError(f"{self.path}: nothing has been evaluated yet; {now}")
        return summary, rows, f"not ended: {now}"

    @property
    def resume_command(self) -> str:
        """What goes on with the run, for whoever has a shell."""
        return shlex.join(["perennial", "resume", str(self.path)])

    def _unfinished(self) -> str:
        if owner := self.owner():
            return f"{owner} is at work on it"
        if (note := self.path / PRUNED).is_file():
            where = note.read_text(encoding="utf-8").strip()
            return f"a search stopped it {where} ({self.resume_command} runs the rest)"
        if self.checkpoints():
            stopped, how = self.path / "error.txt", "the run has not ended"
            if stopped.is_file():
                how = f"the run stopped: {stopped.read_text(encoding='utf-8', errors='replace').strip()}"
            return f"{how} ({self.resume_command})"
        return (
            "the run ended before its first checkpoint, so there is nothing to resume; start it again: "
            f"perennial run --config {shlex.quote(str(self.path / 'config.toml'))} --out ANOTHER-FOLDER"
        )

    def save_model(self, name: str, tensors: Tensors) -> None:
        """Write `models/NAME.safetensors`."""
        folder = self.path / "models"
        folder.mkdir(exist_ok=True)
        save_tensors(folder / f"{name}.safetensors", tensors)

    # ------------------------------------------------------------------ checkpoints

    def checkpoints(self) -> list[int]:
        """Rounds of the checkpoints held, oldest first."""
        # Somebody may have put a damaged one aside under another name.
        found = (re.fullmatch(r"round-(\d+)", path.name) for path in (self.path / "checkpoint").glob("round-*"))
        return sorted(int(match[1]) for match in found if match)

    def checkpoint_path(self, round_: int) -> Path:
        """Folder of a checkpoint."""
        return self.path / "checkpoint" / f"round-{round_}"

    @property
    def clients(self) -> Path:
        """Where the local runtime puts what clients keep, for all checkpoints: as versions, of which a checkpoint
        adds those that are new (`client/state.py`)."""
        return self.path / "checkpoint" / "clients"

    def ask_to_stop(self, why: str) -> None:
        """Ask the run, wherever on this machine it goes on, to end after the round at hand."""
        write_text(self.path / STOP, why or "by the one who watched it")

    def asked_to_stop(self) -> str:
        """Why the run was asked to end, and the request is forgotten; empty where it was not."""
        if not (path := self.path / STOP).is_file():
            return ""
        why = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        return why

    def save_checkpoint(
        self,
        checkpoint: Checkpoint,
        save_clients: Callable[[Path], None] | None = None,
        hold: int | None = None,
    ) -> None:
        """Write a checkpoint, then let go of all but the newest `HELD_CHECKPOINTS` and that of the round `hold`.

        It is written beside its place and renamed, so a crash at any moment leaves the one before it whole.
        """
        parent = self.path / "checkpoint"
        parent.mkdir(exist_ok=True)
        clear(parent)
        unfinished = Path(tempfile.mkdtemp(dir=parent, prefix=UNFINISHED))
        final = self.checkpoint_path(checkpoint.round)
        try:
            sync(self.log)  # the checkpoint counts its bytes
            save_tensors(unfinished / "arrays.safetensors", checkpoint.arrays)
            save_records(unfinished / "strategy.safetensors", checkpoint.strategy)
            state = State(
                round=checkpoint.round,
                run_id=checkpoint.run_id,
                seconds=checkpoint.seconds,
                log_bytes=checkpoint.log_bytes,
                config=checkpoint.config.model_dump(mode="json", exclude_none=True) if checkpoint.config else None,
                sha256={name: _digest(unfinished / name) for name in get_args(TensorFile)},
            )
            write_text(unfinished / "state.json", state.model_dump_json())
            if save_clients:
                save_clients(self.clients)
            sync(unfinished)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(unfinished, final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # on a full disk, every byte counts
            raise
        sync(parent)
        for stale in {*self.checkpoints()[:-HELD_CHECKPOINTS]} - {hold}:
            shutil.rmtree(self.checkpoint_path(stale))

    def load_checkpoint(self, round_: int | None = None) -> Checkpoint:
        """The newest checkpoint, or that of a round. Raises `UserError` when there is none, it is damaged, or of
        other code."""
        rounds = [own for own in self.checkpoints() if round_ in (None, own)]
        if not rounds:
            raise UserError(
                f"{self.path} has no checkpoint to resume from; start the run again with another --out"
            )
        path = self.checkpoint_path(rounds[-1])
        try:
            state = State.model_validate_json((path / "state.json").read_bytes())
            if state.round != rounds[-1]:
                raise ValueError(f"state.json is of round {state.round}")
            for name, digest in state.sha256.items():
                if digest != _digest(path / name):
                    raise ValueError(f"the checksum of {name} does not match")
            arrays = load_tensors(path / "arrays.safetensors")
            strategy = load_records(path / "strategy.safetensors")
        except (OSError, ValueError, SafetensorError, UserError) as error:
            older = f"; move it away to resume from round {rounds[-2]}" if len(rounds) > 1 else ""
            raise UserError(f"checkpoint {path} is damaged ({reason(error)}){older}") from None
        try:
            config = load_config(options=state.config) if state.config else None
        except UserError as error:  # the one before it would say the same
            raise UserError(
                f"checkpoint {path} was made with other code of a plug-in, or of Perennial ({reason(error)}); put "
                "that code back, or start a run of its own with another --out"
            ) from None
        return Checkpoint(state.round, state.run_id, arrays, strategy, state.seconds, state.log_bytes, config)

    def origin(self, config: RunConfig) -> Checkpoint:
        """The newest checkpoint, if the run can go on from it with this configuration. Changes nothing.

        Raises `UserError` as `load_checkpoint` and `changes` do, and for a log or a count of releases that does
        not go with it.
        """
        checkpoint = self.load_checkpoint()
        self.changes(checkpoint, config)
        if isinstance(config.privacy, Clipping) and self.releases() < checkpoint.round:
            raise UserError(
                f"{self.path / 'checkpoint' / 'releases.json'} must say how many models with noise were made, at "
                f"least {checkpoint.round}, or ε is not known; restore it from a copy"
            )
        self._must_reach(checkpoint.log_bytes)
        rows = self._rows_up_to(checkpoint.log_bytes)
        with understood(self.path):
            done = [row["round"] for row in rows if row["kind"] == "round"]
            if done != list(range(1, checkpoint.round + 1)):
                raise ValueError(f"metrics.jsonl does not hold the {checkpoint.round} rounds of the checkpoint")
            summarise(config, rows, seconds=0)  # what would fail at the end fails now
            evaluated = {row["round"] for row in rows if row["kind"] == "evaluation-traffic"}
        if checkpoint.round == config.rounds and config.rounds not in evaluated:
            raise UserError(
                f"config.toml: rounds: {config.rounds} is not possible; the model of that round is there and was "
                f"not evaluated; take {config.rounds + 1} or more"
            )
        return checkpoint

    def changes(self, origin: Checkpoint, config: RunConfig) -> dict[str, list[str]]:
        """What is other now than in the rounds up to a checkpoint: settings, and modules by their digests.

        Raises `UserError` as `Checkpoint.changes` does, and where sites' data have changed.
        """
        other = self.other_inputs(config)
        if sites := [name for name in other if name in config.sites_with_data]:
            raise UserError(
                f"the data of {', '.join(sites)} have changed since the run began; put them back, or start a run "
                "of its own with another --out"
            )
        return origin.changes(config) | other

    def resumes(self) -> list[int]:
        """Rounds after which this run was taken up again, in the order in which that happened."""
        return self._kept("checkpoint/resumes.json", RESUMES, [])

    def add_resume(self, round_: int) -> list[int]:
        """Note that the run is taken up again after a round; all of `resumes`, the new one last."""
        # Not a part of the checkpoint: a run that is taken up twice from the same one has two resumes, and what
        # clients kept in between must not be mistaken for the present attempt's.
        path, resumes = self.path / "checkpoint" / "resumes.json", [*self.resumes(), round_]
        write_text(path, json.dumps(resumes))
        sync(path.parent)
        (self.path / "summary.json").unlink(missing_ok=True)  # of a run that had fewer rounds
        return resumes

    def releases(self) -> int:
        """How many models with noise were made, in all attempts. Raises `UserError` if the file is damaged."""
        return self._kept("checkpoint/releases.json", RELEASES, 0)

    def add_release(self) -> None:
        """Count one more; it is on disk when this returns."""
        path = self.path / "checkpoint" / "releases.json"
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(self.releases() + 1))

    def _kept(self, name: str, kind: TypeAdapter[T], otherwise: T) -> T:
        path = self.path / name
        try:
            return kind.validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return otherwise
        except (OSError, ValidationError) as error:
            raise UserError(f"{path} is damaged ({reason(error)}); restore it from a copy") from None

    def cut_log(self, length: int) -> None:
        """Drop the rows of rounds after a checkpoint. Raises `UserError` if the log is shorter than that."""
        self._must_reach(length)
        os.truncate(self.log, length)

    def _must_reach(self, length: int) -> None:
        if (self.log.stat().st_size if self.log.exists() else 0) < length:
            raise UserError(f"{self.log} is shorter than it was at the checkpoint; restore it from a copy")


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """What is missing in a run folder's files, or of another kind than it should be, is a `UserError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        word = reason(f"{type(error).__name__}: {error}")
        raise UserError(f"the files of {path} are damaged or of another version ({word})") from error


def reason(error: Exception | str) -> str:
    """What is the matter with a file, as a part of a sentence of bounded length."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = first["msg"] if first["type"] == "json_invalid" else sentence(error)
    return text if len(text) <= 300 else f"{text[:299]}…"


def taken_over(died: str, path: Path) -> str:
    """What to say of a process that held a folder and did not give it back."""
    return f"{died} was at work on {path} and ended without a word; its lock is taken over"


def _owner(handle: int) -> str:
    return _text_of(handle) or "another process"


def _text_of(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, 300).decode(errors="replace").strip()


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"--out {path} cannot be written ({error.strerror or error}); give another folder")


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
