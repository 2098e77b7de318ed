"""Every random draw is keyed by (seed, client, round, purpose), so none depends on what ran before it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive(seed: int, *key: str | int) -> int:
    """A 63-bit seed that depends on `seed` and on every part of `key`."""
    return _drawn("\x1f".join([str(seed), *map(str, key)]))


def derive_each(seed: int, names: Iterable[str], *key: str | int) -> list[int]:
    """`derive(seed, name, *key)` of each name."""
    before, after = f"{seed}\x1f", "".join(f"\x1f{part}" for part in key)
    return [_drawn(f"{before}{name}{after}") for name in names]


def _drawn(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *key: str | int) -> torch.Generator:
    """A CPU torch generator for one purpose, e.g. `torch_generator(seed, client, round, "batches")`.

    PyTorch takes 32 bits of the key. So of a hundred thousand clients a few pairs have the same draws.
    """
    import torch

    return torch.Generator().manual_seed(derive(seed, *key))


def numpy_generator(seed: int, *key: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    import numpy as np

    return np.random.default_rng(derive(seed, *key))
