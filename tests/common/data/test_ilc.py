from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from perennial.common.config import load_config
from perennial.common.data.datasets import DATASETS, Dataset, load
from perennial.common.data.environments import rotate
from perennial.common.data.examples import ClientData
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Scenario, all_shares
from perennial.common.data.scenarios.ilc import ANGLES, FLAT, PRESETS, ColorDigits, ColorMNIST, RotatedCIFAR10
from perennial.common.utils.errors import UserError
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config


def raw_like(per_class: int, test_per_class: int, shape: tuple[int, ...]) -> Raw:
    """Noise whose first pixel tells the place in the file."""
    labels = torch.arange(10).repeat(per_class + test_per_class)
    images = torch.randint(1, 256, (len(labels), *shape), generator=torch.Generator().manual_seed(0))
    return Raw(images.to(torch.uint8), labels, 10 * per_class)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """6,000 digits and 4,500 pictures for training; the test files must not be used."""
    sizes: dict[str, Any] = {"mnist": (600, (28, 28)), "cifar10": (450, (3, 32, 32))}
    for name, (count, shape) in sizes.items():
        monkeypatch.setitem(DATASETS, name, Dataset("", lambda _, c=count, s=shape: raw_like(c, 10, s)))
    yield tmp_path
    load.__globals__["_load"].cache_clear()
    all_shares.cache_clear()


def everything(scenario: Scenario, root: Path, seed: int = 0) -> list[ClientData]:
    return [scenario.client_data(client, seed, root) for client in range(scenario.clients)]


def near(hits: Tensor, probability: float) -> bool:
    """Within four standard errors."""
    error = sqrt(probability * (1 - probability) / len(hits))
    return abs(float(hits.float().mean()) - probability) <= 4 * error


def indices(shares: list[Any], part: str) -> np.ndarray[Any, Any]:
    return np.concatenate([getattr(share, part) for share in shares])


# ---------------------------------------------------------------------- Color-MNIST

COLOR = ColorMNIST(images=6000)


def colour(x: Tensor) -> Tensor:
    """Which channel has the picture; the other is blank."""
    bright = x.flatten(2).any(dim=2)
    assert torch.equal(bright.sum(dim=1), torch.ones(len(x), dtype=torch.long))
    return bright[:, 1].long()


def test_colours_agree_as_often_as_the_paper_says(root: Path) -> None:
    for p, data in zip((0.85, 0.7, 0.55, 0.4, 0.25), everything(COLOR, root), strict=True):
        assert near(colour(data.train.x) == data.train.y, p)
        assert near(colour(data.validation.x) == data.validation.y, p)
        assert data.test.keys() == {"p=0.1"}
    test = [data.test["p=0.1"] for data in everything(COLOR, root)]
    assert near(torch.cat([colour(part.x) == part.y for part in test]), 0.1)
    assert all((part.environment == -1).all() for part in test)


def test_labels_are_clean_in_the_silos_and_flipped_outside(root: Path) -> None:
    raw, shares = load("mnist", root), all_shares(COLOR, 0, root.resolve())
    wrong = []
    for share, data in zip(shares, everything(COLOR, root), strict=True):
        for index, part in ((share.train, data.train), (share.validation, data.validation)):
            assert torch.equal((raw.labels[torch.from_numpy(index)] < 5).long(), part.y)
        wrong.append((raw.labels[torch.from_numpy(share.test)] < 5).long() != data.test["p=0.1"].y)
    assert near(torch.cat(wrong), 0.15)


def test_sizes_and_who_has_which_digit(root: Path) -> None:
    """A tenth of the paper's 8,000, 2,000 and 10,000; the last images of the training file are the test set."""
    data, shares = everything(COLOR, root), all_shares(COLOR, 0, root.resolve())
    assert [(len(d.train), len(d.validation), len(d.test["p=0.1"])) for d in data] == [(800, 200, 200)] * 5
    pool = np.concatenate([indices(shares, "train"), indices(shares, "validation")])
    assert sorted(pool) == list(range(5000))
    assert sorted(indices(shares, "test")) == list(range(5000, 6000))
    assert data[0].train.x.shape[1:] == COLOR.input_shape == (2, 14, 14)
    assert [int(d.train.environment[0]) for d in data] == [0, 1, 2, 3, 4]
    again, other = everything(COLOR, root), everything(COLOR, root, seed=1)
    assert all(torch.equal(one.train.x, two.train.x) for one, two in zip(data, again, strict=True))
    assert not torch.equal(data[0].train.x, other[0].train.x)


