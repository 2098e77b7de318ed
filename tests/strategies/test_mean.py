import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.strategies.mean import StreamingMean


def mean_of(sets: list[dict[str, torch.Tensor]], weights: list[float]) -> dict[str, torch.Tensor]:
    mean = StreamingMean()
    for tensors, weight in zip(sets, weights, strict=True):
        mean.add(tensors, weight)
    return mean.result()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31), st.floats(1e-3, 1e6)), min_size=1, max_size=6))
def test_equals_numpys_weighted_mean(clients: list[tuple[int, float]]) -> None:
    values = [np.random.default_rng(seed).normal(size=(3, 2)).astype("f4") for seed, _ in clients]
    weights = [weight for _, weight in clients]
    found = mean_of([{"w": torch.from_numpy(value)} for value in values], weights)["w"]
    expected = np.average(np.stack(values).astype("f8"), axis=0, weights=weights).astype("f4")
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)


def test_sums_in_float64() -> None:
    """In float32, 2^24 + 1 is 2^24: the small clients would be lost."""
    sets = [{"w": torch.tensor(2.0**24)}] + [{"w": torch.tensor(1.0)}] * 1000
    assert mean_of(sets, [1.0] * 1001)["w"].item() == np.float32((2**24 + 1000) / 1001)


def test_the_order_of_clients_hardly_matters_and_that_of_names_not_at_all() -> None:
    sets = [{"w": torch.full((2,), 0.1 * i), "b": torch.full((2,), 7.0 * i)} for i in range(4)]
    orders = itertools.permutations(range(4))
    results = [mean_of([sets[i] for i in order], [i + 1 for i in order]) for order in orders]
    assert all(torch.allclose(result["w"], results[0]["w"], rtol=1e-7) for result in results)
    turned = [dict(reversed(list(tensors.items()))) if i % 2 else tensors for i, tensors in enumerate(sets)]
    expected, found = mean_of(sets, [1, 2, 3, 4]), mean_of(turned, [1, 2, 3, 4])
    assert list(found) == ["w", "b"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_type_comes_out_as_it_went_in_and_integers_rounded() -> None:
    sets = [
        {"n": torch.tensor([n, 2**40]), "h": torch.tensor(h).half(), "d": torch.tensor(d, dtype=torch.float64)}
        for n, h, d in ((6, 1.0, 0.1), (3, 2.0, 0.3))
    ]
    found = mean_of(sets, [1, 3])
    assert found["n"].tolist() == [4, 2**40]  # 3.75
    assert found["n"].dtype == torch.int64
    assert found["h"].dtype == torch.float16
    assert found["h"].item() == 1.75
    assert found["d"].item() == pytest.approx(0.25, abs=1e-15)


def test_what_went_in_is_left_as_it_was_and_the_result_is_new() -> None:
    first = {"w": torch.ones(2, dtype=torch.float64)}
    mean = StreamingMean()
    mean.add(first, 2)
    result = mean.result()
    mean.add({"w": torch.full((2,), 4.0).double()}, 1)
    assert first["w"].tolist() == result["w"].tolist() == [1, 1]
    assert mean.result()["w"].tolist() == [2, 2]
    assert mean.weight == 3


def test_the_mean_of_one_is_itself_bit_by_bit() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean_of([{"w": tensor}], [1])["w"], tensor)


def test_there_is_no_mean_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        StreamingMean().result()


def test_a_stack_is_taken_in_as_its_clients_are() -> None:
    stack, weights = {"w": torch.randn(4, 3), "n": torch.arange(4)}, [3, 1, 0, 2]
    one_by_one, together = StreamingMean(), StreamingMean()
    for mean in (one_by_one, together):
        mean.add({"w": torch.ones(3), "n": torch.tensor(7)}, 2)
    for place, weight in enumerate(weights):
        one_by_one.add({name: tensor[place] for name, tensor in stack.items()}, weight)
    together.add_stack(stack, weights)
    together.add_stack({"w": stack["w"][:1], "n": stack["n"][:1]}, [1])
    one_by_one.add({name: tensor[0] for name, tensor in stack.items()}, 1)
    assert one_by_one.weight == together.weight == 9
    expected, found = one_by_one.result(), together.result()
    assert torch.equal(found["n"], expected["n"])
    torch.testing.assert_close(found["w"], expected["w"])
