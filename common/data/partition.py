"""Who gets which sample: pure functions from labels to one index array per client.

Index arrays are disjoint, int64, and in random order, so that a slice of one is a random sample of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

from perennial.common.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Indices: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True)
class Share:
    """What one client holds: indices into a `Raw` data set, and the training environments it has."""

    train: Indices
    validation: Indices
    test: Indices
    environments: tuple[int, ...] = (0,)


def iid(n: int, parts: int, rng: np.random.Generator) -> list[Indices]:
    """Samples 0..n-1 dealt at random to `parts` parts whose sizes differ by at most one."""
    import numpy as np

    return np.array_split(rng.permutation(n), parts)


def by_label(
    labels: Indices, wanted: Sequence[Sequence[int]], count: int, rng: np.random.Generator
) -> list[Indices]:
    """For each client `count` samples of each of its `wanted` labels, none of them for two clients.

    `labels`: (n,). Raises `UserError` when a label has too few samples for all clients that want it.
    """
    import numpy as np

    chosen: list[list[Indices]] = [[] for _ in wanted]
    for label in sorted({label for own in wanted for label in own}):
        pool = rng.permutation(np.flatnonzero(labels == label))
        owners = [client for client, own in enumerate(wanted) if label in own]
        if count * len(owners) > len(pool):
            raise UserError(
                f"{len(owners)} clients want {count} samples each of class {label}, "
                f"but there are only {len(pool)}; make it {len(pool) // len(owners)} or fewer"
            )
        for place, client in enumerate(owners):
            chosen[client].append(pool[place * count : (place + 1) * count])
    return [rng.permutation(np.concatenate(own)) for own in chosen]


def dirichlet(
    labels: Indices, wanted: Sequence[Collection[int]], concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """For each client a share of each of its `wanted` labels, in proportions from a symmetric Dirichlet.

    `labels`: (n,). Every sample of a label goes to exactly one of the clients that want it. A small
    `concentration` gives each label to few clients (some may get nothing), a large one approaches equal shares.
    """
    import numpy as np

    chosen: list[list[Indices]] = [[] for _ in wanted]
    for label in sorted({label for own in wanted for label in own}):
        pool = rng.permutation(np.flatnonzero(labels == label))
        owners = [client for client, own in enumerate(wanted) if label in own]
        ends = np.cumsum(rng.dirichlet(np.full(len(owners), concentration)))[:-1]
        pieces = np.split(pool, np.rint(ends * len(pool)).astype(int))
        for client, piece in zip(owners, pieces, strict=True):
            chosen[client].append(piece)
    return [rng.permutation(np.concatenate(own)) for own in chosen]


def cuts_by_size(sizes: Sequence[int], parts: int) -> list[int]:
    """How many of `parts` pieces each set is cut into: one each, then one more where pieces are the largest.

    Where two are, it is the first, as in FedIIR's public code. FedIIR Alg 2.
    """
    counts = [1] * len(sizes)
    for _ in range(parts - len(sizes)):
        largest = max(range(len(sizes)), key=lambda place: sizes[place] / counts[place])
        counts[largest] += 1
    return counts


def by_domain(
    domains: Sequence[Indices], test: Indices, clients: int, validation_fraction: float, rng: np.random.Generator
) -> list[Share]:
    """Each domain over as many clients as its size demands, a part of it held out; `test` over all of them.

    Clients of the first domain come first; a client's environment is the number of its domain (FedIIR Alg 2).
    """
    import numpy as np

    mixed = [rng.permutation(own) for own in domains]
    cuts = [int(validation_fraction * len(own)) for own in mixed]
    counts = cuts_by_size([len(own) - cut for own, cut in zip(mixed, cuts, strict=True)], clients)
    tests = iter(np.array_split(rng.permutation(test), clients))
    return [
        Share(train, validation, next(tests), (environment,))
        for environment, (own, cut, count) in enumerate(zip(mixed, cuts, counts, strict=True))
        for train, validation in zip(
            np.array_split(own[cut:], count), np.array_split(own[:cut], count), strict=True
        )
    ]


def by_environment(clients: int, environments: int, rng: np.random.Generator) -> list[int]:
    """One environment for each client at random, each environment for equally many (to within one).

    An independent draw per client could leave an environment empty.
    """
    import numpy as np

    return [int(environment) for environment in rng.permutation(np.arange(clients) % environments)]


def class_pairs(classes: Sequence[int], rng: np.random.Generator) -> list[tuple[int, int]]:
    """Eight different pairs of five classes, in random order, each class in three or four of them.

    That is all ten pairs but two which have no class in common. In Tang 2025 §4.5.2 each of eight clients has two
    of the five digits of a label; which ones is not given.
    """
    a, b, c, d, _ = (int(item) for item in rng.permutation(classes))
    left_out = ({a, b}, {c, d})
    pairs = [pair for pair in combinations(classes, 2) if set(pair) not in left_out]
    return [pairs[place] for place in rng.permutation(len(pairs))]
