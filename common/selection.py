"""What a client counts for the selection `split`: held-out samples told apart by whether a model that was trained
on one environment alone knows their label, and how many of either kind a model gets right.

Of a sample with several labels each one that is known is counted, as an answer of its own; a class is one answer.

Such a model f_e is called the reference of environment e. Where a shortcut is more useful in one environment than
in another, it agrees with the label mostly among the samples that f_e gets right, and mostly not among the others
(after Bao, Chang and Barzilay 2021). The rule that reads these counts is in `server/selection/split_rule.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perennial.common.measures.scores import Summable, counts_in
from perennial.common.methods.base import Sum

if TYPE_CHECKING:
    from torch import Tensor

    from perennial.common.data.scenario import Scenario
    from perennial.common.utils.tensors import Tensors

SPLIT = "split"
"""Where the counts stand in an evaluation: `MODEL/split/samples` and `MODEL/split/correct`."""
COLUMNS = ("samples", "correct")
PREFIX = "reference-"

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class References:
    """The references of a run."""

    records: Mapping[str, Tensors]
    """By `record`, one for each training environment."""
    digest: str
    """Of the file that they are from."""


def record(environment: int) -> str:
    """Name of the record that holds the reference of a training environment, by its number."""
    return f"{PREFIX}{environment}"


@dataclass(frozen=True)
class Tally(Summable):
    """Counts of one model on held-out samples, one for each (reference, environment, kind, knows).

    A kind is what the right answer is (`PredictionTask.kinds`), such as the class. `knows` is 0 for the answers
    that the reference gets right (✓), 1 for the others (×). Clients' tallies add up.
    """

    samples: Counts
    """n✓ and n×."""
    correct: Counts
    """c✓ and c×: those of them that the model gets right."""


Place = tuple[int, int]
"""How many training environments there are, and how many kinds of answers."""


def place_of(scenario: Scenario) -> Place:
    """That of a run."""
    return len(scenario.train_environments), sum(scenario.task.answers)


def shape(environments: int, kinds: int) -> tuple[int, int, int, int]:
    """Of the counts: every environment has a reference."""
    return environments, environments, kinds, 2


def tally(known: Sequence[Tensor], correct: Tensor, kinds: Tensor, environment: Tensor, count: int) -> Tally:
    """The counts of a model that is right where `correct` is, under references right where `known` are.

    All are (n, answers), as are the `kinds`, of `count` ones; of an answer whose kind is -1 nothing is counted.
    `environment`: (n,).
    """
    import torch

    place = shape(len(known), count)
    there = kinds >= 0
    cells = []
    for right in known:
        cell = ((environment[:, None] * count + kinds) * 2 + (~right).long())[there].cpu()
        size = place[1] * count * 2
        cells.append([torch.bincount(own, minlength=size).numpy() for own in (cell, cell[correct[there].cpu()])])
    samples, hits = (np.stack([cell[part] for cell in cells]).reshape(place) for part in (0, 1))
    return Tally(samples, hits)


# ---------------------------------------------------------------------- what is added up over clients

SUMS = (Sum("evaluate", SPLIT),)
"""The record of `contribution` counts, where secure aggregation hides each client's."""
STEPS = 2**22
"""Of a client's accuracy: sums of whole numbers are the same in every order, and under masks."""


def contribution(tallies: Mapping[str, Tally], models: Sequence[str], place: Place) -> dict[str, Counts]:
    """What a client adds to the sums over clients, by name: counts, and accuracies of the references in `STEPS`.

    Of its models those that have a tally; 0 for the others, and everywhere where it has held nothing out.
    """
    nothing = Tally(np.zeros(shape(*place), np.int64), np.zeros(shape(*place), np.int64))
    samples = next(iter(tallies.values()), nothing).samples  # the references do not depend on the model
    right, every = samples[..., 0].sum(axis=2), samples.sum(axis=(2, 3))
    accuracy = right / every.clip(min=1)
    return {
        "samples": samples,
        "clients": (every[0] > 0).astype(np.int64),
        "accuracy": np.rint(accuracy * STEPS).astype(np.int64),
        "squares": np.rint(accuracy**2 * STEPS).astype(np.int64),
        **{f"{model}/correct": tallies.get(model, nothing).correct for model in models},
    }


def split_off(
    metrics: Mapping[str, Any], models: Sequence[str], place: Place
) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """A client's own answer without the counts, and these as the record of `SUMS`."""
    import torch

    tallies, rest = dict[str, Tally](), dict(metrics)
    for model in models:
        names = [f"{model}/{SPLIT}/{name}" for name in COLUMNS]
        if all(name in rest for name in names):
            tallies[model] = Tally(*(np.array(rest.pop(name), np.int64).reshape(shape(*place)) for name in names))
    found = contribution(tallies, models, place)
    return {SPLIT: {name: torch.from_numpy(counts).double() for name, counts in found.items()}}, rest


# ---------------------------------------------------------------------- on the wire


def columns(found: Tally) -> dict[str, list[int]]:
    """A tally as `COLUMNS`, flat lists of plain numbers."""
    return {name: getattr(found, name).flatten().tolist() for name in COLUMNS}


def from_columns(given: Mapping[str, Any], place: Place, count: int, correct: int) -> Tally:
    """What `columns` made, of a client with `count` held-out answers of which the model gets `correct` right.

    Raises `ValueError` or `TypeError` where it cannot be.
    """
    (samples,), (hits,) = (
        counts_in(given, [name], shape(*place), most) for name, most in zip(COLUMNS, (count, correct), strict=True)
    )
    found = Tally(samples, hits)
    must_add_up(found, count, correct)
    return found


def must_add_up(found: Tally, count: int, correct: int) -> None:
    """Raises `ValueError` unless counts can be those of `count` held-out answers, `correct` of them right."""
    if (found.correct < 0).any() or (found.correct > found.samples).any():
        raise ValueError("more correct answers than samples")
    for name, counts, total in (("samples", found.samples, count), ("correct", found.correct, correct)):
        each = counts.sum(axis=3)  # the same samples, told apart by another reference
        if (each != each[0]).any() or each[0].sum() != total:
            raise ValueError(f"{name} does not add up to the {total} held-out ones under every reference")
