"""Raw data sets as tensors, read where they lie; nothing is ever written beside them."""

import csv
import gzip
import lzma
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from perennial.common.data import eicu
from perennial.common.data.raw_data import (
    EICU_COLUMNS,
    EICU_DEMO_COLUMNS,
    IDENTITIES,
    OFFICE_HOME,
    PACS,
    VLCS,
    Files,
    Raw,
)
from perennial.common.data.sprites import SHAPES, SIDE, draw_factors, render
from perennial.common.utils.errors import UserError
from perennial.common.utils.seeding import numpy_generator

T = TypeVar("T")

DIGITS_TRAIN = 1240
"""Our own cut. The file's order is roughly by writer, so the test part has mostly other hands."""


def _bundled(name: str, file: str, delimiter: str | None = None) -> npt.NDArray[Any]:
    """A table that comes with scikit-learn, from its file: to import its `load_…` takes seconds."""
    package = find_spec("sklearn")
    assert package, "a dependency"
    path = Path(str(package.origin)).parent / "datasets" / "data" / file
    read = partial(np.loadtxt, dtype=np.float32, delimiter=delimiter)
    return _read(name, path, "install scikit-learn again", read)


def _digits(_: Path | None) -> Raw:
    table = _bundled("digits", "digits.csv.gz", ",")
    images, labels = table[:, :-1].reshape(-1, 8, 8) / 16, table[:, -1].astype(np.int64)
    return Raw(torch.from_numpy(images), torch.from_numpy(labels), DIGITS_TRAIN)


def _diabetes(_: Path | None) -> Raw:
    table, progression = (_bundled("diabetes", f"diabetes_{part}.csv.gz") for part in ("data_raw", "target"))
    return Raw(torch.from_numpy(table), torch.from_numpy(progression.astype(np.int64)), len(table))


def _below(name: str, root: Path | None, layout: str) -> Path:
    """The data root. Raises `UserError` where none is given; `layout` is what it must hold."""
    if root is None:
        raise UserError(
            f"data set {name!r} is not bundled and no data root is given; "
            f"set PERENNIAL_DATA or data_root (--data-root) to a folder that holds {layout}"
        )
    return root


def _read(name: str, path: Path, get: str, read: Callable[[Path], T]) -> T:
    """`read(path)`. Raises `UserError` for a file that is not there or cannot be read; `get` is what to do."""
    if not path.exists():
        raise UserError(f"data set {name!r}: there is no {path.name} in {path.parent}; {get}")
    try:
        return read(path)
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, csv.Error, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"data set {name!r}: {path} cannot be read ({error}); delete it, then {get}") from None


def _joined(
    name: str,
    folder: Path,
    get: str,
    parts: Mapping[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.integer[Any]]]],
) -> Raw:
    """A training and a test part, images and labels each, as one. Raises `UserError` where they do not match."""
    for part, (images, labels) in parts.items():
        if len(images) != len(labels):
            raise UserError(
                f"data set {name!r}: {folder} has {len(images)} {part} images but {len(labels)} labels; "
                f"delete both files, then {get}"
            )
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts.values(), strict=True))
    first, _ = parts.values()
    return Raw(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), len(first[1]))


def _mnist_like(name: str, kind: str, root: Path | None) -> Raw:
    """torchvision's layout `root/kind/raw`, with the four idx files unpacked or still as .gz.

    torchvision's own class reads only unpacked files and would unpack them beside the .gz, which a data
    folder mounted read-only does not allow.
    """
    folder = (
        _below(name, root, f"{kind}/raw/train-images-idx3-ubyte(.gz) and its three sister files") / kind / "raw"
    )
    get = (
        f"copy the four files into {folder}, or run: "
        f"python -c \"from torchvision.datasets import {kind}; {kind}('{root}', download=True)\""
    )

    def read(stem: str, dimensions: int) -> npt.NDArray[np.uint8]:
        path = next((path for path in (folder / stem, folder / f"{stem}.gz") if path.exists()), None)
        if path is None:
            raise UserError(f"data set {name!r}: there is no {stem} or {stem}.gz in {folder}; {get}")
        return _read(name, path, get, partial(read_idx, dimensions=dimensions))

    def both(part: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        return read(f"{part}-images-idx3-ubyte", 3), read(f"{part}-labels-idx1-ubyte", 1)

    return _joined(name, folder, get, {part: both(part) for part in ("train", "t10k")})


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


CIFAR_RECORD = 1 + 3 * 32 * 32
"""Bytes of an image in CIFAR-10's binary files: the label, then the planes red, green and blue."""


def _cifar10(root: Path | None) -> Raw:
    """The binary version. torchvision keeps the "python version", which is pickle and is never read here."""
    folder = _below("cifar10", root, "cifar-10-batches-bin/data_batch_1.bin and its five sister files")
    folder = folder / "cifar-10-batches-bin"
    get = (
        f"unpack the binary version, https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, in {root} "
        "(cifar-10-batches-py will not do, since it is pickle)"
    )

    def read(path: Path) -> npt.NDArray[np.uint8]:
        data = np.fromfile(path, np.uint8)
        if len(data) == 0 or len(data) % CIFAR_RECORD or data[::CIFAR_RECORD].max() > 9:
            raise ValueError(f"not one or more records of {CIFAR_RECORD} bytes with labels 0 to 9")
        return data.reshape(-1, CIFAR_RECORD)

    stems = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    batches = [_read("cifar10", folder / f"{stem}.bin", get, read) for stem in stems]
    records = torch.from_numpy(np.concatenate(batches))
    images, labels = records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()
    return Raw(images, labels, len(labels) - len(batches[-1]))


def _cifar10_subset(root: Path | None) -> Raw:
    name, layout = "cifar10-subset", "cifar10/train_images.npy.xz and its three sister files"
    folder = _below(name, root, layout) / "cifar10"
    get = (
        f"copy the four files into {folder} (docs/scenarios.md has their format), or take the full set, 'cifar10'"
    )

    def both(part: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.integer[Any]]]:
        images = _read(name, folder / f"{part}_images.npy.xz", get, read_packed)
        return images, _read(name, folder / f"{part}_labels.npz", get, lambda path: read_columns(path)["labels"])

    return _joined(name, folder, get, {part: both(part) for part in ("train", "test")})


