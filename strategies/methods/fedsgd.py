"""FedSGD, server half: a step along the mean of the clients' gradients."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from perennial.common.config import RunConfig
from perennial.common.mathematics.adam import Adam
from perennial.common.methods.fedsgd import ServerTraining
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import Payload

S = TypeVar("S", bound=ServerTraining)


class FedSGDStrategy(MethodStrategy[S]):
    """`w ← w − η Σ_u (n_u / Σn) ∇R_u(w)` over the clients that answered, or Adam's step for that gradient.

    A subclass says with `combined` what it makes of the gradients (McMahan et al. 2017, Algorithm 1 with E = 1 and
    B = ∞). Buffers come in a record of their own: they have started from what was sent, and a gradient from 0.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        self.adam = Adam()

    def state_dict(self) -> dict[str, Tensors]:
        return {"adam": self.adam.state()}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.adam = Adam(state.get("adam"))

    def expect(self, model: Tensors) -> Payload:
        """A gradient, and the buffers of a model that has some that move."""
        gradient = {GRADIENT: {name: model[name] for name in self.network.parameter_names}}
        buffers = {name: model[name] for name in self.network.buffer_names}
        return {**gradient, MODEL: buffers} if buffers else gradient

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """One step on from `model`; buffers as they come, and what is frozen as it is."""
        gradient = means[GRADIENT]
        names = self.network.parameter_names
        params = [model[name] for name in names]
        direction = [gradient[name].to(model[name].device) for name in names]
        if self.hparams.weight_decay:
            torch._foreach_add_(direction, params, alpha=self.hparams.weight_decay)
        if self.hparams.optimizer == "adam":
            direction = self.adam.direction(direction)
        moved = torch._foreach_add(params, direction, alpha=-self.hparams.learning_rate)
        return {**model, **means.get(MODEL, {}), **dict(zip(names, moved, strict=True))}
