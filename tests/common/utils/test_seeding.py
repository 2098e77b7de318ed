from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from perennial.common.utils.seeding import derive, derive_each, numpy_generator, torch_generator

parts = st.one_of(st.integers(-5, 5), st.text("abc-0123", max_size=4))
keys = st.lists(parts, max_size=4)


@given(st.integers(0, 3), keys, st.integers(0, 3), keys)
def test_different_keys_give_different_seeds(seed: int, key: list[Any], other: int, with_: list[Any]) -> None:
    assume((str(seed), *map(str, key)) != (str(other), *map(str, with_)))
    assert derive(seed, *key) != derive(other, *with_)


def test_the_derivation_never_changes() -> None:
    """Another derivation would make every published number unrepeatable."""
    digest = blake2b(b"0\x1fclient-1\x1f3\x1fbatches", digest_size=8).digest()
    assert derive(0, "client-1", 3, "batches") == int.from_bytes(digest, "big") // 2
    assert derive(0, "server", 1, "cohort") == 468762256009572354


@given(st.integers(0, 3), st.lists(st.text("abc-0123", max_size=4), max_size=3), keys)
def test_the_seeds_of_many_clients_are_those_of_each(seed: int, names: list[str], key: list[Any]) -> None:
    assert derive_each(seed, names, *key) == [derive(seed, name, *key) for name in names]


@given(st.integers(0, 2**31 - 1), keys)
def test_a_seed_fits_torch_and_numpy(seed: int, key: list[str | int]) -> None:
    assert 0 <= derive(seed, *key) < 2**63
    torch_generator(seed, *key)


def test_generators_repeat_and_leave_the_global_ones_alone() -> None:
    before = torch.get_rng_state()
    one, two = (torch.rand(5, generator=torch_generator(1, "client-0", 2, "batches")) for _ in range(2))
    other = torch.rand(5, generator=torch_generator(1, "client-0", 2, "noise"))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(numpy_generator(1, "a").random(5), numpy_generator(1, "a").random(5))
    assert not np.array_equal(numpy_generator(1, "a").random(5), numpy_generator(2, "a").random(5))
