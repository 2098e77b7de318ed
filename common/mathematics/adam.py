"""Adam, for a server as for a client: what it remembers is named tensors, like everything that is kept."""

import torch
from torch import Tensor

from perennial.common.utils.tensors import Tensors

STEPS = "steps"
"""The one tensor of a state that is not a moment."""
FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """`m̂ / (√v̂ + ε)` with bias-corrected moments m̂ and v̂ of the gradients (Kingma, Ba 2015, Algorithm 1)."""

    def __init__(
        self,
        state: Tensors | None = None,
        *,
        betas: tuple[float, float] = (FIRST_DECAY, SECOND_DECAY),
        epsilon: float = EPSILON,
    ) -> None:
        """`state` is what `state()` gave; it is left as it is."""
        state = state or {}
        self.betas, self.epsilon = betas, epsilon
        self._steps = int(state[STEPS].max()) if STEPS in state else 0  # the clients of a stack have taken as many
        count = len(state) // 2
        self._first, self._second = (
            [state[f"{moment}.{place}"].clone() for place in range(count)] for moment in ("first", "second")
        )

    def direction(self, gradient: list[Tensor]) -> list[Tensor]:
        """Where to step for this gradient, the same tensors at every call."""
        if not self._steps:
            self._first, self._second = ([torch.zeros_like(part) for part in gradient] for _ in range(2))
        self._steps += 1
        first, second = self.betas
        torch._foreach_lerp_(self._first, gradient, 1 - first)
        torch._foreach_mul_(self._second, second)
        torch._foreach_addcmul_(self._second, gradient, gradient, 1 - second)
        root = torch._foreach_sqrt(self._second)
        torch._foreach_div_(root, (1 - second**self._steps) ** 0.5)
        torch._foreach_add_(root, self.epsilon)
        step = torch._foreach_div(self._first, root)
        torch._foreach_div_(step, 1 - first**self._steps)
        return list(step)

    def state(self) -> Tensors:
        """All that the next step depends on; empty before the first."""
        if not self._steps:
            return {}
        moments = {"first": self._first, "second": self._second}
        named = {f"{name}.{place}": part for name, parts in moments.items() for place, part in enumerate(parts)}
        return {STEPS: torch.tensor(self._steps), **named}
