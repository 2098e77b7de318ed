"""The models of the papers, and the one resident module per process that runs them over explicit tensors.

Every model is a classifier on a featurizer (f = w∘Φ), and says of itself which part is which. Its weights
live outside it: a method keeps them as `Tensors`, and `Network` runs them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache, singledispatch
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from perennial.common.errors import UserError
from perennial.common.model_settings import CnnGroupNorm, ConvNet, Lenet, Logistic, Mlp, ModelSettings, ResNet18
from perennial.common.seeding import derive

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


# --- Building each of them ---------------------------------------------------------------------------------


@singledispatch
def build(settings: ModelSettings, input_shape: tuple[int, ...], classes: int) -> Model:
    """A freshly initialised model, drawn from torch's global generator.

    `input_shape` is one sample's; `classes` is the number of logits. Raises `UserError` for a shape that
    the model cannot take.
    """
    raise NotImplementedError(f"nothing builds {type(settings).__name__}")


@build.register
def _logistic(settings: Logistic, input_shape: tuple[int, ...], classes: int) -> Model:
    return Model(nn.Flatten(), nn.Linear(prod(input_shape), classes))


@build.register
def _mlp(settings: Mlp, input_shape: tuple[int, ...], classes: int) -> Model:
    activation = nn.ReLU if settings.activation == "relu" else nn.ELU
    layers: list[nn.Module] = []
    for wide, narrow in pairwise((prod(input_shape), *settings.hidden)):
        norm = [nn.BatchNorm1d(narrow)] if settings.batch_norm else []
        layers += [nn.Linear(wide, narrow), *norm, activation()]
    split = len(layers) - len(layers) // len(settings.hidden) * settings.head_layers
    featurizer = [nn.Flatten(), *layers[: split - 1 if settings.linear_features else split]]
    if settings.one_logit and classes != 2:
        raise UserError(f"model.one_logit is for two classes, but here there are {classes}; leave it out")
    output = OneLogit(settings.hidden[-1]) if settings.one_logit else nn.Linear(settings.hidden[-1], classes)
    # A classifier of one layer is that layer itself: its tensors are "classifier.weight" and "…bias".
    head = nn.Sequential(*layers[split:], output) if settings.head_layers else output
    model = Model(nn.Sequential(*featurizer), head)
    if settings.init == "xavier":
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
    return model


@build.register
def _lenet(settings: Lenet, input_shape: tuple[int, ...], classes: int) -> Model:
    channels, height, width = _image(settings, input_shape, lambda side: ((side - 4) // 2 - 4) // 2)
    first, second = settings.channels
    featurizer = nn.Sequential(
        nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(second * height * width, settings.width), nn.ReLU(),
    )  # fmt: skip
    return Model(featurizer, nn.Linear(settings.width, classes))


@build.register
def _convnet(settings: ConvNet, input_shape: tuple[int, ...], classes: int) -> Model:
    channels, _, _ = _image(settings, input_shape)
    featurizer = nn.Sequential(
        *_conv_norm(channels, 64), *_conv_norm(64, 128, stride=2), *_conv_norm(128, 128),
        *_conv_norm(128, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    return Model(featurizer, _kaiming(nn.Linear(128, classes)))


@build.register
def _cnn_groupnorm(settings: CnnGroupNorm, input_shape: tuple[int, ...], classes: int) -> Model:
    # Pool, stride-2 convolution (rounds up), pool, pool.
    channels, height, width = _image(settings, input_shape, lambda side: (side // 2 + 1) // 2 // 2 // 2)
    featurizer = nn.Sequential(
        *_conv_norm(channels, 64), nn.MaxPool2d(2),
        *_conv_norm(64, 128, stride=2), nn.MaxPool2d(2),
        *_conv_norm(128, 128), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * height * width, 128),
    )  # fmt: skip
    return Model(featurizer, nn.Linear(128, classes))


@build.register
def _resnet18(settings: ResNet18, input_shape: tuple[int, ...], classes: int) -> Model:
    # Importing torchvision takes seconds, and only this model needs it here.
    from torchvision.models import resnet18

    channels, _, _ = _image(settings, input_shape)
    norm = nn.BatchNorm2d if settings.batch_norm else lambda width: nn.GroupNorm(GROUPS, width)
    featurizer = resnet18(weights=None, norm_layer=norm)
    if settings.small_input:
        featurizer.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        featurizer.maxpool = nn.Identity()
    elif channels != 3:
        featurizer.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(featurizer.conv1.weight, mode="fan_out", nonlinearity="relu")
    featurizer.fc = nn.Identity()
    if not settings.head_hidden:
        return Model(featurizer, nn.Linear(512, classes))
    hidden, output = nn.Linear(512, settings.head_hidden), nn.Linear(settings.head_hidden, classes)
    return Model(featurizer, nn.Sequential(_kaiming(hidden), nn.ReLU(), _kaiming(output)))


def _conv_norm(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(GROUPS, outputs)]


def _kaiming(layer: nn.Linear) -> nn.Linear:
    nn.init.kaiming_normal_(layer.weight)
    return layer


def _image(
    settings: ModelSettings, input_shape: tuple[int, ...], shrink: Callable[[int], int] = lambda side: side
) -> tuple[int, int, int]:
    """Channels, and the height and width that `shrink` leaves; `UserError` where it leaves nothing."""
    if len(input_shape) != 3:
        shape = "x".join(map(str, input_shape))
        raise UserError(
            f"model {settings.name!r} needs images (channels x height x width), "
            f"but a sample here has shape {shape}"
        )
    channels, height, width = input_shape
    if min(shrink(height), shrink(width)) < 1:
        least = next(side for side in range(1, 1000) if shrink(side) >= 1)
        raise UserError(
            f"model {settings.name!r} needs images of at least {least}x{least} pixels, "
            f"but these have {height}x{width}"
        )
    return channels, shrink(height), shrink(width)


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
            return build(self.settings, self.input_shape, self.classes)

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
