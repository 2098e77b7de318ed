"""What a command may write over: a file of its own kind, and never one of somebody's own or of a run."""

import os
from collections.abc import Sequence
from pathlib import Path

from perennial.common.data.scenarios.arrays import FOLDER
from perennial.common.utils.errors import UserError
from perennial.common.utils.tracebacks import NAME as TRACEBACKS
from perennial.server.run.folder import INPUTS, LOCK, PRUNED

OF_RUNS = {
    *("config.toml", "metrics.jsonl", "log.jsonl", "summary.json", "error.txt"),
    *(LOCK, INPUTS, PRUNED, TRACEBACKS, FOLDER, "checkpoint", "models", "flower"),
}
"""Files and folders that a run keeps in its own folder."""


def must_be_ours(path: Path, endings: Sequence[str], option: str = "--out", begins: str = "") -> None:
    """Raises `UserError` where a file cannot be written, is a run's, or is there and not of a command's own kind.

    A file of that kind has one of the endings, and begins with a text. Ask before the work; write at its end.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file, such as {path / f'new{endings[0]}'}")
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"{option} {path}: there is no folder {folder}; make it, or name a file elsewhere")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{option} {path} cannot be written into {folder}; name a file elsewhere")
    place = folder.resolve() / path.name
    for above in place.parents:
        if place.relative_to(above).parts[0] in OF_RUNS and (above / "metrics.jsonl").exists():
            raise UserError(f"{option} {path} would write over what the run {above} keeps; give another name")
    if not path.exists():
        return
    if path.suffix.lower() not in endings:
        raise UserError(
            f"{option} {path} is there and does not end in {' or '.join(endings)}, so it may be a file of your "
            "own; give another name"
        )
    if begins:
        with path.open("rb") as file:
            if file.read(len(begins.encode())) not in (begins.encode(), b""):
                raise UserError(f"{option} {path} is there and is a table of another kind; give another name")
