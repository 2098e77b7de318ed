"""Modules as people have them, each with something of its own; for `model.name = "user_models:…"`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Module):
    """The last linear layer is called neither classifier nor anything else that is known."""

    def __init__(self, classes: int, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.out = nn.Linear(width, classes)  # made first and run last
        self.inner = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(F.relu(self.norm(self.inner(x))), self.dropout, self.training))


class Named(nn.Module):
    """Both parts by their names, and nothing between them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.featurizer = nn.Sequential(nn.Linear(2, 5), nn.Tanh())
        self.classifier = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.featurizer(x))


class Between(Named):
    """Both names, and something between the two."""

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(2 * self.featurizer(x))


class Tied(nn.Module):
    """One weight in two places, a lazy layer, and a constant that no state dict holds."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.again = nn.Linear(2, 2)
        self.again.weight = self.first.weight
        self.out = nn.LazyLinear(classes)
        self.register_buffer("shift", torch.tensor([0.5, -0.5]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.first(x)))) + self.shift)


class Scaled(nn.Module):
    """A constant that a state dict holds."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([3.0, 2.0]))
        self.inner = nn.Linear(2, 6)
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x * self.scale)))


def sequence(num_classes: int, hidden: list[int] = [4]) -> nn.Sequential:  # noqa: B006 - as people write it
    """A function, and layers after the last linear one."""
    return nn.Sequential(
        nn.Linear(2, hidden[0]), nn.ReLU(), nn.Linear(hidden[0], num_classes), nn.LogSoftmax(dim=1)
    )


def unsaid(num_classes: int):  # type: ignore[no-untyped-def]
    """A function that does not say what it makes."""
    return nn.Linear(2, num_classes)


def no_module(classes: int) -> nn.Module:
    """A function that does not do what it says."""
    return "a module"  # type: ignore[return-value]


class Two(Plain):
    """Two inputs."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * mask)


class Raises(nn.Module):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("the moon is not full")


class Headless(nn.Module):
    """No linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, classes))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class After(Plain):
    """Something after the classifier."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(dim=1)


class Squeezed(Plain):
    """One sample's logits without a dimension for samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class InPlace(Plain):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5))


class Many(Plain):
    """Always three logits."""

    def __init__(self) -> None:
        super().__init__(3)


class Across(nn.Module):
    """The classifier shares its weight with the featurizer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.out = nn.Linear(2, classes)
        self.out.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Pair(Plain):
    """Two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Picture(nn.Module):
    """For pictures, with BatchNorm and dropout."""

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(4 * (input_shape[1] - 2) * (input_shape[2] - 2), classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.body(x)))


made = Plain(2)
