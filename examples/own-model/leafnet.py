"""A model as you would write it without Perennial: an ordinary `torch.nn.Module`."""

import torch
from torch import Tensor, nn


class LeafNet(nn.Module):
    """A small network for pictures. `classes` and `input_shape` are filled in from the scenario."""

    def __init__(
        self, classes: int, input_shape: tuple[int, int, int], width: int = 16, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(input_shape[0], width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(16 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (samples, classes) of pictures (samples, channels, height, width)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def small(classes: int, input_shape: tuple[int, ...], hidden: int = 32) -> nn.Sequential:
    """A function works, too. It must say what it returns."""
    size = int(torch.tensor(input_shape).prod())
    return nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, classes))
