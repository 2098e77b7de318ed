"""The architectures of the papers: a classifier w on a featurizer Φ (f = w∘Φ), built from its settings."""

from collections.abc import Callable
from functools import singledispatch
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.common.models.lora import add
from perennial.common.models.own_module import constructed, ids_as_numbers, layout, parts
from perennial.common.models.settings import (
    CnnGroupNorm,
    ConvNet,
    EmbeddingBag,
    Lenet,
    Logistic,
    Mlp,
    ModelSettings,
    Module,
    Pretrained,
    ResNet18,
    TextTransformer,
)
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import PAD, shape_in_words, vocabulary_of

GROUPS = 8
"""Groups of every GroupNorm layer: FedIIR's and FedILC's networks have 8."""


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


class FeatureNorm(nn.BatchNorm1d):
    """BatchNorm; a mini-batch of one sample, without a variance, gets the running statistics and leaves them."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) > 1:
            return super().forward(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def model_for(settings: ModelSettings, input_shape: tuple[int, ...], classes: int) -> Model:
    """`build`, with LoRA where it is set, and for samples as they are announced: a model that takes numbers alone
    is given ids as numbers."""
    model = build(settings, input_shape, classes)
    if isinstance(settings, Pretrained) and settings.lora:
        add(model.featurizer, settings.lora)
    if vocabulary_of(input_shape) and not settings.takes_ids and isinstance(model, Model):
        model.featurizer.register_forward_pre_hook(ids_as_numbers)
    return model


class Embedded(nn.Module):
    """Ids of tokens (n, length), `PAD` behind the end, to embeddings (n, length, width), and where tokens are."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        there = ids != PAD
        return self.tokens(ids.clamp(min=0)), there


def mean_of_tokens(x: Tensor, there: Tensor) -> Tensor:
    """The mean (n, width) of vectors (n, length, width) over the places where tokens are; 0 of none."""
    own = there[..., None].to(x.dtype)
    return (x * own).sum(dim=-2) / own.sum(dim=-2).clamp(min=1)


class Bag(nn.Module):
    """The mean of the embeddings of all tokens, and a layer on it."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedded, self.hidden = Embedded(vocabulary, width), nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        return F.relu(self.hidden(mean_of_tokens(*self.embedded(ids))))


class Attention(nn.Module):
    """Attention of several heads, written out, so that it may be differentiated twice."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(~there[..., None, None, :], -1e9)  # not -inf: there may be none
        heard: Tensor = self.output((scores.softmax(dim=-1) @ value).transpose(-2, -3).flatten(-2))
        return heard


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + layers(norm(x))`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.second = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        x = x + self.attention(self.first(x), there)
        changed: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return changed


class Encoder(nn.Module):
    """Embeddings of tokens and places, blocks, and the mean over tokens."""

    def __init__(self, vocabulary: int, length: int, settings: TextTransformer) -> None:
        super().__init__()
        self.embedded = Embedded(vocabulary, settings.width)
        self.places = nn.Parameter(0.02 * torch.randn(length, settings.width))
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, ids: Tensor) -> Tensor:
        x, there = self.embedded(ids)
        x = x + self.places
        for block in self.blocks:
            x = block(x, there)
        return mean_of_tokens(self.norm(x), there)


# --- Building each of them ---------------------------------------------------------------------------------


@singledispatch
def build(settings: ModelSettings, input_shape: tuple[int, ...], classes: int) -> Model:
    """A freshly initialised model, drawn from torch's global generator.

    `input_shape` is one sample's; `classes` is the number of logits. Raises `UserError` for a shape that
    the model cannot take.
    """
    kind = type(settings).__name__
    raise UserError(
        f"model {settings.name!r}: nothing builds it; write a function for {kind} with @build.register"
    )


@build.register
def _logistic(settings: Logistic, input_shape: tuple[int, ...], classes: int) -> Model:
    return Model(nn.Flatten(), nn.Linear(prod(input_shape), classes))


@build.register
def _mlp(settings: Mlp, input_shape: tuple[int, ...], classes: int) -> Model:
    activation = nn.ReLU if settings.activation == "relu" else nn.ELU
    layers: list[nn.Module] = []
    for wide, narrow in pairwise((prod(input_shape), *settings.hidden)):
        norm = [FeatureNorm(narrow)] if settings.batch_norm else []
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
        return _in_units(Model(featurizer, nn.Linear(512, classes)), settings)
    hidden, output = nn.Linear(512, settings.head_hidden), nn.Linear(settings.head_hidden, classes)
    head = nn.Sequential(_kaiming(hidden), nn.ReLU(), _kaiming(output))
    return _in_units(Model(featurizer, head), settings)


@build.register
def _embedding_bag(settings: EmbeddingBag, input_shape: tuple[int, ...], classes: int) -> Model:
    vocabulary, _ = _text(settings, input_shape)
    return Model(Bag(vocabulary, settings.width), nn.Linear(settings.width, classes))


@build.register
def _text_transformer(settings: TextTransformer, input_shape: tuple[int, ...], classes: int) -> Model:
    return Model(Encoder(*_text(settings, input_shape), settings), nn.Linear(settings.width, classes))


def _text(settings: ModelSettings, input_shape: tuple[int, ...]) -> tuple[int, int]:
    """How many ids there are, and the length of a text. Raises `UserError` where samples are no texts."""
    if not (most := vocabulary_of(input_shape)) or len(input_shape) != 1:
        raise UserError(
            f"model {settings.name!r} needs sequences of ids of tokens, but a sample here has shape "
            f"{shape_in_words(input_shape)}"
        )
    return most, input_shape[0]


@build.register
def _module(settings: Module, input_shape: tuple[int, ...], classes: int) -> Model:
    found = layout(settings, input_shape, classes)
    return _in_units(Model(*parts(constructed(settings, input_shape, classes), found, input_shape)), settings)


def _in_units(model: Model, settings: Pretrained) -> Model:
    """The model, which from now on brings pictures to the units of its weights: `factor · x + offset`."""

    def rescaled(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        factor, offset = (inputs[0].new_tensor(each)[:, None, None] for each in (settings.factor, settings.offset))
        return inputs[0] * factor + offset

    if settings.factor:
        model.featurizer.register_forward_pre_hook(rescaled)
    return model


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
            f"but these have {height}x{width}; take another, such as model.name=mlp"
        )
    return channels, shrink(height), shrink(width)
