"""Means that a few hostile clients cannot lead astray, of vectors that lie on a disk.

A rule sees n vectors x_1 … x_n of length d, one of each client. Coordinate rules work on a range of coordinates at
a time. All others work on G, the inner products of the vectors, and find weights: what comes out is a weighted sum
of the vectors. So memory is n² + n · chunk numbers and one result, whatever d is.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import SpooledTemporaryFile, gettempdir

import numpy as np
import torch
from torch import Tensor

from perennial.common.aggregation import Aggregation
from perennial.common.utils.files import writing
from perennial.common.utils.tensors import Tensors

CHUNK = 2**21
"""Numbers of all clients' vectors together that are in memory at a time."""
SPILL = 2**26
"""Bytes of vectors beyond which they lie on a disk, in Python's folder for temporary files."""


class RobustMean:
    """In place of `StreamingMean`: what a rule makes of the clients' tensors, each client counting the same.

    `start` are the tensors that the clients were sent, from which geometric median and centred clipping begin; 0
    where they were sent none. `order(n)` is the permutation that fills the buckets. `lowered(n, f)` is told where
    only n clients sent something, of whom the rule withstands f hostile ones and not as many as are set.
    """

    def __init__(
        self,
        rule: Aggregation,
        start: Tensors | None = None,
        order: Callable[[int], Tensor] = torch.arange,
        lowered: Callable[[int, int], object] = lambda n, f: None,
    ) -> None:
        self.weight = 0
        """Clients so far."""
        self._rule, self._start, self._order, self._lowered = rule, start or {}, order, lowered
        self._like: Tensors = {}
        self._file = SpooledTemporaryFile(max_size=SPILL)  # noqa: SIM115 - gone with this object

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        """Take a client's tensors in; its weight, which it may have made up, does not count."""
        if not self._like:
            # Integers (BatchNorm's counters) last: they are no part of a distance.
            names = sorted(tensors, key=lambda name: not tensors[name].is_floating_point())
            self._like = {name: torch.empty_like(tensors[name], device="meta") for name in names}
            self._names, self._device = list(tensors), next(iter(tensors.values())).device
            small = {torch.float16, torch.float32, torch.bfloat16}
            exact = all(tensor.dtype in small for tensor in tensors.values())
            self._type = np.dtype(np.float32 if exact else np.float64)
        with writing(Path(gettempdir())):
            self._file.write(_flat(tensors, self._like).numpy().astype(self._type).tobytes())
        self.weight += 1

    def result(self) -> Tensors:
        """What the rule makes of them, in the types that came in. Raises `ValueError` before the first `add`."""
        if not self._like:
            raise ValueError("the mean of nothing")
        rule, n = self._rule, self.weight
        hostile = min(rule.hostile, rule.borne(n))
        if hostile < rule.hostile:
            self._lowered(n, hostile)
        buckets = _buckets(self._order(n), rule.bucket) if rule.before == "bucketing" else torch.eye(n).double()
        if rule.before == "nearest-neighbours":
            buckets = neighbours(self._gram(buckets)[:-1, :-1], hostile)
        if rule.rule in ("median", "trimmed-mean"):
            cut = (len(buckets) - 1) // 2 if rule.rule == "median" else hostile
            found = torch.cat([trimmed(buckets @ chunk[:-1], cut) for chunk in self._chunks(self._size)])
        else:
            weights = weigh(rule, self._gram(buckets), hostile)
            own = torch.cat([weights[:-1] @ buckets, weights[-1:]])
            found = torch.cat([own @ chunk for chunk in self._chunks(self._size)])
        return self._shaped(found)

    # ------------------------------------------------------------------ inside

    @property
    def _size(self) -> int:
        return sum(tensor.numel() for tensor in self._like.values())

    def _gram(self, mixed: Tensor) -> Tensor:
        """Inner products of the rows of `mixed @ x` and, last, of the start, all less the x_i's median."""
        floating = sum(tensor.numel() for tensor in self._like.values() if tensor.is_floating_point())
        gram = torch.zeros(len(mixed) + 1, len(mixed) + 1, dtype=torch.float64)
        for chunk in self._chunks(floating):
            # What all have in common would only round the rest. A mean could be as far away as one hostile x_i.
            chunk = chunk - chunk[:-1].median(dim=0).values
            rows = torch.cat([mixed @ chunk[:-1], chunk[-1:]])
            gram += rows @ rows.T
        return gram

    def _chunks(self, size: int) -> Iterator[Tensor]:
        """The first `size` coordinates of all vectors and, last, of the start: (n + 1, width) each, in float64."""
        width, item, whole = max(1, CHUNK // (self.weight + 1)), self._type.itemsize, self._size
        start = _flat(self._start, self._like)
        for first in range(0, size, width):
            rows = np.empty((self.weight + 1, min(width, size - first)))
            for client in range(self.weight):
                self._file.seek((client * whole + first) * item)
                rows[client] = np.frombuffer(self._file.read(rows.shape[1] * item), self._type)
            rows[-1] = start[first : first + rows.shape[1]].numpy()
            yield torch.from_numpy(rows)
        self._file.seek(0, 2)

    def _shaped(self, vector: Tensor) -> Tensors:
        parts = torch.split(vector, [tensor.numel() for tensor in self._like.values()])
        found = {}
        for (name, like), part in zip(self._like.items(), parts, strict=True):
            value = part if like.is_floating_point() else part.round()
            found[name] = value.reshape(like.shape).to(like.dtype).to(self._device)
        return {name: found[name] for name in self._names}


# ---------------------------------------------------------------------- the rules


def trimmed(rows: Tensor, cut: int) -> Tensor:
    """`1/(n − 2f) Σ` of what is left of each coordinate of `rows` (n, width) without its f = `cut` greatest and
    least values (Yin et al. 2018, Definition 2); the median where `cut` is (n − 1) // 2."""
    return rows.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0)


