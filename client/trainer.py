"""Base of every method's client half: local steps, federated evaluation, kept state.

A subclass answers actions: `train` is the method `train`, `train.gradient` is `train_gradient`, and so on. Its
objective is `loss(params, batch, received) -> (scalar, metrics)`, a pure function of tensors.

The same half serves one client, or a stack of clients at once (client/cohort.py): then every tensor that it
gets, keeps and answers has the clients as first axis. `each` makes a function of one client's tensors one of the
stack's, and for a client alone it changes nothing.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from operator import itemgetter
from typing import Any, ClassVar, Generic, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import register_pytree_node, tree_map

from perennial.client.steps import Momentum, Working, clipped_norm
from perennial.common.data.augmentation import Augmentation
from perennial.common.data.examples import ClientData, Examples
from perennial.common.mathematics.adam import Adam
from perennial.common.measures.ranking import BATCH, columns, rank
from perennial.common.measures.scores import SCORES
from perennial.common.methods.base import LocalTraining, Method
from perennial.common.models.memory import activation_bytes
from perennial.common.models.network import Network
from perennial.common.models.settings import Module
from perennial.common.selection import SPLIT, tally
from perennial.common.selection import columns as split_columns
from perennial.common.tasks import Classes, PredictionTask
from perennial.common.training import Training
from perennial.common.utils.seeding import derive_each
from perennial.common.utils.tensors import Tensors, number_or_stack
from perennial.common.wire import MODEL, NUM_EXAMPLES, PERSONAL, Scalar

H = TypeVar("H", bound=Method)
T = TypeVar("T", bound=LocalTraining)
P = ParamSpec("P")
R = TypeVar("R")

Metrics = dict[str, Tensor]
"""Named scalars of one mini-batch; what a round reports is their mean over its steps."""
Predictor = Callable[[Tensor], Tensor]
"""Inputs (n, *input_shape) to logits (n, classes)."""

Role = Literal["trains", "tests", "adapts"]
"""What a client does: it may train nothing but test, with or without a personal model of a few samples."""

EVALUATION_BATCH = 4096
CACHED_BATCH = 256
"""What a processor's cache holds, for a small network. On the CPU larger pieces take up to twice the time."""
VALIDATION, TEST = "validation", "test"


@dataclass(frozen=True)
class Received:
    """What a request brought: the round, named tensors, and the method's own scalars."""

    round: int
    arrays: Mapping[str, Tensors] = field(default_factory=dict)
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    references: Sequence[Tensors] = ()
    """With a request to evaluate: a model of each training environment, to tell held-out samples apart."""

    def __getitem__(self, record: str) -> Tensors:
        """A record of tensors. Raises `ValueError` where the server has not sent it."""
        if record not in self.arrays:
            raise ValueError(f"the request has no record {record!r}")
        return self.arrays[record]


# How `vmap` finds the tensors of these: of what was received, the records, since a loss needs no more.
register_pytree_node(Examples, lambda e: ([e.x, e.y, e.environment], None), lambda parts, _: Examples(*parts))
register_pytree_node(
    Received,
    lambda r: ([dict(r.arrays)], (r.round, r.settings)),
    lambda parts, rest: Received(rest[0], next(iter(parts)), rest[1]),
)

Loss = Callable[[Tensors, Examples, Received], tuple[Tensor, Metrics]]
"""Parameters, a mini-batch and what was received, to the scalar to descend on and its metrics."""


OPTIMIZER = "optimizer-"
"""What the records of kept optimizers begin with."""

PIECE = 256
"""Samples that go through a model at a time where a method has no mini-batches, to bound memory."""
PIECE_BYTES = 2**30
"""What the activations of a piece may take on a GPU, whose pieces are larger."""


@dataclass(frozen=True)
class Reply:
    """What a client answers: named tensors and plain numbers."""

    arrays: Mapping[str, Tensors] = field(default_factory=dict)
    metrics: Mapping[str, int | float | list[int] | list[float] | Tensor] = field(default_factory=dict)
    """A tensor is a stack's: the clients are its first axis."""
    settings: Mapping[str, Scalar] = field(default_factory=dict)