def read_packed(path: Path) -> npt.NDArray[np.uint8]:
    """Images (n, 3, h, w) from an xz-packed array (3, n, h, w) of the planes G, R-G and B-G.

    Each plane is differenced along rows and columns, all modulo 256. Raises `ValueError` when it is no such
    array; `OSError`, `EOFError` or `lzma.LZMAError` when it cannot be read or unpacked.
    """
    with lzma.open(path) as file:
        planes = np.load(file)
    if planes.dtype != np.uint8 or planes.ndim != 4 or len(planes) != 3:
        raise ValueError(f"not three planes of bytes: shape {planes.shape}, type {planes.dtype}")
    green, red, blue = planes.cumsum(axis=2, dtype=np.uint8).cumsum(axis=3, dtype=np.uint8)
    return np.stack([red + green, green, blue + green], axis=1)


def read_columns(path: Path) -> dict[str, npt.NDArray[np.integer[Any]]]:
    """The whole numbers (n,) in an npz archive, by name.

    Raises `ValueError`, `OSError` or `BadZipFile` when it is no such archive.
    """
    with np.load(path) as archive:
        return {name: column for name, column in archive.items() if column.dtype.kind in "ui"}


WATERBIRDS = "waterbird_complete95_forest2water2"
"""The folder that the published archive unpacks to."""


def _waterbirds(root: Path | None) -> Raw:
    """Pictures of CUB's birds on backgrounds from Places. Label 1 is a waterbird.

    Tags: `place` (1: on water), `species` (1 to 200, CUB's numbers), `split` (0 training, 1 validation, 2 test).
    """
    folder = _below("waterbirds", root, f"{WATERBIRDS}/metadata.csv and the pictures that it lists") / WATERBIRDS
    get = f"unpack {WATERBIRDS}.tar.gz (Sagawa et al. 2020, Group DRO's repository links to it) in {root}"

    def read(path: Path) -> list[tuple[str, int, int, int, int]]:
        with path.open(newline="") as file:
            found = [(row["img_filename"], row) for row in csv.DictReader(file)]
        if not found:
            raise ValueError("it lists no pictures")
        rows = [(name, int(row["y"]), int(row["place"]), int(name[:3]), int(row["split"])) for name, row in found]
        return sorted(rows, key=lambda row: row[-1])  # stable: in the order of the file within a split

    names, *columns = zip(*_read("waterbirds", folder / "metadata.csv", get, read), strict=True)
    label, place, species, split = (torch.tensor(column) for column in columns)
    tags = {"place": place, "species": species, "split": split}
    return Raw(Files([folder / name for name in names]), label, int((split == 0).sum()), tags)


def _tree(name: str, folder_name: str, domains: Sequence[str], classes: int, root: Path | None) -> Raw:
    """Pictures in folders DOMAIN/CLASS. Label c is the c-th class in alphabetical order."""
    folder = _below(name, root, f"{folder_name}/{domains[0]}/CLASS/*.jpg and so on") / folder_name
    get = f"unpack it so that its pictures are {folder}/DOMAIN/CLASS/*.jpg, with the domains {', '.join(domains)}"
    paths: list[Path] = []
    labels: list[int] = []
    domain: list[int] = []
    for number, each in enumerate(domains):
        if not (folder / each).is_dir():
            raise UserError(f"data set {name!r}: there is no {each} in {folder}; {get}")
        named = sorted(path for path in (folder / each).iterdir() if path.is_dir())
        if len(named) != classes:
            raise UserError(f"data set {name!r}: {folder / each} has {len(named)} classes, not {classes}; {get}")
        for label, place in enumerate(named):
            found = sorted(_pictures(place))
            paths += found
            labels += [label] * len(found)
            domain += [number] * len(found)
    return Raw(Files(paths), torch.tensor(labels), len(labels), {"domain": torch.tensor(domain)})


