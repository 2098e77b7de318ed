"""LoRA: chosen linear layers of a frozen featurizer learn a matrix of low rank beside their weights."""

import math
import re
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.common.models.settings import Lora, is_adapter
from perennial.common.utils.errors import UserError


class LoraLinear(nn.Linear):
    """`y = W x + b + (α / r) B A x` (Hu et al. 2022, §4.1): A (r, inputs) is drawn, B (outputs, r) begins at 0."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add(featurizer: nn.Module, settings: Lora) -> None:
    """Give each chosen linear layer its two matrices, drawn from torch's global generator as peft draws them, and
    freeze everything else. Raises `UserError` where no layer is chosen."""
    linear = {
        name: layer
        for name, layer in featurizer.named_modules()
        # Others, such as the one in `nn.MultiheadAttention`, are asked for their weights alone.
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    }
    chosen = [name for name in linear if settings.layers == "all" or re.search(settings.layers, name)]
    if not chosen:
        there = ", ".join([*linear][:8]) + (", …" if len(linear) > 8 else "") or "none"
        raise UserError(
            f"model.lora.layers: no linear layer of the featurizer has {settings.layers!r} in its name; there "
            f"are: {there}"
        )
    featurizer.requires_grad_(False)
    for name in chosen:
        layer = linear[name]
        layer.__class__ = LoraLinear
        adapted = cast(LoraLinear, layer)
        adapted.lora_a = nn.Parameter(torch.empty(settings.rank, layer.in_features))
        adapted.lora_b = nn.Parameter(torch.zeros(layer.out_features, settings.rank))
        adapted.scale = settings.alpha / settings.rank
        nn.init.kaiming_uniform_(adapted.lora_a, a=math.sqrt(5))


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Make plain linear layers of a module's, whose weights are `W + (α / r) B A`."""
    for layer in module.modules():
        if isinstance(layer, LoraLinear):
            layer.weight += layer.scale * layer.lora_b @ layer.lora_a
            del layer.lora_a, layer.lora_b
            layer.__class__ = nn.Linear  # type: ignore[assignment]


def apart(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model without the matrices, and these."""
    return (
        {name: tensor for name, tensor in tensors.items() if not is_adapter(name)},
        {name: tensor for name, tensor in tensors.items() if is_adapter(name)},
    )
