"""The arithmetic of secure aggregation: exact sums, masks that cancel, and what is out of range."""

import secrets

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perennial.common.privacy.secure_aggregation import (
    STEPS,
    Summand,
    as_bytes,
    as_tensor,
    dequantised,
    mask,
    means_of_sum,
    pair_mask,
    public,
    quantised,
    shared_key,
    vector,
)
from perennial.common.utils.tensors import Tensors

BEFORE: Tensors = {"a": torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "b": torch.tensor(0.25)}


def moved(*by: float) -> Tensors:
    one, other = torch.tensor(by[:4]).reshape(2, 2), torch.tensor(by[4])
    return {"a": BEFORE["a"] + one, "b": BEFORE["b"] + other}


@given(st.lists(st.lists(st.floats(-2, 2, width=32), min_size=5, max_size=5), min_size=1, max_size=5), st.data())
def test_the_mean_of_quantised_updates_is_within_half_a_step(
    updates: list[list[float]], data: st.DataObject
) -> None:
    weights = [data.draw(st.integers(1, 10_000_000)) for _ in updates]
    models = [moved(*update) for update in updates]
    total = sum(
        (quantised(model, BEFORE, 8.0) * np.uint64(weight) for model, weight in zip(models, weights, strict=True)),
        start=np.zeros(5, dtype=np.uint64),
    )
    found = dequantised(total, sum(weights), BEFORE, 8.0)
    for name, before in BEFORE.items():
        terms = [weight * (model[name].double()) for model, weight in zip(models, weights, strict=True)]
        mean = torch.stack(terms).sum(dim=0) / sum(weights)
        assert found[name].dtype == before.dtype
        assert float((found[name] - mean).abs().max()) <= 8.0 / STEPS / 2 + 2e-7 * float(mean.abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -8.1, 1e30])
def test_an_update_out_of_range_is_not_cut_but_refused(bad: float) -> None:
    assert len(quantised(moved(8.0, -8.0, 0.0, 0.0, 0.0), BEFORE, 8.0)) == 5
    with pytest.raises(ValueError, match=r"a parameter changed by .* and privacy.range=8 is the limit"):
        quantised(moved(0.0, 0.0, bad, 0.0, 0.0), BEFORE, 8.0)


@pytest.mark.parametrize("entry", [STEPS * 3 + 1, -STEPS * 3 - 1, 2**63 - 1, -(2**63)])
def test_a_sum_that_no_updates_make_is_refused(entry: int) -> None:
    total = np.array([STEPS * 3, -STEPS * 3, 0, 0, 0], dtype=np.int64)
    assert dequantised(total.view(np.uint64), 3, BEFORE, 8.0)["a"].flatten().tolist() == [9, -10, 0.5, 3]
    total[4] = entry
    with pytest.raises(ValueError, match="larger than the clients' updates can make it"):
        dequantised(total.view(np.uint64), 3, BEFORE, 8.0)


@pytest.mark.parametrize("weight", [0, 2**40])
def test_a_weight_that_would_overflow_is_refused(weight: int) -> None:
    with pytest.raises(ValueError, match=f"the clients have {weight} samples"):
        dequantised(np.zeros(5, dtype=np.uint64), weight, BEFORE, 8.0)


def test_the_masks_of_a_pair_cancel_and_hide_every_bit() -> None:
    one, other = secrets.token_bytes(32), secrets.token_bytes(32)
    first = pair_mask(one, public(other), "client-1", "client-2", 1000)
    second = pair_mask(other, public(one), "client-2", "client-1", 1000)
    assert not (first + second).any()
    bits = np.unpackbits(first.view(np.uint8)).reshape(1000, 64).mean(axis=0)
    assert bits.min() > 0.4
    assert bits.max() < 0.6


def test_a_key_is_for_two_and_for_one_purpose() -> None:
    one, other, third = (secrets.token_bytes(32) for _ in range(3))
    assert shared_key(one, public(other), "seal") == shared_key(other, public(one), "seal")
    assert shared_key(one, public(other), "seal") != shared_key(one, public(other), "mask")
    assert shared_key(one, public(other), "seal") != shared_key(one, public(third), "seal")
    # All 256 bits of a key count: Flower's own generator folds them to 32.
    assert (mask(bytes(32), 4) != mask(bytes(28) + bytes([0, 0, 0, 1]), 4)).all()
    assert (mask(b"\1\0\0\0\1\0\0\0" + bytes(24), 4) != mask(bytes(32), 4)).all()


def test_bytes_travel_as_they_are() -> None:
    data = bytes(range(256))
    assert as_bytes(as_tensor(data)) == data


def test_more_owners_of_a_record_than_clients_are_an_error() -> None:
    part = Summand("head", {"w": torch.zeros(2)}, owners=True)
    assert means_of_sum(vector([part], {"head": {"w": torch.ones(2)}}, 3, 8.0), [part], 3, 8.0).keys() == {"head"}
    with pytest.raises(ValueError, match="more clients have a record than there are"):
        means_of_sum(vector([part], {"head": {"w": torch.ones(2)}}, 4, 8.0), [part], 3, 8.0)
