"""What makes an environment out of raw images: seeded transforms of tensors, without state.

Whatever is random takes its own generator, so that the same key gives the same draw anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def binary_label(classes: Tensor, ones: Iterable[int]) -> Tensor:
    """Labels (n,) int64 from classes (n,): 1 for the classes in `ones`, 0 for all others."""
    import torch

    return torch.isin(classes, torch.tensor(list(ones))).long()


def flip(bits: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Bits (n,) int64, each flipped with `probability` independently: label noise on binary labels."""
    import torch

    return bits ^ (torch.rand(bits.shape, generator=generator) < probability).long()


def draw_colour(labels: Tensor, agreement: float, generator: torch.Generator) -> Tensor:
    """Colour bits (n,) int64, each equal to its label with probability `agreement` = p^e.

    At 0 and 1 exactly none and exactly all agree. Arjovsky et al. 2019 write e = 1 - p^e.
    """
    return flip(labels, 1 - agreement, generator)


def unit_range(images: Tensor) -> Tensor:
    """Images as float32 in [0, 1]; those that are float already stay as they are."""
    import torch

    return images.float() / 255 if images.dtype == torch.uint8 else images


def standardise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Images (n, c, h, w) or features (n, c), less each channel's mean, in units of its standard deviation."""
    import torch

    each = (-1,) + (1,) * (images.ndim - 2)
    less, by = (torch.tensor(values, device=images.device).view(each) for values in (mean, std))
    return (images - less) / by


PHOTOS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel of ImageNet's photos, the usual numbers."""


def downsample(images: Tensor, stride: int) -> Tensor:
    """Every `stride`-th row and column of images (n, h, w), the first one included."""
    return images[:, ::stride, ::stride]


def colourise(images: Tensor, colour: Tensor) -> Tensor:
    """Two-channel images (n, 2, h, w): the image (n, h, w) in channel `colour` (n,), zeros in the other."""
    import torch

    result = images.new_zeros(images.shape[0], 2, *images.shape[1:])
    result[torch.arange(len(images)), colour] = images
    return result


def grey(images: Tensor) -> Tensor:
    """Two-channel images (n, 2, h, w) that say nothing about a colour: the image (n, h, w) in both."""
    return images.unsqueeze(1).repeat(1, 2, 1, 1)


Mark = Literal["patch", "background", "stripes", "rotation"]


def mark(images: Tensor, bits: Tensor, kind: Mark) -> Tensor:
    """Images (n, s, s) in [0, 1], each with one of two marks, by its bit (n,) int64.

    patch: a bright square in the upper left or the upper right corner; background: the upper or the lower half is
    at least 0.4; stripes: grey ones across the whole, s/2 or 2 pixels from one to the next; rotation: none, or by
    90 degrees.
    """
    import torch

    if kind == "rotation":
        return torch.where(bits[:, None, None] == 1, rotate_quarter(images, 1), images)
    side = images.shape[-1]
    marks = images.new_zeros(2, side, side)
    if kind == "patch":
        marks[0, : side // 4, : side // 4] = 1
        marks[1, : side // 4, -(side // 4) :] = 1
    elif kind == "background":
        marks[0, : side // 2] = 0.4
        marks[1, side // 2 :] = 0.4
    else:
        columns = torch.arange(side)
        for bit, period in enumerate((side // 2, 2)):
            marks[bit, :, columns % period < period // 2] = 0.5
    return images.maximum(marks[bits])


def rotate_quarter(images: Tensor, turns: int) -> Tensor:
    """Images (..., h, w) turned by `turns` times 90 degrees counter-clockwise, pixel by pixel exact."""
    import torch

    return torch.rot90(images, turns, dims=(-2, -1))


def rotate(
    images: Tensor, degrees: float | Tensor, interpolation: Literal["bilinear", "nearest"] = "bilinear"
) -> Tensor:
    """Images (n, c, h, w), floats, turned counter-clockwise about their middle; what comes in from outside is 0.

    All by the same angle, or each by its own of (n,).
    """
    import torch
    import torch.nn.functional as F

    if not len(images):  # which F.grid_sample refuses
        return images
    angle = torch.deg2rad(torch.as_tensor(degrees, dtype=images.dtype)).expand(len(images))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    tall = images.shape[-2] / images.shape[-1]
    # Where a pixel of the result comes from, in coordinates that go from -1 to 1 along either side.
    origin = torch.stack([cos, -sin * tall, zero, sin / tall, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(origin, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode=interpolation, padding_mode="zeros", align_corners=False)
