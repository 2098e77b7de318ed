"""Tensors by their names, and records of them, as every file, message and model holds them."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Literal

from torch import Tensor

from perennial.common.utils.errors import UserError

Tensors = dict[str, Tensor]
"""Parameters and buffers by their state-dict names, such as "classifier.weight"."""


def part(tensors: Mapping[str, Tensor], name: Literal["featurizer", "classifier"]) -> Tensors:
    """One part's parameters and buffers of a model."""
    return {full: tensor for full, tensor in tensors.items() if full.startswith(f"{name}.")}


def flattened(records: Mapping[str, Tensors]) -> Tensors:
    """Named records as one, with keys `RECORD/TENSOR`."""
    return {f"{record}/{key}": tensor for record, tensors in records.items() for key, tensor in tensors.items()}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """64 hex digits that change with every name, type, shape and number of the tensors."""
    found = sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()


def must_be_records(records: Mapping[str, Any], where: str) -> None:
    """Raises `UserError` for a record that would not come back from a file as it is."""
    for name, tensors in records.items():
        if "/" in name:
            raise UserError(f"{where}: a record's name {name!r} is not possible; it must have no '/'")
        if not isinstance(tensors, Mapping):
            kind = type(tensors).__name__
            raise UserError(
                f"{where}: {name!r} is of type {kind}, which is not possible; it must be tensors by name"
            )
        must_be_tensors(tensors, f"{where}: {name!r}")


def must_be_tensors(tensors: Mapping[str, Any], what: str) -> None:
    """Raises `UserError` for a value that is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise UserError(f"{what}: {name!r} is of type {kind}, which is not possible; it must be a tensor")


def change_marks(tensors: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """What is other once a tensor has been changed in place, or another has taken its place."""
    try:
        return [(id(tensor), tensor._version) for tensor in tensors.values()]
    except RuntimeError:  # of inference mode, whose tensors count no changes
        return [(id(tensor), 0) for tensor in tensors.values()]


def unflattened(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """What `flattened` joined; records without tensors are gone."""
    records: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        record, _, key = name.partition("/")
        records.setdefault(record, {})[key] = tensor
    return records


def number_or_stack(value: Tensor) -> Any:
    """A scalar as a number; of a stack of clients, the tensor (clients,) as it is."""
    return value if value.dim() else value.item()