_GENERATORS: list[torch.Generator] = []
"""Of orders that nobody asks for any more, to be seeded anew: to make one takes as long as to seed it."""


class Orders:
    """Random orders of clients' samples."""

    def passes(
        self, seed: int, clients: str | Sequence[str], round_: int, purpose: str, count: int, device: torch.device
    ) -> Iterator[Tensor]:
        """Without end an order of a client's `count` samples, or of each client's in a stack (clients, count)."""
        names = [clients] if isinstance(clients, str) else clients
        generators = [
            (_GENERATORS.pop() if _GENERATORS else torch.Generator()).manual_seed(key)
            for key in derive_each(seed, names, round_, purpose)
        ]
        try:
            while isinstance(clients, str):
                yield torch.randperm(count, generator=generators[0]).to(device)
            while True:
                drawn = torch.empty(len(names), count, dtype=torch.int64)
                for generator, row in zip(generators, drawn.unbind(), strict=True):
                    torch.randperm(count, generator=generator, out=row)
                yield drawn.to(device)
        finally:
            _GENERATORS.extend(generators)


@dataclass(frozen=True)
class Site:
    """What stands at a client for the whole run: who it is, its data, its resident network, its run's seed."""

    client: str
    data: ClientData
    network: Network
    seed: int
    stack: tuple[str, ...] = ()
    """The clients of a stack, in the order of its tensors' first axis; empty where it is one client's site."""
    task: PredictionTask | None = None
    """What there is to predict; None: as many classes as the network has outputs."""
    role: Role = "trains"
    training: Training = field(default_factory=Training)
    """How steps are taken."""
    augmentation: Augmentation | None = None
    """What changes the samples of mini-batches."""
    orders: Orders = field(default_factory=Orders)
    """Where the orders of mini-batches come from."""

    @cached_property
    def forms(self) -> tuple[str, str, str]:
        """What clients of one stack have alike: the shapes of what they train on, of all data that they evaluate,
        and how many samples there are of each environment."""
        data = self.data
        every = [("", data.train), ("", data.validation), *data.test.items()]
        shapes = [(name, tuple(part.x.shape), part.x.dtype) for name, part in every]
        found, counts = torch.unique(data.train.environment, return_counts=True)
        return repr(shapes[0]), repr(shapes), repr((found.tolist(), counts.tolist()))

    def drawing(self, round_: int, action: str) -> AbstractContextManager[None]:
        """In which the model's own draws, as dropout's, are this client's for the action in this round."""
        return self.network.drawing(self.seed, self.client, round_, action)


@torch.no_grad()
def in_pieces(function: Predictor, x: Tensor, stack: int = 0) -> Tensor:
    """A function's outputs for samples x (n, …), or of a stack of clients (stack, n, …), in pieces that fit."""
    size = EVALUATION_BATCH // max(1, stack)
    if x.device.type == "cpu":
        size = min(size, CACHED_BATCH)
    dim = 1 if stack else 0
    return torch.cat([function(piece) for piece in torch.split(x, max(1, size), dim)], dim)