def test_the_whole_recipe_has_the_papers_sizes() -> None:
    raw = Raw(torch.zeros(60_000, 1, 1, dtype=torch.uint8), torch.zeros(60_000, dtype=torch.long), 60_000)
    shares = ColorMNIST().shares(0, raw)
    assert [(len(s.train), len(s.validation), len(s.test)) for s in shares] == [(8000, 2000, 2000)] * 5


def test_the_bundled_digits_are_all_used_once() -> None:
    """The last 300 images of the file are for testing; colours and label noise are Color-MNIST's."""
    scenario, raw = ColorDigits(), load("digits")
    shares, data = scenario.shares(0, raw), everything(scenario, Path())
    pool = np.concatenate([indices(shares, "train"), indices(shares, "validation")])
    assert sorted(pool) == list(range(1497))
    assert sorted(indices(shares, "test")) == list(range(1497, 1797))
    assert {(len(d.train), len(d.validation), len(d.test["p=0.1"])) for d in data} <= {
        (240, 60, 60),
        (239, 60, 60),
        (239, 59, 60),
    }
    for p, share, own in zip((0.85, 0.7, 0.55, 0.4, 0.25), shares, data, strict=True):
        assert near(colour(own.train.x) == own.train.y, p)
        assert torch.equal((raw.labels[torch.from_numpy(share.train)] < 5).long(), own.train.y)
        assert torch.equal(own.train.x.sum(dim=1), raw.images[torch.from_numpy(share.train)])
    test = [d.test["p=0.1"] for d in data]
    clean = raw.labels[torch.from_numpy(indices(shares, "test"))] < 5
    assert near(torch.cat([part.y for part in test]) != clean, 0.15)
    assert near(torch.cat([colour(part.x) == part.y for part in test]), 0.1)
    assert scenario.ranking_batch <= min(len(part) for part in test)
    with pytest.raises(ValidationError, match="images"):
        ColorDigits(images=1798)


@pytest.mark.parametrize("name", ["color-digits-ilc", "color-mnist-ilc"])
def test_the_oracle_has_no_colour_and_the_same_labels(name: str, root: Path) -> None:
    plain, grey = (
        PRESETS[preset].model_copy(update={"images": 600}).client_data(0, 0, root)
        for preset in (name, f"{name}-oracle")
    )
    for own, other in ((plain.train, grey.train), (plain.test["p=0.1"], grey.test["p=0.1"])):
        assert torch.equal(own.y, other.y)
        for channel in range(2):
            assert torch.equal(other.x[:, channel], own.x.sum(dim=1))


def test_too_many_images_are_told(root: Path) -> None:
    with pytest.raises(UserError, match=r"scenario\.images: 60000 is too many; the training file has 6000 images"):
        ColorMNIST().client_data(0, 0, root)
    with pytest.raises(UserError, match=r"scenario\.images: 50000 is too many"):
        RotatedCIFAR10().client_data(0, 0, root)


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [("fedsgd", 306_151, 306_151), ("geometric", 306_151, 306_151), ("fishr-inter-geo", 306_542, 612_693)],
)
def test_floats_per_client_and_round_are_the_papers(
    root: Path, method: str, down: int, up: int, tmp_path: Path
) -> None:
    """Color-MNIST with its own model."""
    options = {"method": method, "scenario": {"name": "color-mnist-ilc", "images": 600}, "rounds": 1}
    config = load_config(options={**options, "data_root": str(root)})
    folder = RunFolder.create(tmp_path / "run", config)
    summary = LocalRuntime(config).run(folder)
    assert summary["bytes_per_client_and_round"] == {"down": 4 * down, "up": 4 * up}
    assert summary["models"]["global"]["final"]["areas"]["p=0.1"].keys() == {
        "auroc",
        "auprc",
    }  # 20 test samples of a client are no full batch of 32
    assert toy_config(method).method.evaluates == ("global",)


# ---------------------------------------------------------------------- Rotated-CIFAR10

ROTATED = RotatedCIFAR10(images=4500)


