"""FedProx, client half: FedAvg's steps, each pulled back towards the received model."""

from torch import Tensor

from perennial.client.objectives import squared_distance
from perennial.client.trainer import LocalTrainer, Metrics, Received
from perennial.common.data.examples import Examples
from perennial.common.methods.fedprox import FedProx
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL


class FedProxClient(LocalTrainer[FedProx]):
    """`w_u ← w_u − η (∇R(w_u; B) + μ (w_u − w^t))`, `local_steps` times from w^t (Li et al. 2020)."""

    stacks = ("train", "evaluate")

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`R(w; B) + (μ/2) ‖w − w^t‖²`."""
        risk, metrics = super().loss(params, batch, received)
        distance = squared_distance(params, received[MODEL], self.network.parameter_names)
        return risk + self.hparams.proximity / 2 * distance, {**metrics, "distance": distance}
