"""The mathematics of local objectives: pure functions, tensors in, tensor out."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models import Tensors


def squared_distance(params: Tensors, anchor: Tensors, names: Iterable[str]) -> Tensor:
    """‖θ − θ'‖² over the named tensors."""
    parts = [(params[name] - anchor[name]).square().sum() for name in names]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def interpolate(start: Tensors, end: Tensors, weight: float, names: Iterable[str]) -> Tensors:
    """`(1 − weight) start + weight end` over the named tensors; exactly the one or the other at 0 and 1."""
    return {name: torch.lerp(start[name], end[name], weight) for name in names}


def mixing_slope(shared: Sequence[Tensor], own: Sequence[Tensor], gradient: Sequence[Tensor]) -> Tensor:
    """`d/dα R(α v + (1 − α) w) = ⟨v − w, ∇R⟩` of own v and shared w, ∇R at the mixture (Deng et al. 2020)."""
    return torch.stack([((v - w) * g).sum() for w, v, g in zip(shared, own, gradient, strict=True)]).sum()


def proximal(gradient: list[Tensor], params: list[Tensor], anchor: list[Tensor], proximity: float) -> list[Tensor]:
    """`∇R(θ) + λ (θ − ω)`, the gradient of `R(θ) + (λ/2) ‖θ − ω‖²`, from R's own; no autograd for the rest."""
    total = list(torch._foreach_add(gradient, params, alpha=proximity))
    torch._foreach_add_(total, anchor, alpha=-proximity)
    return total


def largest_eigenvalue(
    multiply: Callable[[Tensor], Tensor], start: Tensor, tolerance: float = 1e-3, most: int = 100
) -> float:
    """Largest |eigenvalue| of a symmetric matrix that is given by its products, by power iteration.

    `start` is a vector, not orthogonal to the eigenvector. It ends once a step changes the estimate, which comes
    from below, by less than the relative `tolerance`, or after `most` steps.
    """
    vector, value = start / start.norm(), 0.0
    for _ in range(most):
        product = multiply(vector)
        before, value = value, float(product.norm())
        if value - before <= tolerance * value:
            break
        vector = product / value
    return value


def squared_norm(params: Tensors, names: Iterable[str]) -> Tensor:
    """‖θ‖² over the named tensors."""
    return torch.stack([params[name].square().sum() for name in names]).sum()


def irm_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """`g = d/ds CE(s · logits, labels)` at s = 1, a scalar: the mean of `Σ_k (softmax(z)_k − 1{y = k}) z_k`.

    Logits (n, classes), labels (n,). Logits (0, z) give binary cross-entropy's `(σ(z) − y) z` (Arjovsky et al.
    2019, IRMv1's dummy classifier).
    """
    expected = (logits.softmax(dim=1) * logits).sum(dim=1)
    return (expected - logits.gather(1, labels[:, None]).squeeze(1)).mean()


def irm_penalty(logits: Tensor, labels: Tensor, halves: bool = False) -> Tensor:
    """g² of `irm_gradient`; with `halves` the product of the g of two halves of the samples.

    Of a random mini-batch the former expects g² plus the variance of g, the latter g² (Arjovsky et al. 2019,
    appendix D). A single sample has no halves.
    """
    if halves and len(labels) > 1:
        return irm_gradient(logits[::2], labels[::2]) * irm_gradient(logits[1::2], labels[1::2])
    return irm_gradient(logits, labels).square()


def contrast(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Mean of `−log(e^{cos(a,p)} / (e^{cos(a,p)} + 0.2 e^{cos(a,n)}))` over rows (PerInvFL's public code)."""
    gap = F.cosine_similarity(anchor, negative) - F.cosine_similarity(anchor, positive)
    return F.softplus(gap + math.log(0.2)).mean()
