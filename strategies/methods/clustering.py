"""Which models belong together: k-means on their parameters, stable labels, how many clusters (CGPFL).

Points are rows. `labels` (n,) give each point its cluster, 0, 1, … without gaps.
"""

import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import e, log, sqrt
from typing import Any

import torch
from torch import Tensor

from perennial.common.utils.tensors import Tensors

RESTARTS = 10
ITERATIONS = 100
FAR, LENGTHS = 1e3, 10.0
"""How far from the median a point may lie: in median distances, or in lengths of the median if that is more."""


def flat(models: Iterable[Tensors], names: Sequence[str]) -> Tensor:
    """The named tensors of each model as one row, (models, d) in float64."""
    return torch.stack([torch.cat([model[name].flatten() for name in names]).double() for model in models])


def pulled_in(rows: Tensor) -> Tensor:
    """The points of `rows` (n, d), those that lie too far from the median moved to where a point may lie.

    So a client that sends 1e9 sets no scale at which all others look like one point. Without such a point the rows
    stay as they are, to the bit.
    """
    median = rows.median(dim=0).values
    away = (rows - median).norm(dim=1)
    limit = max(FAR * float(away.median()), LENGTHS * float(median.norm()))
    if not 0 < limit < float(away.max()):
        return rows
    moved: Tensor = median + (rows - median) * (limit / away.clamp(min=limit))[:, None]
    return moved


def coordinates(rows: Tensor) -> Tensor:
    """The points of `rows` (n, d) seen from their mean in a basis of their span, (n, min(n, d)).

    All distances stay as they are, so clusters are the same, and d may be millions.
    """
    centred = rows - rows.mean(dim=0)
    # What is left of equal rows is rounding, which must not look like distances.
    centred[centred.abs() <= 1e-12 * rows.abs().max()] = 0
    triangle: Tensor = torch.linalg.qr(centred.T, mode="r")[1]
    return triangle.T.contiguous()


def averaging(labels: Tensor) -> Tensor:
    """P (n, clusters): 1/|C_k| where point i is in cluster k, else 0; `P.T @ points` are the clusters' means
    (thesis §3.5)."""
    members = torch.nn.functional.one_hot(labels).double()
    return members / members.sum(dim=0)


def cost(points: Tensor, labels: Tensor) -> float:
    """`(1/n) Σ_i ‖x_i − mean of its cluster‖²`, the k-means objective (thesis (3.3))."""
    means = averaging(labels).T @ points
    return float((points - means[labels]).square().sum() / len(points))


def k_means(points: Tensor, clusters: int, seed: int) -> Tensor:
    """Labels of the best of `RESTARTS` k-means++ starts; the same seed gives the same draws.

    Where there are fewer distinct points than `clusters`, the distinct ones are the clusters.
    """
    clusters = min(clusters, _distinct(points))
    if clusters == 1:
        return torch.zeros(len(points), dtype=torch.long)
    # scikit-learn takes seconds to import.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    solver = KMeans(clusters, init="k-means++", n_init=RESTARTS, max_iter=ITERATIONS, random_state=seed % 2**32)
    # With one thread the sums are always in the same order.
    with _threads().limit(limits=1), warnings.catch_warnings():
        # Points that are all but equal may leave a cluster without any: it is left out below.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = torch.from_numpy(solver.fit(points.numpy()).labels_).long()
    labels: Tensor = torch.unique(found, return_inverse=True)[1]
    return labels


def align(means: Tensor, contexts: Tensor) -> list[int]:
    """The context (row of `contexts`) that each of as many or fewer clusters continues: the assignment with the
    least sum of squared distances."""
    from scipy.optimize import linear_sum_assignment

    found: list[int] = linear_sum_assignment(torch.cdist(means, contexts).square().numpy())[1].tolist()
    return found


def costs(points: Tensor, most: int, seed: int) -> list[float]:
    """The cost with 1, 2, …, `most` clusters, which more clusters never raise."""
    found: list[float] = []
    for clusters in range(1, most + 1):
        value = cost(points, k_means(points, clusters, seed))
        found.append(min([value, *found[-1:]]))  # k-means may end in a worse local optimum than with one less
    return found


def capacity(parameters: int, samples: float) -> float:
    """`c = √((d/m) log(e m/d))`, the factor of √K in the bound (thesis (3.27)), for d parameters and m samples.

    1 where d ≥ e·m, for which the bound says nothing.
    """
    if parameters >= e * samples:
        return 1.0
    return sqrt(parameters / samples * log(e * samples / parameters))


def balancing(costs: Sequence[float], factor: float) -> float:
    """The μ with which both terms of `clusters_by_bound` have the same range over K = 1, …, K_max.

    0 where the cost does not fall (relative 1e-12), so that one cluster is chosen.
    """
    fall = costs[0] - costs[-1]
    return factor * (sqrt(len(costs)) - 1) / fall if fall > 1e-12 * costs[0] else 0.0


def clusters_by_bound(costs: Sequence[float], factor: float, mu: float) -> int:
    """`argmin_K c √K + μ cost(K)`, the least K of equals (thesis (3.27))."""
    errors = [factor * sqrt(number) + mu * value for number, value in enumerate(costs, start=1)]
    return errors.index(min(errors)) + 1


@lru_cache
def _threads() -> Any:
    """The thread pools of this process; finding them takes as long as a small k-means."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


def _distinct(points: Tensor) -> int:
    """How many points k-means can tell apart; it compares squares of distances, rounded as large numbers."""
    gaps = torch.cdist(points, points)
    same = (gaps <= 1e-6 * gaps.max()).tril(diagonal=-1)
    return int((~same.any(dim=1)).sum())
