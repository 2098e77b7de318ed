"""Whether a reply may touch the model."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from torch import Tensor

from perennial.common.config import RunConfig
from perennial.common.flower.arrays import HEADER_BYTES, TensorArray
from perennial.common.stacks import StackReply
from perennial.common.utils.errors import printable
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import LONGEST_NAME, NUM_EXAMPLES, from_record, record_bytes

LONGEST_REASON = 300
FLOAT32_MAX = torch.finfo(torch.float32).max

Template = Mapping[str, Tensor]
"""Tensors of the shapes and types that a reply's record must have."""


class Rejected(Exception):  # noqa: N818 - a reply's fate, not a fault
    """Why a reply is left out, in a few words for the operator.

    Parts of it may be a client's own words: they go to a terminal and a log, so on one line, and not for ever.
    """

    def __init__(self, reason: str) -> None:
        line = printable(reason[:LONGEST_REASON])
        super().__init__(line if len(reason) <= LONGEST_REASON else line + " …")


class NotFinite(Rejected):
    """Tensors with a number that is none."""


@dataclass(frozen=True)
class Limits:
    """What no reply of a run may go beyond."""

    run: RunConfig
    enrolled: Callable[[int], int | None] = lambda _: None
    """Samples that a node had when it enrolled, by its id; none if it has not said."""


def check_sizes(
    arrays: Mapping[str, ArrayRecord], metrics: MetricRecord, settings: ConfigRecord, run: RunConfig
) -> None:
    """Whether a reply is of a size that may be looked at. Nothing in it is decoded, matched or added up here.

    Raises `Rejected`.
    """
    for what, record in (("metrics", metrics), ("settings", settings)):
        if len(record) > run.most_items:
            raise Rejected(f"it has {len(record)} {what}, and most_items={run.most_items} is the limit")
        for name in record:
            if len(name) > LONGEST_NAME or not name.isprintable():
                raise Rejected(f"{what}: {name[:LONGEST_NAME]!r} is no name of at most {LONGEST_NAME} letters")
    sizes = {
        "array": sum(_array_bytes(array) for record in arrays.values() for array in record.values()),
        "metric": record_bytes(metrics),
        "setting": record_bytes(settings),
    }
    for what, size in sizes.items():
        if size > (most := getattr(run, f"most_{what}_bytes")):
            raise Rejected(f"its {what}s have {size} bytes, and most_{what}_bytes={most} is the limit")


def accept(name: str, record: ArrayRecord | None, template: Template, largest: float) -> Tensors:
    """The tensors of a reply's record, in the template's order, no value beyond ± `largest`.

    Raises `Rejected` with the reason. Keys, shapes, types and sizes are compared before any byte is decoded.
    """
    if record is None:
        raise Rejected(f"record {name!r} is missing")
    if missing := template.keys() - record.keys():
        raise Rejected(f"{name!r} lacks {_some(missing)}")
    if extra := record.keys() - template.keys():
        raise Rejected(f"{name!r} has unexpected {_some(extra)}")
    for key, like in template.items():
        array, dtype = record[key], str(like.dtype).removeprefix("torch.")
        if tuple(array.shape) != tuple(like.shape):
            shape = tuple(array.shape[:10])
            raise Rejected(f"{name!r}: {key} has shape {shape} instead of {tuple(like.shape)}")
        if array.dtype != dtype:
            raise Rejected(f"{name!r}: {key} has type {array.dtype[:LONGEST_NAME]} instead of {dtype}")
        size = like.nbytes
        if not isinstance(array, TensorArray) and len(array.data) > size + HEADER_BYTES:
            raise Rejected(f"{name!r}: {key} has {len(array.data)} bytes; its values take {size}")
    try:
        tensors = from_record(record)
    except Exception:  # numpy's reader raises nearly anything on hostile bytes, MemoryError included
        raise Rejected(f"{name!r} cannot be decoded: its bytes are no arrays of numbers") from None
    for key, (low, high) in _ranges(tensors).items():
        # NaN comes through: no comparison with NaN holds.
        if not -largest <= low <= high <= largest:
            if not torch.isfinite(tensors[key]).all():
                raise NotFinite(f"{name!r} is not finite in {key}")
            worst = max(low, high, key=abs)
            raise Rejected(f"{name!r}: {key} has the value {worst:g}, and largest={largest:g} is the limit")
    return {key: tensors[key] for key in template}


def check_metrics(
    metrics: MetricRecord, *, counted: bool = False, lists: bool = False, most_examples: int = 10**18
) -> MetricRecord:
    """A reply's metrics if they are finite; a count of samples is from one to `most_examples`, and is there if
    `counted`. Lists, and names with a "/", are for evaluations.

    Raises `Rejected`.
    """
    for key, value in metrics.items():
        if not lists and "/" in key:
            raise Rejected(f"metric {key!r} is for evaluations alone")
        if isinstance(value, list) and (not lists or key == NUM_EXAMPLES):
            raise Rejected(f"metric {key!r} is a list")
        # A metric is the mean of float32s. What is larger could overflow where it is weighted and added up.
        for number in value if isinstance(value, list) else [value]:
            if not abs(number) <= FLOAT32_MAX:
                raise Rejected(f"metric {key!r} is {number}")
    if counted and NUM_EXAMPLES not in metrics:
        raise Rejected(f"metric {NUM_EXAMPLES!r} is missing")
    if NUM_EXAMPLES in metrics:
        count = metrics[NUM_EXAMPLES]
        if not isinstance(count, int) or count < 1:
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, not a count of samples")
        if count > most_examples:
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, and most_examples={most_examples} is the limit")
    return metrics


def within(reply: StackReply, limits: Limits) -> list[bool]:
    """Of each client of a stack whether all its numbers are finite and within bounds, as `accept` and
    `check_metrics` look at one reply's."""
    largest, most = limits.run.largest, limits.run.most_examples
    fine = np.ones(len(reply), bool)
    for tensors in reply.arrays.values():
        for name, (low, high) in _ranges(tensors).items():
            if not -largest <= low <= high <= largest:  # so somebody's are not
                own = [tensor.double() for tensor in tensors[name].reshape(len(reply), -1).aminmax(dim=1)]
                fine &= ((own[0] >= -largest) & (own[1] <= largest)).cpu().numpy()
    for name, values in reply.metrics.items():
        if name == NUM_EXAMPLES:
            counts, enrolled = np.array(values), list(map(limits.enrolled, reply.nodes))
            bounds = [most if own is None or own > most else own for own in enrolled]
            fine &= (counts >= 1) & (counts <= np.array(bounds))
        else:
            numbers = np.abs(np.array(values, np.float64)).reshape(len(reply), -1)
            fine &= (numbers <= FLOAT32_MAX).all(axis=1)
    found: list[bool] = fine.tolist()
    return found


def _array_bytes(array: Array) -> int:
    """Of an array that has not been encoded yet, those of its values."""
    if isinstance(array, TensorArray):
        return array.tensor.nbytes
    return len(array.data)


def _ranges(tensors: Tensors) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of each tensor that has any; one wait for the device, however many."""
    full = {key: tensor for key, tensor in tensors.items() if tensor.numel()}
    if not full:
        return {}
    extremes = [end for tensor in full.values() for end in tensor.aminmax()]
    if len({(end.dtype, end.device) for end in extremes}) > 1:
        extremes = [end.double().to(extremes[0].device) for end in extremes]
    found = iter(torch.stack(extremes).tolist())
    return {key: (next(found), next(found)) for key in full}


def _some(keys: Collection[str]) -> str:
    first = min(keys)[:LONGEST_NAME]
    return first + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
