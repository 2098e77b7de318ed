"""What a raw data set is, and what the scenarios know of some before they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from perennial.common.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image
    from torch import Tensor

FORMATS, MOST_PIXELS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"), 2**26
"""PIL's names of the kinds of pictures that come from elsewhere; width times height, together."""
IDENTITIES = ("male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white")
PACS = ("art_painting", "cartoon", "photo", "sketch")
VLCS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
OFFICE_HOME = ("Art", "Clipart", "Product", "Real World")
"""Their domains, by the names of their folders. The tag `domain` counts in this order."""

EICU_COLUMNS, EICU_DEMO_COLUMNS = 1399, 150
"""Width of eICU's tables."""


@dataclass(frozen=True)
class Files:
    """Pictures that are decoded when they are asked for, so that a client reads no more than its own.

    Each becomes `shape`, (3, h, w) in colour or (1, h, w) in grey, whatever its own (PIL's bilinear filter).
    """

    paths: Sequence[Path]
    shape: tuple[int, int, int] = (3, 64, 64)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Pictures (n, *shape) uint8 of an index (n,). Raises `UserError` for one that cannot be read."""
        import numpy as np
        import torch

        channels, height, width = self.shape
        pixels = np.empty((len(index), channels, height, width), np.uint8)
        for place, number in enumerate(index.tolist()):
            try:
                with opened(self.paths[number]) as found:
                    pixels[place] = resized(found, self.shape)
            except ValueError as error:
                raise UserError(f"picture {self.paths[number]} cannot be read ({error})") from None
        return torch.from_numpy(pixels)


@contextmanager
def opened(file: Path | BinaryIO, formats: tuple[str, ...] | None = None) -> Iterator[Image]:
    """A picture of which PIL has read the head alone.

    Raises `ValueError` where it, or what is done with it, cannot be read, or it is of none of PIL's `formats`.
    """
    from PIL import Image

    try:
        with Image.open(file, formats=formats) as found:
            yield found
    except MemoryError:
        raise
    except Exception as error:  # PIL's readers check little: of a damaged TIFF there are TypeErrors and others
        raise ValueError(re.sub(r" <.*>", "", str(error))) from None  # PIL names a buffer by its address


def eight_bits(found: Image, mode: str) -> Image:
    """A picture in grey (mode "L") or in colour ("RGB"). Raises `ValueError` where it has more than 8 bits."""
    if found.mode[0] in "IF":  # of which PIL would make white, or black
        raise ValueError("it has more than 8 bits for each value; save it with 8")
    return found.convert(mode)


def resized(found: Image, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """A picture's pixels in this shape (channels, height, width), whatever its own (PIL's bilinear filter).

    Raises `ValueError` where it has more than 8 bits, and whatever PIL raises.
    """
    import numpy as np
    from PIL.Image import Resampling

    channels, height, width = shape
    small = eight_bits(found, "RGB" if channels == 3 else "L").resize((width, height), Resampling.BILINEAR)
    return np.asarray(small).reshape(height, width, channels).transpose(2, 0, 1)


@dataclass(frozen=True)
class Raw:
    """A data set as published: its training part first, then its test part.

    `images`: (n, h, w), or (n, 3, h, w) where they are in colour, uint8 in 0..255 or float32 in [0, 1]; or files;
    or a table (n, d) of 0 and 1, uint8, or of numbers, float32; or (n, 0) where the samples are `texts`.
    `labels`: (n,) int64 classes, or whole numbers; samples [0, train_size) are the training part, or all where
    there is no such split. `tags`: what else is known of each sample, by name, (n,) int64.
    """

    images: Tensor | Files
    labels: Tensor
    train_size: int
    tags: Mapping[str, Tensor] = field(default_factory=dict)
    texts: Sequence[str] = ()

    def __len__(self) -> int:
        return self.labels.shape[0]

    def at(self, side: int) -> Raw:
        """The same with colour pictures `side` pixels high and wide.

        Raises `UserError` where the pictures are packed in another size.
        """
        if isinstance(self.images, Files):
            return replace(self, images=replace(self.images, shape=(3, side, side)))
        if self.images.shape[-1] != side:
            raise UserError(
                f"side = {side} needs the picture files; those packed here are {self.images.shape[-1]} pixels wide"
            )
        return self
