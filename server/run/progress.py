"""What somebody who watches a run is told, round by round."""

from collections.abc import Callable
from dataclasses import dataclass

from perennial.common.tasks import HEADLINES
from perennial.common.utils.errors import printable


@dataclass(frozen=True)
class Progress:
    """What somebody who watches a run is told after each round."""

    round: int
    rounds: int
    metrics: dict[str, float]
    left_out: dict[str, str]


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
