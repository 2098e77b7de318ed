"""Sites that bring their own data: what the server announces of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from perennial.common.data.columns import AnyColumn, Column, NumberColumn, width
from perennial.common.data.datasets import resolve_root
from perennial.common.data.dialect import Dialect
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Scenario
from perennial.common.data.site_files import LABEL, Found, place_of, read, target_columns
from perennial.common.data.texts import text_ids
from perennial.common.tasks import Classes, Event, Labels, Numbers, PredictionTask
from perennial.common.tasks.numbers import NumbersLoss
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.samples import SampleShape, group_of, unpacked
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.suggestions import meant, unknown

if TYPE_CHECKING:
    from torch import Tensor
SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a site may be called: its name is a folder's name, too, on every kind of disk."""
SITE_TEXT = "letters (a to z, A to Z), digits, '.', '_' and '-', at most 64, the first one a letter or a digit"
BALANCED = "balanced"
"""A rule for weights of classes, which is everybody's name for it."""
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Weight = Annotated[float, Field(ge=1e-6, le=1e6)]


class Sites(Scenario):
    """Clients that have names, and samples which they divide themselves.

    Of each environment that a site has, a part drawn at random is for testing and another is held out. The test
    environments are the training environments.
    """

    clients: int = knob(2, "number of sites, which follows from their names", exclude=True)
    sites: tuple[str, ...] = knob(("site-1", "site-2"), "names of the sites", min_length=1)
    inputs: tuple[PositiveInt, ...] | tuple[str, ...] = knob(
        ("x1", "x2"),
        "of a table the names of its features; otherwise a sample's shape, (channels, height, width) of pictures",
        min_length=1,
    )
    vocabulary: int = knob(
        0, "a sample's numbers are ids of tokens, from 0 to below this; 0: they are numbers", ge=0
    )
    padded: bool = knob(
        False, "sequences of ids may be shorter than the sample's shape, and have -1 behind their end"
    )
    target: Literal["classes", "numbers", "labels", "event"] = knob(
        "classes", "what is predicted: one of several classes, numbers, several labels, or the time to an event"
    )
    labels: tuple[str, ...] = knob(
        ("0", "1"),
        "names of the classes; else of the columns with the targets, which for an event are its time and whether "
        "it happened (1) or not (0)",
        min_length=1,
    )
    loss: NumbersLoss = knob("squared", "of numbers; poisson is for counts")
    target_mean: tuple[Number, ...] = knob((), "what is subtracted from each number in training; empty: nothing")
    target_scale: tuple[Positive, ...] = knob((), "what each is then divided by; empty: nothing")
    target_least: tuple[Number, ...] = knob((), "what each number is at least; empty: anything finite")
    target_most: tuple[Number, ...] = knob((), "what each number is at most; empty: anything finite")
    times: tuple[Positive, ...] = knob((), "of an event the ends of the intervals in which it may happen")
    censoring: tuple[Share, ...] = knob(
        (), "probability of being censored after each of times, for the Brier score; empty: nobody is censored"
    )
    environments: tuple[str, ...] = knob(("own",), "names of the environments", min_length=1)
    class_weights: tuple[Weight, ...] = knob(
        (),
        "what a row of each class counts in training, in the order of labels, or of several labels a row that has "
        "it; empty: all count the same",
    )
    test_fraction: float = knob(0.2, "part of an environment's samples that is for testing", ge=0, lt=1)
    validation_fraction: float = knob(0.1, "part that is held out for validation", ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _count_sites(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "clients" in values:
            raise UserError("scenario.clients follows from the names in scenario.sites; leave it out")
        sites = values.get("sites", cls.model_fields["sites"].default)
        return {**values, "clients": len(sites)} if isinstance(sites, Sequence) else values

    @field_validator("sites", "inputs", "labels", "environments")
    @classmethod
    def _check_names(cls, names: tuple[str, ...] | tuple[int, ...]) -> tuple[str, ...] | tuple[int, ...]:
        if isinstance(names[0], str) and len(set(names)) < len(names):
            raise ValueError("a name is there twice")
        return names

    @field_validator("sites")
    @classmethod
    def _check_sites(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            if not SITE.fullmatch(site):
                raise ValueError(f"{site!r} is no name of a site; take {SITE_TEXT}")
        return tuple(sorted(sites))  # as all client ids

    @field_validator("vocabulary")
    @classmethod
    def _check_vocabulary(cls, most: int, info: ValidationInfo) -> int:
        if most and any(isinstance(name, str) for name in info.data.get("inputs", ())):
            raise ValueError("it is for arrays, and inputs has names of a table's columns; leave it out")
        return most

    @field_validator("padded")
    @classmethod
    def _check_padded(cls, padded: bool, info: ValidationInfo) -> bool:
        if padded and (not info.data.get("vocabulary") or len(info.data.get("inputs", ())) != 1):
            raise ValueError("it is for sequences of ids, with vocabulary and one number in inputs; leave it out")
        return padded

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        target = info.data.get("target")
        if target == "classes" and len(labels) < 2:
            raise ValueError("there must be at least two classes")
        if target == "event" and len(labels) != 2:
            raise ValueError("an event has two columns: its time, and whether it happened")
        return labels

    @field_validator("loss", "target_mean", "target_scale", "target_least", "target_most")
    @classmethod
    def _check_numbers_only(cls, value: Any, info: ValidationInfo) -> Any:
        names, target = info.data.get("labels", ()), info.data.get("target")
        if value not in ((), "squared") and target not in (None, "numbers"):
            raise ValueError(f"it is for target = 'numbers', and here that is {target!r}; leave it out")
        if isinstance(value, tuple) and len(value) not in (0, len(names)):
            raise ValueError(f"there must be one for each of {len(names)} targets, or none")
        if info.data.get("loss") == "poisson" and value and info.field_name in ("target_mean", "target_scale"):
            raise ValueError("with loss = 'poisson' the numbers are counts, which stay as they are; leave it out")
        return value

    @field_validator("times", "censoring")
    @classmethod
    def _check_event_only(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        target = info.data.get("target")
        if value and target not in (None, "event"):
            raise ValueError(f"it is for target = 'event', and here that is {target!r}; leave it out")
        return value

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        try:
            _ = self.task
        except UserError as error:  # of an event's intervals
            raise ValueError(str(error)) from None
        return self

    @field_validator("class_weights", mode="before")
    @classmethod
    def _check_numbers(cls, weights: object) -> object:
        if isinstance(weights, str):
            raise ValueError(
                f"write a number for each class; perennial describe --class-weights {BALANCED} writes them"
            )
        return weights

    @field_validator("class_weights")
    @classmethod
    def _check_weights(cls, weights: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        target = info.data.get("target")
        if weights and target in ("numbers", "event"):
            raise ValueError(f"they are for classes and labels, and here target is {target!r}; leave them out")
        if "labels" in info.data and len(weights) not in (0, classes := len(info.data["labels"])):
            raise ValueError(f"there must be one for each of {classes} {target}, or none")
        return weights

    @model_validator(mode="after")
    def _check_fractions(self) -> Self:
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError(
                f"test_fraction: {self.test_fraction} is not possible with validation_fraction = "
                f"{self.validation_fraction}; together they must be less than 1, or nothing is left to train on"
            )
        return self

    @property
    def model(self) -> dict[str, Any]:
        if self.padded:
            return {"name": "embedding-bag"}
        return {"name": "cnn-small"} if len(self.input_shape) == 3 else {"name": "mlp", "hidden": (64,)}

    @property
    def input_shape(self) -> tuple[int, ...]:
        sizes = _shape(self.inputs)
        return SampleShape(sizes, self.vocabulary, self.padded) if self.vocabulary else sizes

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if isinstance(name, str))

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.labels if self.target == "classes" else ()

    @property
    def task(self) -> PredictionTask:
        if self.target == "numbers":
            scaled, bounds = (self.target_mean, self.target_scale), (self.target_least, self.target_most)
            return Numbers(self.labels, self.loss, *scaled, *bounds)
        if self.target == "labels":
            return Labels(self.labels, tuple((1.0, weight) for weight in self.class_weights))
        if self.target == "event":
            return Event(self.times, self.censoring)
        return Classes(self.classes, self.class_weights, self.labels)

    @property
    def loss_weights(self) -> tuple[float, ...]:
        return self.class_weights if self.target == "classes" else ()

    @property
    def train_environments(self) -> tuple[str, ...]:
        return self.environments

    @property
    def test_environments(self) -> tuple[str, ...]:
        return self.environments

    @cached_property
    def client_ids(self) -> tuple[str, ...]:
        return self.sites

    def divide(self, site: str, seed: int, every: Examples) -> ClientData:
        """A site's samples: of each environment in a random order the first for testing, the next held out."""
        import torch

        train: list[Tensor] = []
        validation: list[Tensor] = []
        test: dict[str, Examples] = {}
        for number, name in enumerate(self.environments):
            own = torch.nonzero(every.environment == number).flatten()
            own = own[torch.randperm(len(own), generator=torch_generator(seed, site, "split", name))]
            tests, held_out = (round(part * len(own)) for part in (self.test_fraction, self.validation_fraction))
            if tests:
                chosen = every[own[:tests]]
                test[name] = replace(chosen, environment=torch.full_like(chosen.environment, -1))
            validation.append(own[tests : tests + held_out])
            train.append(own[tests + held_out :])
        return ClientData(every[torch.cat(train)], every[torch.cat(validation)], test)


class OwnData(Sites):
    """What samples look like, the same at all sites. A site's data stay where they are."""

    title = "own data: sites that join with tables, pictures or arrays of theirs"
    source = "the operator"
    dataset = "own"

    name: Literal["own-data"] = "own-data"
    label_column: str = knob(LABEL, "a table's column of the class, unless a site says another")
    environment_column: str = knob("", "a table's column of the environment, unless a site says another")
    image_column: str = knob("", "a table's column of pictures, beside the others; empty: there is none")
    image_shape: tuple[PositiveInt, ...] = knob((), "of them, (channels, height, width)")
    mean: tuple[Number, ...] = knob((), "what is subtracted from each feature or channel; empty: nothing")
    scale: tuple[Positive, ...] = knob((), "what each is then divided by; empty: nothing")
    columns: dict[str, Column] = knob({}, "of a table what becomes of each column's cells; none: all are numbers")
    own_columns: dict[str, dict[str, NumberColumn]] = knob({}, "of a site, other means, scales and fills")
    ignored: tuple[str, ...] = knob((), "columns of a table that nobody uses")
    text_column: str = knob("", "a table's column of texts, which are all of a sample; empty: there is none")
    tokenizer: str = knob("", "Hugging Face's tokenizer file, by which texts become ids; empty: words are hashed")
    tokenizer_digest: str = knob("", "SHA-256 of that file, noted by describe", pattern="^([0-9a-f]{64})?$")
    separator: str = knob("", "what separates cells of .csv files in a data root: ;, |, tab; empty: a comma")
    decimal: str = knob("", "the mark in their numbers; empty: a point")
    encoding: str = knob("", "of their letters, such as latin-1; empty: UTF-8")

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, AnyColumn], info: ValidationInfo) -> dict[str, Any]:
        inputs, named = info.data.get("inputs", ()), set(columns)
        if columns and named != set(inputs):
            strange, lacking = named - {*inputs}, {*map(str, inputs)} - named
            other = min(strange or lacking)
            hint = meant(other, lacking if strange else ())
            raise ValueError(
                f"there must be one for each name in inputs, or none; {other!r} is in one alone{hint}"
            )
        if columns and not info.data.get("image_column") and (info.data.get("mean") or info.data.get("scale")):
            raise ValueError("with columns, mean and scale belong to each column; leave out those of all")
        return {name: columns[name] for name in inputs} if columns else {}

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if self.text_column and not self.padded:
            raise ValueError("text_column: texts need vocabulary, padded = true and their length in inputs")
        if self.tokenizer and not (self.text_column and self.tokenizer_digest):
            raise ValueError("tokenizer: it needs text_column and tokenizer_digest, which describe writes")
        return self

    @model_validator(mode="after")
    def _check_pictures(self) -> Self:
        shape = self.image_shape
        if self.image_column and (len(shape) != 3 or shape[0] not in (1, 3)):
            raise ValueError(
                "image_shape: with image_column it is channels (1 or 3), height and width, such as [3, 64, 64]"
            )
        if self.image_column and not self.column_names:
            raise ValueError("image_column: with it, inputs are names of the table's other columns")
        if shape and not self.image_column:
            raise ValueError("image_shape: it is for pictures of image_column; name that, too, or leave it out")
        return self

    @field_validator("own_columns")
    @classmethod
    def _check_own(
        cls, own: dict[str, dict[str, NumberColumn]], info: ValidationInfo
    ) -> dict[str, dict[str, NumberColumn]]:
        sites, columns = info.data.get("sites", ()), info.data.get("columns", {})
        for site, changed in own.items():
            if site not in sites:
                raise ValueError(unknown("site", site, sites))
            for name, column in changed.items():
                of_all = columns.get(name)
                if not isinstance(of_all, NumberColumn) or of_all.missing != column.missing:
                    raise ValueError(f"column {name!r} must be one of numbers in columns, and missing as there")
        return own

    @model_validator(mode="after")
    def _check_dialect(self) -> Self:
        try:
            Dialect.of(self)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    @field_validator("mean", "scale")
    @classmethod
    def _check_each(cls, values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if values and info.data.get("vocabulary"):
            raise ValueError("with vocabulary, samples are ids of tokens, which are not scaled; leave it out")
        of = info.data.get("image_shape") or _shape(info.data.get("inputs", ()))
        if "inputs" in info.data and len(values) not in (0, (features := of[0])):
            raise ValueError(f"there must be one for each of {features} features or channels, or none")
        return values

    def at(self, client: str) -> "OwnData":
        if self.own_columns and not client:
            raise UserError(
                "each site's numbers are scaled by its own mean and deviation (own_columns); say whose, such as "
                f"with client={self.sites[0]!r} or --client {self.sites[0]}"
            )
        return self.model_copy(update={"columns": self.columns_of(client), "own_columns": {}})

    def columns_of(self, site: str) -> dict[str, AnyColumn]:
        """What becomes of each column's cells at a site."""
        return {**self.columns, **self.own_columns.get(site, {})}

    @property
    def cells(self) -> dict[str, AnyColumn]:
        return self.columns

    @property
    def input_shape(self) -> tuple[int, ...]:
        own = (width(self.columns),) if self.columns else super().input_shape
        return group_of({"image": self.image_shape, "table": own}) if self.image_column else own

    def prepare(self, x: "Tensor") -> "Tensor":
        if not self.image_column:
            return super().prepare(x)
        import torch

        parts = unpacked(x, self.input_shape)
        return torch.cat([super().prepare(parts["image"]).flatten(1), parts["table"]], dim=1)

    @property
    def standardised(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.mean or (0.0,), self.scale or (1.0,)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        """For a rehearsal in one process, from a data root that has a file or a folder for each site."""
        root, site = resolve_root(data_root), self.sites[client]
        if root is None:
            raise UserError(
                "own-data is for sites that join with their own data (perennial join); to rehearse it in one "
                f"process, give a data root with a file or folder for each site, such as {site}.csv"
            )
        place, dialect = place_of(root, site), Dialect.of(self)
        return self.divided(site, seed, read(place, self.targets_in(""), self.environment_column, dialect))

    def divided(self, site: str, seed: int, found: Found) -> ClientData:
        """A site's samples as `divide` has them. Raises `UserError` where they are not what is announced."""
        environment = found.numbers("environment", self._environments(site, found), self.environments)
        every = Examples(self.prepare(self.samples(site, found)), self._targets(found), environment)
        return self.divide(site, seed, every)

    def samples(self, site: str, found: Found) -> "Tensor":
        """A site's samples (n, *input_shape) in the units of its data. Raises `UserError` if they do not fit."""
        if self.text_column:
            return self.ids(found.texts(self.text_column))
        beside = (*self.ignored, self.image_column) if self.image_column else self.ignored
        x = found.tensor(self.input_shape, self.column_names, self.columns_of(site), beside)
        if not self.image_column:
            return x
        import torch

        return torch.cat([found.pictures(self.image_column, self.image_shape).flatten(1), x], dim=1)

    def ids(self, texts: Sequence[str]) -> "Tensor":
        """Texts as a model takes them. Raises `UserError` where there are none to be taken."""
        if not self.text_column:
            raise UserError("x: the run's samples are no texts")
        return text_ids(texts, self.input_shape[0], self.vocabulary, self.tokenizer, self.tokenizer_digest)

    def targets_in(self, label_column: str) -> str | tuple[str, ...]:
        """The column of the class, or the columns of other targets; a site may call them otherwise."""
        if self.target == "classes":
            return label_column or self.label_column
        return target_columns(label_column, self.labels)

    def _targets(self, found: Found) -> "Tensor":
        if self.target == "classes":
            return found.numbers("class", found.labels, self.labels)
        targets = found.target_numbers(self.labels, may_be_missing=self.target == "labels")
        if wrong := self.task.misfit(targets):
            raise UserError(
                f"{found.name}: a row {wrong}", f"{found.name}: a row's target is not what the server announces"
            )
        return targets

    def _environments(self, site: str, found: Found) -> Sequence[str]:
        """Every sample's environment: as the data say, or the only one, or the one of the site's name."""
        if found.environments is not None:
            return found.environments
        only = self.environments if len(self.environments) == 1 else {site} & set(self.environments)
        if not only:
            raise UserError(
                f"{found.name} does not say of which environment its samples are; the server announces "
                f"{', '.join(self.environments)}"
            )
        return [*only] * len(found)


def balanced(counts: Mapping[str, float]) -> dict[str, float]:
    """`w_c = n / (k n_c)` of n rows of k classes, n_c of class c, as scikit-learn's `class_weight="balanced"`.

    All classes then add up to the same, and their weights have the mean 1 over rows.
    """
    rows = sum(counts.values())
    return {name: rows / (len(counts) * count) for name, count in counts.items()}


def _shape(inputs: Sequence[int | str]) -> tuple[int, ...]:
    return tuple(size for size in inputs if isinstance(size, int)) or (len(inputs),)


PRESETS: dict[str, Scenario] = {"own-data": OwnData()}
