"""A scenario small enough for hundreds of runs, a grid that spoils replies, and one whose clients are far away."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from pydantic import Field
from torch import Tensor

from perennial.client.app import OneHandlerApp
from perennial.client.host import Host
from perennial.client.state import FileStates
from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Spurious
from perennial.common.flower.arrays import carried
from perennial.common.tasks import Event, Labels, Numbers, PredictionTask, TaskName
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import from_record
from perennial.server.run.grid import LocalGrid
from perennial.testing.kept_and_sent import Sent


class TwoFeatures(Spurious, ABC):
    """Two features, of which the second helps in training only, in two environments."""

    source = "tests"
    dataset = "generated"

    clients: int = Field(4, ge=1, le=1000)
    samples: int = Field(40, ge=1, le=100_000)

    model: ClassVar[dict[str, Any]] = {"name": "mlp", "hidden": (8,)}
    rounds: ClassVar[int] = 6
    input_shape: ClassVar[tuple[int, ...]] = (2,)
    train_environments: ClassVar[tuple[str, ...]] = ("p=0.9", "p=0.8")
    test_environments: ClassVar[tuple[str, ...]] = ("p=0.1", "p=0.9")

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        environment = client % 2
        agreement = (0.9, 0.8)[environment]
        return ClientData(
            self._draw(client, seed, "train", agreement, environment),
            self._draw(client, seed, "validation", agreement, environment),
            {name: self._draw(client, seed, name, p, -1) for name, p in (("p=0.1", 0.1), ("p=0.9", 0.9))},
        )

    @abstractmethod
    def _draw(self, client: int, seed: int, part: str, agreement: float, environment: int) -> Examples:
        """Samples of a client and a part, whose second feature is right as often as `agreement` says."""


class Toy(TwoFeatures):
    """The first feature says the label, the second does so in training only."""

    title = "two features, two environments"

    name: Literal["toy"] = "toy"
    classes: ClassVar[int] = 2

    def _draw(self, client: int, seed: int, part: str, agreement: float, environment: int) -> Examples:
        generator = torch_generator(seed, client, "toy", part)
        y = torch.randint(0, 2, (self.samples,), generator=generator)
        sign = 2.0 * y - 1
        agrees = torch.rand(self.samples, generator=generator) < agreement
        clean = sign + torch.randn(self.samples, generator=generator)
        spurious = torch.where(agrees, sign, -sign)
        x = torch.stack([clean, torch.zeros_like(spurious) if self.oracle else spurious], dim=1)
        return Examples(x, y, torch.full_like(y, environment))


class Hidden(TwoFeatures, ABC):
    """Targets of a hidden number. The first feature says it; the second, too, but with the other sign where it
    does not agree."""

    title = "two features of a hidden number, two environments"

    def _draw(self, client: int, seed: int, part: str, agreement: float, environment: int) -> Examples:
        generator = torch_generator(seed, client, "toy", part)
        hidden = torch.randn(self.samples, generator=generator)
        agrees = torch.rand(self.samples, generator=generator) < agreement
        clean = hidden + torch.randn(self.samples, generator=generator) / 2
        spurious = torch.where(agrees, hidden, -hidden)
        x = 2 * torch.stack([clean, torch.zeros_like(spurious) if self.oracle else spurious], dim=1)
        return Examples(x, self._targets(hidden, generator), torch.full((self.samples,), environment))

    @abstractmethod
    def _targets(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """The targets of hidden numbers (n,)."""


class ToyNumbers(Hidden):
    """Two numbers, in units of their own."""

    name: Literal["toy-numbers"] = "toy-numbers"
    task: ClassVar[PredictionTask] = Numbers(("days", "cost"), mean=(10.0, 0.0), scale=(5.0, 100.0))

    def _targets(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        return torch.stack([10 + 5 * hidden, -100 * hidden], dim=1)


class ToyLabels(Hidden):
    """Three labels, some of which are missing."""

    name: Literal["toy-labels"] = "toy-labels"
    task: ClassVar[PredictionTask] = Labels(("high", "low", "higher"))

    def _targets(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        y = torch.stack([hidden > 0, hidden < 0.2, hidden > 0.5], dim=1).float()
        missing = torch.rand(y.shape, generator=generator) < 0.1
        return y.masked_fill(missing, torch.nan)


class ToyEvent(Hidden):
    """A time that is shorter where the number is high, and that one sample in four is not followed to."""

    name: Literal["toy-event"] = "toy-event"
    task: ClassVar[PredictionTask] = Event((0.5, 1.0, 2.0, 4.0))

    def _targets(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        time = (-hidden - torch.rand(len(hidden), generator=generator) / 2).exp()
        followed = torch.rand(len(hidden), generator=generator)
        return torch.stack([time * followed.mul(4).clamp(max=1), (followed > 0.25).float()], dim=1)


TOYS: dict[TaskName, str] = {
    "classes": "toy",
    "numbers": "toy-numbers",
    "labels": "toy-labels",
    "event": "toy-event",
}
"""The toy scenario of each task."""
LEARNT: dict[TaskName, float] = {"classes": 0.75, "numbers": 35.0, "labels": 0.65, "event": 0.65}
"""What the headline measure of a model that has learnt something on it is better than. A constant has the mean
absolute error 42 (of the numbers it has 4 and 80), and of labels and an event ½."""

STRIDES = {
    "fedadg": ("noise_size=8", "projection_size=16"),
    "f-fl-games": ("local_steps=20", "learning_rate=0.02"),
    "v-fl-games": ("local_steps=20", "learning_rate=0.02", "representation_rate=0.02"),
    **dict.fromkeys(
        ("geometric", "fedcurv", "fishr", "fishr-inter-geo", "fishr-intra-geo", "fishr-intra-arith"),
        ("learning_rate=0.1",),
    ),
    "f-fl-games/numbers": ("local_steps=3",),
    **dict.fromkeys(("pfedme/event", "cgpfl/event", "cgpfl-heur/event"), ("proximity=2", "local_steps=30")),
    **dict.fromkeys(("fedsgd/event", "and-mask/event", "vrex/event"), ("learning_rate=0.3",)),
    "fedsdr-fedavg": ("local_steps=4", "environment_steps=4"),
    **dict.fromkeys(("fedsdr", "fedsdr-pfedme"), ("local_steps=4", "environment_steps=4", "personal_steps=4")),
}
"""For methods that by default take one small step in a round, and hundreds of rounds: enough for a few.