class Client(Generic[H]):
    """Base of all client halves, one object per message; whatever must last goes into `self.kept`."""

    stacks: ClassVar[tuple[str, ...]] = ()
    """The actions that this half can do for a stack of clients. Said anew by each class: it is not inherited."""
    captures: ClassVar[tuple[str, ...]] = ()
    """Of `stacks` the actions whose work in one round is that of another but for tensors, the orders of samples
    and `phase`: a GPU does it without Python (client/captured.py). Said anew by each class, too."""
    by_environment: ClassVar[bool] = False
    """Whether it looks at samples of each environment apart: then a stack's clients have as many of each."""

    @classmethod
    def can_stack(cls, network: Network) -> bool:
        """Whether clients of this model can be a stack."""
        return True

    @classmethod
    def phase(cls, hparams: Any, training: Training, round_: int) -> Hashable:
        """What of a round changes the work of `captures`, beside tensors and draws."""
        return training.schedule.at(round_)

    def __init__(self, site: Site, hparams: H, kept: dict[str, Tensors]) -> None:
        self.client, self.data, self.network, self.seed = site.client, site.data, site.network, site.seed
        self.stack, self._task, self.orders = site.stack, site.task, site.orders
        self.role, self.training, self.augmentation = site.role, site.training, site.augmentation
        self.hparams = hparams
        self.kept = kept
        """Tensors that this client keeps between rounds, by record name; stored once the action has succeeded."""

    @cached_property
    def task(self) -> PredictionTask:
        """What there is to predict."""
        return self._task or Classes(self.network.outputs)

    def answer(self, action: str, received: Received) -> Reply:
        """Do the work of an action, e.g. `train` or `train.gradient`."""
        handler: Callable[[Received], Reply] = getattr(self, action.replace(".", "_"))
        return handler(received)

    def each(self, function: Callable[P, R]) -> Callable[P, R]:
        """A pure function of one client's tensors, as it is, or for every client of a stack at once.

        Its arguments may be tensors, `Examples`, `Received`, and mappings and sequences of them. It must not look
        at values (`if`, `item`), and draw nothing.
        """
        return vmap(function) if self.stack else function

    def same(self, tensors: Tensors) -> Tensors:
        """Tensors that are the same for every client of a stack, with its first axis; to be read only."""
        if not self.stack:
            return tensors
        return {name: tensor.expand(len(self.stack), *tensor.shape) for name, tensor in tensors.items()}

    def models(self, received: Received) -> dict[str, Predictor]:
        """The models that this client evaluates, by the names in the method's `evaluates`: "personal" is the
        client's own, any other name the received one."""
        return {
            name: self.predictor(self.personal(received) if name == "personal" else received[MODEL])
            for name in self.hparams.evaluates
        }

    def untrained(self, received: Received) -> dict[str, Predictor]:
        """Those of `models` that a client without training samples has: all but its own."""
        if "personal" not in self.hparams.evaluates:
            return self.models(received)
        return {name: self.predictor(received[MODEL]) for name in self.hparams.evaluates if name != "personal"}

    def evaluated(self, received: Received) -> dict[str, Predictor]:
        """The models that this client evaluates, by what it does in the run."""
        if self.role == "adapts" and "personal" in self.hparams.evaluates:
            return self.visited(received)
        return self.models(received) if self.role == "trains" else self.untrained(received)

    @torch.enable_grad()
    def visited(self, received: Received) -> dict[str, Predictor]:
        """`models` after a visit to a client that keeps nothing of it."""
        before = dict(self.kept)
        self.visit(received)
        models = self.models(received)
        self.kept = before
        return models

    def visit(self, received: Received) -> None:
        """Make what `models` needs of a client that was never asked to train: as it would do if it were, once."""
        self.answer("train", received)

    def personal(self, received: Received) -> Tensors:
        """This client's personal model; before its first round, the received or the initial one."""
        start = received.arrays.get(MODEL)
        return self.kept.get(PERSONAL) or start or self.initial()

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """Mean loss of a mini-batch: the empirical risk R(f; D)."""
        risk = self.criterion(self.network.predict(params, batch.x, training=True), batch.y)
        return risk, {"risk": risk}

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss () of the run's task on a mini-batch's outputs and targets."""
        loss = self.task.mapped_loss if self.stack else self.task.loss
        return loss(outputs, targets, smoothing=self.training.label_smoothing)

    def value(self, loss: Loss, model: Working, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        """A loss where the model stands, and its metrics. Raises `ValueError` where one of them is no scalar."""
        found, metrics = self.each(loss)(model.tensors, batch, received)
        axes = bool(self.stack)
        for what, value in [("loss", found), *((f"metric {name!r}", metric) for name, metric in metrics.items())]:
            if not isinstance(value, Tensor):
                raise ValueError(f"{what}: {value!r} is not possible; it must be a scalar tensor")
            if value.dim() != axes:
                shape = [*value.shape[axes:]]
                raise ValueError(f"{what}: a tensor of shape {shape} is not possible; it must be a scalar")
        return found, metrics

    @property
    def in_bulk(self) -> bool:
        """Whether more samples go through the model at a time than a processor takes, for which a GPU is fast: not
        through one that draws or has statistics, which would change by more than rounding, nor one that we do not
        know."""
        own = self.network
        known = not (isinstance(own.settings, Module) or own.draws or own.buffer_names)
        return own.device.type != "cpu" and known

    @property
    def piece(self) -> int:
        """How many samples go through the model at a time where a method has no mini-batches."""
        if self.stack or not self.in_bulk:
            return PIECE
        each, _ = activation_bytes(self.network.settings, self.network.input_shape, self.network.outputs)
        return max(PIECE, min(EVALUATION_BATCH, PIECE_BYTES // each))

    def full_gradient(
        self, model: Working, loss: Loss, received: Received, *, size: int, equal_pieces: bool = False
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Gradient of `loss` over all training data where the model stands, and its metrics.

        The data go through it in pieces of `size` samples. With `equal_pieces` a last, smaller one counts as much
        as the others, which makes it the mean of the mini-batches' gradients.
        """
        train, means = self.data.train, Means()
        total = [torch.zeros_like(value) for value in model.values]
        pieces = torch.split(torch.arange(len(train), device=train.y.device), size)
        for index in pieces:
            value, metrics = self.value(loss, model, train[index], received)
            weight = 1 / len(pieces) if equal_pieces else len(index) / len(train)
            torch._foreach_add_(total, model.gradient(value), alpha=weight)
            means.add(metrics, weight)
        return total, means.result()

    def predictor(self, tensors: Tensors) -> Predictor:
        """A model in evaluation mode; a `partial`, whose first argument is the tensors."""
        return partial(self.each(self.network.predict), tensors)

    def outputs(self, function: Predictor, x: Tensor) -> Tensor:
        """A function's outputs for all samples x, which go through it in pieces."""
        return in_pieces(function, x, len(self.stack))

    def mean_loss(self, predict: Predictor, examples: Examples) -> float:
        """A model's loss on samples, which go through it in pieces and are summed in float64; of a stack a tensor
        (clients,)."""
        losses = self.losses(self.outputs(predict, examples.x), examples.y)
        mean: float = number_or_stack(losses.double().sum(dim=-1)) / len(examples)
        return mean

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample (n,), or of each client's samples in a stack (clients, n)."""
        return self.each(partial(self.task.loss, reduction="none"))(outputs, targets)

    def initial(self) -> Tensors:
        """The run's common initial model, the same at every client and at the server."""
        return self.same(self.network.initial(self.seed))

    def lists(
        self, place: str, count: Callable[..., Mapping[str, list[Any]]], *tensors: Any
    ) -> dict[str, list[Any] | Tensor]:
        """Lists of numbers that `count` makes of one client's tensors, as metrics `PLACE/NAME`; for a stack one
        client after the other."""
        if not self.stack:
            return {f"{place}/{name}": values for name, values in count(*tensors).items()}
        found = [count(*tree_map(itemgetter(client), tensors)) for client in range(len(self.stack))]
        return {f"{place}/{name}": torch.from_numpy(np.array([own[name] for own in found])) for name in found[0]}

    @torch.no_grad()
    def evaluate(self, received: Received) -> Reply:
        """Counts and sums of each model on held-out training data and on each test environment.

        Metrics are lists `MODEL/SPLIT/NAME` of `count`, `loss` and the task's columns, environment after
        environment, and where the request has `BATCH` the columns of rankings, and where it has `SCORES` the
        task's `scored` of test samples; the settings of the reply name the environments of each split. Where the
        request has references, the columns of `common/selection.py` are there as well, from held-out data alone.
        """
        batch = int(received.settings.get(BATCH, 0))  # type: ignore[arg-type]
        splits = {VALIDATION: {VALIDATION: self.data.validation}, TEST: self.data.test}
        metrics: dict[str, int | float | list[int] | list[float] | Tensor] = {}
        held_out = self.data.validation
        known = [
            self.task.right(self.outputs(self.predictor(tensors), held_out.x), held_out.y)
            for tensors in received.references
        ]
        for model, predict in (self.evaluated if len(self.data.train) else self.untrained)(received).items():
            for split, environments in splits.items():
                parts = list(environments.values())
                answers, losses = self.judged(predict, parts)
                place = f"{model}/{split}"
                metrics[f"{place}/count"] = [len(part) for part in parts]
                sums = [
                    {**self.task.sums(*answer), "loss": own.double().sum(dim=-1, keepdim=True)}
                    for answer, own in zip(answers, losses, strict=True)
                ]
                for name in (*self.task.columns, "loss"):
                    metrics[f"{place}/{name}"] = column([own[name] for own in sums])
                if SCORES in received.settings and split == TEST:
                    metrics |= self.lists(place, self.task.counted, answers)
                if batch:
                    metrics |= self.lists(place, partial(_rankings, batch=batch), answers)
                if known and split == VALIDATION:
                    (answer,) = answers
                    counted = known, self.task.right(*answer), self.task.kinds(held_out.y), held_out.environment
                    count = partial(_tallies, count=sum(self.task.answers))
                    metrics |= self.lists(f"{model}/{SPLIT}", count, *counted)
        return Reply(metrics=metrics, settings={split: list(parts) for split, parts in splits.items()})

    def judged(
        self, predict: Predictor, parts: Sequence[Examples]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """A model's usable outputs and the targets of each part, and its losses; in a stack all parts go through
        the model together."""
        if not self.stack or len(parts) < 2:
            answers = [(self.task.usable(self.outputs(predict, part.x), part.y), part.y) for part in parts]
            return answers, [self.losses(*answer) for answer in answers]
        targets = torch.cat([part.y for part in parts], dim=1)
        outputs = self.task.usable(self.outputs(predict, torch.cat([part.x for part in parts], dim=1)), targets)
        sizes = [len(part) for part in parts]
        each = [
            list(torch.split(every, sizes, dim=1)) for every in (outputs, targets, self.losses(outputs, targets))
        ]
        return list(zip(each[0], each[1], strict=True)), each[2]


def column(sums: Sequence[Tensor]) -> list[int] | list[float] | Tensor:
    """Sums (size,) of several environments as one list of numbers, environment after environment; of a stack,
    sums (clients, size), one tensor (clients, numbers)."""
    if not sums:
        return []
    joined = torch.cat(list(sums), dim=-1)
    found: list[float] = joined.tolist()
    return joined if joined.dim() > 1 else found


def _rankings(answers: Sequence[tuple[Tensor, Tensor]], batch: int) -> dict[str, list[int] | list[float]]:
    return columns([rank(logits, labels, batch) for logits, labels in answers])


def _tallies(
    known: Sequence[Tensor], right: Tensor, kinds: Tensor, environment: Tensor, count: int
) -> dict[str, list[int]]:
    return split_columns(tally(known, right, kinds, environment, count))


class LocalTrainer(Client[T]):
    """A client that takes mini-batch gradient steps; as it stands, FedAvg's.

    A subclass with a loop of its own takes its steps with `optimizer` and `step`.
    """

    def __init__(self, site: Site, hparams: T, kept: dict[str, Tensors]) -> None:
        super().__init__(site, hparams, kept)
        self._lasting: dict[str, Momentum | Adam] = {}
        """The message's optimizers whose state is kept."""
        self.rate_factor = 1.0
        """What the round multiplies step sizes of training with; not where a model is made to be tested."""

    def answer(self, action: str, received: Received) -> Reply:
        if action.startswith("train") and self.role == "trains":
            self.rate_factor = self.training.schedule.at(received.round)
        reply = super().answer(action, received)
        states = {name: optimizer.state() for name, optimizer in self._lasting.items()}
        self.kept |= {f"{OPTIMIZER}{name}": state for name, state in states.items() if state}
        return reply

    def train(self, received: Received) -> Reply:
        """`local_steps` updates of the received model on `loss`."""
        trained, metrics = self.descend(received[MODEL], self.loss, received)
        return Reply({MODEL: trained}, {NUM_EXAMPLES: len(self.data.train), **metrics})

    def batches(
        self, steps: int, round_: int, purpose: str = "batches", of: Examples | None = None
    ) -> Iterator[Examples]:
        """`steps` local updates' worth of mini-batches, reshuffled at the end of each pass over the data.

        With `local_unit` "epoch", `steps` counts passes. The same (round, purpose) gives the same batches; `of` is
        something else that there is for each training sample.
        """
        train = self.data.train if of is None else of
        found = islice(self.stream(train, round_, purpose), self.mini_batches(steps))
        return self.augmented(found, round_, purpose) if of is None else found

    def augmented(self, batches: Iterable[Examples], round_: int, purpose: str) -> Iterator[Examples]:
        """Mini-batches whose samples are changed, with draws of their own for each."""
        change = self.augmentation
        for number, batch in enumerate(batches):
            if change:
                x, y = change(batch.x, batch.y, self.seed, self.client, round_, purpose, number)
                batch = replace(batch, x=x, y=y)
            yield batch

    def stream(self, examples: Examples, round_: int, purpose: str) -> Iterator[Examples]:
        """Mini-batches of some of the client's samples without end, reshuffled at the end of each pass."""
        clients, device = self.stack or self.client, examples.y.device
        for order in self.orders.passes(self.seed, clients, round_, purpose, len(examples), device):
            for index in torch.split(order, self.hparams.batch_size, dim=-1):
                yield examples[index]

    def mini_batches(self, steps: int) -> int:
        """How many mini-batches `steps` local updates take."""
        each = self.training.accumulate if self.hparams.local_unit == "step" else self.per_pass
        return steps * each

    @property
    def per_pass(self) -> int:
        """Mini-batches in a pass over the client's training data."""
        return -(-len(self.data.train) // self.hparams.batch_size)

    def gradient(
        self, model: Working, loss: Loss, batch: Examples, received: Received
    ) -> tuple[list[Tensor], Metrics]:
        """Gradient of `loss`, `clipped`, and of weight decay where the model stands, and the loss's metrics."""
        slope, metrics = self.slope(model, loss, batch, received)
        return self.with_decay(self.clipped(slope), model), metrics

    def slope(
        self, model: Working, loss: Loss, batch: Examples, received: Received
    ) -> tuple[list[Tensor], Metrics]:
        """Gradient of `loss` alone where the model stands, and the loss's metrics."""
        value, metrics = self.value(loss, model, batch, received)
        return model.gradient(value), metrics

    def mean_gradient(
        self, model: Working, loss: Loss, group: Sequence[Examples], received: Received, means: "Means"
    ) -> list[Tensor]:
        """`gradient` of the mean loss of several mini-batches, whose metrics go into `means`."""
        total = [torch.zeros_like(value) for value in model.values]
        for batch in group:
            slope, metrics = self.slope(model, loss, batch, received)
            torch._foreach_add_(total, slope, alpha=1 / len(group))
            means.add(metrics)
        return self.with_decay(self.clipped(total), model)

    def clipped(self, gradient: list[Tensor]) -> list[Tensor]:
        """A gradient, cut to `clip_norm` or `clip_value`."""
        if most := self.training.clip_norm:
            return clipped_norm(gradient, most, stack=bool(self.stack))
        if most := self.training.clip_value:
            return [part.clamp(-most, most) for part in gradient]
        return gradient

    def with_decay(self, gradient: list[Tensor], model: Working) -> list[Tensor]:
        """`g + weight_decay · θ`; with adamw, whose steps have it, as it is."""
        if not self.hparams.weight_decay or self.training.optimizer.name == "adamw":
            return gradient
        return list(torch._foreach_add(gradient, model.values, alpha=self.hparams.weight_decay))

    def descend(
        self,
        start: Tensors,
        loss: Loss,
        received: Received,
        *,
        steps: int | None = None,
        rate: float | None = None,
        names: Iterable[str] | None = None,
        purpose: str = "batches",
        optimizer: str | Momentum | Adam = MODEL,
        anchor: Tensors | None = None,
        proximity: float = 0.0,
    ) -> tuple[Tensors, dict[str, float]]:
        """Steps on `loss` from `start` (left as it is); the model reached, and the mean metrics of the steps.

        `rate` is the step size, by default the method's `learning_rate`; `names` are the tensors to be trained, by
        default all parameters of the network; `purpose` keys the mini-batches; `optimizer` is one, or the name of
        the model, by which the run's is kept (`optimizer`). With an `anchor` they are steps on
        `loss + (proximity/2) ‖θ − anchor‖²`.
        """
        hparams = self.hparams
        model = Working(start, self.network.parameter_names if names is None else names, anchor, proximity)
        rate = hparams.learning_rate if rate is None else rate
        taken, means = self.optimizer(optimizer) if isinstance(optimizer, str) else optimizer, Means()
        batches = self.batches(hparams.local_steps if steps is None else steps, received.round, purpose)
        while group := list(islice(batches, self.training.accumulate)):
            if len(group) == 1:
                gradient, metrics = self.gradient(model, loss, group[0], received)
                means.add(metrics)
            else:
                gradient = self.mean_gradient(model, loss, group, received, means)
            self.step(model, taken, gradient, rate)
        return model.result(), means.result()

    def optimizer(self, name: str = MODEL) -> Momentum | Adam:
        """The run's optimizer for a model's steps in this message: fresh, or with `optimizer.keep` as it was left.

        `name` is the model's, another one for each that takes steps; empty: of a model that nothing stays of.
        Raises `ValueError` where a name is asked for again.
        """
        settings = self.training.optimizer
        lasts = settings.keep and bool(name)
        if lasts and name in self._lasting:
            raise ValueError(f"two models take steps with the optimizer {name!r}; give each a name of its own")
        state = self.kept.get(f"{OPTIMIZER}{name}") if lasts else None
        found: Momentum | Adam
        if settings.name == "sgd":
            found = Momentum(self.hparams.momentum, nesterov=settings.nesterov, state=state)
        else:
            found = Adam(state, betas=settings.betas, epsilon=settings.epsilon)
        if lasts:
            self._lasting[name] = found
        return found

    def step(self, model: Working, optimizer: Momentum | Adam, gradient: list[Tensor], rate: float) -> None:
        """A step along the optimizer's direction, of size `rate` times the round's factor.

        With adamw it is `θ ← (1 − rate · weight_decay) θ` before it (Loshchilov and Hutter 2019, Algorithm 2).
        """
        rate *= self.rate_factor
        if self.training.optimizer.name == "adamw" and self.hparams.weight_decay:
            model.shrink(1 - rate * self.hparams.weight_decay)
        model.step(optimizer.direction(gradient), rate)


class Means:
    """Means of named scalars over a round's steps, left on their device until the end."""

    def __init__(self) -> None:
        self._sums: Metrics = {}
        self._weight = 0.0

    def add(self, metrics: Metrics, weight: float = 1.0) -> None:
        """Take in one step's scalars, the same names at each step, with a weight > 0."""
        for name, metric in metrics.items():
            term = metric.detach() if weight == 1.0 else metric.detach() * weight
            self._sums[name] = self._sums[name] + term if self._weight else term
        self._weight += weight

    def result(self) -> dict[str, float]:
        """The mean of each; of a stack, each client's, in a tensor that only a reply may be made of."""
        return {name: number_or_stack(total.double()) / self._weight for name, total in self._sums.items()}
