"""What a client trains and is tested on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perennial.common.tasks.base import PredictionTask, must_be_targets
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import PAD, padded, sample_dtype, vocabulary_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """Samples with their labels and the training environment that each came from.

    `x`: (n, *input_shape) float32, or int64 ids of tokens; `y`: (n,) int64 classes, or (n, targets) float32;
    `environment`: (n,) int64 index into the scenario's `train_environments` (-1 for test samples, whose
    environment no client knows).
    """

    x: Tensor
    y: Tensor
    environment: Tensor

    def __len__(self) -> int:
        return self.y.shape[0]

    def __getitem__(self, index: Tensor) -> Examples:
        """By number, (b,) or of several mini-batches (batches, b), by a condition (n,); here by a slice, too."""
        import torch

        if isinstance(index, torch.Tensor) and index.dtype == torch.int64 and index.dim() == 1:  # half as long
            return Examples(*(part.index_select(0, index) for part in (self.x, self.y, self.environment)))
        return Examples(self.x[index], self.y[index], self.environment[index])

    def by_environment(self) -> list[Examples]:
        """The samples of each environment that is there, in the order of the environments."""
        return list(self.numbered().values())

    def numbered(self) -> Mapping[int, Examples]:
        """The samples of each environment that is there, by its number."""
        import torch

        return {number: self[self.environment == number] for number in torch.unique(self.environment).tolist()}

    def to(self, device: torch.device) -> Examples:
        return replace(self, x=self.x.to(device), y=self.y.to(device), environment=self.environment.to(device))


def must_be_samples(what: str, part: Examples, shape: tuple[int, ...], task: PredictionTask) -> None:
    """Raises `UserError` where a part is not as `Examples` says, of samples of this shape and a task's targets."""
    import torch

    x, most = sample_dtype(shape), vocabulary_of(shape)
    if isinstance(part.x, torch.Tensor) and part.x.is_floating_point() and not most:
        x = part.x.dtype
    wanted = {
        "x": (x, shape),
        "y": (getattr(torch, task.target_dtype), task.target_shape),
        "environment": (torch.int64, ()),
    }
    for name, (dtype, own) in wanted.items():
        tensor = getattr(part, name)
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{what}: {name} is of type {type(tensor).__name__}; it must be a tensor")
        if tensor.dtype != dtype:
            raise UserError(f"{what}: {name} is {tensor.dtype}; it must be {dtype}")
        if tuple(tensor.shape) != (len(part.x), *own):
            found, right = [*tensor.shape], [len(part.x), *own]
            raise UserError(f"{what}: {name} has shape {found}; it must be {right}")
    least = PAD if padded(shape) else 0
    if most and len(part.x) and not least <= int(part.x.min()) <= int(part.x.max()) < most:
        raise UserError(f"{what}: x has ids from {part.x.min()} to {part.x.max()}; they must be 0 to {most - 1}")
    must_be_targets(what, task, part.y)


def join(parts: Sequence[Examples]) -> Examples:
    """The samples of all parts, one part after the other."""
    import torch

    x, y, environment = zip(*((part.x, part.y, part.environment) for part in parts), strict=True)
    return Examples(torch.cat(x), torch.cat(y), torch.cat(environment))


@dataclass(frozen=True)
class ClientData:
    """One client's own data: training, held-out training-environment data, and its test environments."""

    train: Examples
    validation: Examples
    test: Mapping[str, Examples]

    def to(self, device: torch.device) -> ClientData:
        return ClientData(
            self.train.to(device),
            self.validation.to(device),
            {name: part.to(device) for name, part in self.test.items()},
        )

    def for_testing(self, train: Sequence[str], test: Sequence[str], few: Tensor | None = None) -> ClientData:
        """Nothing to train on: samples of a training environment that is also a test environment are tested.

        `train` and `test` are the names of the environments. `few` are the places, among training and held-out
        samples, of those that the client may learn from all the same.
        """
        import torch

        every, tests = join([self.train, self.validation]), dict(self.test)
        known = torch.zeros(len(every), dtype=torch.bool)
        if few is not None:
            known[few] = True
        kept, every = every[known], every[~known]
        for number, name in enumerate(train):
            own = every[every.environment == number]
            if name in test and len(own):
                own = replace(own, environment=own.environment.new_full((len(own),), -1))
                tests[name] = join([tests[name], own]) if name in tests else own
        none = every[every.environment < -1]
        return ClientData(kept, none, tests)

    def without(self, environment: int) -> ClientData:
        """Without a training environment, whose samples, of both kinds, become the held-out ones."""
        train, held_out = self.train, self.validation
        left_out = join([part[part.environment == environment] for part in (train, held_out)])
        return replace(self, train=train[train.environment != environment], validation=left_out)
