"""Whether a reply may touch the model."""

from collections.abc import Collection, Mapping

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from common.models import Tensors
from common.wire import NUM_EXAMPLES, TensorArray, from_record

HEADER_BYTES = 1024
"""More than numpy writes in front of an array's values."""
MOST_METRICS, LONGEST_NAME, LONGEST_REASON = 100, 100, 300
FLOAT32_MAX = torch.finfo(torch.float32).max

Template = Mapping[str, Tensor]
"""Tensors of the shapes and types that a reply's record must have."""


class Rejected(Exception):  # noqa: N818 - a reply's fate, not a fault
    """Why a reply is left out, in a few words for the operator.

    Parts of it may be a client's own words: they go to a terminal and a log, so on one line, and not for ever.
    """

    def __init__(self, reason: str) -> None:
        line = "".join(letter if letter.isprintable() else " " for letter in reason)
        super().__init__(line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + " …")


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
            raise Rejected(f"{name!r}: {key} has shape {tuple(array.shape)} instead of {tuple(like.shape)}")
        if array.dtype != dtype:
            raise Rejected(f"{name!r}: {key} has type {array.dtype} instead of {dtype}")
        size = like.numel() * like.element_size()
        if not isinstance(array, TensorArray) and len(array.data) > size + HEADER_BYTES:
            raise Rejected(f"{name!r}: {key} has {len(array.data)} bytes; its values take {size}")
    try:
        tensors = from_record(record)
    except Exception:  # numpy's reader raises nearly anything on hostile bytes, MemoryError included
        raise Rejected(f"{name!r} cannot be decoded: its bytes are no arrays of numbers") from None
    for key, like in template.items():
        # What was announced and what was decoded may differ in a hostile reply.
        if tensors[key].shape != like.shape or tensors[key].dtype != like.dtype:
            raise Rejected(f"{name!r}: {key} is not what its header says")
    for key, tensor in tensors.items():
        # One pass, and NaN comes through it: no comparison with NaN holds.
        low, high = (float(value) for value in tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
        if not -largest <= low <= high <= largest:
            if not torch.isfinite(tensor).all():
                raise Rejected(f"{name!r} is not finite in {key}")
            worst = max(low, high, key=abs)
            raise Rejected(f"{name!r}: {key} has the value {worst:g}, and largest={largest:g} is the limit")
    return {key: tensors[key] for key in template}


def check_metrics(
    metrics: MetricRecord | None, *, counted: bool = False, most_examples: int = 10**18
) -> MetricRecord:
    """A reply's metrics if they are there and finite; a count of samples is from one to `most_examples`, and is
    there if `counted`.

    Raises `Rejected`.
    """
    if metrics is None:
        raise Rejected("the metrics are missing")
    if len(metrics) > MOST_METRICS:
        raise Rejected(f"it has {len(metrics)} metrics; {MOST_METRICS} is the limit")
    for key, value in metrics.items():
        if len(key) > LONGEST_NAME or not key.isprintable():
            raise Rejected(f"metric {key!r} has no name of at most {LONGEST_NAME} letters")
        values = value if isinstance(value, list) else [value]
        # A metric is the mean of float32s. What is larger could overflow where it is weighted and added up.
        if not all(abs(number) <= FLOAT32_MAX for number in values):
            raise Rejected(f"metric {key!r} is {value}")
    if counted and NUM_EXAMPLES not in metrics:
        raise Rejected(f"metric {NUM_EXAMPLES!r} is missing")
    if NUM_EXAMPLES in metrics:
        count = metrics[NUM_EXAMPLES]
        if not isinstance(count, int) or count < 1:
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, not a count of samples")
        if count > most_examples:
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, and most_examples={most_examples} is the limit")
    return metrics


def _some(keys: Collection[str]) -> str:
    first, *rest = sorted(keys)
    return first + (f" and {len(rest)} more" if rest else "")
