"""The model, the data, and how both are trained and tested.

The digits of scikit-learn stand for the quickstart's pictures, so that nothing is downloaded. Each picture has a
background, bright or dark. In training it tells whether the digit is even, as often as the client's own share
says. In the test data it tells the opposite.
"""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

SHARES = (0.95, 0.7)
"""How often the background tells the digit, of clients with an even and an odd number."""


class Net(nn.Module):
    """A small network for 8x8 pictures and their background; it says whether a digit is even."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(65, 32)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.fc1(x).relu())
        return logits


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All pictures, and whether each digit is even."""
    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target % 2 == 0).long()


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """This client's training and test data."""
    x, y = (part[partition_id::num_partitions] for part in digits())
    cut = len(y) * 4 // 5
    draw = torch.rand(len(y), generator=torch.Generator().manual_seed(partition_id))
    told = torch.where(draw < SHARES[partition_id % 2], y, 1 - y)
    background = torch.cat([told[:cut], 1 - told[cut:]])
    data = TensorDataset(torch.cat([x, background[:, None].float()], dim=1), y)
    train, test = (TensorDataset(*data[part]) for part in (slice(cut), slice(cut, None)))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train the network; the mean loss."""
    optimizer, total = torch.optim.SGD(net.parameters(), lr=lr), 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """The mean loss and the share of right answers."""
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            logits = net(x)
            loss += cross_entropy(logits, y, reduction="sum").item()
            right += int((logits.argmax(1) == y).sum())
            count += len(y)
    return loss / count, right / count
