"""Other ways to choose among trials without test data, for comparison with `split` (docs/selection.md).

Each is one number of a model, of which more is better, from what a run writes down at its last evaluation: every
client's held-out samples, right answers and loss by environment, and the counts of `split`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, pstdev, pvariance

from perennial.server.selection.split_rule import Row, Select


@dataclass(frozen=True)
class HeldOut:
    """What a model does on a client's held-out samples of one training environment."""

    client: str
    environment: str
    count: int
    correct: int
    loss: float
    """Sum over the samples."""


@dataclass(frozen=True)
class Evidence:
    """All that is known of a model without test data."""

    held_out: Sequence[HeldOut]
    counts: Row | None = None
    """The row of kind `split`, where there were references."""


def evidence(rows: Iterable[Row], model: str, round_: int) -> Evidence:
    """That of a model after a round. Rows of tasks without right answers have nothing to say."""
    own = [row for row in rows if row.get("round") == round_ and row.get("model") == model]
    held_out = [
        HeldOut(row["client"], *values)
        for row in own
        if row["kind"] == "evaluation" and row["split"] == "validation" and "correct" in row
        for values in zip(row["environment"], row["count"], row["correct"], row["loss"], strict=True)
    ]
    counts = next((row for row in own if row["kind"] == "split"), None)
    return Evidence([part for part in held_out if part.count], counts)


def _by(parts: Sequence[HeldOut], key: Callable[[HeldOut], str]) -> list[tuple[float, float]]:
    """Accuracy and mean loss of all samples that share a key."""
    sums: dict[str, list[float]] = {}
    for part in parts:
        so_far = sums.setdefault(key(part), [0.0, 0.0, 0.0])
        for place, value in enumerate((part.count, part.correct, part.loss)):
            so_far[place] += value
    return [(correct / count, loss / count) for count, correct, loss in sums.values()]


def worst_client(of: Evidence) -> float | None:
    """The lowest accuracy of a client."""
    return min((accuracy for accuracy, _ in _by(of.held_out, lambda part: part.client)), default=None)


def less_deviation(of: Evidence) -> float | None:
    """The clients' mean accuracy less its deviation over them."""
    accuracies = [accuracy for accuracy, _ in _by(of.held_out, lambda part: part.client)]
    return fmean(accuracies) - pstdev(accuracies) if accuracies else None


def worst_environment(of: Evidence) -> float | None:
    """The lowest accuracy of a training environment."""
    return min((accuracy for accuracy, _ in _by(of.held_out, lambda part: part.environment)), default=None)


def risk_variance(of: Evidence) -> float | None:
    """Mean risk of the training environments and its variance over them, with a minus.

    V-REx's measure with β = 1 (Krueger et al., ICML 2021).
    """
    risks = [loss for _, loss in _by(of.held_out, lambda part: part.environment)]
    return -(fmean(risks) + pvariance(risks)) if risks else None


def worst_group(of: Evidence) -> float | None:
    """The lowest accuracy of a class in a training environment: GroupDRO's worst group (Sagawa et al. 2020)."""
    if not of.counts:
        return None
    # Every reference has the same samples, in another order.
    return _lowest(
        (sum(samples), sum(correct))
        for environment in zip(of.counts["samples"][0], of.counts["correct"][0], strict=True)
        for samples, correct in zip(*environment, strict=True)
    )


def inferred_group(of: Evidence) -> float | None:
    """The lowest accuracy of a class among the samples that a reference knows, or among those that it does not.

    Groups from the mistakes of a model that was trained plainly: JTT (Liu et al., ICML 2021), and *Predict then
    Interpolate* (Bao et al., ICML 2021).
    """
    if not of.counts:
        return None
    return _lowest(
        (sum(own[label][kind] for own in samples), sum(own[label][kind] for own in correct))
        for samples, correct in zip(of.counts["samples"], of.counts["correct"], strict=True)
        for label, kind in product(range(len(samples[0])), (0, 1))
    )


def _lowest(groups: Iterable[tuple[int, int]]) -> float | None:
    return min((correct / count for count, correct in groups if count), default=None)


RIVALS: Mapping[Select, Callable[[Evidence], float | None]] = {
    Select.worst_client: worst_client,
    Select.less_deviation: less_deviation,
    Select.worst_environment: worst_environment,
    Select.risk_variance: risk_variance,
    Select.worst_group: worst_group,
    Select.inferred_group: inferred_group,
}
WITH_REFERENCES = {Select.by_split, Select.worst_group, Select.inferred_group}
"""Selections that need the references' counts."""
