"""The raw data sets by name, and where they are looked for. Reading one imports NumPy, PyTorch and Pillow."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from perennial.common.data.raw_data import Raw
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown


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


def _read(name: str, root: Path | None) -> Raw:
    from perennial.common.data.readers import READERS

    return READERS[name](root)


DATASETS = {
    name: Dataset(summary, partial(_read, name))
    for name, summary in {
        "digits": "1,797 handwritten digits of 8x8 pixels, bundled with scikit-learn",
        "diabetes": "442 patients with diabetes: ten measurements, and how far it went in a year",
        "mnist": "MNIST: 70,000 handwritten digits of 28x28 pixels",
        "fashion-mnist": "Fashion-MNIST: 70,000 pictures of clothes of 28x28 pixels, 10 classes",
        "sprites": "21,000 squares, ellipses and hearts of 64x64 pixels, rendered after dSprites",
        "cifar10": "CIFAR-10: 60,000 colour pictures of 32x32 pixels, 10 classes",
        "cifar10-subset": "25,000 of CIFAR-10's pictures, packed, equally many of each class",
        "waterbirds": "Waterbirds: 11,788 pictures of birds on land and on water, 2 classes",
        "pacs": "PACS: 9,991 pictures of 7 classes in 4 domains, from photos to sketches",
        "vlcs": "VLCS: 10,729 photos of 5 classes in 4 domains",
        "office-home": "Office-Home: 15,588 pictures of 65 classes in 4 domains",
        "camelyon17": "Camelyon17-WILDS: 455,954 patches of tissue from 5 hospitals, 2 classes (perennial[wilds])",
        "civilcomments": "CivilComments-WILDS: 448,000 comments, toxic or not, 8 identities (perennial[wilds])",
        "amazon": "Amazon-WILDS: reviews of 3,920 reviewers, one to five stars (perennial[wilds])",
        "eicu": "eICU-CRD: patients of 58 hospitals, 1,399 drugs, death in hospital",
        "eicu-demo": "eICU's open demo: patients of 173 hospitals, 150 diagnoses and groups",
        "eicu-synthetic": "generated: 30,760 patients of 58 hospitals, a stand-in for eICU",
    }.items()
}
"""Every raw data set by name."""
