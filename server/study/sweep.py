"""Random search over a method's hyper-parameters, chosen on held-out training-environment data."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from perennial.common.config import RunConfig
from perennial.common.methods.base import Method
from perennial.common.training import Optimizer
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import Search, between
from perennial.common.utils.seeding import numpy_generator
from perennial.common.utils.suggestions import sentence
from perennial.server.study.batch import Outcome

REDRAWS = 100


def search_ranges(method: type[Method]) -> dict[str, Search]:
    """Where a sweep looks, by the name of the hyper-parameter; those without a range stay as they are."""
    extras = {name: field.json_schema_extra for name, field in method.model_fields.items()}
    return {
        name: Search(**extra["search"])  # type: ignore[arg-type]
        for name, extra in extras.items()
        if isinstance(extra, Mapping) and "search" in extra
    }


ADAM_RATES = between(1e-4, 1e-2, log=True)
"""Step sizes for adam and adamw, whose steps do not shrink with the gradient."""


def _ranges(config: RunConfig) -> dict[str, Search]:
    """`search_ranges` of a run's method, with the run's optimizer."""
    ranges = search_ranges(type(config.method))
    if config.optimizer.name == "sgd":
        return ranges
    rates = {"learning_rate", "personal_learning_rate"} & ranges.keys()
    return {name: own for name, own in ranges.items() if name != "momentum"} | dict.fromkeys(rates, ADAM_RATES)


def with_optimizer(config: RunConfig, name: str) -> RunConfig:
    """The run with an optimizer of this name, all else of it by default; momentum is sgd's alone.

    Raises `UserError` where there is none, or the method does not take it.
    """
    if name == config.optimizer.name:
        return config
    try:
        found = Optimizer.model_validate({"name": name, "keep": config.optimizer.keep})
    except ValidationError as error:
        raise UserError(f"optimizers: {sentence(error)}") from None
    has_momentum = name != "sgd" and "momentum" in type(config.method).model_fields
    method = config.method.model_copy(update={"momentum": 0.0} if has_momentum else {})
    other = config.model_copy(update={"optimizer": found, "method": method})
    if misfit := other.misfit(method):
        raise UserError(f"optimizers: {misfit}")
    return other


def trial(
    config: RunConfig, number: int, fixed: Collection[str] = (), optimizers: Sequence[str] = ()
) -> RunConfig:
    """Trial `number` of a method: 0 is the configuration itself, later ones are drawn.

    A draw depends on (seed, method, number, hyper-parameter) only, so that it is the same for everybody, and a
    `fixed` hyper-parameter does not change the others. Of `optimizers` one is drawn, and then a step size from its
    own range. Settings that break a rule between them, or do not fit the scenario, are drawn again. Raises
    `UserError` for a value beyond its bounds, or if none of `REDRAWS` fits.
    """
    if number == 0:
        return config
    if optimizers:
        generator = numpy_generator(config.seed, config.method.name, number, "optimizer.name")
        config = with_optimizer(config, str(generator.choice(list(optimizers))))
    method = config.method
    for attempt in range(REDRAWS):
        key = (method.name, number, attempt) if attempt else (method.name, number)
        drawn = {
            name: search.draw(numpy_generator(config.seed, *key, name))
            for name, search in _ranges(config).items()
            if name not in fixed
        }
        try:
            settings = type(method).model_validate({**method.model_dump(), **drawn})
            misfit = settings.misfit(config.scenario)
        except ValidationError as error:
            if error.errors()[0]["loc"]:  # of one hyper-parameter: its range is wider than its bounds
                raise UserError(f"trial {number} of {method.name}: {sentence(error)}") from None
            misfit = sentence(error)
        if not misfit:
            return config.model_copy(update={"method": settings})
    raise UserError(f"trial {number} of {method.name}: none of {REDRAWS} draws fits; the last: {misfit}")


def trials(
    config: RunConfig, count: int, fixed: Collection[str] = (), optimizers: Sequence[str] = ()
) -> list[RunConfig]:
    """The first `count` trials."""
    for name in optimizers:
        with_optimizer(config, name)
    return [trial(config, number, fixed, optimizers) for number in range(count)]


def values_of(config: RunConfig) -> dict[str, Any]:
    """What a search may draw, by the name by which it is set: hyper-parameters and the optimizer."""
    return {**config.method.model_dump(), "optimizer": config.optimizer.name}


def key_of(setting: str) -> str:
    """The hyper-parameter that a `key=value` setting fixes."""
    return setting.partition("=")[0].strip().removeprefix("method.")


def best(outcomes: Sequence[Outcome]) -> int | None:
    """The trial whose headline model is best on held-out data after the last round, the earliest of equals.

    None if no trial has one: all stopped, or the scenario holds nothing out.
    """
    return next(iter(equals(outcomes)), None)


def equals(outcomes: Sequence[Outcome]) -> list[int]:
    """The trials that are as good as the best one, which is among them, the earliest first."""
    scores = held_out(outcomes)
    if not scores:
        return []
    highest = max(map(outcomes[0].config.predicts.headline.goodness, scores.values()))
    return [n for n, score in scores.items() if outcomes[n].config.predicts.headline.goodness(score) == highest]


def held_out(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """The headline model's measure on held-out data after the last round, by trial, where there is one."""
    return {
        number: found.validation
        for number, outcome in enumerate(outcomes)
        if (found := outcome.selected("final")) and found.validation is not None
    }


def tie(trials: int, chosen: int | None) -> str:
    """What to say of so many trials that are equally good; empty of a single one."""
    if trials < 2:
        return ""
    return f"{trials} trials tie; {'the first of them was taken' if chosen else 'the defaults were kept'}"


def differences(config: RunConfig, base: RunConfig) -> dict[str, Any]:
    """The hyper-parameters in which a trial differs from the trial 0 of its sweep."""
    values, before = values_of(config), values_of(base)
    return {name: value for name, value in values.items() if value != before[name]}
