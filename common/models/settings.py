"""The settings of every model: what a person may choose of it. `models.py` builds and runs them."""

import re
from abc import ABC
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from perennial.common import plugins
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.suggestions import sentence, unknown


class ModelSettings(BaseModel, ABC):
    """Base of all model settings: frozen, so that equal settings are one key of `network`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    summary: ClassVar[str]
    """One line for `perennial list models`."""
    source: ClassVar[str]
    """The paper that the model is from."""
    stacks: ClassVar[bool] = True
    """Whether many clients' models of this kind can be run as one stack (client/cohort.py)."""
    whole_travels: ClassVar[bool] = False
    """Whether what is frozen travels, too, since no two processes make it alike."""
    takes_ids: ClassVar[bool] = False
    """Whether ids of tokens come to it as int64; otherwise as float32, as any other numbers."""

    name: str

    @property
    def batch_norm(self) -> bool:
        """Whether it has BatchNorm layers, as far as these settings tell."""
        return False

    @property
    def moving_statistics(self) -> bool:
        """Whether it has BatchNorm layers whose parameters or running statistics training changes."""
        return self.batch_norm


class Logistic(ModelSettings):
    """Multinomial logistic regression."""

    summary = "one linear layer on the flattened sample"
    source = "CGPFL's MLR, Tang 2025 §3.8.1"

    name: Literal["logistic"] = "logistic"


class Mlp(ModelSettings):
    """Fully connected layers; the last one is the classifier unless `head_layers` says otherwise."""

    summary = "fully connected layers on the flattened sample"
    source = "Tang 2025 §3.8.1 and §4.5.2, PerInvFL A.4, FedILC §5.1, IRM Games' code"

    name: Literal["mlp"] = "mlp"
    hidden: tuple[PositiveInt, ...] = knob(
        (390,), "widths of the hidden layers", source="one: Tang 2025 §4.5.2; 390: PerInvFL A.4",
        min_length=1, max_length=100,
    )  # fmt: skip
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


class Lenet(ModelSettings):
    """Two 5x5 convolutions, each with ReLU and 2x2 max-pooling, and two fully connected layers.

    No BatchNorm, since CGPFL averages and clusters the parameters.
    """

    channels: ClassVar[tuple[int, int]]
    width: ClassVar[int]


class CnnSmall(Lenet):
    """LeNet with 6 and 16 channels, 120 features."""

    summary = "two convolutions (6, 16 channels), 120 features"
    source = "CGPFL's CIFAR-10 CNN, Tang 2025 §3.8.1; sizes ours, after pFedMe's public code"
    channels = (6, 16)
    width = 120

    name: Literal["cnn-small"] = "cnn-small"


class CnnLarge(Lenet):
    """LeNet with 32 and 64 channels, 512 features."""

    summary = "two convolutions (32, 64 channels), 512 features"
    source = "CGPFL's CIFAR-10 CNN, Tang 2025 §3.8.1; sizes ours, for a GPU"
    channels = (32, 64)
    width = 512

    name: Literal["cnn-large"] = "cnn-large"


class ConvNet(ModelSettings):
    """Four 3x3 convolutions with GroupNorm after the ReLU, and global average pooling to 128 features."""

    summary = "four convolutions with GroupNorm, average-pooled to 128 features"
    source = "FedIIR's RotatedMNIST network, §5.1 and its public code"

    name: Literal["convnet"] = "convnet"


class CnnGroupNorm(ModelSettings):
    """Three 3x3 convolutions, each with ReLU, GroupNorm and 2x2 max-pooling, and 128 linear features."""

    summary = "three convolutions with GroupNorm and max-pooling, 128 linear features"
    source = "FedILC's Rotated-CIFAR10 network, its public code"

    name: Literal["cnn-groupnorm"] = "cnn-groupnorm"


Positive = Annotated[float, Field(gt=0)]


class Lora(BaseModel):
    """Which linear layers of the featurizer learn a matrix of low rank, and of which rank (Hu et al. 2022)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: PositiveInt = 8
    layers: str = "all"
    """A part of their names, or a regular expression that is found in them; all: every one."""
    alpha: Positive = 8.0
    """What the matrix is multiplied with, over its rank."""

    @field_validator("layers")
    @classmethod
    def _check_expression(cls, layers: str) -> str:
        try:
            re.compile(layers)
        except re.error as error:
            raise ValueError(f"{layers!r} is no regular expression ({error})") from None
        return layers


def is_adapter(name: str) -> bool:
    """Whether a tensor of a state dict is one of LoRA's two matrices."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