For FedADG networks of the toy's size; for FedSDR fewer steps, as each of them is many. Players of numbers who all
answer to the past at once make up for the same error, and overshoot."""


def toy_config(method: str, *settings: str, **options: Any) -> RunConfig:
    """A run of a method on the toy scenario, of classes or, as METHOD/TASK, of another task: few, quick rounds."""
    name, _, task = method.partition("/")
    strides = [setting for key in dict.fromkeys((name, method)) for setting in STRIDES.get(key, ())]
    scenario = {"name": TOYS[task or "classes"]}  # type: ignore[index]
    return load_config(
        options={"method": name, "scenario": scenario, **options},
        settings=["evaluate_every=2", "checkpoint_every=2", *strides, *settings],
    )


class SpoilingGrid(Grid):
    """Passes a grid's replies through `spoil(request, reply)`; a reply that becomes None is never given."""

    def __init__(self, inner: Grid, spoil: Callable[[Message, Message], Message | None]) -> None:
        self.inner, self.spoil = inner, spoil
        self.get_node_ids = inner.get_node_ids  # type: ignore[method-assign]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        for message in messages:
            for reply in self.inner.send_and_receive([message], timeout=timeout):
                if (given := self.spoil(message, reply)) is not None:
                    yield given

    def _absent(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = get_node_ids = _absent
    run = property(_absent)


class WireGrid(LocalGrid):
    """Clients as at a deployment: bytes travel, every message meets a new process, states lie on a disk, and
    replies arrive in the reverse order."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        super().__init__(ClientApp(), len(config.scenario.client_ids))
        self.path = path
        self.sent: list[Sent] = []
        """All replies to train, as they arrived."""

    def send_and_receive(  # type: ignore[override]
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [self._answer(message) for message in messages][::-1]

    def _answer(self, request: Message) -> Message:
        metadata = request.metadata
        node = metadata.dst_node_id
        host = Host(FileStates(self.path / f"site-{node}"))
        before = self._kept(host)
        message = Message(carried(request.content), node, metadata.message_type, group_id=metadata.group_id)
        reply = OneHandlerApp(lambda message, _: host.handle(message, node - 1))(message, self.contexts[node])
        content = carried(reply.content)
        if metadata.message_type.startswith("train"):
            self.sent.append(Sent(node - 1, _arrays(message.content), _arrays(content), before, self._kept(host)))
        return Message(content, reply_to=request)

    def _kept(self, host: Host) -> dict[str, Tensors]:
        """What the host's one client keeps, in the newest version."""
        versions = [version for place in host.states.values() for version in place]
        return max(versions, key=lambda version: (version.round, version.part)).kept if versions else {}


def _arrays(content: RecordDict) -> dict[str, Tensors]:
    return {name: from_record(record) for name, record in content.array_records.items()}
