"""Little federations in float64, trained by client halves alone."""

from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from tiny_runs import Quadratic
from torch import Tensor

from perennial.client.trainer import Client, Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.mean import StreamingMean, mix

Kept = dict[str, Tensors]

LITERAL: dict[str, Any] = {
    "batch_size": 100_000,
    "penalty_estimator": "single",
    "rescale": False,
    "anneal_rounds": 0,
}
"""Settings of Algorithm 1 to the letter: all data in every step, one weight λ."""

SIGNS = (1, 1, -1, -1)
K1 = ((0.95,), (0.90,), (0.85,), (0.80,))
K2 = ((0.95, 0.70), (0.90, 0.65), (0.95, 0.65), (0.90, 0.70))
"""P(colour = label) in the environments of each client."""


def federate(
    make: Callable[[Site, Kept], Client[Any]],
    sites: Sequence[Site],
    start: Tensors,
    rounds: int,
    mixing: float = 1.0,
) -> tuple[Tensors, list[Kept]]:
    """The shared model after some rounds of all clients, and what each keeps."""
    model, kept = start, [Kept() for _ in sites]
    for number in range(1, rounds + 1):
        mean = StreamingMean()
        for place, site in enumerate(sites):
            client = make(site, kept[place])
            mean.add(client.answer("train", Received(number, {MODEL: model})).arrays[MODEL])
            kept[place] = client.kept
        model = mix(model, mean.result(), mixing)
    return model, kept


def close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding in float64."""
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


class Squares(Quadratic):
    """Mixed into a client half of IRM's family: the risk of a `Quadratic`, and no penalty."""

    def risk(self, params: Tensors, part: Examples) -> Tensor:
        return Quadratic.loss(self, params, part, Received(0))[0]

    def risk_and_penalty(self, params: Tensors, part: Examples) -> tuple[Tensor, Tensor]:
        return self.risk(params, part), torch.zeros(())


def logits(params: Tensors, x: Tensor, training: bool = False) -> Tensor:
    """(0, x·θ): their cross-entropy is binary cross-entropy with logit x·θ."""
    z = x @ params["theta"]
    return torch.stack([torch.zeros_like(z), z], dim=1)


LOGISTIC: Any = SimpleNamespace(parameter_names=("theta",), buffer_names=(), predict=logits, outputs=2)


def population(p: float, sign: int, environment: int = 0) -> Examples:
    """Atoms (y, s, c, u) as often as P(s = y) = .75, P(c = y) = p, P(u = y) = .80 say, 800 in all.

    Features are 2s − 1 (shared and invariant), 2c − 1 (spurious) and sign · (2u − 1) (personal and invariant).
    """
    x, y = [], []
    for label, s, c, u in product((0, 1), repeat=4):
        share = (0.75 if s == label else 0.25) * (p if c == label else 1 - p) * (0.8 if u == label else 0.2)
        count = round(400 * share)
        x += [[2.0 * s - 1, 2.0 * c - 1, sign * (2.0 * u - 1)]] * count
        y += [label] * count
    assert len(y) == 800
    return Examples(torch.tensor(x, dtype=torch.float64), torch.tensor(y), torch.full((800,), environment))


def logistic_site(number: int, contexts: Sequence[float], sign: int) -> Site:
    """A client of the population logistic regression; each context is an environment."""
    parts = [population(p, sign, environment) for environment, p in enumerate(contexts)]
    train = Examples(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y", "environment")))
    return Site(f"client-{number}", ClientData(train, train, {}), LOGISTIC, 0)


def logistic_sites(contexts: Sequence[Sequence[float]] = K2) -> list[Site]:
    """The four clients."""
    return [logistic_site(i, own, sign) for i, (own, sign) in enumerate(zip(contexts, SIGNS, strict=True))]


def accuracy(params: Tensors, p: float, sign: int) -> float:
    """Of the population at P(colour = label) = p."""
    part = population(p, sign)
    return float((logits(params, part.x).argmax(1) == part.y).double().mean())