def _pictures(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))


def _pacs(root: Path | None) -> Raw:
    """The folders of pictures, or where there are none, all of them packed at 64x64 pixels, in the same order."""
    if root is None or (root / "PACS").exists() or not (root / "pacs").exists():
        return _tree("pacs", "PACS", PACS, 7, root)
    folder = root / "pacs"
    get = f"copy pacs64_images.npy.xz and pacs64_labels.npz into {folder}, or unpack the pictures in {root}/PACS"

    def read(path: Path) -> tuple[Tensor, Tensor]:
        columns = {name: torch.from_numpy(column.astype(np.int64)) for name, column in read_columns(path).items()}
        return columns["labels"], columns["domains"]

    images = torch.from_numpy(_read("pacs", folder / "pacs64_images.npy.xz", get, read_packed))
    labels, domain = _read("pacs", folder / "pacs64_labels.npz", get, read)
    if not len(images) == len(labels) == len(domain):
        raise UserError(f"data set 'pacs': {folder} has {len(images)} images but {len(labels)} labels; {get}")
    return Raw(images, labels, len(labels), {"domain": domain})


SPRITES = 21_000, 15_000
"""How many are rendered, and how many of them, the first, are for training: a third of each for each shape."""


def _sprites(_: Path | None) -> Raw:
    labels = np.arange(SPRITES[0]) % len(SHAPES)
    factors = draw_factors(len(labels), numpy_generator(0, "sprites"))
    images = np.empty((len(labels), SIDE, SIDE), np.uint8)
    for shape in range(len(SHAPES)):
        for part in np.array_split(np.flatnonzero(labels == shape), 7):  # a thousand at a time, for the memory
            images[part] = render(shape, **{name: values[part] for name, values in factors.items()})
    return Raw(torch.from_numpy(images), torch.from_numpy(labels), SPRITES[1])


EICU_HOSPITALS = 58


def _patients(name: str, columns: int, make: Callable[[], eicu.Patients]) -> Raw:
    """A table of patients, with the tag `hospital`."""
    try:
        found = make()
        if found.columns.shape[1] != columns:
            raise ValueError(f"{found.columns.shape[1]} columns instead of {columns}")
    except ValueError as error:
        raise UserError(f"data set {name!r} cannot be made of these tables: {error}") from None
    x, y, hospital = map(torch.from_numpy, (found.columns, found.died, found.hospital))
    return Raw(x, y, len(y), {"hospital": hospital})


def _eicu(root: Path | None) -> Raw:
    """eICU-CRD 2.0: 1 for the drugs that a patient got in the first 48 hours; the label is death in hospital."""
    layout = "eicu/patient.csv.gz and eicu/medication.csv.gz, or eicu/prepared.csv"
    folder = _below("eicu", root, layout) / "eicu"
    get = f"copy it from PhysioNet's eICU-CRD 2.0, for which one must be credentialed, to {folder}"
    if (folder / "prepared.csv").exists():
        ready = _read("eicu", folder / "prepared.csv", get, eicu.read_prepared)
        return _patients("eicu", EICU_COLUMNS, lambda: ready)
    read = partial(eicu.read_stays, outcome="hospitaldischargestatus", person=lambda _: ())
    stays = _read("eicu", folder / "patient.csv.gz", get, read)
    drugs = _read("eicu", folder / "medication.csv.gz", get, partial(eicu.read_medication, stays=stays))
    make = partial(eicu.patients, stays, drugs, EICU_HOSPITALS, EICU_COLUMNS)
    return _patients("eicu", EICU_COLUMNS, make)


def _eicu_demo(root: Path | None) -> Raw:
    """eICU's open demo: 1 for diagnoses of the first 48 hours, groups of them, age group and sex."""
    folder = _below("eicu-demo", root, "eicu_demo/patient.csv.gz and eicu_demo/diagnosis.csv.gz") / "eicu_demo"
    get = f"copy it to {folder} (docs/scenarios.md has its columns)"
    read = partial(
        eicu.read_stays,
        outcome="actualhospitalmortality",
        person=lambda row: (f"age {row['agegroup']}", f"gender {row['gender']}"),
    )
    stays = _read("eicu-demo", folder / "patient.csv.gz", get, read)
    diagnoses = _read("eicu-demo", folder / "diagnosis.csv.gz", get, partial(eicu.read_diagnoses, stays=stays))
    make = partial(eicu.patients, stays, diagnoses, None, EICU_DEMO_COLUMNS)
    return _patients("eicu-demo", EICU_DEMO_COLUMNS, make)


