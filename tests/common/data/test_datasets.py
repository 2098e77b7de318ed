import gzip
import hashlib
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from real_data import REAL
from sklearn.datasets import load_digits

from perennial.common.data.datasets import DATASETS, load, resolve_root
from perennial.common.data.readers import read_idx
from perennial.common.utils.errors import UserError

SIZES = {"train": 12, "t10k": 5}


def idx(array: np.ndarray) -> bytes:
    """The idx format, written from its description and not with the code under test."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write(root: Path, kind: str = "MNIST", packed: bool = True) -> dict[str, np.ndarray]:
    folder = root / kind / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in SIZES.items():
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, n)
    for stem, array in arrays.items():
        if packed:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / stem).write_bytes(idx(array))
    return arrays


def complaint(name: str, root: Path | None) -> str:
    with pytest.raises(UserError) as caught:
        load(name, root)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_digits_are_bundled_scaled_and_cut_in_two() -> None:
    raw = load("digits")
    assert raw.images.shape == (1797, 8, 8)
    assert raw.images.dtype == torch.float32
    assert raw.labels.dtype == torch.int64
    images, labels = load_digits(return_X_y=True)
    assert np.array_equal(raw.images.flatten(1).numpy(), images / 16)
    assert np.array_equal(raw.labels.numpy(), labels)
    # Up to four clients want 30 and 13 of each digit (ColoredDigits).
    assert raw.labels[: raw.train_size].bincount().min() >= 4 * 30
    assert raw.labels[raw.train_size :].bincount().min() >= 4 * 13


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read_where_they_lie(tmp_path: Path, name: str, kind: str, packed: bool) -> None:
    arrays = write(tmp_path, kind, packed)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    raw = load(name, tmp_path)
    assert raw.train_size == SIZES["train"]
    assert len(raw) == sum(SIZES.values())
    assert raw.images.dtype == torch.uint8
    assert raw.labels.dtype == torch.int64
    images = np.concatenate([arrays["train-images-idx3-ubyte"], arrays["t10k-images-idx3-ubyte"]])
    labels = np.concatenate([arrays["train-labels-idx1-ubyte"], arrays["t10k-labels-idx1-ubyte"]])
    assert np.array_equal(raw.images.numpy(), images)
    assert np.array_equal(raw.labels.numpy(), labels)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_torchvision_reads_the_same(tmp_path: Path) -> None:
    from torchvision.datasets import MNIST

    write(tmp_path, packed=False)
    raw = load("mnist", tmp_path)
    for train, part in ((True, slice(0, raw.train_size)), (False, slice(raw.train_size, None))):
        theirs = MNIST(str(tmp_path), train=train, download=False)
        assert torch.equal(raw.images[part], theirs.data)
        assert torch.equal(raw.labels[part], theirs.targets)


def test_a_set_is_read_once_per_process(tmp_path: Path) -> None:
    write(tmp_path)
    assert load("mnist", tmp_path) is load("mnist", tmp_path / "MNIST" / "..")


def test_the_root_is_the_argument_or_else_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_DATA", str(tmp_path / "environment"))
    assert resolve_root(tmp_path) == tmp_path.resolve()
    assert resolve_root(None) == (tmp_path / "environment").resolve()
    monkeypatch.setenv("PERENNIAL_DATA", "")
    assert resolve_root(None) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_root(Path("~/data")) == (tmp_path / "data").resolve()
    write(tmp_path)
    monkeypatch.setenv("PERENNIAL_DATA", str(tmp_path))
    assert load("mnist").train_size == SIZES["train"]


def test_no_root_says_which_setting_and_what_it_must_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    text = complaint("fashion-mnist", None)
    for part in ("'fashion-mnist'", "PERENNIAL_DATA", "data_root", "FashionMNIST/raw/train-images-idx3-ubyte"):
        assert part in text


def test_a_missing_set_says_what_where_and_how_to_get_it(tmp_path: Path) -> None:
    text = complaint("mnist", tmp_path)
    for part in ("'mnist'", "train-images-idx3-ubyte", str(tmp_path / "MNIST" / "raw"), "download=True"):
        assert part in text
    write(tmp_path)
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "there is no t10k-labels-idx1-ubyte" in complaint("mnist", tmp_path)


IMAGES = "train-images-idx3-ubyte"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[: len(data) // 2],
        lambda data: b"<html>404</html>" + data[16:],
        lambda data: data + b"\1",
    ],
    ids=["empty", "header only", "half", "other format", "longer"],
)
def test_a_corrupt_file_is_named(tmp_path: Path, packed: bool, harm: Callable[[bytes], bytes]) -> None:
    write(tmp_path, packed=packed)
    path = tmp_path / "MNIST" / "raw" / (IMAGES + ".gz" * packed)
    path.write_bytes(harm(path.read_bytes()))
    text = complaint("mnist", tmp_path)
    assert f"{path} cannot be read" in text
    assert "download=True" in text


def test_a_changed_byte_in_an_archive_is_found(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "MNIST" / "raw" / f"{IMAGES}.gz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"{path} cannot be read" in complaint("mnist", tmp_path)


def test_labels_in_the_place_of_images_are_found(tmp_path: Path) -> None:
    arrays = write(tmp_path)
    path = tmp_path / "MNIST" / "raw" / f"{IMAGES}.gz"
    path.write_bytes(gzip.compress(idx(arrays["train-labels-idx1-ubyte"])))
    assert "with 3 dimension(s)" in complaint("mnist", tmp_path)


def test_images_and_labels_must_be_equally_many(tmp_path: Path) -> None:
    arrays = write(tmp_path)
    path = tmp_path / "MNIST" / "raw" / f"{IMAGES}.gz"
    path.write_bytes(gzip.compress(idx(arrays[IMAGES][:-1])))
    assert "has 11 train images but 12 labels" in complaint("mnist", tmp_path)


def test_an_unknown_set_is_met_with_the_closest_one() -> None:
    text = complaint("fashion_mnist", None)
    assert "did you mean 'fashion-mnist'?" in text
    assert all(name in text for name in DATASETS)


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "MNIST").exists(), reason="needs MNIST in PERENNIAL_DATA or ../shared/data")
def test_mnist_is_the_published_one() -> None:
    raw = load("mnist", REAL)
    assert raw.images.shape == (70_000, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert raw.labels[: raw.train_size].bincount().tolist() == counts
    test_counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert raw.labels[raw.train_size :].bincount().tolist() == test_counts
    assert raw.images[: raw.train_size].float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)


@pytest.mark.skipif(
    not (REAL / "FashionMNIST").exists(), reason="needs Fashion-MNIST in PERENNIAL_DATA or ../shared/data"
)
def test_fashion_mnist_is_the_published_one() -> None:
    raw = load("fashion-mnist", REAL)
    assert raw.labels[: raw.train_size].bincount().tolist() == [6000] * 10
    assert raw.labels[raw.train_size :].bincount().tolist() == [1000] * 10
    assert raw.images[: raw.train_size].float().mean() / 255 == pytest.approx(0.2860, abs=1e-4)


# --- CIFAR-10 ------------------------------------------------------------------------------------------


def write_binary(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10's binary version with four images a file; the images (24, 3, 32, 32) and labels."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, 24, dtype=np.uint8)
    stems = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for place, stem in enumerate(stems):
        own = range(4 * place, 4 * place + 4)
        # A record is the label, then 1,024 bytes each of red, green and blue, row by row.
        (folder / f"{stem}.bin").write_bytes(b"".join(bytes([labels[i]]) + images[i].tobytes() for i in own))
    return images, labels


def write_subset(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """The packed format, written from its description: the images (5, 6, 4, 3) and labels of both parts."""
    folder = root / "cifar10"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 6, 4, 3), dtype=np.uint8), rng.integers(0, 10, 5, dtype=np.uint8)
    for part, own in (("train", slice(0, 3)), ("test", slice(3, 5))):
        red, green, blue = (images[own][..., channel].astype(int) for channel in range(3))
        planes = np.stack([green, red - green, blue - green])
        for axis in (2, 3):
            planes = np.diff(planes, axis=axis, prepend=0)
        with lzma.open(folder / f"{part}_images.npy.xz", "wb") as file:
            np.save(file, (planes % 256).astype(np.uint8))
        names = np.array([b"one.png"] * len(labels[own]))
        np.savez(folder / f"{part}_labels.npz", labels=labels[own], names=names)
    return images, labels


def test_cifars_binary_files_are_read(tmp_path: Path) -> None:
    images, labels = write_binary(tmp_path)
    raw = load("cifar10", tmp_path)
    assert np.array_equal(raw.images.numpy(), images)
    assert np.array_equal(raw.labels.numpy(), labels)
    assert (raw.train_size, raw.labels.dtype) == (20, torch.int64)


def test_the_packed_subset_is_read(tmp_path: Path) -> None:
    images, labels = write_subset(tmp_path)
    raw = load("cifar10-subset", tmp_path)
    assert np.array_equal(raw.images.numpy(), images.transpose(0, 3, 1, 2))
    assert np.array_equal(raw.labels.numpy(), labels)
    assert (raw.train_size, raw.labels.dtype) == (3, torch.int64)


def test_a_missing_cifar_says_what_where_and_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    text = complaint("cifar10", tmp_path)
    for part in ("no data_batch_1.bin", str(tmp_path / "cifar-10-batches-bin"), "binary version", "pickle"):
        assert part in text
    text = complaint("cifar10-subset", tmp_path)
    for part in ("no train_images.npy.xz", str(tmp_path / "cifar10"), "docs/scenarios.md", "'cifar10'"):
        assert part in text


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 3072, b"\0" * 3074, b"\x0a" + b"\0" * 3072], ids=["empty", "short", "long", "label"]
)
def test_a_corrupt_cifar_file_is_named(tmp_path: Path, data: bytes) -> None:
    write_binary(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(data)
    assert f"{path} cannot be read" in complaint("cifar10", tmp_path)


def pickled(path: Path) -> None:
    np.savez(path, labels=np.array([{"not": "a number"}], dtype=object))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("train_images.npy.xz", lambda path: path.write_bytes(path.read_bytes()[:40])),
        ("train_images.npy.xz", lambda path: path.write_bytes(b"<html>")),
        ("train_images.npy.xz", lambda path: path.write_bytes(lzma.compress(b"not numpy"))),
        ("test_labels.npz", lambda path: path.write_bytes(path.read_bytes()[:40])),
        ("test_labels.npz", lambda path: path.write_bytes(b"<html>")),
        ("test_labels.npz", lambda path: np.savez(path, other=np.arange(2))),
        ("test_labels.npz", pickled),
    ],
    ids=["half", "no xz", "no numpy", "half labels", "no npz", "no labels", "pickle"],
)
def test_a_corrupt_packed_file_is_named(tmp_path: Path, name: str, harm: Callable[[Path], object]) -> None:
    write_subset(tmp_path)
    path = tmp_path / "cifar10" / name
    harm(path)
    assert f"{path} cannot be read" in complaint("cifar10-subset", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "cifar10").exists(), reason="needs the packed CIFAR-10 in PERENNIAL_DATA")
def test_the_subset_is_the_described_one() -> None:
    raw = load("cifar10-subset", REAL)
    assert raw.images.shape == (25_000, 3, 32, 32)
    assert raw.train_size == 20_000
    assert raw.labels[:20_000].bincount().tolist() == [2000] * 10
    assert raw.labels[20_000:].bincount().tolist() == [500] * 10
    # Given with the data, over the arrays (n, h, w, 3).
    decoded = raw.images[20_000:].permute(0, 2, 3, 1).contiguous().numpy()
    assert hashlib.sha256(decoded.tobytes()).hexdigest().startswith("ff72d936823f7a12")


def test_an_idx_array_survives(tmp_path: Path) -> None:
    array = np.arange(24).reshape(2, 3, 4)
    path = tmp_path / "array"
    path.write_bytes(idx(array))
    assert np.array_equal(read_idx(path, 3), array)
    with pytest.raises(ValueError, match="1 dimension"):
        read_idx(path, 1)
