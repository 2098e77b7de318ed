"""What one sample is: the sizes of a tensor, and whether its numbers are ids of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SampleShape(tuple[int, ...]):
    """The sizes of a sample whose numbers are whole: ids of tokens from 0 to below `vocabulary`.

    A plain tuple is the shape of a sample of float32 numbers, and equal to none of these.
    """

    vocabulary: int

    def __new__(cls, sizes: Iterable[int], vocabulary: int) -> SampleShape:
        made = super().__new__(cls, sizes)
        made.vocabulary = vocabulary
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.vocabulary

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SampleShape) and tuple(self) == tuple(other) and self.vocabulary == other.vocabulary
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.vocabulary))


def vocabulary_of(shape: tuple[int, ...]) -> int:
    """How many ids of tokens there are; 0 where a sample has float numbers."""
    return shape.vocabulary if isinstance(shape, SampleShape) else 0


def made_up(shape: tuple[int, ...], count: int = 2) -> Tensor:
    """Samples (count, *shape) of the kind that is announced, the same on every call: normal numbers, or ids that
    are equally likely, among which are the first and the last one."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if not (most := vocabulary_of(shape)):
        return torch.randn(count, *shape, generator=generator, device="cpu")
    ids = torch.randint(most, (count, *shape), generator=generator, device="cpu")
    ids.view(-1)[0], ids.view(-1)[-1] = 0, most - 1
    return ids


def blank(shape: tuple[int, ...], count: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Samples (count, *shape) of zeros."""
    import torch

    return torch.zeros(count, *shape, dtype=sample_dtype(shape), device=device)


def sample_dtype(shape: tuple[int, ...]) -> torch.dtype:
    """The type of samples: int64 of ids, float32 of anything else."""
    import torch

    return torch.int64 if vocabulary_of(shape) else torch.float32


def shape_in_words(shape: tuple[int, ...]) -> str:
    """A sample's shape as a sentence has it."""
    sizes = "x".join(map(str, shape)) or "of a single number"
    return f"{sizes} (ids of tokens below {most})" if (most := vocabulary_of(shape)) else sizes
