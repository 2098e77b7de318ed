"""What a scenario is: data set + environments + partition over clients + test environments."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from perennial.common.data.columns import AnyColumn
from perennial.common.data.datasets import load
from perennial.common.data.environments import standardise
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import Raw
from perennial.common.tasks import Classes, PredictionTask
from perennial.common.utils.knobs import knob

if TYPE_CHECKING:
    from torch import Tensor


AS_THEY_ARE = (0.0,), (1.0,)
"""Mean and deviation of samples that are not standardised."""


class Scenario(BaseModel, ABC):
    """One experiment's data. Subclasses add a `name: Literal[...]` field and their own fields (see `knob`).

    Everything that the server needs (shapes, names) is a property that needs no data; only `client_data`,
    which runs at a client, reads any. Equal scenarios with equal seeds give bit-identical data everywhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    title: ClassVar[str]
    """One line for `perennial list scenarios`."""
    source: ClassVar[str]
    """The paper and section that the recipe is from."""
    dataset: ClassVar[str]
    """Name of the raw data set (see `datasets.DATASETS`), "generated", or "own" to the sites."""
    name: str
    clients: int

    @property
    def rounds(self) -> int:
        """Rounds that a run takes unless told otherwise."""
        return 100

    @property
    def participation(self) -> float:
        """Fraction of the clients that is asked in a round, unless told otherwise."""
        return 1.0

    @property
    def ranking_batch(self) -> int:
        """Samples in a batch of the areas that evaluations of a binary task have, too (`measures/ranking.py`).

        0: no areas.
        """
        return 0

    @property
    @abstractmethod
    def model(self) -> dict[str, Any]:
        """Settings of the model that the paper uses here, e.g. {"name": "mlp", "hidden": (390,)}."""

    @property
    def drawn_samples(self) -> int:
        """How many samples of a client are generated, those of all test environments included; 0 where they are
        taken of a data set."""
        return 0

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    @property
    def classes(self) -> int:
        """Number of classes; 0 where `task` has none."""
        return 0

    @property
    def task(self) -> PredictionTask:
        """What there is to predict."""
        return Classes(self.classes, self.loss_weights, self.class_names)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of a table's features, in the order of a sample's numbers; empty where samples are no rows."""
        return ()

    @property
    def cells(self) -> Mapping[str, AnyColumn]:
        """What becomes of each column's cells; empty where all are numbers, or samples are no rows."""
        return {}

    def at(self, client: str) -> "Scenario":
        """The scenario as one client prepares its samples.

        Raises `UserError` for the client "", which is nobody, where each prepares them otherwise.
        """
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers; empty where they have none."""
        return ()

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """What a sample of each class counts in the loss, in the order of classes; empty: all count the same."""
        return ()

    def prepare(self, x: "Tensor") -> "Tensor":
        """Samples (n, *input_shape) in the units of the raw data, of pictures from 0 to 1, as models take them."""
        return x if self.standardised == AS_THEY_ARE else standardise(x, *self.standardised)

    def cannot_ask_sites(self) -> str:
        """What it is that keeps a site from being tested with its own samples; empty where it can be."""
        return ""

    @property
    def standardised(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation, of each channel or of all, by which pictures in [0, 1] are standardised."""
        return AS_THEY_ARE

    @property
    @abstractmethod
    def train_environments(self) -> tuple[str, ...]:
        """Names of all training environments in the federation; a client has at least one of them."""

    @property
    @abstractmethod
    def test_environments(self) -> tuple[str, ...]:
        """Names of the test environments, the keys of `ClientData.test`, in the order of the tables."""

    @abstractmethod
    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        """Client number `client` (from 0) of the run with this seed.

        Raises `UserError` when the raw data set is not there: what, where looked for, how to get it.
        """

    @cached_property
    def client_ids(self) -> tuple[str, ...]:
        """Stable client ids, zero-padded so that their alphabetical order is their number order."""
        width = len(str(self.clients - 1))
        return tuple(f"client-{number:0{width}d}" for number in range(self.clients))


class Partitioned(Scenario, ABC):
    """A scenario that shares out a raw data set among its clients."""

    @abstractmethod
    def shares(self, seed: int, raw: Raw) -> list[Share]:
        """Every client's share of the raw data; no sample is anyone's training data and in another share.

        Raises `UserError` when the data set is too small for the scenario's sizes.
        """


@lru_cache(maxsize=4)
def all_shares(scenario: Partitioned, seed: int, root: Path | None) -> list[Share]:
    """The partition, made once per process for all of a run's clients; `root` as `resolve_root` gives it."""
    return scenario.shares(seed, load(scenario.dataset, root))


class Spurious(Scenario, ABC):
    """A scenario whose training environments have a shortcut that the test environments break."""

    oracle: bool = knob(
        False, "remove the spurious feature, in training and test alike", source="Tang 2025 Fig 4.4"
    )


class Draw(Protocol):
    """Samples of a client: causes and targets depend on the split alone, the shortcut on `key`, too."""

    def __call__(self, split: str, count: int, strength: float, environment: int, /, *key: str) -> Examples: ...


def drawn_data(
    draw: Draw,
    *,
    train_samples: int,
    validation_fraction: float,
    test_samples: int,
    own: tuple[float, int],
    tests: Mapping[str, float],
) -> ClientData:
    """A client whose test environments are the same samples, each with the shortcut drawn anew.

    `own`: strength of the shortcut in the client's training environment, and that one's number. `tests`: strength
    of the shortcut in each test environment.
    """
    held_out = round(validation_fraction * train_samples)
    return ClientData(
        draw("train", train_samples - held_out, *own),
        draw("validation", held_out, *own),
        {name: draw("test", test_samples, strength, -1, name) for name, strength in tests.items()},
    )


Probability = Annotated[float, Field(ge=0, le=1)]


class Agreeing(Spurious, ABC):
    """A binary label with which a shortcut agrees as often as the environment's probability p says."""

    test_agreement: ClassVar[tuple[float, ...]]
    """P(the shortcut agrees with the label) in each test environment."""
    train_agreement: tuple[Probability, ...]
    classes: ClassVar[int] = 2

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"p={p}" for p in self.train_agreement)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return tuple(f"p={p}" for p in self.test_agreement)


def with_oracle(presets: Mapping[str, Spurious]) -> dict[str, Scenario]:
    """The presets, and after them each without its shortcut, as `NAME-oracle`."""
    without = {
        f"{name}-oracle": scenario.model_copy(update={"oracle": True}) for name, scenario in presets.items()
    }
    return {**presets, **without}
