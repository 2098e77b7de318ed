"""The mathematics of local objectives: pure functions, tensors in, tensor out."""

from collections.abc import Iterable

from torch import Tensor

from common.models import Tensors


def squared_distance(params: Tensors, anchor: Tensors, names: Iterable[str]) -> Tensor:
    """‖θ − θ'‖² over the named tensors."""
    parts = [(params[name] - anchor[name]).square().sum() for name in names]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
