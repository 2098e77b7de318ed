"""What all hyper-parameter classes have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from perennial.common.data.scenario import Scenario
from perennial.common.models.settings import ModelSettings
from perennial.common.tasks import EVERY_TASK, TaskName
from perennial.common.utils.knobs import between, choice, knob

if TYPE_CHECKING:
    from perennial.common.utils.tensors import Tensors

EVALUATED = ("global", "personal", "ensemble")
"""Names of models that clients evaluate."""
EVERY = "whenever it changes"
FIRST = "in the first reply"
CHANGE = "how it changes, since a tensor that is sent changes alike"
STEPS = ("optimizer", "schedule", "clip_norm", "clip_value", "accumulate", "augment", "mix")
"""Settings of `common/training.py` that say how steps on mini-batches are taken."""
CROSS_ENTROPY = {"loss": "whose terms are those of the cross-entropy"}
ONE_CLASS = {"mix": "which uses the one class of each sample"}
OWN_LOOP = {"accumulate": "which takes another step on each mini-batch"}
OWN_GRADIENT = dict.fromkeys(("clip_norm", "clip_value"), "whose steps are along more than one gradient")
OWN_OPTIMIZER = "whose paper or code has steps of its own; choose between them with method.optimizer"
BUFFERS = "its BatchNorm statistics alone, whenever they change"


@dataclass(frozen=True)
class Sum:
    """What of the replies to one exchange enters the server as a sum over clients, and in no other way."""

    exchange: str
    """Message type, e.g. "train.gradient"."""
    record: str
    """By its name among `Method.terms`; a `*` stands for any letters."""
    weight: Literal["client", "owner"] = "client"
    """Each client's weight; or that of those who send the record, whose sum is one more number that enters."""
    bounded: bool = False
    """Whether each of its numbers is within ±1, whatever a client does."""


ONE_MODEL = (Sum("train", "model"),)
"""A client sends one model in a round, and the server uses the mean of these alone."""


class Method(BaseModel):
    """Base of all hyper-parameter classes."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    title: ClassVar[str]
    """The name that papers print."""
    summary: ClassVar[str]
    """One line for `perennial list methods`."""
    source: ClassVar[str]
    """Where the method is published."""
    evaluates: ClassVar[tuple[str, ...]]
    """The models that clients evaluate, the headline one last: of `EVALUATED`."""
    tasks: ClassVar[tuple[TaskName, ...]] = EVERY_TASK
    """What it can learn to predict (`common/tasks/`). A method that is written for a risk R(f; D), whatever the
    loss, has every task."""
    tasks_because: ClassVar[str] = ""
    """Why it has not every task, from its mathematics: a clause about it. Empty where it has."""
    nearest: ClassVar[str] = ""
    """The nearest method that has the others."""
    actions: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    """Message types that the client half answers, e.g. "train.gradient"."""
    sums: ClassVar[tuple[Sum, ...]] = ()
    """All that the server uses of the tensors that clients send in training, where it enters as sums alone: what
    differential privacy and secure aggregation need (docs/privacy.md). Empty where it is more than sums."""
    fractions: ClassVar[tuple[str, ...]] = ()
    """Settings that count in fractions of all rounds: with more rounds, those before would have been others."""
    keeps: ClassVar[frozenset[str]] = frozenset()
    """Records that a client keeps between rounds, be it with some settings alone; a `*` stands for any letters."""
    sends: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    """Those that it also sends, and when: `EVERY`, `FIRST`, `CHANGE` or `BUFFERS`. Tests look at what was sent."""
    keeps_batch_norm: ClassVar[bool] = False
    """Whether BatchNorm layers, parameters and statistics, are among what clients keep and do not send."""
    adapts: ClassVar[bool] = False
    """Whether a client that trains nothing can make a personal model of a few samples with `Client.visit`, of what
    a request to evaluate brings."""
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(STEPS, "whose clients take no steps on mini-batches")
    """Settings of `common/training.py` that it does not take, and why not, after its name."""
    listed: ClassVar[bool] = True
    """Whether it is a method to be chosen, and not only a part of the machinery that trains like one."""
    family: ClassVar[str] = ""
    """File name of the two halves, where several methods share them; empty: the method's own name."""

    name: str

    @classmethod
    def module(cls) -> str:
        """Name of the method's file in `strategies/methods/` and `client/methods/`."""
        return cls.family or str(cls.model_fields["name"].default).replace("-", "_")

    @classmethod
    def leaving(cls) -> str:
        """What a client sends of what it keeps, for a table."""
        return "; ".join(f"`{name}`: {when}" for name, when in sorted(cls.sends)) or "nothing"

    def server(self) -> str:
        """File in `strategies/methods/` of the server half where it has none of its own; "base" is FedAvg's."""
        return "base"

    def clash(self, scenario: Scenario, *taken: str) -> str:
        """Why this cannot run: a client has the name of one of the method's own records. Empty where none has."""
        if not (clients := set(taken).intersection(scenario.client_ids)):
            return ""
        return f"name: {self.name!r} has a record {min(clients)!r} of its own; give that site another name"

    def lacks(self, task: TaskName) -> str:
        """Why this cannot learn a task, after its name. Empty where it can."""
        if task in self.tasks:
            return ""
        why = f", since {self.tasks_because}" if self.tasks_because else ""
        other = f", such as {self.nearest!r}" if self.nearest else ""
        return f"is for {', '.join(self.tasks)}{why}, and not for {task}; take another method{other}"

    def misfit(self, scenario: Scenario) -> str:
        """Why this cannot run on the scenario: the field, the value, what would be right. Empty where it can."""
        return ""

    def summed(self) -> tuple[Sum, ...]:
        """`sums`, with these settings."""
        return self.sums

    def terms(self, arrays: Mapping[str, "Tensors"], metrics: Mapping[str, float]) -> Mapping[str, "Tensors"]:
        """What a client's reply to training adds to `sums`, by record: what it sends, and what is made of it."""
        return arrays

    def no_rule(self) -> str:
        """Why no robust rule can stand for the server's means, after the method's name. Empty where one can."""
        return ""

    def cannot_adapt(self) -> str:
        """Why clients cannot make its personal model of a few samples, after its name. Empty if there is none."""
        if self.adapts or "personal" not in self.evaluates:
            return ""
        return "whose personal model is made of more than a request to evaluate brings"

    def caution(self, scenario: Scenario) -> str:
        """What to know before believing the numbers of this combination, one sentence. Empty: nothing."""
        return ""

    def model_caution(self, model: ModelSettings) -> str:
        """The same of the model that is trained."""
        return ""