def test_slices_of_the_whole_set_have_the_papers_sizes() -> None:
    """3,334 of each environment in the paper, of which six are also held out; here none is, and six have 3,333."""
    raw = Raw(torch.zeros(50_000, 3, 1, 1, dtype=torch.uint8), torch.zeros(50_000, dtype=torch.long), 50_000)
    shares = RotatedCIFAR10().shares(0, raw)
    assert [len(share.train) for share in shares] == [10_002, 9_999, 9_999]
    assert [len(share.validation) for share in shares] == [1112 + 2 * 1111, 3 * 1111, 3 * 1111]
    assert sorted(len(share.test) for share in shares) == [3333, 3333, 3334]
    everyone = np.concatenate([indices(shares, part) for part in ("train", "validation", "test")])
    assert sorted(everyone) == list(range(50_000))


def test_pictures_are_turned_by_their_environments_angle(root: Path) -> None:
    raw = load("cifar10", root)
    shares = all_shares(ROTATED, 0, root.resolve())
    for client, data in enumerate(everything(ROTATED, root)):
        angles = torch.tensor(FLAT)[data.train.environment]
        assert set(angles.tolist()) == set(ANGLES[client])
        counts = torch.bincount(data.train.environment)[3 * client : 3 * client + 3]
        assert counts.tolist() == [300, 300, 300]
        for place in range(5):
            picture = raw.images[shares[client].train[place]].float()[None, :, ::2, ::2] / 255
            expected = rotate(picture, float(angles[place]), "nearest")[0]
            assert torch.equal(data.train.x[place], expected)
        assert data.train.x.shape[1:] == (3, 16, 16)
        assert torch.equal(data.train.y, raw.labels[torch.from_numpy(shares[client].train)])


def test_outside_every_picture_has_an_angle_of_its_own(root: Path) -> None:
    """Between 0 and 45 degrees more and more of the corners is blank, up to 90 less and less."""
    raw, shares = load("cifar10", root), all_shares(ROTATED, 0, root.resolve())
    blank = []
    for client, data in enumerate(everything(ROTATED, root)):
        assert data.test.keys() == {"ood"}
        plain = raw.images[torch.from_numpy(shares[client].test)].float()[:, :, ::2, ::2] / 255
        changed = (data.test["ood"].x != plain).flatten(1).any(dim=1)
        assert changed.float().mean() > 0.95
        blank.append((data.test["ood"].x[:, 0] == 0).flatten(1).float().mean(dim=1))
    corners = torch.cat(blank)
    assert len(corners) == 900
    assert corners.unique().numel() > 8
    assert corners.min() < 0.02 < 0.15 < corners.max()


def test_the_silos_own_environments_as_test_environments(root: Path) -> None:
    scenario = ROTATED.model_copy(update={"tested": "silos"})
    assert scenario.test_environments == ("10°", "25°", "40°", "60°", "75°", "90°", "-10°", "-40°", "-90°")
    for client, (data, plain) in enumerate(
        zip(everything(scenario, root), everything(ROTATED, root), strict=True)
    ):
        assert list(data.test) == [f"{angle}°" for angle in ANGLES[client]]
        assert sum(len(part) for part in data.test.values()) == len(data.validation)
        assert torch.equal(data.train.x, plain.train.x)
        first = data.test[f"{ANGLES[client][0]}°"]
        assert (first.environment == 3 * client).all()


def test_in_32_pixels_nothing_is_dropped(root: Path) -> None:
    scenario = ROTATED.model_copy(update={"side": 32})
    assert scenario.input_shape == (3, 32, 32)
    assert scenario.client_data(0, 0, root).train.x.shape[1:] == (3, 32, 32)


def test_the_presets() -> None:
    assert {name: (scenario.rounds, scenario.ranking_batch) for name, scenario in PRESETS.items()} == {
        "color-digits-ilc": (301, 32),
        "color-digits-ilc-oracle": (301, 32),
        "color-mnist-ilc": (301, 32),
        "color-mnist-ilc-oracle": (301, 32),
        "rotated-cifar10": (301, 0),
        "rotated-cifar10-silos": (301, 0),
        "rotated-cifar10-subset": (301, 0),
        "rotated-cifar10-subset-silos": (301, 0),
    }