def _eicu_synthetic(_: Path | None) -> Raw:
    rng = numpy_generator(0, "eicu")
    return _patients("eicu-synthetic", EICU_COLUMNS, lambda: eicu.generate(rng))


def _camelyon17(root: Path | None) -> Raw:
    """`ROOT/camelyon17_v1.0`, as WILDS unpacks it, by WILDS' own loader.

    Tags: `hospital`, from 0, and `split`: 0 training, 1 held-out training, 2 and 3 other hospitals.
    """
    folder = _below("camelyon17", root, "camelyon17_v1.0, as WILDS unpacks it") / "camelyon17_v1.0"
    loader = _wilds("camelyon17", "Camelyon17Dataset")

    def read(path: Path) -> Raw:
        found = _loaded(loader, path, ["hospital", "y"])
        # The loader's own `get_input` opens a file at a time and does not scale it.
        files = Files([path / name for name in found._input_array], (3, 96, 96))
        return Raw(files, found.y_array, len(found.y_array), _tags(found, ["hospital"]))

    return _read("camelyon17", folder, _by_wilds("camelyon17"), read)


def _wilds_texts(name: str, folder: str, kind: str, tags: Sequence[str], root: Path | None) -> Raw:
    """`ROOT/FOLDER`, as WILDS unpacks it, by WILDS' own loader, whose class `kind` is.

    Tags: `tags` of its metadata, and `split`, WILDS' number of it.
    """
    place = _below(name, root, f"{folder}, as WILDS unpacks it") / folder
    loader = _wilds(name, kind)

    def read(path: Path) -> Raw:
        found = _loaded(loader, path, tags)
        count = len(found.y_array)
        texts = [str(found.get_input(number)) for number in range(count)]
        return Raw(torch.empty(count, 0), found.y_array.long(), count, _tags(found, tags), texts)

    return _read(name, place, _by_wilds(name), read)


def _by_wilds(name: str) -> str:
    return f"have WILDS put it there: wilds.get_dataset({name!r}, root_dir=DATA_ROOT, download=True)"


def _loaded(loader: Any, path: Path, fields: Sequence[str]) -> Any:
    """A data set of WILDS. Raises `ValueError` where its metadata lack a field."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # pandas 3's, and only read
        found = loader(root_dir=str(path.parent), download=False)
    if missing := [name for name in fields if name not in found.metadata_fields]:
        raise ValueError(f"it has no {missing[0]}")
    return found


def _tags(found: Any, fields: Sequence[str]) -> dict[str, torch.Tensor]:
    tags = {name: found.metadata_array[:, found.metadata_fields.index(name)] for name in fields}
    return {**tags, "split": torch.from_numpy(np.array(found.split_array, dtype=np.int64))}


def _wilds(name: str, kind: str) -> Any:
    """A data set's class, which is called `kind`. Raises `UserError` where the package is not installed."""
    known = sys.modules.get("outdated")
    sys.modules["outdated"] = None  # type: ignore[assignment] # with it WILDS asks a server for its newest version
    try:
        return getattr(import_module(f"wilds.datasets.{name}_dataset"), kind)
    except ImportError as error:
        raise UserError(
            f"data set {name!r} needs the extra perennial[wilds], which is not installed ({error}); "
            "in the project's folder: uv sync --inexact --extra wilds"
        ) from None
    finally:
        del sys.modules["outdated"]
        if known:
            sys.modules["outdated"] = known


READERS: dict[str, Callable[[Path | None], Raw]] = {
    "digits": _digits,
    "diabetes": _diabetes,
    "mnist": partial(_mnist_like, "mnist", "MNIST"),
    "fashion-mnist": partial(_mnist_like, "fashion-mnist", "FashionMNIST"),
    "sprites": _sprites,
    "cifar10": _cifar10,
    "cifar10-subset": _cifar10_subset,
    "waterbirds": _waterbirds,
    "pacs": _pacs,
    "vlcs": partial(_tree, "vlcs", "VLCS", VLCS, 5),
    "office-home": partial(_tree, "office-home", "office_home", OFFICE_HOME, 65),
    "camelyon17": _camelyon17,
    "civilcomments": partial(
        _wilds_texts, "civilcomments", "civilcomments_v1.0", "CivilCommentsDataset", IDENTITIES
    ),
    "amazon": partial(_wilds_texts, "amazon", "amazon_v2.1", "AmazonDataset", ("user",)),
    "eicu": _eicu,
    "eicu-demo": _eicu_demo,
    "eicu-synthetic": _eicu_synthetic,
}
"""How each data set of `DATASETS` is read, from the resolved data root."""
