"""What one sample is: the sizes of a tensor, whether its numbers are ids of tokens, and whether it is a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAD = -1
"""What stands in the place of a token behind the end of a sequence; no model is given it."""
LARGEST_EXACT = 2**24
"""Whole numbers up to it are exact as float32."""


class SampleShape(tuple[int, ...]):
    """The sizes of a sample of which there is more to say.

    With a `vocabulary` its numbers are ids of tokens, from 0 to below it, in int64. Where it is `padded`, a
    sequence may end before its last place, and has `PAD` behind its end. With `parts` it is a group of samples by
    name, whose numbers lie one behind the other in a vector of float32. A plain tuple is the shape of a sample of
    float32 numbers, and equal to none of these.
    """

    vocabulary: int
    padded: bool
    parts: tuple[tuple[str, tuple[int, ...]], ...]

    def __new__(
        cls,
        sizes: Iterable[int],
        vocabulary: int = 0,
        padded: bool = False,
        parts: tuple[tuple[str, tuple[int, ...]], ...] = (),
    ) -> SampleShape:
        made = super().__new__(cls, sizes)
        made.vocabulary, made.padded, made.parts = vocabulary, padded, parts
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self._all

    @property
    def _all(self) -> tuple[Any, ...]:
        return tuple(self), self.vocabulary, self.padded, self.parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleShape) and self._all == other._all

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._all)


def group_of(shapes: Mapping[str, tuple[int, ...]]) -> SampleShape:
    """The shape of a group of samples by name."""
    return SampleShape((sum(map(prod, shapes.values())),), parts=tuple(shapes.items()))


def vocabulary_of(shape: tuple[int, ...]) -> int:
    """How many ids of tokens there are; 0 where a sample has float numbers."""
    return shape.vocabulary if isinstance(shape, SampleShape) else 0


def padded(shape: tuple[int, ...]) -> bool:
    """Whether a sequence may end before its last place."""
    return isinstance(shape, SampleShape) and shape.padded


def parts_of(shape: tuple[int, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The parts of a group, by name; none of any other sample."""
    return shape.parts if isinstance(shape, SampleShape) else ()


def made_up(shape: tuple[int, ...], count: int = 2) -> Tensor:
    """Samples (count, *shape) of the kind that is announced, the same on every call: normal numbers, or ids that
    are equally likely, among which are the first and the last one."""
    import torch

    if parts := parts_of(shape):
        return torch.cat([made_up(own, count).flatten(1).float() for _, own in parts], dim=1)
    generator = torch.Generator().manual_seed(0)
    if not (most := vocabulary_of(shape)):
        return torch.randn(count, *shape, generator=generator, device="cpu")
    ids = torch.randint(most, (count, *shape), generator=generator, device="cpu")
    ids.view(-1)[0], ids[0].view(-1)[-1] = 0, most - 1
    if padded(shape):
        ids[-1, (shape[0] + 1) // 2 :] = PAD
    return ids


def blank(shape: tuple[int, ...], count: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Samples (count, *shape) of zeros."""
    import torch

    return torch.zeros(count, *shape, dtype=sample_dtype(shape), device=device)


def unpacked(x: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The parts (n, *part) of samples x (n, …) of a group, ids as int64."""
    found, at = {}, 0
    for name, own in parts_of(shape):
        part = x[:, at : at + prod(own)].reshape(len(x), *own)
        found[name] = part.long() if vocabulary_of(own) else part
        at += prod(own)
    return found


def sample_dtype(shape: tuple[int, ...]) -> torch.dtype:
    """The type of samples: int64 of ids, float32 of anything else."""
    import torch

    return torch.int64 if vocabulary_of(shape) else torch.float32


def shape_in_words(shape: tuple[int, ...]) -> str:
    """A sample's shape as a sentence has it."""
    if parts := parts_of(shape):
        return ", ".join(f"{name} {shape_in_words(own)}" for name, own in parts)
    sizes = "x".join(map(str, shape)) or "of a single number"
    return f"{sizes} (ids of tokens below {most})" if (most := vocabulary_of(shape)) else sizes
