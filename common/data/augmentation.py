"""Random changes of training samples, by name: those of `torchvision.transforms.v2`, and some for tables."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from perennial.common.data.picture_transforms import transformed
from perennial.common.plugins import member
from perennial.common.tasks.base import like
from perennial.common.utils.samples import blank, parts_of, vocabulary_of
from perennial.common.utils.seeding import derive
from perennial.common.utils.suggestions import unknown

if TYPE_CHECKING:
    from torch import Tensor

PICTURES = (
    *("RandomCrop", "RandomResizedCrop", "RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotation"),
    *("RandomAffine", "RandomPerspective", "RandomErasing", "ColorJitter", "RandomGrayscale", "GaussianBlur"),
)
"""What may be named of torchvision: what keeps a picture a picture, and needs its pixels alone."""
MIXES = ("MixUp", "CutMix")
"""What mixes samples and targets of a mini-batch: torchvision's, of Zhang et al. 2018 and Yun et al. 2019."""
DOMAINBED = "DomainBed"
"""The transforms of Gulrajani and Lopez-Paz 2021, whatever the side of the pictures."""


@dataclass(frozen=True)
class Noise:
    """Normal noise of a standard deviation, in units of the samples as the model sees them."""

    std: float

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError("std must be 0 or more")

    def __call__(self, x: Tensor) -> Tensor:
        import torch

        return x + self.std * torch.randn(x.shape).to(x)  # drawn on the CPU, so a GPU has the same


@dataclass(frozen=True)
class FeatureDropout:
    """Each number of a sample is 0 with a probability; 0 is the mean of a standardised feature."""

    p: float

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError("p must be 0 or more and below 1")

    def __call__(self, x: Tensor) -> Tensor:
        import torch

        return x * (torch.rand(x.shape) >= self.p).to(x)


TABLES: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {"Noise": Noise, "FeatureDropout": FeatureDropout}


class Augmentation:
    """Transforms in their order, with draws of their own for each sample of a mini-batch, and a mix of samples."""

    def __init__(
        self,
        named: Sequence[str],
        input_shape: tuple[int, ...],
        standardised: tuple[tuple[float, ...], tuple[float, ...]],
        plugins: Sequence[str] = (),
        mix: str = "",
        classes: int = 0,
    ) -> None:
        """`named` are calls such as `RandomCrop(32, padding=4)`, read and never evaluated, or `DomainBed`.

        Samples have the shape `input_shape`; pictures in [0, 1] have been `standardised` by mean and deviation. A
        name may be `MODULE:NAME` of one of the `plugins`. `mix` is a call such as `MixUp(0.2)`, for so many
        `classes`. Raises `ValueError` for what is none, or does not fit.
        """
        self._must_be_of_numbers(named, mix, input_shape)
        self.standardised = standardised
        self._mix = _mixing(mix, input_shape, classes) if mix else None
        self._transforms: list[tuple[bool, Callable[[Tensor], Tensor]]] = []
        for text in named:
            for whose in _domainbed(input_shape) if text == DOMAINBED else [text]:
                self._transforms.append(_made(whose, input_shape, plugins))
        self._must_fit(named, input_shape)

    def __call__(self, x: Tensor, y: Tensor, seed: int, *key: str | int) -> tuple[Tensor, Tensor]:
        """Changed samples (n, *input_shape) and their targets; of mixed ones shares of each class (n, classes).

        The draws depend on `seed` and `key` alone, and the global generators are left as they were.
        """
        import torch

        devices = [x.device] if x.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(derive(seed, "augment", *key))
            if devices:
                with torch.cuda.device(x.device):
                    torch.cuda.manual_seed(derive(seed, "augment", *key))
            for picture, group in groupby(self._transforms, key=lambda own: own[0]):
                if picture:
                    x = self._pictures(x, [transform for _, transform in group])
                else:
                    for _, transform in group:
                        x = transform(x)
            if self._mix:
                flat = x if x.dim() == 4 else x.reshape(len(x), 1, 1, -1)  # torchvision takes batches of pictures
                mixed, y = self._mix(flat, y)
                x = mixed.view_as(x)
        return x, y

    def _pictures(self, x: Tensor, transforms: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """In [0, 1], where brightness has a meaning and what is added at a border is black."""
        mean, std = (like(own, x).view(-1, 1, 1) for own in self.standardised)
        x = x * std + mean
        for transform in transforms:
            x = transformed(transform, x)
        return (x - mean) / std

    @staticmethod
    def _must_be_of_numbers(named: Sequence[str], mix: str, input_shape: tuple[int, ...]) -> None:
        """Ids of tokens have no means and no noise; a plug-in's own transform may know what to do with them."""
        if not any(map(vocabulary_of, (input_shape, *dict(parts_of(input_shape)).values()))):
            return
        ids = "and samples have ids of tokens"
        if mix:
            raise ValueError(f"mix: {mix} is for numbers, {ids}, which cannot be mixed; leave it out")
        if ours := [text for text in named if ":" not in text.partition("(")[0]]:
            raise ValueError(
                f"augment: {ours[0]} is for numbers, {ids}; leave it out, or take a transform of your own "
                "(MODULE:NAME)"
            )

    def _must_fit(self, named: Sequence[str], input_shape: tuple[int, ...]) -> None:
        import torch

        if not self._transforms:
            return
        shape, names = "x".join(map(str, input_shape)), ", ".join(named)
        try:
            found, _ = self(blank(input_shape, 2), torch.zeros(2, dtype=torch.int64), 0)
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"augment: {names} cannot take samples of shape {shape}: {why}") from None
        if tuple(found.shape[1:]) != tuple(input_shape):
            made = "x".join(map(str, found.shape[1:]))
            raise ValueError(
                f"augment: {', '.join(named)} makes {made} of samples of shape {shape}; keep their shape"
            )


