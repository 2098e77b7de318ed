"""Names of what travels, and the step from tensors to Flower's records and back.

Tensors in a record are encoded only when the record leaves the process. On the local runtime they never do,
so a message costs no copy; over gRPC the bytes are numpy's own format, read with pickling refused.
This is the one module that leans on how `flwr.app.Array` is made; `tests/common/test_wire.py` fails when that
changes.
"""

import re
from collections.abc import Mapping
from io import BytesIO
from math import prod
from typing import TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from numpy.lib import format
from torch import Tensor

from perennial.common.utils.tensors import Tensors

R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord)
Scalar = int | float | str | bool | list[int] | list[float] | list[str]

# Record names. A method's own records are named in its strategy and client alike.
MODEL = "model"
PERSONAL = "personal"
HEAD = "head"
GRADIENT = "gradient"
CONFIG = "config"
METRICS = "metrics"

# Keys of the configuration record that every request carries.
TASK = "task"
RUN = "run"
ROUND = "round"
KEPT = "kept"
RESUMED = "resumed"

# Keys of the settings in the answer to a `query`: which client this is, why it cannot take part, and on what
# protection its policy insists.
CLIENT = "client"
REFUSED = "refused"
INSISTS = "insists"

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A run's, which names a folder at the sites."""
LONGEST_NAME = 100
"""Letters of a record's, a metric's or a setting's name."""
HEADER_BYTES = 1024
"""More than numpy writes in front of an array's values."""

# Key of a reply's metrics: Flower's own name for the sample count.
NUM_EXAMPLES = "num-examples"


class TensorArray(Array):
    """A Flower array that still is a tensor; `data` is made when somebody asks for bytes."""

    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        # Flower (numpy) has no bfloat16; float32 holds every bfloat16 value exactly.
        tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        # Past Flower's `__setattr__`, which looks at each name for what has been encoded before.
        self.__dict__.update(tensor=tensor, dtype=dtype, shape=tuple(tensor.shape), stype="numpy.ndarray")

    def plain(self) -> Array:
        """The same array, encoded."""
        if "_plain" not in self.__dict__:
            self.__dict__["_plain"] = Array.from_torch_tensor(self.tensor)
        array: Array = self.__dict__["_plain"]
        return array

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return self.plain().data

    def deflate(self) -> bytes:
        return self.plain().deflate()

    def slice_array(self) -> list[tuple[str, InflatableObject]]:
        return self.plain().slice_array()


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """An array record over the tensors themselves; the caller must not change them afterwards."""
    record = ArrayRecord()
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


def plain_record(record: ArrayRecord) -> ArrayRecord:
    """A record of Flower's own arrays, which its processes hand to each other as they like."""
    return ArrayRecord(
        {name: array.plain() if isinstance(array, TensorArray) else array for name, array in record.items()}
    )


def from_record(record: ArrayRecord) -> Tensors:
    """The tensors of a record, to be read and not changed. Raises nearly anything for bytes that are no array."""
    return {
        name: array.tensor if isinstance(array, TensorArray) else _decoded(array) for name, array in record.items()
    }


def _decoded(array: Array) -> Tensor:
    """numpy makes room for what the bytes' own header says, so that is compared with what was announced."""
    file = BytesIO(array.data[:HEADER_BYTES])
    read = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}[format.read_magic(file)]
    shape, _, dtype = read(file)
    if (shape, dtype.name) != (tuple(array.shape), array.dtype) or prod(shape) * dtype.itemsize > len(array.data):
        raise ValueError("an array is not what its header says")
    return torch.from_numpy(array.numpy())


def records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """The records of one kind in a message, by name.

    Flower's `content.array_records` and its like hold the same, but are made and type-checked anew at every use,
    which takes ten times as long.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def record_bytes(record: MetricRecord | ConfigRecord) -> int:
    """About what numbers, texts and lists of them take on the wire: 8 for a number and 1 for a letter."""
    return sum(
        len(item) if isinstance(item, (str, bytes)) else 8
        for value in record.values()
        for item in (value if isinstance(value, list) else [value])
    )


def numbers(metrics: Mapping[str, int | float | list[int] | list[float]]) -> dict[str, float]:
    """Those of a reply's metrics that are no lists."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the values alone: 4 bytes for a float32, without names and framing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
