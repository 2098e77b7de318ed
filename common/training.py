"""How clients and server take their steps: settings of a run that every method with mini-batches shares."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from perennial.common.methods.base import Method
from perennial.common.utils.knobs import choice, knob

ADAM_RATE = 1e-3
"""Step size with adam and adamw where none is given, PyTorch's."""
OF_THE_METHOD = {
    "lr": "learning_rate",
    **{name: name for name in ("learning_rate", "momentum", "weight_decay")},
}
"""What people look for in `optimizer` and the method has."""


class Optimizer(BaseModel):
    """What a client's model takes its steps with; rate, momentum and weight decay are the method's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["sgd", "adam", "adamw"] = knob(
        "sgd",
        "steps as PyTorch's class of this name takes them; adamw: weight decay apart from the gradient",
        source="adam: Kingma and Ba 2015; adamw: Loshchilov and Hutter 2019",
        search=choice("sgd", "adam", "adamw"),
    )
    nesterov: bool = knob(False, "Nesterov's momentum, for sgd", source="Sutskever et al. 2013")
    betas: tuple[float, float] = knob(
        (0.9, 0.999), "decay of the means of gradients and of their squares, for adam and adamw", source="PyTorch"
    )
    epsilon: float = knob(
        1e-8, "what is added to the divisor of a step, for adam and adamw", source="PyTorch", gt=0, le=1
    )
    keep: bool = knob(
        False, "whether its state stays at the client from round to round; otherwise each round begins anew"
    )

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        return _decays(betas)

    @model_validator(mode="after")
    def _of_its_name(self) -> "Optimizer":
        if self.nesterov and self.name != "sgd":
            raise ValueError(f"nesterov: true is for sgd, and optimizer.name is {self.name!r}")
        return self


class ServerOptimizer(BaseModel):
    """What the server takes its steps towards the clients' mean with."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["none", "fedavgm", "fedadagrad", "fedadam", "fedyogi"] = knob(
        "none",
        "none: the next model is the mean; otherwise a step towards it",
        source="fedavgm: Hsu et al. 2019; the others: Reddi et al. 2021, Algorithm 2",
    )
    learning_rate: float = knob(
        0.1,
        "step size of the server; 1 is usual for fedavgm, and there the default",
        symbol="η",
        source="Flower; Reddi et al. 2021 tune it",
        gt=0,
        le=100,
    )
    momentum: float = knob(0.9, "for fedavgm", symbol="β", source="Hsu et al. 2019", ge=0, lt=1)
    betas: tuple[float, float] = knob(
        (0.9, 0.99),
        "decay of the means of steps and of their squares; for fedadagrad the first alone, there 0 by default",
        symbol="β₁, β₂",
        source="Reddi et al. 2021 §5.2",
    )
    adaptivity: float = knob(
        1e-3,
        "what is added to the divisor of a step, for all but fedavgm; the larger, the more alike coordinates are",
        symbol="τ",
        source="Reddi et al. 2021 §5.2",
        gt=0,
        le=1,
    )

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        return _decays(betas)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_name(cls, values: Any) -> Any:
        own: dict[Any, dict[str, Any]] = {"fedavgm": {"learning_rate": 1.0}, "fedadagrad": {"betas": (0.0, 0.99)}}
        return {**own.get(values.get("name"), {}), **values} if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _nothing_without_a_name(self) -> "ServerOptimizer":
        fields = type(self).model_fields.items()
        if self.name == "none" and (given := [name for name, own in fields if getattr(self, name) != own.default]):
            raise ValueError(f"{given[0]}: it needs a server_optimizer.name, such as fedavgm or fedadam")
        return self


def _decays(betas: tuple[float, float]) -> tuple[float, float]:
    if all(0 <= beta < 1 for beta in betas):
        return betas
    raise ValueError("both must be 0 or more and below 1")


