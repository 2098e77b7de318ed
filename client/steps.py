"""A model under training: its tensors as autograd sees them, and the steps taken on them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from perennial.client.objectives import pull
from perennial.common.mathematics.adam import Adam
from perennial.common.utils.tensors import Tensors


class Working:
    """A model's working copy; the tensors it starts from stay as they are."""

    def __init__(
        self, start: Tensors, names: Iterable[str], anchor: Tensors | None = None, proximity: float = 0.0
    ):
        """`names` are the tensors to be trained, in the order of every gradient.

        With an `anchor`, every gradient has that of `(proximity/2) ‖θ − anchor‖²` in it, without autograd.
        """
        self.tensors: Tensors = {name: tensor.detach().clone() for name, tensor in start.items()}
        """What losses are computed from; always at the latest step."""
        self._names = tuple(names)
        self._params = [self.tensors[name].requires_grad_() for name in self._names]
        self.values = [tensor.detach() for tensor in self._params]
        """The trained tensors in the same memory, to be changed in place unseen by autograd."""
        self._anchor = [anchor[name] for name in self._names] if anchor else []
        self._proximity = proximity

    def gradient(self, value: Tensor, *, create_graph: bool = False) -> list[Tensor]:
        """Gradient of a scalar, or of each client's in a stack; zeros for a tensor it does not depend on. To be
        read only: autograd may give several tensors one gradient (of a sum of the two)."""
        value = value.sum() if value.dim() else value  # no client's scalar depends on another one's tensors
        found = torch.autograd.grad(value, self._params, create_graph=create_graph, materialize_grads=True)
        if self._anchor:
            return list(torch._foreach_add(found, pull(self.values, self._anchor, self._proximity)))
        return list(found)

    def step(self, direction: Sequence[Tensor], rate: float) -> None:
        """`θ ← θ − rate · direction`."""
        torch._foreach_add_(self.values, list(direction), alpha=-rate)

    def shrink(self, factor: float) -> None:
        """`θ ← factor · θ`."""
        torch._foreach_mul_(self.values, factor)

    def descend(self, value: Tensor, optimizer: "Momentum | Adam", rate: float) -> None:
        """A step along the optimizer's direction for a scalar's gradient."""
        self.step(optimizer.direction(self.gradient(value)), rate)

    def moved(self, direction: Sequence[Tensor], rate: float) -> "Working":
        """A copy, `rate · direction` further down; this one stays where it is."""
        copy = Working(self.tensors, self._names)
        copy.step(direction, rate)
        return copy

    def result(self) -> Tensors:
        """The model reached, without gradients. Ends the training."""
        for tensor in self._params:
            tensor.requires_grad_(False)
        return self.tensors


def clipped_norm(gradient: list[Tensor], most: float, *, stack: bool = False) -> list[Tensor]:
    """A gradient whose norm over all tensors is at most `most`, as PyTorch's `clip_grad_norm_` has it; in a stack
    each client's."""
    squares = [part.square().flatten(1 if stack else 0).sum(-1) for part in gradient]
    scale = (most / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
    return [part * scale.view(-1, *[1] * (part.dim() - 1)) if stack else part * scale for part in gradient]


class Momentum:
    """Heavy-ball steps: `u ← momentum · u + g`, then along u; plain gradient steps at momentum 0.

    With `nesterov` along `g + momentum · u` (Sutskever et al. 2013, as PyTorch's SGD has it).
    """

    def __init__(self, momentum: float, *, nesterov: bool = False, state: Tensors | None = None) -> None:
        """`state` is what `state()` gave; it is left as it is."""
        self.momentum, self.nesterov = momentum, nesterov
        self._velocity = [state[f"velocity.{place}"].clone() for place in range(len(state))] if state else []

    def direction(self, gradient: list[Tensor]) -> list[Tensor]:
        """Where to step for this gradient."""
        if not self.momentum:
            return gradient
        if self._velocity:
            torch._foreach_mul_(self._velocity, self.momentum)
            torch._foreach_add_(self._velocity, gradient)
        else:
            self._velocity = [part.clone() for part in gradient]
        if self.nesterov:
            return list(torch._foreach_add(gradient, self._velocity, alpha=self.momentum))
        return self._velocity

    def state(self) -> Tensors:
        """All that the next step depends on; empty before the first, and at momentum 0."""
        return {f"velocity.{place}": part for place, part in enumerate(self._velocity)}
