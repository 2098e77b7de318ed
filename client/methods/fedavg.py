"""FedAvg, client half: local SGD on the client's risk, from the received model."""

from perennial.client.trainer import LocalTrainer
from perennial.common.methods.fedavg import FedAvg


class FedAvgClient(LocalTrainer[FedAvg]):
    """`w_u ← w_u − η ∇R(w_u; B)`, `local_steps` times from w^t (McMahan et al. 2017)."""

    stacks = ("train", "evaluate")
    captures = ("train",)