class Schedule(BaseModel):
    """How a step size changes from round to round: what it is multiplied by, of the round alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["constant", "step", "exponential", "cosine"] = knob(
        "constant", "after the warm-up", source="PyTorch's; cosine: Loshchilov and Hutter 2017"
    )
    warm_up: int = knob(0, "rounds in which it rises evenly, before the first with all of it", ge=0, le=1_000_000)
    every: int = knob(10, "rounds between two falls, for step", ge=1, le=1_000_000)
    decay: float = knob(
        0.1, "what a fall multiplies with, for step; what each round does, for exponential, there 0.95", gt=0, le=1
    )
    rounds: int = knob(
        0, "the round at whose end cosine would have come down; 0: the last of the run", ge=0, le=1_000_000
    )
    least: float = knob(0.0, "what cosine comes down to", ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_name(cls, values: Any) -> Any:
        own = {"decay": 0.95} if isinstance(values, Mapping) and values.get("name") == "exponential" else {}
        return {**own, **values} if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _of_its_name(self) -> "Schedule":
        needs = {"every": ("step",), "decay": ("step", "exponential"), "rounds": ("cosine",), "least": ("cosine",)}
        for name, kinds in needs.items():
            if self.name not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: it is for {' and '.join(kinds)}, and the schedule is {self.name!r}")
        if 0 < self.rounds <= self.warm_up:
            raise ValueError(f"rounds: {self.rounds} is not possible; it must be above warm_up={self.warm_up}")
        return self

    @property
    def whole_run(self) -> bool:
        """Whether it depends on how many rounds there are."""
        return self.name == "cosine" and not self.rounds

    def over(self, rounds: int) -> "Schedule":
        """The same in a run of so many rounds."""
        return self.model_copy(update={"rounds": max(rounds, self.warm_up + 1)}) if self.whole_run else self

    def at(self, round_: int) -> float:
        """What the step size is multiplied by in a round, the first being 1; cosine needs `over`."""
        if round_ <= self.warm_up:
            return round_ / (self.warm_up + 1)
        done = round_ - 1 - self.warm_up
        match self.name:
            case "step":
                return float(self.decay ** (done // self.every))
            case "exponential":
                return float(self.decay**done)
            case "cosine":
                share = min(1.0, done / (self.rounds - self.warm_up))
                return self.least + (1 - self.least) * (1 + math.cos(math.pi * share)) / 2
            case _:
                return 1.0


class Training(BaseModel):
    """What the clients of a run must know of it. A default is what a run does that says nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    clip_norm: float = knob(
        0.0, "norm to which the gradient of a step is cut, before weight decay; 0: none", ge=0, le=1e6
    )
    clip_value: float = knob(0.0, "absolute value to which each of its numbers is cut; 0: none", ge=0, le=1e6)
    loss: str = knob(
        "", "what is minimised in place of the task's loss: MODULE:NAME, a function of a plug-in", max_length=200
    )
    metric: str = knob(
        "",
        "by which models are judged in place of the task's measure: MODULE:NAME, a plug-in's function or Metric",
        max_length=200,
    )
    label_smoothing: float = knob(
        0.0,
        "share of a label that is spread over all classes in training",
        source="Szegedy et al. 2016",
        ge=0,
        lt=1,
    )
    accumulate: int = knob(1, "mini-batches of whose gradients a step takes the mean", ge=1, le=10_000)

    augment: tuple[str, ...] = knob(
        (),
        "random changes of training samples, such as RandomHorizontalFlip(); DomainBed: those of its paper",
        max_length=20,
    )
    mix: str = knob(
        "",
        "what mixes the samples of a mini-batch, and their labels: MixUp(0.2) or CutMix(1)",
        source="Zhang et al. 2018; Yun et al. 2019",
        max_length=200,
    )
    precision: Literal["float32", "bf16"] = knob(
        "float32", "what clients run the model in; bf16: bfloat16, by autocast, with weights and losses in float32"
    )
    tf32: bool = knob(
        False, "whether a GPU multiplies and convolves in TF32, faster and with three digits, so unlike a CPU"
    )

    @field_validator("augment", mode="before")
    @classmethod
    def _one_or_several(cls, named: Any) -> Any:
        return (named,) if isinstance(named, str) else named

    @model_validator(mode="after")
    def _one_way_to_cut(self) -> Self:
        if self.clip_norm and self.clip_value:
            raise ValueError(f"clip_norm: it is not possible beside clip_value={self.clip_value:g}; take one")
        return self

    def chosen(self) -> dict[str, Any]:
        """The settings of this class that are other than their defaults, tables without what is a default."""
        found = {}
        for name, field in Training.model_fields.items():
            own = getattr(self, name)
            if own != field.default:
                found[name] = own.model_dump(mode="json", exclude_defaults=True) if _is_table(own) else own
        return found

    def misfit(self, method: Method) -> str:
        """Why a method cannot be trained so: the setting, the value, what would be right. Empty where it can."""
        chosen = self.chosen()
        for name in chosen:
            if why := method.refuses.get(name):
                setting, value = next(_dotted({name: chosen[name]}))
                shown = str(value).lower() if isinstance(value, bool) else repr(value)
                return f"{setting}: {shown} is not possible with method {method.name!r}, {why}"
        momentum = getattr(method, "momentum", 0.0)
        if self.optimizer.nesterov and not momentum:
            return "optimizer.nesterov: true needs a momentum above 0, such as momentum=0.9"
        if self.optimizer.name != "sgd" and momentum:
            return f"momentum: {momentum:g} is for sgd; {self.optimizer.name} has optimizer.betas"
        return ""


def _is_table(value: Any) -> bool:
    return isinstance(value, BaseModel)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
