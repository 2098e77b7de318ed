"""The model and the data, as in any Flower app."""

import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import Tensor, nn

Part = tuple[Tensor, Tensor]


class Net(nn.Module):
    """The last layer is the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.hidden(x).relu())
        return logits


def load_data(context: Context) -> tuple[Part, Part]:
    """This client's training and test samples: every n-th of the digits, of which it tests on a fifth."""
    own, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)[own::clients]
    y = torch.tensor(digits.target)[own::clients]
    cut = len(y) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])
