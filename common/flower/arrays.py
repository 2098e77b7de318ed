"""Flower's arrays as tensors, and back: the one module that leans on how `flwr.app.Array` is made."""

from io import BytesIO
from math import prod

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from numpy.lib import format
from torch import Tensor

HEADER_BYTES = 1024
"""More than numpy writes in front of an array's values."""


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


def record_of(arrays: dict[str, TensorArray]) -> ArrayRecord:
    """A record of arrays that need no look at the type of each, which takes as long as to make them."""
    record = ArrayRecord()
    record.__dict__["_data"].update(arrays)
    return record


def plain_record(record: ArrayRecord) -> ArrayRecord:
    """A record of Flower's own arrays, which its processes hand to each other as they like."""
    return ArrayRecord(
        {name: array.plain() if isinstance(array, TensorArray) else array for name, array in record.items()}
    )


def decoded(array: Array) -> Tensor:
    """The tensor of an array that came as bytes. Raises nearly anything for bytes that are no array.

    numpy makes room for what the bytes' own header says, so that is compared with what was announced.
    """
    file = BytesIO(array.data[:HEADER_BYTES])
    read = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}[format.read_magic(file)]
    shape, _, dtype = read(file)
    if (shape, dtype.name) != (tuple(array.shape), array.dtype) or prod(shape) * dtype.itemsize > len(array.data):
        raise ValueError("an array is not what its header says")
    return torch.from_numpy(array.numpy())


def carried(content: RecordDict) -> RecordDict:
    """What arrives of a message's content that goes over gRPC."""
    return recorddict_from_proto(ProtoRecordDict.FromString(recorddict_to_proto(content).SerializeToString()))
