"""A network of a picture and a row of a table."""

import torch
from torch import Tensor, nn


class Both(nn.Module):
    """`forward` names the parts of a sample, and `input_shape` has the shape of each."""

    def __init__(self, classes: int, input_shape: dict[str, tuple[int, ...]], width: int = 16) -> None:
        super().__init__()
        channels, (columns,) = input_shape["image"][0], input_shape["table"]
        self.look = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.read = nn.Sequential(nn.Linear(columns, width), nn.ReLU())
        self.join = nn.Sequential(nn.Linear(32 + width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(self.join(torch.cat([self.look(image), self.read(table)], dim=1)))
