"""A network of so many numbers, of which a hundredth is trained or all is; for `benchmarks/memory.py`."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """About `numbers` parameters in square layers, of which the last one alone is trained unless `all_of_it`."""

    def __init__(
        self, classes: int, input_shape: tuple[int, ...], numbers: int, layers: int = 100, all_of_it: bool = False
    ) -> None:
        super().__init__()
        self.width = round((numbers / layers) ** 0.5)
        self.body = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(layers))
        self.head = nn.Linear(self.width, classes)
        if not all_of_it:
            for layer in self.body[:-1]:
                layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Of a sample its first numbers, or with zeros behind them."""
        x = x.flatten(1)[:, : self.width]
        x = nn.functional.pad(x, (0, self.width - x.shape[1]))
        for layer in self.body:
            x = x + torch.relu(layer(x)) / len(self.body)
        return self.head(x)
