"""What FedPIN's objectives can and cannot do, by enumeration of a small world.

Four clients, two environments; y uniform; z_g = y with .75; z_p tells y with a chance and a sign of the client's
own, a little better where z_g = 1; z_s = y with p_e. A feature of x = (z_g, z_p, z_s) is a partition of values.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from perennial.client.objectives import anchored, client_information

BASE = (0.85, 0.15, 0.7, 0.3)
"""P(z_p = y) of each client, up to the 0.1 that z_g makes."""
X = list(product((0, 1), repeat=3))
Z_G, Z_S, PAIR = tuple(x[0] for x in X), tuple(x[2] for x in X), tuple(2 * x[0] + x[1] for x in X)
"""Features by the part that each value of x belongs to."""


@cache
def world(
    agreement: tuple[float, float] = (0.9, 0.8), own_environment: bool = False, with_p: bool = True
) -> Tensor:
    """P(x, y, u, e), float64 (8, 2, 4, 2). E is independent of U unless `own_environment` makes e = u mod 2."""
    joint = torch.zeros(8, 2, 4, 2, dtype=torch.float64)
    for (number, (g, p, s)), y, u, e in product(enumerate(X), (0, 1), range(4), (0, 1)):
        ahead = (BASE[u] if y else 1 - BASE[u]) + (0.1 if g else -0.1)
        one = min(max(ahead, 0.01), 0.99) if with_p else 0.5
        client = (float(e == u % 2) if own_environment else 0.5) / 4
        chances = (0.75 if g == y else 0.25, one if p else 1 - one, agreement[e] if s == y else 1 - agreement[e])
        joint[number, y, u, e] = 0.5 * client * float(np.prod(chances))
    return joint


@cache
def partitions(size: int = 8) -> list[tuple[int, ...]]:
    def grow(head: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(head) == size:
            yield head
            return
        for part in range(max(head, default=-1) + 2):
            yield from grow((*head, part))

    return list(grow(()))


def pushed(joint: Tensor, features: list[tuple[int, ...]]) -> Tensor:
    """P(φ, y, …) of every feature, (features, 8, 2, …)."""
    member = torch.nn.functional.one_hot(torch.tensor(features), 8).double()
    return torch.einsum("fxk,x...->fk...", member, joint)


def entropy(joint: Tensor, keep: int) -> Tensor:
    """H of what remains of the axes 1 to `keep` − 1, by row."""
    left = joint.flatten(keep).sum(dim=keep) if joint.dim() > keep else joint
    return torch.special.entr(left).flatten(1).sum(dim=1)


def risks(joint: Tensor, features: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """H(Y | Φ), the least R(ω_g(Φ)), and I(E, U; Y | Φ), of every feature; joint (8, 2, …)."""
    found = pushed(joint, features)
    blind = entropy(found, 3) - entropy(found, 2)
    known = entropy(found, found.dim()) - entropy(found.sum(dim=2, keepdim=True), found.dim())
    return blind, blind - known


def samples(joint: Tensor, feature: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Best logits that know Φ, best logits that know (Φ, U), and labels, of a population of 12,800."""
    counts = (joint.sum(dim=3) * 12_800).round().long()
    assert int(counts.sum()) == 12_800
    x, y, u = torch.nonzero(counts, as_tuple=True)
    x, y, u = (index.repeat_interleave(counts[counts > 0]) for index in (x, y, u))
    phi = torch.tensor(feature)[x]
    found = pushed(joint.sum(dim=3), [feature])[0]  # (φ, y, u)
    return found.sum(dim=2).log()[phi], found.log().transpose(1, 2)[phi, u], y


# ---------------------------------------------------------------------- what the client tells


def test_information_ranks_the_shortcut_above_the_invariant_feature() -> None:
    """Clients that have an environment each: 0 for z_g, 0.0100 nats for z_s."""
    joint = world(own_environment=True)
    values = {
        name: float(client_information(torch.nn.functional.cross_entropy, *samples(joint, f)))
        for name, f in (("g", Z_G), ("s", Z_S))
    }
    assert values["g"] == pytest.approx(0, abs=1e-12)
    assert values["s"] == pytest.approx(0.0100, abs=5e-5)
    exact = risks(joint, [Z_G, Z_S])[1]
    assert list(values.values()) == pytest.approx(exact.tolist(), abs=1e-12)


def test_information_is_blind_where_environments_are_mixed_alike_at_every_client() -> None:
    """There I(E, U; Y | z_s) is 0.0100 as well, but who is told u and not e sees none of it."""
    joint = world()
    assert float(client_information(torch.nn.functional.cross_entropy, *samples(joint, Z_S))) == pytest.approx(
        0, abs=1e-12
    )
    assert float(risks(joint, [Z_S])[1]) == pytest.approx(0.0100, abs=5e-5)


# ---------------------------------------------------------------------- what the global objective chooses


@pytest.mark.parametrize("own_environment", [False, True])
def test_the_best_feature_without_information_is_the_invariant_one(own_environment: bool) -> None:
    """Of all 4140 features; all others without information say nothing of the label."""
    risk, information = risks(world(own_environment=own_environment), partitions())
    free = [number for number in range(4140) if information[number] < 1e-10]
    first, second = sorted(free, key=lambda number: float(risk[number]))[:2]
    assert partitions()[first] == Z_G
    assert float(risk[first]) == pytest.approx(0.5623, abs=5e-5)
    assert float(risk[second]) == pytest.approx(0.6931, abs=5e-5)