class Pretrained(ModelSettings):
    """Models that may start from saved weights (`common/models/weights.py`)."""

    weights: str = knob(
        "", "what it starts from: a .pt, .pth, .bin or .safetensors file, or torchvision's name, such as "
        "IMAGENET1K_V2; empty: a draw",
    )  # fmt: skip
    digest: str = knob(
        "", "SHA-256 of the file of weights, noted where the run is made and compared wherever the file is read",
        pattern="^([0-9a-f]{64})?$",
    )  # fmt: skip
    freeze: Literal["none", "featurizer"] = knob(
        "none", "the part that is not trained and always runs as in evaluation"
    )
    frozen_statistics: bool | None = knob(
        None, "whether BatchNorm runs with its running statistics in training, too, and leaves them as they are; "
        "unless set: with weights",
        source="FedIIR's public code",
    )  # fmt: skip
    lora: Lora | None = knob(
        None, "LoRA: the featurizer is frozen but for a matrix of low rank beside each chosen linear layer, such "
        'as {rank = 8, layers = "attn"}; unless set: none',
        source="Hu et al. 2022",
    )  # fmt: skip
    mean: tuple[float, ...] = knob(
        (), "mean of each channel, of pixels from 0 to 1, by which the weights want pictures standardised; unless "
        "set: as torchvision says of its own, and else as the scenario has them",
    )  # fmt: skip
    std: tuple[Positive, ...] = knob((), "standard deviation of each channel that goes with `mean`")
    factor: tuple[float, ...] = knob((), "worked out of these: what the scenario's samples are multiplied with")
    offset: tuple[float, ...] = knob((), "worked out of these: what is added to them then")

    @property
    def moving_statistics(self) -> bool:
        return self.batch_norm and self.freeze != "featurizer" and not self.lora

    @property
    def named_weights(self) -> bool:
        """Whether the weights have torchvision's name, and are no file."""
        return bool(re.fullmatch("[A-Z][A-Z0-9_]*", self.weights))

    @property
    def starts_from_weights(self) -> bool:
        """Whether there are weights to be read."""
        return bool(self.weights)

    @property
    def statistics_stay(self) -> bool:
        """Whether BatchNorm's running statistics are used and left alone in training."""
        return bool(self.weights) if self.frozen_statistics is None else self.frozen_statistics

    @model_validator(mode="after")
    def _check_frozen(self) -> "Pretrained":
        if self.lora and self.freeze != "none":
            raise ValueError("freeze: with lora the featurizer is frozen anyway; leave it out")
        return self

    @model_validator(mode="after")
    def _check_pixels(self) -> "Pretrained":
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"mean has {len(self.mean)} channels and std has {len(self.std)}; give as many of each"
            )
        return self


LIBRARIES = ("torchvision", "transformers", "timm")
"""Packages whose networks have names of their own."""


class Module(Pretrained):
    """A `torch.nn.Module` of somebody else's: a class, or a function that makes one, by the name MODULE:NAME.

    Every other setting is a keyword argument of it.
    """

    model_config = ConfigDict(extra="allow")

    summary = "a torch.nn.Module of your own, or a classifier of torchvision; see docs/models.md"
    source = "its package"
    stacks = False
    takes_ids = True

    name: str = Field(
        pattern=r"^((transformers|timm):[^\x00-\x1f]+|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)$", max_length=500
    )
    classifier: str = knob(
        "", "where in the module its classifier is, such as fc; unless set: its attribute `classifier`, or the "
        "last linear layer",
    )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        return dict(self.model_extra or {})

    @property
    def library(self) -> str:
        """The package whose network it is by that one's name; empty for a module of one's own."""
        package = self.name.partition(":")[0]
        return package if package in LIBRARIES else ""

    @property
    def network(self) -> str:
        """What stands behind the first colon."""
        return self.name.partition(":")[2]

    @property
    def torchvision(self) -> str:
        """The name of a classifier of torchvision; empty for any other module."""
        return self.network if self.library == "torchvision" else ""

    @property
    def starts_from_weights(self) -> bool:
        # A folder may have none, which its reader sees.
        return super().starts_from_weights or self.library == "transformers"

    def __hash__(self) -> int:  # an option may be a list
        return hash(self.model_dump_json())


