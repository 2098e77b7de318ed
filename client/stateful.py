"""Local training with an optimizer whose state may last: for PerInvFL, its ablations and its baselines."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from perennial.client.objectives import squared_norm
from perennial.client.steps import Momentum, Working
from perennial.client.trainer import LocalTrainer, Means, Metrics, Received, Reply, Site
from perennial.common.data.examples import Examples
from perennial.common.mathematics.adam import Adam
from perennial.common.methods.stateful import StatefulTraining
from perennial.common.training import Training
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES

S = TypeVar("S", bound=StatefulTraining)

SHARED = "optimizer-shared"
OWN = "optimizer-personal"


@dataclass(frozen=True)
class Chosen(Examples):
    """A mini-batch of which some samples count: `counts` (n,) is 1 for these, and 0 for the others."""

    counts: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """The mean of values (n,) over the samples that count; 0 where there are none."""
        return (values * self.counts).sum() / self.counts.sum().clamp(min=1)


register_pytree_node(
    Chosen, lambda c: ([c.x, c.y, c.environment, c.counts], None), lambda parts, _: Chosen(*parts)
)


class StatefulTrainer(LocalTrainer[S]):
    """`v ← v − γ · direction(∇L(v; B))`, `local_steps` times from the received model.

    A subclass with a personal model has a loop of its own and takes the steps of v with `shared_step`.
    """

    @classmethod
    def phase(cls, hparams: Any, training: Training, round_: int) -> Hashable:
        begins = round_ if hparams.batch_order == "sequential" else 0
        return super().phase(hparams, training, round_), begins

    def __init__(self, site: Site, hparams: S, kept: dict[str, Tensors]) -> None:
        super().__init__(site, hparams, kept)
        self._optimizers: dict[str, Momentum | Adam] = {}

    def train(self, received: Received) -> Reply:
        v, means = self.working(received[MODEL]), Means()
        for batch in self.batches(self.hparams.local_steps, received.round):
            means.add(self.shared_step(v, batch, received))
        return self.finish(v, means)

    def shared_step(self, v: Working, batch: Examples, received: Received) -> Metrics:
        """One step of the shared model's local copy on `loss`; its metrics."""
        value, metrics = self.value(self.loss, v, batch, received)
        v.descend(value, self.optimizer(SHARED), self.hparams.learning_rate)
        return metrics

    def finish(self, v: Working, means: Means) -> Reply:
        """The reply of a round, once the optimizers' states are kept."""
        adams = {name: found for name, found in self._optimizers.items() if isinstance(found, Adam)}
        self.kept |= {name: adam.state() for name, adam in adams.items()}
        return Reply({MODEL: v.result()}, {NUM_EXAMPLES: len(self.data.train), **means.result()})

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """`R(v; B) + (weight_decay/2) ‖v‖²`."""
        risk = self.risk(params, batch)
        return self.decayed(risk, params), {"risk": risk}

    def risk(self, params: Tensors, part: Examples) -> Tensor:
        """Mean cross-entropy of samples."""
        return self.risk_of(self.network.predict(params, part.x, training=True), part)

    def risk_of(self, outputs: Tensor, part: Examples) -> Tensor:
        """Mean loss of samples with these outputs."""
        if not isinstance(part, Chosen):
            return self.criterion(outputs, part.y)
        smoothing = self.training.label_smoothing
        return part.mean(self.task.loss(outputs, part.y, smoothing=smoothing, reduction="none"))

    def decayed(self, value: Tensor, params: Tensors) -> Tensor:
        """`value + (weight_decay/2) ‖θ‖²`. Part of the loss here, since IRM's rescaling divides it, too."""
        weight = self.hparams.weight_decay / 2
        return value + weight * squared_norm(params, self.network.parameter_names) if weight else value

    def working(self, start: Tensors) -> Working:
        """A working copy of all parameters."""
        return Working(start, self.network.parameter_names)

    def optimizer(self, name: str = SHARED) -> Momentum | Adam:
        """The message's optimizer of that name: Adam as this client left it, or SGD, whose momentum is fresh."""
        if name not in self._optimizers:
            adam = self.hparams.optimizer == "adam"
            self._optimizers[name] = Adam(self.kept.get(name)) if adam else Momentum(self.hparams.momentum)
        return self._optimizers[name]

    def batches(
        self, steps: int, round_: int, purpose: str = "batches", of: Examples | None = None
    ) -> Iterator[Examples]:
        """As in the base class; in sequential order, number (round − 1) · steps of one endless sequence and on."""
        if self.hparams.batch_order == "shuffled":
            yield from super().batches(steps, round_, purpose, of)
            return
        train, count = self.data.train if of is None else of, self.mini_batches(steps)
        pieces = torch.split(torch.arange(len(train), device=train.y.device), self.hparams.batch_size)
        for number in range((round_ - 1) * count, round_ * count):
            yield train[pieces[number % len(pieces)]]

    def contexts(self, round_: int) -> Iterator[tuple[Examples, list[Examples]]]:
        """The round's mini-batches, each with its samples by environment; in a stack, whose clients do not draw as
        many of each, they are `Chosen` from the mini-batch.

        Which samples these are is found out beforehand, on the host: so a step does not wait for the device.
        """
        train = self.data.train
        if self.stack:
            for batch in self.batches(self.hparams.local_steps, round_):
                x, y, place = batch.x, batch.y, batch.environment
                yield batch, [Chosen(x, y, place, (place == number).float()) for number in train.numbered()]
            return
        rows = torch.arange(len(train))
        drawn = self.batches(self.hparams.local_steps, round_, of=Examples(rows, rows, train.environment.cpu()))
        found = [[batch.x, *(part.x for part in batch.by_environment())] for batch in drawn]
        each = torch.cat([own for parts in found for own in parts]).to(train.y.device)
        pieces = iter(torch.split(each, [len(own) for parts in found for own in parts]))
        for parts in found:
            batch, *own = (train[index] for index in islice(pieces, len(parts)))
            yield batch, own
