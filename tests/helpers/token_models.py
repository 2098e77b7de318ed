"""Networks over ids of tokens as people write them; for `model.name = "token_models:…"`."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Lstm(nn.Module):
    """Nothing is done to make whole numbers of what comes."""

    def __init__(self, classes: int, vocabulary: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))
        return self.out(states[:, -1])


class Transformer(nn.Module):
    """Two layers, with attention written out, so that it may be differentiated twice."""

    def __init__(self, classes: int, vocab_size: int, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        weights = (self.query(x) @ self.key(x).mT / x.shape[-1] ** 0.5).softmax(dim=-1)
        return self.classifier(self.dropout(weights @ self.value(x)).mean(dim=1))


class Masked(Transformer):
    """The mean over tokens alone, and nothing of what is behind the end."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        assert ids.min() >= 0
        x, own = self.embedding(ids), mask[..., None]
        return self.classifier((x * own).sum(dim=1) / own.sum(dim=1))


class Both(nn.Module):
    """A picture and a row of a table, by their names."""

    def __init__(self, classes: int, input_shape: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        channels = input_shape["image"][0]
        self.look = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.read = nn.Sequential(nn.Linear(input_shape["table"][0], 4), nn.ReLU())
        self.head = nn.Linear(20, classes)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.cat([self.look(image), self.read(table)], dim=1))


class OfDict(Both):
    """The same, of a dict."""

    def forward(self, sample: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(sample["image"], sample["table"])


class Three(Both):
    """Wants what no sample has."""

    def forward(self, image: Tensor, table: Tensor, sound: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(image, table) + sound


class Fixed(Transformer):
    """With fewer rows than there are ids."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, 40)


class Dict(Transformer):
    """Logits among other outputs."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return OrderedDict(loss=torch.zeros(()), logits=super().forward(ids))


@dataclass
class Output:
    """As Hugging Face's."""

    logits: Tensor


class Object(Transformer):
    """The same, as an object."""

    def forward(self, ids: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(ids))


class Nameless(Transformer):
    """A dict without logits."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"scores": super().forward(ids)}


class Numbers(nn.Module):
    """Takes numbers alone, as everybody's network did before ids stayed whole."""

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.hidden = nn.Linear(input_shape[0], 4)
        self.out = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x)))