class EmbeddingBag(ModelSettings):
    """The mean of the embeddings of a text's words, and a linear classifier."""

    summary = "ids of tokens: mean of their embeddings, a hidden layer, linear classifier"
    source = "Joulin et al. 2017 (fastText); sizes ours"
    takes_ids = True

    name: Literal["embedding-bag"] = "embedding-bag"
    width: PositiveInt = knob(32, "numbers of an embedding, and of features", le=10_000)


class TextTransformer(Pretrained):
    """Blocks of attention over the tokens of a text, whose mean is classified."""

    summary = "ids of tokens: two layers of attention, mean over tokens, linear classifier"
    source = "Vaswani et al. 2017, with LayerNorm first (Xiong et al. 2020); sizes ours"
    takes_ids = True

    name: Literal["text-transformer"] = "text-transformer"
    width: PositiveInt = knob(64, "numbers of an embedding, and of features", le=10_000)
    heads: PositiveInt = knob(4, "heads of attention, which share the width", le=100)
    layers: PositiveInt = knob(2, "blocks", le=100)

    @model_validator(mode="after")
    def _check_heads(self) -> "TextTransformer":
        if self.width % self.heads:
            raise ValueError(
                f"heads: {self.heads} heads cannot share a width of {self.width}; take a divisor of it"
            )
        return self


class ResNet18(Pretrained):
    """torchvision's ResNet-18: 512 features, and a linear or FedIIR's two-layer classifier."""

    summary = "ResNet-18, 512 features, from scratch or from weights"
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


MODELS: dict[str, type[ModelSettings]] = {
    str(kind.model_fields["name"].default): kind
    for kind in (Logistic, Mlp, CnnSmall, CnnLarge, ConvNet, CnnGroupNorm, EmbeddingBag, TextTransformer, ResNet18)
}
GIVEN = {
    "torchvision:NAME": "a classifier of torchvision, such as torchvision:resnet50, with or without its weights",
    "transformers:FOLDER": "a classifier of Hugging Face's transformers, of a folder or of this machine's cache",
    "timm:NAME": "a network of timm, such as timm:vit_tiny_patch16_224",
    "MODULE:NAME": "a torch.nn.Module of your own: its class, or a function that makes it (docs/models.md)",
}
"""A line for each kind of model that is named by where it is."""
UNLISTED: dict[str, type[ModelSettings]] = {}
"""Those that nobody chooses by name (common/flower_app.py)."""


plugins.REGISTRIES["models"] = plugins.Registry(ModelSettings, MODELS, lambda: MODELS, lambda _, kinds, __: kinds)


def model_settings(values: Mapping[str, Any]) -> ModelSettings:
    """The settings that a table such as `{"name": "mlp", "hidden": [390, 390]}` stands for.

    Raises `UserError` for a missing or unknown name, an unknown field or a value out of bounds.
    """
    name = values.get("name")
    if name is None:
        raise UserError(f"a model needs a name (there are: {', '.join(sorted(MODELS))})")
    if isinstance(name, str) and name not in {*MODELS, *UNLISTED} and ":" not in name:
        if module := plugins.named("models", name):
            return model_settings({**values, "name": module})
        plugins.look_for("models", name)
    if isinstance(name, str) and ":" in name:
        kind: type[ModelSettings] = Module
    elif isinstance(name, str) and name in {*MODELS, *UNLISTED}:
        kind = MODELS.get(name) or UNLISTED[name]
    else:
        named = unknown("model", name, {*MODELS, *plugins.installed("models")})
        raise UserError(f"{named}; one of your own is MODULE:NAME, such as my_package:Net")
    try:
        return kind(**values)
    except ValidationError as error:
        if kind is Module and error.errors()[0]["loc"] == ("name",):
            text = f"model.name: {name[:200]!r} is not possible; write MODULE:NAME, such as my_package:Net"
            raise UserError(text) from None
        raise UserError(f"model.{sentence(error, kind.model_fields)}") from None