def _domainbed(shape: tuple[int, ...]) -> list[str]:
    sides = tuple(shape[1:])
    return [
        f"RandomResizedCrop({sides!r}, scale=(0.7, 1.0))",
        "RandomHorizontalFlip()",
        "ColorJitter(0.3, 0.3, 0.3, 0.3)",
        "RandomGrayscale()",
    ]


def _made(
    text: str, input_shape: tuple[int, ...], plugins: Sequence[str]
) -> tuple[bool, Callable[[Tensor], Tensor]]:
    """Whether it is one of torchvision's, and the transform."""
    module, colon, call = text.partition(":") if ":" in text.partition("(")[0] else ("", "", text)
    name, args, options = _read(text, call)
    if colon:
        kind = member("augment", f"{module}:{name}", plugins)
    elif name in TABLES:
        kind = TABLES[name]
    elif name in PICTURES:
        if len(input_shape) != 3:
            shape = "x".join(map(str, input_shape))
            raise ValueError(f"augment: {name} is for pictures, and samples have the shape {shape}")
        from torchvision.transforms import v2

        kind = getattr(v2, name)
    else:
        raise ValueError(f"augment: {unknown('transform', name, (*PICTURES, *TABLES, DOMAINBED))}")
    return name in PICTURES and not colon, _called("augment", text, kind, *args, **options)


def _mixing(text: str, input_shape: tuple[int, ...], classes: int) -> Callable[[Tensor, Tensor], Any]:
    from torchvision.transforms import v2

    name, args, options = _read(text, text, "mix", "MixUp(0.2)")
    if name not in MIXES:
        raise ValueError(f"mix: {unknown('mix of samples', name, MIXES)}")
    if name == "CutMix" and len(input_shape) != 3:
        shape = "x".join(map(str, input_shape))
        raise ValueError(f"mix: CutMix is for pictures, and samples have the shape {shape}; take MixUp")
    kind = getattr(v2, name)

    def made(alpha: float = 1.0) -> Any:
        return kind(alpha=float(alpha), num_classes=classes)  # of a whole number PyTorch cannot draw

    mixing: Callable[[Tensor, Tensor], Any] = _called("mix", text, made, *args, **options)
    return mixing


def _called(setting: str, text: str, kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        inspect.signature(kind).bind(*args, **options)
        return kind(*args, **options)
    except Exception as error:
        raise ValueError(f"{setting}: {text!r} is not possible; {' '.join(str(error).split())[:200]}") from None


def _read(
    text: str, call: str, setting: str = "augment", example: str = "RandomCrop(32, padding=4)"
) -> tuple[str, list[Any], dict[str, Any]]:
    """Name and arguments of a call, which must be numbers, texts, and lists of them."""
    try:
        found = ast.parse(call.strip(), mode="eval").body
        if isinstance(found, ast.Name):
            return found.id, [], {}
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name):
            options = {str(own.arg): ast.literal_eval(own.value) for own in found.keywords if own.arg}
            if len(options) == len(found.keywords):
                return found.func.id, [ast.literal_eval(own) for own in found.args], options
        why = "it is no call"
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        why = "it cannot be read"
    raise ValueError(f"{setting}: {text[:200]!r}: {why}; write a transform such as {example!r}")
