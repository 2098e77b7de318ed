"""Whether a reply may touch the model."""

import math
from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from common.models import Tensors
from common.wire import NUM_EXAMPLES, from_record

Template = Mapping[str, Tensor]
"""Tensors of the shapes and types that a reply's record must have."""


class Rejected(Exception):  # noqa: N818 - a reply's fate, not a fault
    """Why a reply is left out, in a few words for the operator."""


def accept(name: str, record: ArrayRecord | None, template: Template) -> Tensors:
    """The tensors of a reply's record, in the template's order. Raises `Rejected` with the reason.

    Keys, shapes and types are compared before any byte is decoded, so an oversized reply costs nothing.
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
    try:
        tensors = from_record(record)
    except Exception as error:  # numpy's reader raises nearly anything on hostile bytes, MemoryError included
        raise Rejected(f"{name!r} cannot be decoded ({error})") from None
    for key, like in template.items():
        # What was announced and what was decoded may differ in a hostile reply.
        if tensors[key].shape != like.shape or tensors[key].dtype != like.dtype:
            raise Rejected(f"{name!r}: {key} is not what its header says")
    if not _finite(tensors):
        bad = [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        raise Rejected(f"{name!r} is not finite in {_some(bad)}")
    return {key: tensors[key] for key in template}


def check_metrics(metrics: MetricRecord | None, *, counted: bool = False) -> MetricRecord:
    """A reply's metrics if they are there and finite; a count of samples is at least one, and there if `counted`.

    Raises `Rejected`.
    """
    if metrics is None:
        raise Rejected("the metrics are missing")
    for key, value in metrics.items():
        values = value if isinstance(value, list) else [value]
        if not all(abs(number) < float("inf") for number in values):
            raise Rejected(f"metric {key!r} is {value}")
    if counted and NUM_EXAMPLES not in metrics:
        raise Rejected(f"metric {NUM_EXAMPLES!r} is missing")
    if NUM_EXAMPLES in metrics:
        count = metrics[NUM_EXAMPLES]
        if not isinstance(count, int) or count < 1:
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, not a count of samples")
    return metrics


def _finite(tensors: Tensors) -> bool:
    # A sum is finite only if every term is; when large finite terms overflow it, look at each value.
    floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    # As a Python float: torch's own `isfinite` costs four times the sum of a small tensor.
    if all(math.isfinite(tensor.sum()) for tensor in floating):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in floating)


def _some(keys: "set[str] | list[str]") -> str:
    first, *rest = sorted(keys)
    return first + (f" and {len(rest)} more" if rest else "")
