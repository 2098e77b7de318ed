"""Samples that are named groups of arrays, and sequences of different lengths, as arrays of one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import LARGEST_EXACT, PAD, SampleShape, group_of, vocabulary_of
from perennial.server.arrays import as_array, numbers, shape_text

if TYPE_CHECKING:
    import numpy.typing as npt

Vocabulary = int | Mapping[str, int] | None
"""How many ids of tokens there are, of all samples or by the name of a group's part."""


def announced(parts: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[int, ...] | None:
    """The shape of samples that are groups, or sequences of different lengths; None of any other.

    `parts` has x by the name of its place. Raises `UserError` where they are not alike.
    """
    groups = {name: x for name, x in parts.items() if isinstance(x, Mapping)}
    if not groups:
        if not any(_ragged(x) for x in parts.values()):
            return None
        if isinstance(vocabulary, Mapping):
            raise UserError("vocabulary: a dict is for samples that are groups; give a number")
        return _shape("x", parts, vocabulary)
    first = next(iter(groups))
    names = [*groups[first]]
    for place, x in parts.items():
        if not isinstance(x, Mapping) or {*map(str, x)} != {*map(str, names)} or not names:
            raise UserError(
                f"{place}: x must be a dict of {' and '.join(map(repr, names)) or 'arrays'} as in {first}; all "
                "must have the same names"
            )
    if odd := [name for name in names if not isinstance(name, str) or not name.isidentifier()]:
        raise UserError(f"{first}: x: {odd[0]!r} is no name of a model's argument; write letters and digits")
    if isinstance(vocabulary, Mapping) and (strange := [name for name in vocabulary if name not in names]):
        raise UserError(f"vocabulary: {strange[0]!r} is no part of a sample; there are {', '.join(names)}")
    below: Mapping[str, int] = vocabulary if isinstance(vocabulary, Mapping) else {}
    of_each = {name: {place: x[name] for place, x in parts.items()} for name in names}
    return group_of({name: _shape(name, own, below.get(name)) for name, own in of_each.items()})


def filled(place: str, x: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Samples (n, *shape) as they are kept: int64 ids, or float32. Raises `UserError` where they do not fit."""
    import numpy as np

    if not isinstance(shape, SampleShape) or not shape.parts:
        return _filled(place, "x", x, shape)
    if not isinstance(x, Mapping) or {*x} != {name for name, _ in shape.parts}:
        raise UserError(f"{place}: x must be a dict of {', '.join(name for name, _ in shape.parts)}")
    columns = [_filled(place, name, x[name], own) for name, own in shape.parts]
    counts = {len(column) for column in columns}
    if len(counts) > 1:
        raise UserError(f"{place}: x has {min(counts)} to {max(counts)} samples; each part must have as many")
    return np.concatenate([column.reshape(len(column), -1).astype(np.float32) for column in columns], axis=1)


def _filled(place: str, what: str, x: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    import numpy as np

    if isinstance(shape, SampleShape) and shape.padded:
        rows = [np.asarray(row) for row in x]
        found = np.full((len(rows), shape[0]), PAD, np.int64)
        for number, row in enumerate(rows):
            if row.ndim != 1 or row.dtype.kind not in "iu" or not 0 < len(row) <= shape[0]:
                raise UserError(f"{place}: {what} of sample {number} must be 1 to {shape[0]} whole numbers")
            found[number, : len(row)] = row
        real = found[found != PAD]
    else:
        real = found = _array(place, what, x)
        if found.shape[1:] != tuple(shape):
            raise UserError(
                f"{place}: {what} has shape {shape_text(found.shape[1:])}, and it must be {shape_text(shape)}"
            )
    if most := vocabulary_of(shape):
        if real.dtype.kind not in "iu" or real.min() < 0 or real.max() >= most:
            raise UserError(f"{place}: {what} must have whole numbers from 0 to {most - 1}")
        return found.astype(np.int64)
    found = numbers(f"{place}: {what}", found)
    return found.astype(np.float32) / (255 if found.dtype == np.uint8 else 1)


def _shape(what: str, values: Mapping[str, Any], said: int | None) -> tuple[int, ...]:
    """The shape of an array that is in several places."""
    import numpy as np

    if any(_ragged(x) for x in values.values()):
        rows = [np.asarray(row) for x in values.values() for row in x]
        if odd := [row for row in rows if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row)]:
            raise UserError(
                f"{what}: sequences of different lengths must be of whole numbers, such as ids of tokens, not "
                f"{odd[0].dtype} of shape {shape_text(odd[0].shape)}"
            )
        most = max(int(row.max()) for row in rows) + 1
        return SampleShape((max(map(len, rows)),), _below(what, most, said), padded=True)
    arrays = {place: _array(place, what, x) for place, x in values.items()}
    first = next(iter(arrays))
    for place, found in arrays.items():
        if found.shape[1:] != arrays[first].shape[1:]:
            raise UserError(
                f"{place}: {what} has shape {shape_text(found.shape[1:])}, and in {first} "
                f"{shape_text(arrays[first].shape[1:])}; all must be alike"
            )
    sizes = tuple(arrays[first].shape[1:])
    if not said:  # whole numbers may as well be ages or counts
        return sizes
    wrong = next((place for place, own in arrays.items() if own.dtype.kind not in "iu" or own.min() < 0), "")
    if wrong:
        raise UserError(f"{wrong}: {what} must have whole numbers from 0 to {said - 1}, as ids of tokens")
    return SampleShape(sizes, _below(what, max(int(own.max()) for own in arrays.values()) + 1, said))


def _below(what: str, found: int, said: int | None) -> int:
    if (said and found > said) or found > LARGEST_EXACT:
        raise UserError(f"{what} has {found - 1}, and ids of tokens are below {said or LARGEST_EXACT}")
    return said or found


def _array(place: str, what: str, x: Any) -> npt.NDArray[Any]:
    found = as_array(place, what, x)
    if found.dtype.kind not in "fiub" or not found.ndim or 0 in found.shape:
        raise UserError(f"{place}: {what} must be numbers, not {found.dtype} of shape {shape_text(found.shape)}")
    return found[:, None] if found.ndim == 1 else found


def _ragged(x: Any) -> bool:
    """Whether it is a list of sequences of whole numbers whose lengths differ."""
    import numpy as np

    if isinstance(x, str | Mapping) or not isinstance(x, Iterable) or getattr(x, "ndim", 1) != 1:
        return False
    lengths = {len(row) if hasattr(row, "__len__") and not isinstance(row, str) else -1 for row in x}
    return len(lengths) > 1 and min(lengths) > 0 and all(np.asarray(row).dtype.kind in "iu" for row in x)
