"""What somebody who watches a run is told, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perennial.common.tasks import HEADLINES
from perennial.common.utils.errors import printable

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors


@dataclass(frozen=True)
class RoundDone:
    """What the log says of a round that has been trained."""

    round: int
    rounds: int
    metrics: dict[str, float]
    left_out: dict[str, str]


@dataclass(frozen=True)
class Progress(RoundDone):
    """What somebody who watches a run is told after each round."""

    rows: Sequence[dict[str, Any]] = ()
    """Of the log, those that have come since the last time. On Flower's runtimes a round is told as soon as it has
    been trained, and its evaluation comes with the next one."""
    _results: Callable[[], Mapping[str, Tensors]] = dict

    def models(self) -> Mapping[str, Tensors]:
        """The server's models after this round, tensors by name; to be read only. Flower's runtimes have them in
        their own processes, and here there are none."""
        return self._results()


MOST_NAMED = 20
"""Clients and nodes left out that a line names; strangers without end may knock at a federation without keys."""
Watcher = Callable[[Progress], None]


def progress_line(progress: Progress) -> str:
    """One line for a round that has something to say: an evaluation, or clients left out; else empty."""
    found = [
        f"{model} {measure.text(value, 1)}{measure.unit}"
        for name, value in progress.metrics.items()
        for model, _, last in [name.rpartition("/")]
        if model and (measure := HEADLINES.get(last))
    ]
    if not found and not progress.left_out:
        return ""
    parts = [f"round {progress.round}/{progress.rounds}", *found]
    left_out = sorted(progress.left_out.items())
    parts += [f"left out {client}: {reason}" for client, reason in left_out[:MOST_NAMED]]
    if (more := len(left_out) - MOST_NAMED) > 0:
        parts.append(f"and {more} more left out")
    return printable("  ".join(parts))


@dataclass(frozen=True)
class Watched:
    """What is told while a run is carried out: what it is doing before its first round, and every round."""

    doing: Callable[[str], None] = lambda _: None
    round: Watcher = lambda _: None


QUIET = Watched()
"""Nobody watches."""