class LocalTraining(Method):
    """What methods have in common whose clients take gradient steps on a model of their own.

    The other settings of these steps are the run's (`common/training.py`).
    """

    refuses: ClassVar[Mapping[str, str]] = {}

    local_steps: int = knob(
        10,
        "local updates of the shared model in a round",
        symbol="R",
        source="Tang 2025 §4.5.2",
        ge=1,
        le=10_000,
        search=choice(5, 10, 20),
    )
    local_unit: Literal["step", "epoch"] = knob(
        "step",
        "whether a local update is one mini-batch step or one pass over the client's data",
        source="ours; Tang 2025 says steps and epochs",
    )
    batch_size: int = knob(
        64,
        "samples in a mini-batch",
        source="ours; Tang 2025 §4.5.2 has a value that we could not read",
        ge=1,
        le=100_000,
        search=choice(32, 64, 128),
    )
    learning_rate: float = knob(
        0.05,
        "step size of the local updates",
        symbol="β (FedPIN), η (FedAvg)",
        source="ours, not tuned; not given in Tang 2025",
        gt=0,
        le=10,
        search=between(1e-3, 0.3, log=True),
    )
    momentum: float = knob(
        0.0,
        "momentum of the local updates with sgd, fresh in every round but with optimizer.keep",
        source="plain gradient steps, Tang 2025 Algorithms 1 to 5",
        ge=0,
        lt=1,
        search=choice(0.0, 0.9),
    )
    weight_decay: float = knob(
        0.0,
        "weight of ½‖θ‖² in the local risk",
        source="plain gradient steps, Tang 2025 Algorithms 1 to 5",
        ge=0,
        le=1,
        search=choice(0.0, 1e-4, 1e-3),
    )


class PresetTraining(LocalTraining):
    """Local training as a paper has it, or as its authors' public code has it.

    Whatever is set by hand overrides its default under both presets.
    """

    CODE: ClassVar[Mapping[str, Any]]
    """Defaults under `preset=code` where they differ; the fields have the others."""

    preset: Literal["paper", "code"]

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_preset(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("preset") == "code":
            return {**cls.CODE, **values}
        return values
