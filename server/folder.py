"""A run folder: complete configuration, log of rows, summary, checkpoints, final models."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from safetensors import SafetensorError

from common.config import RunConfig, load_config, sentence
from common.errors import UserError
from common.files import load_records, load_tensors, save_records, save_tensors, sync, write_text, writing

if TYPE_CHECKING:
    from common.models import Tensors

HELD_CHECKPOINTS = 2
TENSOR_FILES = ("arrays.safetensors", "strategy.safetensors")
RESUMES, RELEASES = TypeAdapter(list[NonNegativeInt]), TypeAdapter(NonNegativeInt)
T = TypeVar("T")


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


def default_out(config: RunConfig) -> str:
    """Where a run goes when nobody says: `runs/TIME-METHOD-SCENARIO-sSEED`."""
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.method.name}-{config.scenario.name}-s{config.seed}"


class RunFolder:
    """The files of one run. Every file is complete or absent, except the log, which is cut to whole rounds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """A new run folder with its configuration. Raises `UserError` if it cannot be made or holds a run."""
        folder = cls(path)
        try:
            folder.must_be_empty()
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / "config.toml", config.toml())
            folder.log.touch()
        except OSError as error:
            raise UserError(
                f"--out {path} cannot be written ({error.strerror or error}); give another folder"
            ) from None
        return folder

    def must_be_empty(self) -> None:
        """Raises `UserError` if the folder holds a run that has written anything."""
        if self.log.exists() and self.log.stat().st_size:
            raise UserError(
                f"{self.path} already holds a run; give another --out, "
                f"or continue it: perennial resume {self.path}"
            )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run folder. Raises `UserError` if it is none."""
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        return cls(path)

    def config(self) -> RunConfig:
        """The run's configuration. Raises `UserError` if the file was damaged."""
        return load_config(self.path / "config.toml")

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows to the log."""
        with writing(self.log), self.log.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the log. Raises `UserError` naming the line that cannot be read."""
        rows: list[dict[str, Any]] = []
        try:
            for line in self.log.read_bytes().splitlines():
                rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{self.log} line {len(rows) + 1} is damaged ({error})") from None
        except OSError as error:
            raise UserError(f"{self.log} cannot be read ({error.strerror})") from None
        return rows

    def rows_after(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Whole rows that were written after a byte offset of the log, and the offset after them."""
        if not self.log.exists():
            return [], offset
        with self.log.open("rb") as file:
            file.seek(offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], offset + len(whole)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """Read `summary.json`. Raises `UserError` when the run has not ended, or the file is damaged."""
        try:
            found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        except FileNotFoundError:
            raise UserError(
                f"{self.path} has no summary yet: the run has not ended (perennial resume {self.path})"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / 'summary.json'} is damaged ({error})") from None
        return found

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
        """Folder of a checkpoint; the local runtime puts what clients keep into its `clients`."""
        return self.path / "checkpoint" / f"round-{round_}"

    def save_checkpoint(self, checkpoint: Checkpoint, save_clients: Callable[[Path], None] | None = None) -> None:
        """Write a checkpoint, then let go of all but the newest `HELD_CHECKPOINTS`.

        It is written beside its place and renamed, so a crash at any moment leaves the one before it whole.
        """
        parent = self.path / "checkpoint"
        parent.mkdir(exist_ok=True)
        for torso in parent.glob(".new-*"):
            shutil.rmtree(torso)
        beside = Path(tempfile.mkdtemp(dir=parent, prefix=".new-"))
        final = self.checkpoint_path(checkpoint.round)
        try:
            sync(self.log)  # the checkpoint counts its bytes
            save_tensors(beside / "arrays.safetensors", checkpoint.arrays)
            save_records(beside / "strategy.safetensors", checkpoint.strategy)
            facts = {key: value for key, value in vars(checkpoint).items() if key not in ("arrays", "strategy")}
            facts["sha256"] = {name: _digest(beside / name) for name in TENSOR_FILES}
            write_text(beside / "state.json", json.dumps(facts))
            if save_clients:
                save_clients(beside / "clients")
            sync(beside)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(beside, final)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)  # on a full disk, every byte counts
            raise
        sync(parent)
        for stale in self.checkpoints()[:-HELD_CHECKPOINTS]:
            shutil.rmtree(self.checkpoint_path(stale))

    def load_checkpoint(self) -> Checkpoint:
        """The newest checkpoint. Raises `UserError` when there is none, or it is damaged."""
        held = self.checkpoints()
        if not held:
            raise UserError(
                f"{self.path} has no checkpoint to resume from; start the run again with another --out"
            )
        path = self.checkpoint_path(held[-1])
        try:
            facts = json.loads((path / "state.json").read_text())
            for name, digest in facts.pop("sha256").items():
                if digest != _digest(path / name):
                    raise ValueError(f"the checksum of {name} does not match")
            return Checkpoint(
                arrays=load_tensors(path / "arrays.safetensors"),
                strategy=load_records(path / "strategy.safetensors"),
                **facts,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            older = f"; move it away to resume from round {held[-2]}" if len(held) > 1 else ""
            raise UserError(f"checkpoint {path} is damaged ({error}){older}") from None

    def resumes(self) -> list[int]:
        """Rounds after which this run was taken up again, in the order in which that happened."""
        return self._noted("resumes.json", RESUMES, [])

    def add_resume(self, round_: int) -> list[int]:
        """Note that the run is taken up again after a round; all of `resumes`, the new one last."""
        # Not a part of the checkpoint: a run that is taken up twice from the same one has two resumes, and what
        # clients kept in between must not be mistaken for the present attempt's.
        path, resumes = self.path / "checkpoint" / "resumes.json", [*self.resumes(), round_]
        write_text(path, json.dumps(resumes))
        sync(path.parent)
        return resumes

    def releases(self) -> int:
        """How many models with noise were made, in all attempts. Raises `UserError` if the file is damaged."""
        return self._noted("releases.json", RELEASES, 0)

    def add_release(self) -> None:
        """Count one more; it is on disk when this returns."""
        path = self.path / "checkpoint" / "releases.json"
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(self.releases() + 1))

    def _noted(self, name: str, kind: TypeAdapter[T], otherwise: T) -> T:
        path = self.path / "checkpoint" / name
        try:
            return kind.validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return otherwise
        except (OSError, ValidationError) as error:
            raise UserError(f"{path} is damaged ({reason(error)}); restore it from a copy") from None

    def cut_log(self, length: int) -> None:
        """Drop the rows of rounds after a checkpoint. Raises `UserError` if the log is shorter than that."""
        if (self.log.stat().st_size if self.log.exists() else 0) < length:
            raise UserError(f"{self.log} is shorter than it was at the checkpoint; restore it from a copy")
        os.truncate(self.log, length)


def reason(error: OSError | ValidationError) -> str:
    """What is the matter with a file, as a part of a sentence."""
    return sentence(error) if isinstance(error, ValidationError) else error.strerror or str(error)


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
