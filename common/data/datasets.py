"""Raw data sets as tensors, read where they lie; nothing is ever written beside them.

Importing scikit-learn takes seconds, so the loader that needs it does so itself.
"""

import gzip
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.errors import UserError
from common.suggest import unknown


@dataclass(frozen=True)
class Raw:
    """A data set as published: its training part first, then its test part.

    `images`: (n, h, w), uint8 in 0..255 or float32 in [0, 1]; `labels`: (n,) int64 classes; samples
    [0, train_size) are the training part.
    """

    images: Tensor
    labels: Tensor
    train_size: int

    def __len__(self) -> int:
        return self.labels.shape[0]


@dataclass(frozen=True)
class Dataset:
    """An entry of `DATASETS`; `read` gets the resolved data root."""

    summary: str
    read: Callable[[Path | None], Raw]


def resolve_root(data_root: Path | None) -> Path | None:
    """The folder of the raw data sets: the argument, else the environment's PERENNIAL_DATA, else none."""
    root = data_root or os.environ.get("PERENNIAL_DATA")
    return Path(root).expanduser().resolve() if root else None


def load(name: str, data_root: Path | None = None) -> Raw:
    """A raw data set of `DATASETS`, read once per process. Callers must not change its tensors.

    Raises `UserError` for an unknown name, a data set that is not there, and an unreadable file.
    """
    return _load(name, resolve_root(data_root))


@lru_cache(maxsize=4)
def _load(name: str, root: Path | None) -> Raw:
    if name not in DATASETS:
        raise UserError(unknown("data set", name, DATASETS))
    return DATASETS[name].read(root)


DIGITS_TRAIN = 1240
"""Our own cut. The file's order is roughly by writer, so the test part has mostly other hands."""


def _digits(_: Path | None) -> Raw:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype(np.float32) / 16)
    return Raw(images, torch.from_numpy(bunch.target.astype(np.int64)), DIGITS_TRAIN)


def _mnist_like(name: str, kind: str, root: Path | None) -> Raw:
    """torchvision's layout `root/kind/raw`, with the four idx files unpacked or still as .gz.

    torchvision's own class reads only unpacked files and would unpack them beside the .gz, which a data
    folder mounted read-only does not allow.
    """
    layout = f"{kind}/raw/train-images-idx3-ubyte(.gz) and its three sister files"
    if root is None:
        raise UserError(
            f"data set {name!r} is not bundled and no data root is given; "
            f"set PERENNIAL_DATA or data_root to a folder that holds {layout}"
        )
    folder = root / kind / "raw"
    get = (
        f"copy the four files into {folder}, or run: "
        f"python -c \"from torchvision.datasets import {kind}; {kind}('{root}', download=True)\""
    )

    def read(stem: str, dimensions: int) -> npt.NDArray[np.uint8]:
        path = next((path for path in (folder / stem, folder / f"{stem}.gz") if path.exists()), None)
        if path is None:
            raise UserError(f"data set {name!r}: there is no {stem} or {stem}.gz in {folder}; {get}")
        try:
            return read_idx(path, dimensions)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(f"data set {name!r}: {path} cannot be read ({error}); delete it, then {get}") from None

    parts = []
    for part in ("train", "t10k"):
        images, labels = read(f"{part}-images-idx3-ubyte", 3), read(f"{part}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise UserError(
                f"data set {name!r}: {folder} has {len(images)} {part} images but {len(labels)} labels; "
                f"delete both files, then {get}"
            )
        parts.append((images, labels))
    (train_images, train_labels), (test_images, test_labels) = parts
    return Raw(
        torch.from_numpy(np.concatenate([train_images, test_images])),
        torch.from_numpy(np.concatenate([train_labels, test_labels]).astype(np.int64)),
        len(train_labels),
    )


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The uint8 array of an idx file, unpacked or .gz (read-only memory).

    Raises `ValueError` when it is not an idx file of bytes with that many dimensions, or is too short or
    too long; `OSError`, `EOFError` or `zlib.error` when it cannot be read or unpacked.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    start = 4 * (1 + dimensions)
    if len(data) < start or data[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"not an idx file of bytes with {dimensions} dimension(s)")
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if len(data) - start != prod(shape):
        raise ValueError(f"{len(data) - start} bytes of data where its header promises {prod(shape)}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


DATASETS: dict[str, Dataset] = {
    "digits": Dataset("1,797 handwritten digits of 8x8 pixels, bundled with scikit-learn", _digits),
    "mnist": Dataset("MNIST: 70,000 handwritten digits of 28x28 pixels", partial(_mnist_like, "mnist", "MNIST")),
    "fashion-mnist": Dataset(
        "Fashion-MNIST: 70,000 pictures of clothes of 28x28 pixels, 10 classes",
        partial(_mnist_like, "fashion-mnist", "FashionMNIST"),
    ),
}
"""Every raw data set by name."""
