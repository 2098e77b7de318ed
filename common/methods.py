"""Hyper-parameters: one frozen class per method, sent by the server with every message.

A subclass of `Method` that has a `name: Literal[...]` field is a method: the command line, the configuration
file and the all-methods test suite find it here, its two halves in `strategies/` and `client/methods/`.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from common.errors import UserError
from common.knobs import between, choice, knob
from common.modules import named_subclasses
from common.suggest import unknown


class Method(BaseModel):
    """Base of all hyper-parameter classes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: ClassVar[str]
    """The name that papers print."""
    summary: ClassVar[str]
    """One line for `perennial list methods`."""
    source: ClassVar[str]
    """Where the method is published."""
    evaluates: ClassVar[tuple[str, ...]]
    """The models that clients evaluate, the headline one last: of "global", "personal", "ensemble"."""
    actions: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    """Message types that the client half answers, e.g. "train.gradient"."""
    family: ClassVar[str] = ""
    """File name of the two halves, where several methods share them; empty: the method's own name."""

    name: str

    @classmethod
    def module(cls) -> str:
        """Name of the method's file in `strategies/` and `client/methods/`."""
        return cls.family or str(cls.model_fields["name"].default).replace("-", "_")


class LocalTraining(Method):
    """What methods have in common whose clients take gradient steps on a model of their own."""

    local_steps: int = knob(
        10,
        "local updates of the shared model in a round",
        symbol="R",
        source="thesis §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    local_unit: Literal["step", "epoch"] = knob(
        "step",
        "whether a local update is one mini-batch step or one pass over the client's data",
        source="spec/fedsdr.md A6",
    )
    batch_size: int = knob(
        64,
        "samples in a mini-batch",
        source="spec/fedsdr.md §10",
        ge=1,
        le=100_000,
        search=choice(32, 64, 128),
    )
    learning_rate: float = knob(
        0.05,
        "step size of the local updates",
        symbol="β (FedPIN), η (FedAvg)",
        source="not given in the thesis; inside the grid of spec/fedsdr.md §10, not tuned",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    momentum: float = knob(
        0.0,
        "momentum of the local updates, fresh in every round",
        source="plain gradient steps, spec/fedsdr.md §5.6",
        ge=0,
        lt=1,
        search=choice(0.0, 0.9),
    )
    weight_decay: float = knob(
        0.0,
        "weight of ½‖θ‖² in the local risk",
        source="plain gradient steps, spec/fedsdr.md §5.6",
        ge=0,
        le=1,
        search=choice(0.0, 1e-4, 1e-3),
    )


class FedAvg(LocalTraining):
    """Federated averaging."""

    title = "FedAvg"
    summary = "one global model, the sample-weighted mean of what clients trained"
    source = "McMahan et al. 2017"
    evaluates = ("global",)

    name: Literal["fedavg"] = "fedavg"


class Local(LocalTraining):
    """Every client for itself."""

    title = "Local"
    summary = "no communication: every client trains a model of its own"
    source = "reference row, spec/cgpfl.md 8-A14"
    evaluates = ("personal",)

    name: Literal["local"] = "local"


class Ditto(LocalTraining):
    """A personal model beside the global one, pulled towards it."""

    title = "Ditto"
    summary = "FedAvg's global model, and a personal one pulled towards it that never leaves the client"
    source = "Li et al. 2021"
    evaluates = ("global", "personal")

    name: Literal["ditto"] = "ditto"
    proximity: float = knob(
        0.1,
        "weight of ½‖v − w‖², the pull of the personal model v to the received global model w",
        symbol="λ",
        source="Li et al. 2021; grid of spec/cgpfl.md §5.3",
        ge=0,
        le=1e4,
        search=between(1e-2, 3.0, log=True),
    )
    personal_steps: int = knob(
        10,
        "updates of the personal model in a round, in `local_unit`",
        symbol="s",
        source="thesis §4.5.2 (K)",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )


METHODS = named_subclasses(Method)


def method_class(name: str) -> type[Method]:
    """The hyper-parameter class of a method. Raises `UserError` for a name that is none."""
    if name not in METHODS:
        raise UserError(unknown("method", name, METHODS))
    return METHODS[name]
