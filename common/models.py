"""The models of the papers, and the one resident module per process that runs them over explicit tensors.

Every model is a classifier on a featurizer (f = w∘Φ), and says of itself which part is which. Its weights
live outside it: a method keeps them as `Tensors`, and `Network` runs them.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn
from torch.func import functional_call

from common.errors import UserError
from common.knobs import knob
from common.seeding import derive
from common.suggest import unknown

Tensors = dict[str, Tensor]
"""Parameters and buffers by their state-dict names, such as "classifier.weight"."""

GROUPS = 8
"""Groups of every GroupNorm layer: FedIIR's and FedILC's networks have 8."""


def part(tensors: Mapping[str, Tensor], name: Literal["featurizer", "classifier"]) -> Tensors:
    """One part's parameters and buffers of a model."""
    return {full: tensor for full, tensor in tensors.items() if full.startswith(f"{name}.")}


def joined(records: Mapping[str, Tensors]) -> Tensors:
    """Named records as one, with keys `RECORD/TENSOR`."""
    return {f"{record}/{key}": tensor for record, tensors in records.items() for key, tensor in tensors.items()}


def divided(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """What `joined` joined; records without tensors are gone."""
    records: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        record, _, key = name.partition("/")
        records.setdefault(record, {})[key] = tensor
    return records


class Model(nn.Module):
    """A classifier w on a featurizer Φ; its state-dict names start with the part's name."""

    def __init__(self, featurizer: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.featurizer = featurizer
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Logits (samples, classes) of samples (samples, *input_shape)."""
        logits: Tensor = self.classifier(self.featurizer(x))
        return logits


class OneLogit(nn.Linear):
    """A linear layer with one output z, as two logits (0, z): their cross-entropy is z's binary cross-entropy."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        z = super().forward(features)
        return torch.cat([torch.zeros_like(z), z], dim=1)


# --- The settings of each model ------------------------------------------------------------------------


class ModelSettings(BaseModel, ABC):
    """Base of all model settings: frozen, so that equal settings are one key of `network`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    summary: ClassVar[str]
    """One line for `perennial list models`."""
    source: ClassVar[str]
    """The paper that the model is from."""

    name: str

    @property
    def batch_norm(self) -> bool:
        """Whether it has BatchNorm layers."""
        return False

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], classes: int) -> Model:
        """A freshly initialised model, drawn from torch's global generator.

        `input_shape` is one sample's; `classes` is the number of logits. Raises `UserError` for a shape that
        the model cannot take.
        """

    def _image(
        self, input_shape: tuple[int, ...], shrink: Callable[[int], int] = lambda side: side
    ) -> tuple[int, int, int]:
        """Channels, and the height and width that `shrink` leaves; `UserError` where it leaves nothing."""
        if len(input_shape) != 3:
            shape = "x".join(map(str, input_shape))
            raise UserError(
                f"model {self.name!r} needs images (channels x height x width), "
                f"but a sample here has shape {shape}"
            )
        channels, height, width = input_shape
        if min(shrink(height), shrink(width)) < 1:
            least = next(side for side in range(1, 1000) if shrink(side) >= 1)
            raise UserError(
                f"model {self.name!r} needs images of at least {least}x{least} pixels, "
                f"but these have {height}x{width}"
            )
        return channels, shrink(height), shrink(width)


class Logistic(ModelSettings):
    """Multinomial logistic regression."""

    summary = "one linear layer on the flattened sample"
    source = "CGPFL's MLR, Tang 2025 §3.8.1"

    name: Literal["logistic"] = "logistic"

    def build(self, input_shape: tuple[int, ...], classes: int) -> Model:
        return Model(nn.Flatten(), nn.Linear(prod(input_shape), classes))


class Mlp(ModelSettings):
    """Fully connected layers; the last one is the classifier unless `head_layers` says otherwise."""

    summary = "fully connected layers on the flattened sample"
    source = "Tang 2025 §3.8.1 and §4.5.2, PerInvFL A.4, FedILC §5.1, IRM Games' code"

    name: Literal["mlp"] = "mlp"
    hidden: tuple[PositiveInt, ...] = knob(
        (390,), "widths of the hidden layers", source="one: Tang 2025 §4.5.2; 390: PerInvFL A.4", min_length=1
    )
    activation: Literal["relu", "elu"] = knob(
        "relu", "after each hidden layer", source="PerInvFL A.4; elu: IRM Games' code"
    )
    init: Literal["torch", "xavier"] = knob(
        "torch", "PyTorch's own draw, or Xavier-uniform weights and zero biases",
        source="xavier: the codes of Arjovsky et al. 2019 and of FedILC",
    )  # fmt: skip
    linear_features: bool = knob(
        False, "leave out the activation after the featurizer's last layer", source="FedILC's code"
    )
    head_layers: int = knob(
        0, "how many of the hidden layers, from the last, are the classifier's",
        source="IRM Games' code", ge=0,
    )  # fmt: skip
    one_logit: bool = knob(
        False, "for two classes: the classifier has one output z, and the logits are (0, z)",
        source="FedILC's code",
    )  # fmt: skip
    norm: Literal["none", "batch"] = knob(
        "none", "BatchNorm before each activation, for FedBN and its control", source="ours; not given in FL Games"
    )

    @property
    def batch_norm(self) -> bool:
        return self.norm == "batch"

    @model_validator(mode="after")
    def _check_head(self) -> "Mlp":
        own = len(self.hidden) - self.head_layers
        if own < 0:
            raise ValueError(f"head_layers = {self.head_layers}, but hidden has {len(self.hidden)} layer(s)")
        if own == 0 and self.linear_features:
            raise ValueError("linear_features needs a hidden layer that head_layers leaves to the featurizer")
        return self

    def build(self, input_shape: tuple[int, ...], classes: int) -> Model:
        activation = nn.ReLU if self.activation == "relu" else nn.ELU
        layers: list[nn.Module] = []
        for wide, narrow in pairwise((prod(input_shape), *self.hidden)):
            norm = [nn.BatchNorm1d(narrow)] if self.batch_norm else []
            layers += [nn.Linear(wide, narrow), *norm, activation()]
        split = len(layers) - len(layers) // len(self.hidden) * self.head_layers
        featurizer = [nn.Flatten(), *layers[: split - 1 if self.linear_features else split]]
        if self.one_logit and classes != 2:
            raise UserError(f"model.one_logit is for two classes, but here there are {classes}; leave it out")
        output = OneLogit(self.hidden[-1]) if self.one_logit else nn.Linear(self.hidden[-1], classes)
        # A classifier of one layer is that layer itself: its tensors are "classifier.weight" and "…bias".
        head = nn.Sequential(*layers[split:], output) if self.head_layers else output
        model = Model(nn.Sequential(*featurizer), head)
        if self.init == "xavier":
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
                    nn.init.zeros_(layer.bias)
        return model


class _Lenet(ModelSettings):
    """Two 5x5 convolutions, each with ReLU and 2x2 max-pooling, and two fully connected layers.

    No BatchNorm, since CGPFL averages and clusters the parameters.
    """

    channels: ClassVar[tuple[int, int]]
    width: ClassVar[int]

    def build(self, input_shape: tuple[int, ...], classes: int) -> Model:
        channels, height, width = self._image(input_shape, lambda side: ((side - 4) // 2 - 4) // 2)
        first, second = self.channels
        featurizer = nn.Sequential(
            nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(second * height * width, self.width), nn.ReLU(),
        )  # fmt: skip
        return Model(featurizer, nn.Linear(self.width, classes))


class CnnSmall(_Lenet):
    """LeNet with 6 and 16 channels, 120 features."""

    summary = "two convolutions (6, 16 channels), 120 features"
    source = "CGPFL's CIFAR-10 CNN, Tang 2025 §3.8.1; sizes ours, after pFedMe's public code"
    channels = (6, 16)
    width = 120

    name: Literal["cnn-small"] = "cnn-small"


class CnnLarge(_Lenet):
    """LeNet with 32 and 64 channels, 512 features."""

    summary = "two convolutions (32, 64 channels), 512 features"
    source = "CGPFL's CIFAR-10 CNN, Tang 2025 §3.8.1; sizes ours, for a GPU"
    channels = (32, 64)
    width = 512

    name: Literal["cnn-large"] = "cnn-large"


def _conv_norm(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(GROUPS, outputs)]


def _kaiming(layer: nn.Linear) -> nn.Linear:
    nn.init.kaiming_normal_(layer.weight)
    return layer


class ConvNet(ModelSettings):
    """Four 3x3 convolutions with GroupNorm after the ReLU, and global average pooling to 128 features."""

    summary = "four convolutions with GroupNorm, average-pooled to 128 features"
    source = "FedIIR's RotatedMNIST network, §5.1 and its public code"

    name: Literal["convnet"] = "convnet"

    def build(self, input_shape: tuple[int, ...], classes: int) -> Model:
        channels, _, _ = self._image(input_shape)
        featurizer = nn.Sequential(
            *_conv_norm(channels, 64), *_conv_norm(64, 128, stride=2), *_conv_norm(128, 128),
            *_conv_norm(128, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        return Model(featurizer, _kaiming(nn.Linear(128, classes)))


class CnnGroupNorm(ModelSettings):
    """Three 3x3 convolutions, each with ReLU, GroupNorm and 2x2 max-pooling, and 128 linear features."""

    summary = "three convolutions with GroupNorm and max-pooling, 128 linear features"
    source = "FedILC's Rotated-CIFAR10 network, its public code"

    name: Literal["cnn-groupnorm"] = "cnn-groupnorm"

    def build(self, input_shape: tuple[int, ...], classes: int) -> Model:
        # Pool, stride-2 convolution (rounds up), pool, pool.
        channels, height, width = self._image(input_shape, lambda side: (side // 2 + 1) // 2 // 2 // 2)
        featurizer = nn.Sequential(
            *_conv_norm(channels, 64), nn.MaxPool2d(2),
            *_conv_norm(64, 128, stride=2), nn.MaxPool2d(2),
            *_conv_norm(128, 128), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128 * height * width, 128),
        )  # fmt: skip
        return Model(featurizer, nn.Linear(128, classes))


class ResNet18(ModelSettings):
    """torchvision's ResNet-18 from scratch: 512 features, and a linear or FedIIR's two-layer classifier."""

    summary = "ResNet-18 from scratch, 512 features"
    source = "Tang 2025 §4.5.2, PerInvFL A.4, FedIIR §5.1"

    name: Literal["resnet18"] = "resnet18"
    norm: Literal["batch", "group"] = knob(
        "batch", "BatchNorm, whose running statistics are buffers, or GroupNorm, which has none",
        source="He et al. 2016; group: ours",
    )  # fmt: skip
    head_hidden: int = knob(
        0, "width of the classifier's hidden layer; 0 for a linear classifier",
        source="FedIIR's public code: 256", ge=0,
    )  # fmt: skip
    small_input: bool = knob(False, "3x3 stride-1 stem without max-pooling, for images of 64 pixels or fewer")

    @property
    def batch_norm(self) -> bool:
        return self.norm == "batch"

    def build(self, input_shape: tuple[int, ...], classes: int) -> Model:
        # Importing torchvision takes seconds, and only this model needs it here.
        from torchvision.models import resnet18

        channels, _, _ = self._image(input_shape)
        norm = nn.BatchNorm2d if self.batch_norm else lambda width: nn.GroupNorm(GROUPS, width)
        featurizer = resnet18(weights=None, norm_layer=norm)
        if self.small_input:
            featurizer.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            featurizer.maxpool = nn.Identity()
        elif channels != 3:
            featurizer.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(featurizer.conv1.weight, mode="fan_out", nonlinearity="relu")
        featurizer.fc = nn.Identity()
        if not self.head_hidden:
            return Model(featurizer, nn.Linear(512, classes))
        hidden, output = nn.Linear(512, self.head_hidden), nn.Linear(self.head_hidden, classes)
        return Model(featurizer, nn.Sequential(_kaiming(hidden), nn.ReLU(), _kaiming(output)))


MODELS: dict[str, type[ModelSettings]] = {
    str(kind.model_fields["name"].default): kind
    for kind in (Logistic, Mlp, CnnSmall, CnnLarge, ConvNet, CnnGroupNorm, ResNet18)
}


def model_settings(values: Mapping[str, Any]) -> ModelSettings:
    """The settings that a table such as `{"name": "mlp", "hidden": [390, 390]}` stands for.

    Raises `UserError` for a missing or unknown name, an unknown field or a value out of bounds.
    """
    name = values.get("name")
    if name is None:
        raise UserError(f"a model needs a name (there are: {', '.join(sorted(MODELS))})")
    if not isinstance(name, str) or name not in MODELS:
        raise UserError(unknown("model", name, MODELS))
    try:
        return MODELS[name](**values)
    except ValidationError as error:
        raise UserError(_sentence(name, error)) from None


def _sentence(name: str, error: ValidationError) -> str:
    """The first of pydantic's complaints, in one sentence."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    fields = MODELS[name].model_fields
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(field, fields, n=1)
        return f"model {name!r} has no field {field!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    said = first["msg"].removeprefix("Value error, ")
    if not field:
        return f"model {name!r}: {said}"
    return f"model {name!r}: {field} = {first['input']!r}, but {said[0].lower()}{said[1:]}"


# --- Running them --------------------------------------------------------------------------------------


class Network:
    """One model's structure, to be run over any tensors; it holds no weights of its own.

    Calls take tensors by full state-dict name, need only those of the part that they run (`KeyError` names
    a missing one), and ignore others. They change none of them, with one exception: `training=True` lets
    BatchNorm update its running statistics in place in the very buffers that are given. So hand over a copy
    of the buffers of a model that must stay as it is. `training=False`, the default, is also FedIIR's frozen
    BatchNorm: gradients still flow.

    A model without buffers may be differentiated twice and mapped with `torch.func`. Calls from several
    threads at once are not safe, since they share one module.
    """

    parameter_names: tuple[str, ...]
    """State-dict names of all parameters, the featurizer's first."""
    buffer_names: tuple[str, ...]
    """State-dict names of all buffers: BatchNorm's statistics and counters."""
    featurizer_names: tuple[str, ...]
    """State-dict names of the featurizer's parameters."""
    classifier_names: tuple[str, ...]
    """State-dict names of the classifier's parameters."""
    batch_norm_names: tuple[str, ...]
    """State-dict names of all parameters and buffers of BatchNorm layers."""

    def __init__(
        self, settings: ModelSettings, input_shape: tuple[int, ...], classes: int, device: torch.device | str
    ) -> None:
        self.settings = settings
        self.input_shape = input_shape
        self.classes = classes
        self.device = torch.device(device)
        # On "meta" a module takes no memory and can't be run on weights of its own by mistake. It isn't built
        # there, since drawing normal numbers on "meta" makes PyTorch import sympy and more, for 4 s.
        self._model = self._build(0).to("meta")
        parts = {"featurizer": self._model.featurizer, "classifier": self._model.classifier}
        self.parameter_names = tuple(name for name, _ in self._model.named_parameters())
        self.buffer_names = tuple(name for name, _ in self._model.named_buffers())
        self.featurizer_names, self.classifier_names = (
            tuple(f"{part}.{name}" for name, _ in module.named_parameters()) for part, module in parts.items()
        )
        self.batch_norm_names = tuple(
            f"{layer}.{name}"
            for layer, module in self._model.named_modules()
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))
            for name in module.state_dict()
        )
        self._whole = [(name, name) for name in self._model.state_dict()]
        self._featurizer, self._classifier = (
            [(name, f"{part}.{name}") for name in module.state_dict()] for part, module in parts.items()
        )

    def initial(self, seed: int, *key: str | int) -> Tensors:
        """Initial parameters and buffers, a draw that depends on `seed` and `key` alone.

        The same on every call and device, and no global generator is disturbed. The tensors are new, on
        `device`, without `requires_grad`.
        """
        drawn = self._build(derive(seed, "init", *key)).state_dict()
        return {name: tensor.to(self.device) for name, tensor in drawn.items()}

    @cached_property
    def width(self) -> int:
        """How many features the featurizer gives of a sample."""
        sample = torch.zeros(1, *self.input_shape, device=self.device)
        return self.features(self.initial(0), sample).shape[1]

    def predict(self, tensors: Mapping[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        """Logits (samples, classes) of samples x (samples, *input_shape)."""
        return self._call(self._model, self._whole, tensors, x, training)

    def features(self, tensors: Mapping[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        """Features z = Φ(x) (samples, width) of samples x (samples, *input_shape)."""
        return self._call(self._model.featurizer, self._featurizer, tensors, x, training)

    def classify(self, tensors: Mapping[str, Tensor], z: Tensor, training: bool = False) -> Tensor:
        """Logits w(z) (samples, classes) of features z (samples, width)."""
        return self._call(self._model.classifier, self._classifier, tensors, z, training)

    def _build(self, seed: int) -> Model:
        """A model on the CPU, whose global generator is left as it was."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            # Not torch.manual_seed, which would seed the generators of the accelerators, too.
            torch.default_generator.manual_seed(seed)
            return self.settings.build(self.input_shape, self.classes)

    def _call(
        self,
        part: nn.Module,
        names: Iterable[tuple[str, str]],
        tensors: Mapping[str, Tensor],
        x: Tensor,
        training: bool,
    ) -> Tensor:
        if self._model.training != training:  # train() walks all layers, so only when it changes something
            self._model.train(training)
        given = {name: tensors[full] for name, full in names}
        # No tied weights in any model here; looking for them would double the cost of the call.
        output: Tensor = functional_call(part, given, (x,), tie_weights=False)
        return output


@lru_cache(maxsize=8)
def network(
    settings: ModelSettings, input_shape: tuple[int, ...], classes: int, device: torch.device | str = "cpu"
) -> Network:
    """The resident `Network` of this process for these settings; build it once, share it between clients."""
    return Network(settings, input_shape, classes, device)
