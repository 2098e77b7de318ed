"""The mathematics of local objectives: pure functions, tensors in, tensor out."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.common.utils.tensors import Tensors


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


def pull(params: list[Tensor], anchor: list[Tensor], proximity: float) -> list[Tensor]:
    """`λ (θ − ω)`, the gradient in θ of `(λ/2) ‖θ − ω‖²`.

    That of `min_θ R(θ) + (λ/2) ‖θ − ω‖²` in ω is the pull of ω to the minimiser θ (Dinh et al. 2020).
    """
    return list(torch._foreach_mul(torch._foreach_sub(params, anchor), proximity))


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


def irm_penalty(
    slopes: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, halves: bool = False
) -> Tensor:
    """g² of g, the mean of a task's `scale_slopes` over samples; with `halves` the product of the g of two halves.

    Of a random mini-batch the former expects g² plus the variance of g, the latter g² (Arjovsky et al. 2019,
    appendix D). A single sample has no halves.
    """
    if halves and len(targets) > 1:
        return slopes(outputs[::2], targets[::2]).mean() * slopes(outputs[1::2], targets[1::2]).mean()
    return slopes(outputs, targets).mean().square()


def contrast(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Mean of `−log(e^{cos(a,p)} / (e^{cos(a,p)} + 0.2 e^{cos(a,n)}))` over rows (PerInvFL's public code)."""
    gap = F.cosine_similarity(anchor, negative) - F.cosine_similarity(anchor, positive)
    return F.softplus(gap + math.log(0.2)).mean()


def gaussian_divergence(mean: Tensor, deviation: Tensor, other_mean: Tensor, other_deviation: Tensor) -> Tensor:
    """`KL(N(μ, diag σ²) ‖ N(m, diag s²)) = ½ Σ_j [ln(s²/σ²) + (σ² + (μ − m)²)/s² − 1]` of each sample.

    All (n, d), deviations > 0; gives (n,). FedSR's bound on the information I(z; x | y) (Nguyen et al. 2022).
    """
    ratio = (deviation / other_deviation).square()
    distance = ((mean - other_mean) / other_deviation).square()
    return (ratio + distance - 1 - ratio.log()).sum(dim=1) / 2


def balanced_cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """`−ln(n_y e^{g_y} / Σ_c n_c e^{g_c})`, mean over a mini-batch: FedRoD's balanced risk (Chen & Chao 2022).

    `logits` (n, classes), `labels` (n,), `counts` (classes,) > 0 for every label that occurs.
    """
    return F.cross_entropy(logits + counts.log(), labels)


def class_means(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean feature (classes, d) and number (classes,) of each class's samples; zeros for a class without any."""
    counts = (labels[:, None] == torch.arange(classes, device=labels.device)).sum(dim=0)
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, labels, features)
    return sums / counts.clamp(min=1)[:, None], counts


def centroid_distance(features: Tensor, labels: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """`1/(n d) Σ_i ‖z_i − c_{y_i}‖²` over features (n, d): FedPAC's alignment (Xu et al. 2023).

    `means` (classes, d) are the centroids c; a class whose count (classes,) is 0 has none and adds nothing.
    """
    known = (counts > 0)[labels, None]
    return ((features - means[labels]) * known).square().mean()


def centred(logits: Tensor) -> Tensor:
    """Logits (..., classes) less their mean over the classes, on which the probabilities do not depend."""
    return logits - logits.mean(dim=-1, keepdim=True)


def disagreement(logits: Tensor, divergence: str = "logits") -> Tensor:
    """`Σ_i Σ_j d(i, j)` over classifiers' logits (E, n, classes), mean over the n samples.

    d is `½ ‖a_i − a_j‖²` of centred logits or of probabilities (thesis (4.5)), or with "kl" KL(p_i ‖ p_j) (thesis
    (4.3)). All are `E Σ_i ⟨a_i − ā, b_i − b̄⟩`: b = a for the squared distances, a = p and b = ln p for KL.
    """
    if divergence == "logits":
        a = b = centred(logits)
    else:
        a = logits.softmax(dim=-1)
        b = logits.log_softmax(dim=-1) if divergence == "kl" else a
    return len(logits) * ((a - a.mean(dim=0)) * (b - b.mean(dim=0))).sum(dim=(0, 2)).mean()


def conditional_dependence(outputs: Tensor, deviations: Tensor) -> Tensor:
    """Mean |entry| of `E[Φ(X) (Ψ(X) − E[Ψ(X)|Y])ᵀ]`, the covariance within classes (thesis §4.4.2).

    `outputs` (n, k) are Φ's, `deviations` (n, d) Ψ's less their class means. It is 0 if Φ and Ψ are independent
    given Y; the reverse does not hold. The thesis's estimate of I(Φ; Ψ | Y) is k d times this one.
    """
    return (outputs.T @ deviations / len(outputs)).abs().mean()


def gradient_alignment(
    risk: Tensor, params: Tensors, anchor: Tensors, each: Callable[..., Any] = lambda function: function
) -> Tensor:
    """`‖∇_ω R − g̃‖²` over the tensors ω that `anchor` names, differentiable in all that `risk` depends on.

    `risk` must have been computed from `params`, which require gradients (Guo et al. 2023, problem FEDIIR). With a
    half's own `each`, those of all clients of a stack.
    """
    gradient = torch.autograd.grad(risk.sum(), [params[name] for name in anchor], create_graph=True)
    distance: Callable[..., Tensor] = each(partial(squared_distance, names=list(anchor)))
    return distance(dict(zip(anchor, gradient, strict=True)), anchor)


def client_information(
    criterion: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, aware: Tensor, targets: Tensor
) -> Tensor:
    """`R(ω_g(Φ)) − R(ω_a(Φ, u))`: what knowing the client tells of the target beyond the features; for classes in
    nats.

    `outputs` and `aware` (n, outputs) are without and with the client. It is I(U; Y | Φ) if both classifiers are
    as good as can be, and I(E, U; Y | Φ) if besides a client has one environment (FedPIN, thesis (5.3)). It is
    negative if the second is the worse one.
    """
    return criterion(outputs, targets) - criterion(aware, targets)


def anchored(risk: Tensor, information: Tensor, weight: float) -> Tensor:
    """`(R + α I) / (1 + α)`: FedPIN's global objective (thesis (5.5)), in a scale in which α = ∞ is I alone."""
    return (risk + weight * information) / (1 + weight)


def contrastive_loss(features: Tensor, positives: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """`−mean_i log [e^{cos(z_i, p_i)/τ} / (e^{cos(z_i, p_i)/τ} + Σ_j e^{cos(z_i, n_j)/τ})]`, FedPIN's L_con.

    Thesis Prop. 5.4.3, as a bound on log(m + 1) − I(Φ_u; Φ_g | Y), which it is not.
    `features` z and `positives` p are (n, d), `negatives` (m, d) count for every z_i. A vector of zeros has cosine
    0 with all others.
    """
    z, p, n = (F.normalize(vectors, dim=1) for vectors in (features, positives, negatives))
    cosines = torch.cat([(z * p).sum(dim=1, keepdim=True), z @ n.T], dim=1)
    return F.cross_entropy(cosines / temperature, cosines.new_zeros(len(cosines), dtype=torch.long))


def total_variance(features: Tensor) -> Tensor:
    """`mean_i ‖z_i − z̄‖²` of features (n, d), the trace of their covariance (biased): FedPIN's Var(Φ(X))."""
    return (features - features.mean(dim=0)).square().sum(dim=1).mean()
