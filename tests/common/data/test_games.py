from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from perennial.common.data.datasets import DATASETS, Dataset, load
from perennial.common.data.examples import ClientData
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenarios.games import (
    PRESETS,
    CFMNISTGames,
    CMNISTGames,
    ColoredDigitsGames,
    ColoredDSprites,
    Game,
    SpuriousCIFAR10,
)
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError


def raw_like(per_class: int, test_per_class: int, shape: tuple[int, ...] = (28, 28)) -> Raw:
    """Noise, whose first pixel row and column are as bright as the class."""
    labels = torch.arange(10).repeat(per_class + test_per_class)
    images = torch.randint(0, 256, (len(labels), *shape), generator=torch.Generator().manual_seed(0))
    return Raw(images.to(torch.uint8), labels, 10 * per_class)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A data root at which every data set is noise."""
    for name, shape in {"mnist": (28, 28), "fashion-mnist": (28, 28), "cifar10": (3, 32, 32)}.items():
        monkeypatch.setitem(DATASETS, name, Dataset("", lambda _, s=shape: raw_like(400, 100, s)))
    yield tmp_path
    load.__globals__["_load"].cache_clear()


def everything(scenario: Game, root: Path) -> list[ClientData]:
    return [scenario.client_data(client, 0, root) for client in range(scenario.clients)]


def near(hits: Tensor, probability: float) -> bool:
    """Within four standard errors."""
    error = sqrt(probability * (1 - probability) / len(hits))
    return abs(float(hits.float().mean()) - probability) <= 4 * error


def shortcut(scenario: Game, x: Tensor) -> Tensor:
    """What the colour or the patch says, read off the sample."""
    if isinstance(scenario, SpuriousCIFAR10):
        first, second = ((patch == 0).flatten(1).all(dim=1) for patch in (x[..., :5, :5], x[..., -5:, -5:]))
        assert torch.equal(first, ~second)
        return second.long()
    bright = (x > 0.5).flatten(2).any(dim=2)
    assert torch.equal(bright.sum(dim=1), torch.ones(len(x), dtype=torch.long))
    return bright[:, 1].long()


@pytest.mark.parametrize(
    "scenario",
    [
        ColoredDigitsGames(),
        CMNISTGames(),
        CFMNISTGames(),
        CFMNISTGames(dim="own"),
        SpuriousCIFAR10(),
        PRESETS["cmnist-games-5"],
    ],
    ids=lambda scenario: f"{scenario.name}-{scenario.clients}",
)
def test_the_shortcut_agrees_with_the_noisy_label_as_often_as_p_says(scenario: Game, root: Path) -> None:
    raw = load(scenario.dataset, root)
    shares = scenario.shares(0, raw)
    for k, data in enumerate(everything(scenario, root)):
        assert data.train.environment.unique().tolist() == [k]
        splits = {"train": data.train, "validation": data.validation, "test": data.test["p=0.1"]}
        for split, part in splits.items():
            p = 0.1 if split == "test" else scenario.train_agreement[k]
            assert near(shortcut(scenario, part.x) == part.y, p)
            index = torch.from_numpy(getattr(shares[k], split))
            clean = torch.isin(raw.labels[index], torch.tensor(list(scenario.ones))).long()
            assert near(clean != part.y, 0.25)
            assert part.x.shape == (len(part), *scenario.input_shape)
            assert part.x.dtype == torch.float32


def test_what_colour_and_shape_alone_can_reach(root: Path) -> None:
    """Colour 85 % in training and 10 % in testing, shape 75 % in both."""
    scenario, raw = CMNISTGames(), load("mnist", root)
    shares, clients = scenario.shares(0, raw), everything(CMNISTGames(), root)
    for split, colour in (("train", 0.85), ("test", 0.1)):
        parts = [data.train if split == "train" else data.test["p=0.1"] for data in clients]
        assert near(torch.cat([shortcut(scenario, part.x) == part.y for part in parts]), colour)
        clean = [raw.labels[torch.from_numpy(getattr(share, split))] >= 5 for share in shares]
        assert near(torch.cat([part.y == own for part, own in zip(parts, clean, strict=True)]), 0.75)


@pytest.mark.parametrize(
    ("scenario", "train", "test"),
    [
        (CMNISTGames(), 60_000, 10_000),
        (CFMNISTGames(), 54_000, 9_000),
        (PRESETS["cfmnist-games-10"], 54_000, 9_000),
        (CMNISTGames(train_samples=2_000), 2_000, 10_000),
    ],
)
def test_clients_share_out_all_there_is(scenario: Game, train: int, test: int) -> None:
    labels = torch.arange(10).repeat(7000)
    shares = scenario.shares(3, Raw(torch.zeros(70_000, 1, 1), labels, 60_000))
    own = [np.concatenate([share.train, share.validation]) for share in shares]
    assert len(np.unique(np.concatenate(own))) == train == sum(map(len, own))
    tests = np.concatenate([share.test for share in shares])
    assert len(np.unique(tests)) == test == len(tests)
    assert max(map(max, own)) < 60_000 <= tests.min()
    assert {len(share.train) + len(share.validation) for share in shares} == {train // scenario.clients}
    assert all(len(share.validation) == round(0.05 * train / scenario.clients) for share in shares)
    ones = torch.isin(labels[torch.from_numpy(np.concatenate(own))], torch.tensor(list(scenario.ones)))
    if scenario.name == "cfmnist-games":
        assert set(labels[torch.from_numpy(tests)].tolist()) == set(range(10)) - {8}
        assert float(ones.float().mean()) == pytest.approx(1 / 3)


def test_a_digit_is_ink_or_not_in_the_colours_channel(root: Path) -> None:
    scenario, raw = CMNISTGames(), load("mnist", root)
    share, data = scenario.shares(0, raw)[0], everything(scenario, root)[0]
    images = (raw.images[torch.from_numpy(share.train)] > 0).float()
    assert torch.equal(data.train.x.sum(dim=1), images)


@pytest.mark.parametrize("dim", ["both", "own"])
def test_a_garments_dim_pixels(dim: Any) -> None:
    """Bright ones are 1 in the colour's channel and 0 in the other."""
    x = CFMNISTGames(dim=dim).marked(torch.tensor([[[0.0, 0.3, 0.5, 0.6, 1.0]]] * 2), torch.tensor([0, 1]))
    other = [0.0, 0.3, 0.5, 0.0, 0.0] if dim == "both" else [0.0] * 5
    own = [0.0, 0.3, 0.5, 1.0, 1.0]
    assert x.squeeze(2).tolist() == [
        [pytest.approx(own), pytest.approx(other)],
        [pytest.approx(other), pytest.approx(own)],
    ]


