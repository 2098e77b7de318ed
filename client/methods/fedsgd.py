"""FedSGD, client half: the gradient on all training data, and no step."""

from typing import TypeVar

from torch import Tensor

from perennial.client.steps import Working
from perennial.client.trainer import Client, Received, Reply
from perennial.common.methods.fedsgd import ServerTraining
from perennial.common.wire import GRADIENT, MODEL, NUM_EXAMPLES

S = TypeVar("S", bound=ServerTraining)


class FedSGDClient(Client[S]):
    """Sends `∇R_u(w^t; D_u)` (McMahan et al. 2017), and as the model's the buffers that D_u leaves."""

    stacks = ("train", "evaluate")

    def train(self, received: Received) -> Reply:
        names = self.network.parameter_names
        model = Working(received[MODEL], names)
        gradient, metrics = self.own_gradient(model, received)
        arrays, after = {GRADIENT: dict(zip(names, gradient, strict=True))}, model.result()
        if buffers := self.network.buffer_names:
            arrays[MODEL] = {name: after[name] for name in buffers}
        return Reply(arrays, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def own_gradient(self, model: Working, received: Received) -> tuple[list[Tensor], dict[str, float]]:
        """The gradient to be sent, where the model stands, and metrics."""
        return self.full_gradient(model, self.loss, received, size=self.piece)
