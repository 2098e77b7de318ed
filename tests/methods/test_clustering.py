from itertools import permutations
from math import e, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from perennial.strategies.methods.clustering import (
    align,
    averaging,
    balancing,
    capacity,
    clusters_by_bound,
    coordinates,
    cost,
    costs,
    flat,
    k_means,
    pulled_in,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def groups(number: int, each: int, noise: float, seed: int = 0, d: int = 50) -> tuple[Tensor, list[int]]:
    """Centres with s.d. 3, points around them."""
    centres = 3 * draw(number, d, seed=seed)
    points = centres.repeat_interleave(each, dim=0) + noise * draw(number * each, d, seed=seed + 1)
    return points, [k for k in range(number) for _ in range(each)]


def partition(labels: Tensor | list[int]) -> set[frozenset[int]]:
    """Which points are together, whatever their cluster is called."""
    found: dict[int, set[int]] = {}
    for point, label in enumerate(torch.as_tensor(labels).tolist()):
        found.setdefault(label, set()).add(point)
    return {frozenset(members) for members in found.values()}


# ---------------------------------------------------------------------- points


def test_models_become_rows_in_the_order_of_the_names() -> None:
    model = {"b": torch.tensor([3.0]), "a": torch.tensor([[1.0], [2.0]]), "counter": torch.tensor(7)}
    assert flat([model, model], ["a", "b"]).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert flat([model], ["a"]).dtype == torch.float64


@pytest.mark.parametrize("shape", [(6, 200), (6, 2)])
def test_coordinates_keep_all_distances(shape: tuple[int, int]) -> None:
    rows = 5 + draw(*shape)
    points = coordinates(rows)
    assert points.shape == (6, min(shape))
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(rows, rows))


# ---------------------------------------------------------------------- clusters


def test_the_averaging_matrix() -> None:
    """Columns of P sum to 1, J P = I, and `P.T @ points` are the clusters' means (thesis §3.5)."""
    labels = torch.tensor([0, 2, 1, 0, 2, 2])
    p, j = averaging(labels), torch.nn.functional.one_hot(labels).double().T
    assert p.sum(dim=0).tolist() == [1, 1, 1]
    torch.testing.assert_close(j @ p, torch.eye(3, dtype=torch.float64))
    points = draw(6, 4)
    means = torch.stack([points[[0, 3]].mean(dim=0), points[2], points[[1, 4, 5]].mean(dim=0)])
    torch.testing.assert_close(p.T @ points, means)
    by_hand = sum(float((points[i] - means[labels[i]]).square().sum()) for i in range(6)) / 6
    assert cost(points, labels) == pytest.approx(by_hand)


def test_one_partition_is_another_times_a_matrix_only_if_it_is_relabelled() -> None:
    """`P' = P Q` (thesis (3.4)) has a solution Q for a relabelling, and for no other partition."""

    def residual(one: list[int], other: list[int]) -> float:
        p, p_ = averaging(torch.tensor(one)), averaging(torch.tensor(other))
        return float((p @ torch.linalg.lstsq(p, p_).solution - p_).norm())

    assert residual([0, 0, 1, 1, 2], [2, 2, 0, 0, 1]) < 1e-12
    assert residual([0, 0, 1, 1, 2], [0, 0, 0, 1, 2]) > 0.1


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_planted_groups_are_found_whatever_the_order_of_points(number: int) -> None:
    points, planted = groups(number, 6, 0.5)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(3))
    labels = k_means(coordinates(points), number, seed=1)
    assert partition(labels) == partition(planted)
    assert partition(k_means(coordinates(points[order]), number, seed=1)) == partition(labels[order])
    assert torch.equal(labels, k_means(coordinates(points), number, seed=1))


def test_labels_are_a_partition_without_empty_clusters() -> None:
    for clusters in range(1, 12):
        labels = k_means(draw(12, 3), clusters, seed=0)
        assert labels.unique().tolist() == list(range(clusters))


def test_as_many_clusters_as_points_are_the_points() -> None:
    points = draw(7, 9)
    assert len(partition(k_means(points, 7, seed=0))) == 7
    assert len(partition(k_means(points, 9, seed=0))) == 7