def test_a_patch_blackens_its_corner_and_nothing_else() -> None:
    pictures = torch.full((2, 3, 32, 32), 0.4)
    x = SpuriousCIFAR10().marked(pictures, torch.tensor([0, 1]))
    black = x == 0
    assert black.sum(dim=(1, 2, 3)).tolist() == [75, 75]
    assert black[0, :, :5, :5].all()
    assert black[1, :, 27:, 27:].all()
    assert (pictures == 0.4).all()  # the data set is everybody's


@pytest.mark.parametrize(
    "scenario", [ColoredDigitsGames(), CMNISTGames(), CFMNISTGames(), SpuriousCIFAR10()], ids=lambda s: s.name
)
def test_the_oracle_has_no_shortcut_and_the_same_labels(scenario: Game, root: Path) -> None:
    oracle = scenario.model_copy(update={"oracle": True})
    plain, without = (s.client_data(1, 0, root) for s in (scenario, oracle))
    assert torch.equal(plain.train.y, without.train.y)
    if scenario.name == "spurious-cifar10":
        inside = without.train.x[:, :, 6:26, 6:26]
        assert torch.equal(inside, plain.train.x[:, :, 6:26, 6:26])
        assert not (without.train.x[..., :5, :5] == 0).flatten(1).all(dim=1).any()
    else:
        assert torch.equal(without.train.x[:, 0], without.train.x[:, 1])
        assert torch.equal(without.train.x[:, 0], plain.train.x.amax(dim=1))