def neighbours(gram: Tensor, hostile: int) -> Tensor:
    """(n, n): `row i @ x` is the mean of the n − f vectors nearest to x_i, itself among them (Allouah et al. 2023,
    Algorithm 2)."""
    keep = len(gram) - hostile
    nearest = _squares(gram).argsort(dim=1, stable=True)[:, :keep]
    return torch.zeros_like(gram).scatter_(1, nearest, 1 / keep)


def weigh(rule: Aggregation, gram: Tensor, hostile: int) -> Tensor:
    """The weights (n + 1,) that a rule gives the vectors and, last, the start, from their inner products."""
    if rule.rule == "multi-krum":
        return torch.cat([multi_krum(gram[:-1, :-1], hostile), torch.zeros(1, dtype=torch.float64)])
    if rule.rule == "geometric-median":
        return geometric_median(gram, rule.iterations, rule.smoothing)
    return centred_clipping(gram, rule.iterations, rule.radius)


def multi_krum(gram: Tensor, hostile: int) -> Tensor:
    """`1/(n − f)` for each of the n − f vectors whose squared distances to their nearest n − f − 1 others have the
    least sum (Blanchard et al. 2017, §4 and Multi-Krum; so many neighbours as in Farhadkhani et al. 2022)."""
    keep = len(gram) - hostile
    scores = _squares(gram).sort(dim=1).values[:, 1:keep].sum(dim=1)
    chosen = scores.argsort(stable=True)[:keep]
    return torch.zeros(len(gram), dtype=torch.float64).index_fill_(0, chosen, 1 / keep)


def geometric_median(gram: Tensor, steps: int, smoothing: float) -> Tensor:
    """`z ← Σ_i β_i x_i / Σ_i β_i`, `β_i = 1 / max(ν, ‖x_i − z‖)`, from the start on (Pillutla et al. 2022,
    Algorithm 2, with equal weights)."""
    weights = _unit(gram)
    for _ in range(steps):
        beta = 1 / _distances(gram, weights).clamp(min=smoothing)
        weights = torch.cat([beta / beta.sum(), torch.zeros(1, dtype=torch.float64)])
    return weights


def centred_clipping(gram: Tensor, steps: int, radius: float) -> Tensor:
    """`v ← v + 1/n Σ_i (x_i − v) min(1, τ / ‖x_i − v‖)`, from the start on (Karimireddy et al. 2021, §5).

    A `radius` of 0: τ is the median of the ‖x_i − v‖, in every step anew.
    """
    weights = _unit(gram)
    for _ in range(steps):
        distances = _distances(gram, weights)
        limit = radius or float(trimmed(distances[:, None], (len(distances) - 1) // 2))
        share = (limit / distances.clamp(min=1e-300)).clamp(max=1.0) / len(distances)
        weights = weights * (1 - share.sum())
        weights[:-1] += share
    return weights


def _unit(gram: Tensor) -> Tensor:
    """The weights that are the start alone."""
    return torch.zeros(len(gram), dtype=torch.float64).index_fill_(0, torch.tensor([len(gram) - 1]), 1.0)


def _distances(gram: Tensor, weights: Tensor) -> Tensor:
    """`‖x_i − Σ_j w_j x_j‖` of all but the last vector, for weights of sum 1."""
    products = gram @ weights
    squares = gram.diagonal() - 2 * products + weights @ products
    return squares[:-1].clamp(min=0).sqrt()


def _squares(gram: Tensor) -> Tensor:
    """`‖x_i − x_j‖²`, on the diagonal 0."""
    norms = gram.diagonal()
    found = (norms[:, None] + norms - 2 * gram).clamp(min=0)
    return found.fill_diagonal_(0)


def _buckets(order: Tensor, size: int) -> Tensor:
    """(⌈n/s⌉, n): each row is the mean of the next s clients in this order; the last one may have fewer
    (Karimireddy et al. 2022, Algorithm 1)."""
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order)) // size
    members = torch.nn.functional.one_hot(number).T.double()
    return members / members.sum(dim=1, keepdim=True)


def _flat(tensors: Tensors, like: Tensors) -> Tensor:
    """Tensors in the order of `like` as one float64 vector on the CPU; 0 where there is none."""
    parts = [tensors.get(name, torch.zeros(shape.shape)).cpu().double().flatten() for name, shape in like.items()]
    return torch.cat(parts)
