"""Transforms of `torchvision.transforms.v2` on a batch of pictures, each with draws of its own.

torchvision draws once for all that it is given. Here each picture has the parameters that torchvision draws for it
alone, and the transforms with which people train most are done for all pictures at once, equal but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Params = dict[str, Any]
"""What a transform has drawn for one picture."""


def transformed(transform: Any, pictures: Tensor) -> Tensor:
    """Pictures (n, c, h, w) in [0, 1], each as the transform changes it with draws from PyTorch's generator."""
    import torch

    draws = [_drawn(transform, picture) for picture in pictures]
    chosen = [place for place, params in enumerate(draws) if params is not None]
    if not chosen:
        return pictures
    params = [params for params in draws if params is not None]
    if len(chosen) == len(pictures):
        return _changed(transform, pictures, params)
    places = torch.tensor(chosen, device=pictures.device)
    return pictures.index_copy(0, places, _changed(transform, pictures[places], params))


def _drawn(transform: Any, picture: Tensor) -> Params | None:
    """Parameters for one picture, in the order in which torchvision draws them; None where it stays as it is."""
    import torch

    if hasattr(transform, "p") and torch.rand(1) >= transform.p:
        return None
    params: Params = transform.make_params([picture])
    return params


def _changed(transform: Any, pictures: Tensor, params: Sequence[Params]) -> Tensor:
    import torch

    change = _BATCHED.get(type(transform).__name__)
    if change and (found := change(transform, pictures, params)) is not None:
        return found
    pairs = zip(pictures, params, strict=True)
    return torch.stack([transform.transform(picture, own) for picture, own in pairs])


def _numbers(pictures: Tensor, params: Sequence[Params], *names: str) -> list[Tensor]:
    """Whole numbers of each picture, (n,) for each name."""
    import torch

    each = torch.tensor([[own[name] for own in params] for name in names]).to(pictures.device)
    return list(each)


def _crop(transform: Any, pictures: Tensor, params: Sequence[Params]) -> Tensor | None:
    import torch

    if any(params[0]["padding"]):
        pad = {"needs_crop": False, "needs_pad": True, "padding": params[0]["padding"]}
        pictures = transform.transform(pictures, pad)
    top, left = _numbers(pictures, params, "top", "left")
    height, width = params[0]["height"], params[0]["width"]
    rows = top[:, None] + torch.arange(height, device=pictures.device)
    columns = left[:, None] + torch.arange(width, device=pictures.device)
    each, channel = (torch.arange(size, device=pictures.device)[:, None, None] for size in pictures.shape[:2])
    return pictures[each[:, None], channel, rows[:, None, :, None], columns[:, None, None]]


def _resized_crop(transform: Any, pictures: Tensor, params: Sequence[Params]) -> Tensor | None:
    """Two products with a matrix for each picture, whose rows are the triangles of bilinear interpolation."""
    if getattr(transform.interpolation, "value", transform.interpolation) != "bilinear":
        return None
    top, left, height, width = _numbers(pictures, params, "top", "left", "height", "width")
    rows = _triangles(pictures.shape[-2], transform.size[0], top, height, smooth=bool(transform.antialias))
    columns = _triangles(pictures.shape[-1], transform.size[1], left, width, smooth=bool(transform.antialias))
    return rows[:, None].to(pictures) @ pictures @ columns[:, None].mT.to(pictures)


def _triangles(side: int, size: int, start: Tensor, length: Tensor, *, smooth: bool) -> Tensor:
    """Weights (n, size, side) that make `size` pixels of the `length` ones from `start` on."""
    import torch

    scale = length[:, None, None].double() / size
    centres = start[:, None, None] + scale * (torch.arange(size, device=start.device)[:, None] + 0.5)
    pixels = torch.arange(side, device=start.device)
    width = scale.clamp(min=1) if smooth else torch.ones_like(scale)
    weights = (1 - (pixels + 0.5 - centres).abs() / width).clamp(min=0)
    within = (pixels >= start[:, None, None]) & (pixels < (start + length)[:, None, None])
    weights = weights * within
    return weights / weights.sum(dim=-1, keepdim=True)