def test_the_bundled_digits_are_all_used_in_their_shades() -> None:
    scenario, raw = ColoredDigitsGames(), load("digits")
    shares = scenario.shares(0, raw)
    used = np.concatenate([part for own in shares for part in (own.train, own.validation, own.test)])
    assert sorted(used.tolist()) == list(range(1797))
    assert {(len(s.train), len(s.validation)) for s in shares} == {(589, 31)}
    assert sorted(len(s.test) for s in shares) == [278, 279]
    assert torch.equal(
        scenario.client_data(1, 0, None).train.x.sum(dim=1), raw.images[torch.from_numpy(shares[1].train)]
    )


def test_the_presets() -> None:
    plain = {name: scenario for name, scenario in PRESETS.items() if not name.endswith("-oracle")}
    assert len(PRESETS) == 2 * len(plain)
    agreement = {name: (s.clients, s.train_agreement) for name, s in plain.items() if isinstance(s, Game)}
    five, ten = (5, (0.7, 0.75, 0.8, 0.85, 0.9)), 10
    assert agreement["cmnist-games-5"] == agreement["cfmnist-games-5"] == five
    assert agreement["cmnist-games-10"][0] == ten
    assert agreement["cmnist-games-10"][1][::9] == (0.7, 0.9)
    assert all(
        found == (2, (0.8, 0.9)) for name, found in agreement.items() if name[-1] not in "50" or "cifar" in name
    )
    assert all(scenario.test_environments == ("p=0.1",) for scenario in plain.values())


@pytest.mark.parametrize(
    ("name", "whole", "head"),
    [
        ("colored-digits-games", 12_546, 4_290),
        ("cmnist-games", 765_182, 153_272),
        ("spurious-cifar10", 1_351_742, 153_272),
        ("colored-dsprites", 3_348_542, 153_272),
    ],
)
def test_floats_of_the_models(name: str, whole: int, head: int) -> None:
    """IRM Games' code: a predictor of the Fixed game; the Variable one's is what lies behind the first layer."""
    scenario = PRESETS[name]
    net = network(model_settings(scenario.model), scenario.input_shape, scenario.classes)
    sizes = {key: tensor.numel() for key, tensor in net.initial(0).items()}
    assert sum(sizes.values()) == whole
    assert sum(size for key, size in sizes.items() if key in net.classifier_names) == head


def test_what_does_not_fit_is_said(root: Path) -> None:
    with pytest.raises(ValidationError, match="train_agreement has 2 values for 5 clients; give one for each"):
        CMNISTGames(clients=5)
    with pytest.raises(ValidationError, match="train_agreement"):
        CMNISTGames(train_agreement=(0.8, 1.9))
    with pytest.raises(UserError, match="train_samples = 5000, but 'mnist' has 4000 training images"):
        CMNISTGames(train_samples=5000).client_data(0, 0, root)


@pytest.mark.slow
def test_sprites_are_a_data_set_of_their_own() -> None:
    raw = load("sprites")
    assert raw.images.shape == (21_000, 64, 64)
    assert raw.images.unique().tolist() == [0, 255]
    assert raw.labels[: raw.train_size].bincount().tolist() == [5000] * 3
    assert raw.labels[raw.train_size :].bincount().tolist() == [2000] * 3
    assert (raw.images > 0).flatten(1).any(dim=1).all()
    # Nothing is cut off at an edge.
    assert not torch.cat([raw.images[:, edge].flatten() for edge in (0, -1)]).any()
    assert not torch.cat([raw.images[:, :, edge].flatten() for edge in (0, -1)]).any()
    shares = ColoredDSprites().shares(0, raw)
    assert [len(share.train) + len(share.validation) for share in shares] == [5000, 5000]
    assert set(raw.labels[torch.from_numpy(shares[0].train)].tolist()) == {0, 1}
