"""How clients and server take their steps: settings of a run that every method with mini-batches shares."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

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
        if all(0 <= beta < 1 for beta in betas):
            return betas
        raise ValueError("both must be 0 or more and below 1")

    @model_validator(mode="after")
    def _of_its_name(self) -> "Optimizer":
        if self.nesterov and self.name != "sgd":
            raise ValueError(f"nesterov: true is for sgd, and optimizer.name is {self.name!r}")
        return self


class Training(BaseModel):
    """What the clients of a run must know of it. A default is what a run does that says nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Optimizer = Optimizer()

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
