"""How the gradients of a linear classifier vary from sample to sample, in closed form, and between clients."""

import torch
from torch import Tensor

from perennial.common.data.examples import Examples
from perennial.common.models.network import Network
from perennial.common.tasks import PredictionTask
from perennial.common.utils.tensors import Tensors


def gradient_sums(features: Tensor, residuals: Tensor) -> tuple[Tensor, Tensor]:
    """`Σ_i g_i` and `Σ_i g_i²` of each sample's gradient of the loss by a linear classifier.

    `g_i = (d_i h_iᵀ, d_i)`, (outputs · (width + 1),), weights first and biases last, of features h (n, width) and
    residuals d (n, outputs), the derivatives of the samples' losses in the classifier's outputs.
    """
    d = residuals
    first = torch.cat([(d.T @ features).flatten(), d.sum(dim=0)])
    d = d.square()
    return first, torch.cat([(d.T @ features.square()).flatten(), d.sum(dim=0)])


def head_sums(network: Network, task: PredictionTask, model: Tensors, part: Examples) -> tuple[Tensor, Tensor]:
    """`gradient_sums` of a model over samples; they depend on its featurizer, too.

    A classifier of one output has logits (0, z), and only the last residual, `σ(z) − y`, is its own.
    """
    z = network.features(model, part.x)
    residuals = task.residuals(network.classify(model, z), part.y)
    return gradient_sums(z, residuals[:, -len(model["classifier.weight"]) :])


def variance(first: Tensor, second: Tensor, count: int) -> Tensor:
    """`c = (1/n) Σ g_i² − ((1/n) Σ g_i)²`, the diagonal of the gradients' covariance (FedILC §3.2, §5)."""
    return second / count - (first / count).square()


def spread(variances: Tensor) -> Tensor:
    """`L_Fishr = (1/E) Σ_e ‖c_e − c̄‖²` of all clients' variances (E, d) (FedILC §3.2)."""
    return (variances - variances.mean(dim=0)).square().sum(dim=1).mean()