@pytest.mark.parametrize("number", [1, 2, 3])
def test_equal_points_are_one_cluster(number: int) -> None:
    rows = draw(number, 300).float().repeat_interleave(4, dim=0).double()
    points = coordinates(rows)
    for clusters in (number, number + 1, 12):
        assert partition(k_means(points, clusters, seed=0)) == partition([i // 4 for i in range(4 * number)])


@pytest.mark.parametrize("value", [1e4, 1e9, -1e9])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_far_outlier_leaves_all_clusters_but_one_to_the_others(number: int, value: float) -> None:
    others, planted = groups(number, 3, 0.001, d=300)
    rows = torch.cat([torch.full((1, 300), value, dtype=torch.float64), 0.001 * others])
    labels = k_means(coordinates(pulled_in(rows)), number + 1, seed=0)
    assert partition(labels) == {frozenset({0})} | {
        frozenset(point + 1 for point in group) for group in partition(planted)
    }


def test_points_that_lie_as_points_do_are_not_pulled_in() -> None:
    points, _ = groups(4, 3, 0.001)
    assert pulled_in(points) is points
    alone = torch.cat([torch.ones(5, 4), 9 * torch.ones(1, 4)]).double()  # among equal ones
    assert pulled_in(alone) is alone
    zeros = torch.cat([torch.zeros(5, 4), torch.ones(1, 4)]).double()
    assert pulled_in(zeros) is zeros
    assert torch.equal(pulled_in(points[:1]), points[:1])
    assert pulled_in(1e3 * torch.cat([alone, 1e6 * alone[:1]])).isfinite().all()


def test_a_cluster_continues_the_nearest_context() -> None:
    """The assignment is the best of all permutations; fewer clusters than contexts are possible."""
    contexts = draw(4, 3)
    means = draw(4, 3, seed=1)

    def total(slots: tuple[int, ...] | list[int]) -> float:
        return sum(float((mean - contexts[k]).square().sum()) for mean, k in zip(means, slots, strict=True))

    found = align(means, contexts)
    assert total(found) == pytest.approx(min(map(total, permutations(range(4)))))
    assert align(contexts[[2, 0]] + 0.01, contexts) == [2, 0]
    assert align(means, contexts[:1].expand(4, -1)) == [0, 1, 2, 3]  # all alike: as they come


# ---------------------------------------------------------------------- how many


def test_more_clusters_never_cost_more() -> None:
    found = costs(coordinates(draw(14, 5)), 14, seed=0)
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(cost(draw(14, 5), torch.zeros(14, dtype=torch.long)))
    assert found[-1] == pytest.approx(0)


@pytest.mark.parametrize(("d", "c"), [(7850, 0.692), (101_770, 0.645), (52_202, 0.994), (878_538, 1)])
def test_the_factor_of_the_bound(d: int, c: float) -> None:
    """Thesis (3.27) for 45,000 samples; the last has d > e·m, where the bound is not defined."""
    assert capacity(d, 45_000) == pytest.approx(c, abs=5e-4)


def test_the_factor_is_a_number_for_any_sizes() -> None:
    for samples in (1, 10, 1000):
        for parameters in (1, int(e * samples), int(e * samples) + 1, 10**9):
            assert 0 <= capacity(parameters, samples) <= 1


def test_the_bound_by_hand() -> None:
    """c √K + μ cost(K) with c = 2, μ = 1: 2 + 5, 2.83 + 3, 3.46 + 2.9."""
    assert clusters_by_bound([5, 3, 2.9], 2, 1) == 2
    assert clusters_by_bound([5, 3, 2.9], 2, 0) == 1
    assert clusters_by_bound([5, 3, 2.9, 2.9], 2, 1e9) == 3  # the least of those with the least cost
    assert clusters_by_bound([0.0, 0.0], 0, 7) == 1


@pytest.mark.parametrize("true", [1, 2, 4, 5, 10])
@pytest.mark.parametrize("factor", [1.0, 0.013])
def test_auto_finds_the_planted_number_of_groups(true: int, factor: float) -> None:
    """40 points, s.d. 3 between and 0.5 within groups; the bound's factor plays no part."""
    points, _ = groups(true, 40 // true, 0.5, seed=7)
    curve = costs(coordinates(points), 20, seed=0)
    assert clusters_by_bound(curve, factor, balancing(curve, factor)) == true


def test_auto_is_the_scale_free_form() -> None:
    """argmin of (√K − 1)/(√K_max − 1) + (cost(K) − cost(K_max))/(cost(1) − cost(K_max))."""
    for seed in range(20):
        curve = np.sort(np.random.default_rng(seed).exponential(size=9))[::-1]
        terms = [
            (sqrt(k + 1) - 1) / (sqrt(9) - 1) + (curve[k] - curve[-1]) / (curve[0] - curve[-1]) for k in range(9)
        ]
        assert clusters_by_bound(list(curve), 0.3, balancing(list(curve), 0.3)) == int(np.argmin(terms)) + 1
    assert balancing([2.0], 1.0) == balancing([0.0, 0.0], 1.0) == balancing([1.0, 1.0 - 1e-13], 1.0) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_equal_rows_are_one_point_whatever_the_rounding(seed: int) -> None:
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    points = coordinates(row.repeat(7, 1))
    assert torch.equal(points, torch.zeros_like(points))
    assert k_means(points, 3, 0).tolist() == [0] * 7