@pytest.mark.parametrize(
    ("own_environment", "with_p", "threshold", "rivals"),
    [
        (False, True, 69.5, None),
        (True, True, 293.8, None),
        (True, False, 14.0, [Z_S]),
        (True, False, 24.3, [tuple(2 * x[0] + x[2] for x in X)]),
        (True, False, 222.0, None),
    ],
)
def test_how_large_alpha_must_be(
    own_environment: bool, with_p: bool, threshold: float, rivals: list[tuple[int, ...]] | None
) -> None:
    """α of order 1 cannot work. Below the threshold another feature is better than z_g, above it none is."""
    found = partitions() if rivals is None else [*rivals, Z_G]
    risk, information = risks(world(own_environment=own_environment, with_p=with_p), found)
    ours = found.index(Z_G)
    for alpha, wins in ((0.99 * threshold, False), (1.01 * threshold, True)):
        values = anchored(risk, information, alpha)
        assert bool(values[ours] <= values.min() + 1e-12) is wins


# ---------------------------------------------------------------------- what the personal objective would choose


@pytest.mark.parametrize(
    ("client", "agreement", "wins"), [(0, 0.9, 0), (2, 0.9, 0), (0, 0.6, 1091), (2, 0.6, 395)]
)
def test_exact_terms_do_not_always_give_the_personal_invariant_feature(
    client: int, agreement: float, wins: int
) -> None:
    """Against Theorem 5.4.2: how often (z_g, z_p) minimises (5.8) over a grid of 4941 (λ, γ). Where the
    shortcut is strong, no function of (z_g, z_p) ever does but z_g and the constant."""
    joint = world((agreement, agreement))[:, :, client].sum(dim=2)
    with_anchor = torch.zeros(8, 2, 2, dtype=torch.float64)  # P(x, y, z_g)
    for number, (g, _, _) in enumerate(X):
        with_anchor[number, :, g] = joint[number] / joint.sum()
    found = pushed(with_anchor, partitions())
    anchor = found.sum(dim=1, keepdim=True)
    of_phi, of_y = entropy(found, 2), entropy(anchor, 3)
    risk = entropy(found, 3) - of_phi
    shared = entropy(found, 3) + entropy(anchor, 4) - of_y - entropy(found, 4)  # I(Φ; z_g | Y)
    winners = Counter[tuple[int, ...]]()
    entropic = torch.tensor([0.0, *np.logspace(-3, 1, 80)])[:, None]
    for weight in (0.0, *np.logspace(-3, 2, 60)):
        best = (risk - weight * shared + entropic * of_phi).argmin(dim=1)
        winners.update(partitions()[number] for number in best.tolist())
    assert winners.total() == 4941
    assert winners[PAIR] == wins
    if not wins:
        blind = {f for f in winners if all(f[number] == f[number + 1] for number in (0, 2, 4, 6))}
        assert blind <= {Z_G, (0,) * 8}


# ---------------------------------------------------------------------- the saddle


def play(alpha: float, steps: int, literal: bool = False) -> tuple[list[float], float]:
    """On the population: Φ = a·(z_g, z_s) of ±1, ω_g the identity, ω_a a slope and a bias for each of two
    clients with P(z_s = y) = .95 and .55; a step of `a` of .05 down L_g, five of ω_a of .5 down its risk."""
    clients = []
    for p in (0.95, 0.55):
        atoms = [(g, s, y, (0.75 if g == y else 0.25) * (p if s == y else 1 - p)) for g, s, y in X]
        rows = [([2.0 * g - 1, 2.0 * s - 1], y) for g, s, y, share in atoms for _ in range(round(80 * share))]
        clients.append((torch.tensor([x for x, _ in rows]), torch.tensor([y for _, y in rows])))
    a, heads = torch.tensor([0.5, 0.5]), [torch.tensor([1.0, 0.0]) for _ in clients]

    def binary(score: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(score), score], dim=1)

    for _ in range(steps):
        leaves = [tensor.clone().requires_grad_() for tensor in (a, *heads)]
        total = torch.zeros(())
        for (x, y), head in zip(clients, leaves[1:], strict=True):
            score = x @ leaves[0]
            risk = torch.nn.functional.cross_entropy(binary(score), y)
            told = client_information(
                torch.nn.functional.cross_entropy, binary(score), binary(head[0] * score + head[1]), y
            )
            total = total + (1 + alpha) * anchored(risk, told, alpha) / len(clients)
        down, *climbs = torch.autograd.grad(total, leaves)
        a = a - 0.05 * down
        if literal:
            heads = [head - 0.05 * climb for head, climb in zip(heads, climbs, strict=True)]
            continue
        for number, (x, y) in enumerate(clients):
            score = x @ a
            for _ in range(5):
                head = heads[number].clone().requires_grad_()
                own = torch.nn.functional.cross_entropy(binary(head[0] * score + head[1]), y)
                heads[number] = heads[number] - 0.5 * torch.autograd.grad(own, head)[0]
    return a.tolist(), max(float(head.abs().max()) for head in heads)


@pytest.mark.slow
def test_the_saddle_drops_the_shortcut_the_more_the_larger_alpha() -> None:
    """Ends from the logistic gradients in closed form, by another program."""
    ends = {1: (1.121, 0.701), 5: (1.250, 0.470), 20: (1.192, 0.190)}
    for alpha, end in ends.items():
        assert play(alpha, 100)[0] == pytest.approx(end, abs=1e-3)


def test_algorithm_5_to_the_letter_diverges() -> None:
    """|ω_a| is in the thousands after 500 steps with α = 1, and without bound with α = 5."""
    assert play(1, 500, literal=True)[1] > 3000
    assert play(5, 300, literal=True)[1] > 1e10
