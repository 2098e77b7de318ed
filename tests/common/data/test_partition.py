from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perennial.common.data.partition import (
    Indices,
    by_environment,
    by_label,
    class_pairs,
    cuts_by_size,
    dirichlet,
    iid,
)
from perennial.common.utils.errors import UserError
from perennial.common.utils.seeding import numpy_generator

seeds = st.integers(0, 2**31)


def labels_of(n: int, classes: int = 10) -> Indices:
    return numpy_generator(0, "labels").integers(classes, size=n)


def assert_partition(parts: list[Indices], n: int) -> None:
    """Every sample in exactly one part."""
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))


@given(st.integers(0, 300), st.integers(1, 20), seeds)
def test_iid_deals_every_sample_once_and_evenly(n: int, parts: int, seed: int) -> None:
    shares = iid(n, parts, numpy_generator(seed))
    assert len(shares) == parts
    assert_partition(shares, n)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    again = iid(n, parts, numpy_generator(seed))
    assert all(np.array_equal(one, other) for one, other in zip(shares, again, strict=True))


def test_iid_depends_on_the_seed_and_is_in_random_order() -> None:
    one, other = (iid(1000, 2, numpy_generator(seed))[0] for seed in (1, 2))
    assert not np.array_equal(one, other)
    assert any(left > right for left, right in pairwise(one.tolist()))


@given(
    st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(1, 6), seeds,
)  # fmt: skip
def test_by_label_gives_the_wanted_counts_to_each_and_shares_nothing(
    wanted: list[set[int]], count: int, seed: int
) -> None:
    labels = np.tile(np.arange(10), 80)
    parts = by_label(labels, [sorted(own) for own in wanted], count, numpy_generator(seed))
    everything = np.concatenate(parts)
    assert len(set(everything.tolist())) == len(everything)
    for own, part in zip(wanted, parts, strict=True):
        assert dict(zip(*np.unique(labels[part], return_counts=True), strict=True)) == dict.fromkeys(own, count)
    again = by_label(labels, [sorted(own) for own in wanted], count, numpy_generator(seed))
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_by_label_is_in_random_order_over_labels() -> None:
    labels = np.repeat([0, 1], 500)
    (part,) = by_label(labels, [(0, 1)], 500, numpy_generator(0))
    # A sample of the first 100: 50 of each label in the mean, standard error below 5.
    assert abs(labels[part[:100]].sum() - 50) < 20


def test_by_label_chooses_at_random_within_a_label() -> None:
    labels = np.repeat([0, 1], 500)
    one, other = (set(by_label(labels, [(0,)], 50, numpy_generator(seed))[0].tolist()) for seed in (1, 2))
    # 50 of 500, twice: 5 in common in the mean, standard error 2.
    assert len(one & other) < 15
    assert max(one) > 300


def test_by_label_says_which_class_is_too_small_and_what_would_fit() -> None:
    labels = np.array([0] * 10 + [3] * 7)
    assert [len(part) for part in by_label(labels, [(0, 3), (3,)], 3, numpy_generator(0))] == [6, 3]
    with pytest.raises(UserError, match=r"2 clients want 4 samples each of class 3.*only 7; make it 3 or fewer"):
        by_label(labels, [(0, 3), (3,)], 4, numpy_generator(0))


@given(st.integers(1, 400), st.integers(1, 15), st.floats(0.05, 100), seeds)
def test_dirichlet_deals_every_sample_once(n: int, parts: int, concentration: float, seed: int) -> None:
    labels = labels_of(n)
    shares = dirichlet(labels, [range(10)] * parts, concentration, numpy_generator(seed))
    assert len(shares) == parts
    assert_partition(shares, n)
    again = dirichlet(labels, [range(10)] * parts, concentration, numpy_generator(seed))
    assert all(np.array_equal(one, other) for one, other in zip(shares, again, strict=True))


def test_dirichlet_concentration_runs_from_skewed_to_even() -> None:
    labels = np.repeat(np.arange(10), 1000)

    def largest_share(concentration: float) -> float:
        """Mean over labels of the largest part's share of the label's samples."""
        shares = dirichlet(labels, [range(10)] * 5, concentration, numpy_generator(0))
        table = np.array([np.bincount(labels[share], minlength=10) for share in shares])
        return float(table.max(axis=0).mean() / 1000)

    assert largest_share(1e6) == pytest.approx(0.2, abs=0.005)
    assert largest_share(0.01) > 0.9
    # The largest of five uniform spacings: H_5 / 5 = 0.457 in the mean.
    assert largest_share(1.0) == pytest.approx(0.457, abs=0.12)


def test_dirichlet_gives_a_label_to_those_alone_that_want_it() -> None:
    labels = np.repeat([0, 1, 2], 50)
    both, zero, one = dirichlet(labels, [(0, 1), (0,), (1,)], 1.0, numpy_generator(0))
    assert set(labels[zero]) == {0}
    assert set(labels[one]) == {1}
    # Nobody wants 2.
    assert sorted(np.concatenate([both, zero, one]).tolist()) == list(range(100))


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        # FedIIR Alg 2 with 50 clients: PACS without art, without photos; VLCS without LabelMe
        ((2344, 1670, 3929), [15, 11, 24]),
        ((2048, 2344, 3929), [12, 14, 24]),
        ((1415, 3282, 3376), [9, 20, 21]),
    ],
)
def test_large_sets_are_cut_into_more_pieces(sizes: tuple[int, ...], counts: list[int]) -> None:
    assert cuts_by_size([size - int(0.1 * size) for size in sizes], 50) == counts


def test_the_first_of_equals_is_cut_first() -> None:
    assert cuts_by_size([7, 7, 7], 4) == [2, 1, 1]
    assert cuts_by_size([7, 7, 7], 3) == [1, 1, 1]


@given(st.integers(1, 10), st.integers(0, 40), seeds)
def test_environments_are_dealt_evenly(environments: int, more: int, seed: int) -> None:
    clients = environments + more
    dealt = by_environment(clients, environments, numpy_generator(seed))
    counts = np.bincount(dealt, minlength=environments)
    assert len(counts) == environments
    assert counts.min() >= 1
    assert counts.max() - counts.min() <= 1
    assert dealt == by_environment(clients, environments, numpy_generator(seed))


def test_which_client_has_which_environment_depends_on_the_seed() -> None:
    dealt = {tuple(by_environment(8, 2, numpy_generator(seed))) for seed in range(20)}
    assert len(dealt) > 10


@given(st.sampled_from([range(5), range(5, 10)]), seeds)
def test_eight_different_pairs_with_each_class_in_three_or_four(classes: range, seed: int) -> None:
    pairs = class_pairs(classes, numpy_generator(seed))
    assert len(pairs) == 8
    assert len({frozenset(pair) for pair in pairs}) == 8
    assert all(len(set(pair)) == 2 for pair in pairs)
    uses = [sum(own in pair for pair in pairs) for own in classes]
    assert sorted(uses) == [3, 3, 3, 3, 4]
    assert pairs == class_pairs(classes, numpy_generator(seed))


def test_pairs_depend_on_the_seed() -> None:
    assert len({tuple(class_pairs(range(5), numpy_generator(seed))) for seed in range(20)}) == 20