def _jitter(transform: Any, pictures: Tensor, params: Sequence[Params]) -> Tensor | None:
    """Each picture has an order of its own of the four changes, so there are four turns.

    All numbers go to the device in two pieces: a GPU waits for each.
    """
    import torch
    from torchvision.transforms.v2.functional import rgb_to_grayscale

    colour = pictures.shape[1] == 3
    if not colour and pictures.shape[1] != 1:
        return None

    def grey(x: Tensor) -> Tensor:
        return rgb_to_grayscale(x) if colour else x

    changes: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
        ("brightness_factor", lambda x, by: (by * x).clamp(0, 1)),
        ("contrast_factor", lambda x, by: torch.lerp(grey(x).mean((1, 2, 3), keepdim=True), x, by).clamp(0, 1)),
        ("saturation_factor", lambda x, by: torch.lerp(grey(x).expand_as(x), x, by).clamp(0, 1) if colour else x),
        ("hue_factor", lambda x, by: _turned(x, by) if colour else x),
    ]
    factors = [[own[name] or 0.0 for own in params] for name, _ in changes]
    every = torch.tensor(factors, dtype=pictures.dtype).to(pictures.device)[..., None, None, None]
    turns = torch.stack([own["fn_idx"] for own in params]).T
    grouped = turns.argsort(dim=1).to(pictures.device)
    for turn, places_by_change in zip(turns, grouped, strict=True):
        counts: list[int] = turn.bincount(minlength=len(changes)).tolist()
        for number, places in enumerate(places_by_change.split(counts)):
            name, change = changes[number]
            if len(places) and params[0][name] is not None:
                pictures = pictures.index_copy(0, places, change(pictures[places], every[number, places]))
    return pictures


def _turned(pictures: Tensor, by: Tensor) -> Tensor:
    """Pictures (n, 3, h, w) whose hues are turned by a share of the circle; value and saturation stay."""
    import torch

    value, least = pictures.amax(1, keepdim=True), pictures.amin(1, keepdim=True)
    chroma = value - least
    r, g, b = (pictures / torch.where(chroma > 0, chroma, torch.ones_like(chroma))).chunk(3, dim=1)
    red, green, _ = (pictures == value).chunk(3, dim=1)
    hue = torch.where(red, g - b, torch.where(green, 2 + b - r, 4 + r - g)) + 6 * by
    place = torch.cat([hue + 5, hue + 3, hue + 1], dim=1) % 6
    return value - chroma * torch.minimum(place, 4 - place).clamp(0, 1)


def _erase(transform: Any, pictures: Tensor, params: Sequence[Params]) -> Tensor | None:
    import torch

    if transform.value is None or any(own["v"] is None for own in params):  # noise of another shape for each
        return None
    top, left, height, width = (own.view(-1, 1, 1, 1) for own in _numbers(pictures, params, "i", "j", "h", "w"))
    rows, columns = (torch.arange(side, device=pictures.device) for side in pictures.shape[-2:])
    inside = (rows[:, None] >= top) & (rows[:, None] < top + height) & (columns >= left) & (columns < left + width)
    return torch.where(inside, params[0]["v"].to(pictures), pictures)


def _at_once(transform: Any, pictures: Tensor, params: Sequence[Params]) -> Tensor | None:
    """What has nothing to draw but whether it is done."""
    changed: Tensor = transform.transform(pictures, params[0])
    return changed


_BATCHED: dict[str, Callable[[Any, Tensor, Sequence[Params]], Tensor | None]] = {
    "RandomCrop": _crop,
    "RandomResizedCrop": _resized_crop,
    "RandomHorizontalFlip": _at_once,
    "RandomVerticalFlip": _at_once,
    "RandomGrayscale": _at_once,
    "ColorJitter": _jitter,
    "RandomErasing": _erase,
}
"""What a batch has done at once; None is answered where it must be one by one after all."""
