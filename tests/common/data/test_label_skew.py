import gzip
import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from real_data import REAL, needs_mnist

from perennial.common.data.datasets import load
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Spurious, all_shares
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.label_skew import (
    PRESETS,
    CIFAR3Class,
    CIFAR3ClassSubset,
    Digits3Class,
    DigitsContexts,
    FMNIST3Class,
    LabelSkew,
    MNIST3Class,
)
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def raw_of(counts: list[int], test_per_class: int = 0) -> Raw:
    """Labels alone, in no order."""
    rng = np.random.default_rng(0)
    train = rng.permutation(np.repeat(np.arange(10), counts))
    labels = torch.from_numpy(np.concatenate([train, np.repeat(np.arange(10), test_per_class)]))
    return Raw(torch.zeros(len(labels), 1, 1, dtype=torch.uint8), labels, len(train))


MNIST = raw_of(MNIST_COUNTS, 1000)


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training and 20 test images of noise for each class, as MNIST and as CIFAR-10's binary version."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, per_class in (("train", 120), ("t10k", 20)):
        labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), per_class))
        images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        for stem, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            packed = gzip.compress(header + array.tobytes(), compresslevel=1)
            (folder / f"{part}-{stem}-ubyte.gz").write_bytes(packed)
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for stem in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), 20))
        images = rng.integers(0, 256, (len(labels), 3 * 32 * 32), dtype=np.uint8)
        (folder / f"{stem}.bin").write_bytes(np.hstack([labels[:, None], images]).tobytes())
    return root


SMALL = {"clients": 10, "min_samples": 20, "max_samples": 300}


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("label_sets", ["cyclic", "random"])
def test_the_partition_is_the_papers(label_sets: str, seed: int) -> None:
    scenario = MNIST3Class.model_validate({"label_sets": label_sets})
    shares = scenario.shares(seed, MNIST)
    assert len(shares) == 40
    everything = np.concatenate([part for share in shares for part in (share.train, share.validation, share.test)])
    # Every image of the training part is one client's, and the official test part is nobody's.
    assert sorted(everything.tolist()) == list(range(MNIST.train_size))
    for share, own in zip(shares, scenario.own_classes(seed), strict=True):
        mine = np.concatenate([share.train, share.validation, share.test])
        assert 400 <= len(mine) <= 5000
        assert set(MNIST.labels[torch.from_numpy(mine)].tolist()) <= set(own)
        assert len(set(own)) == 3
        # floor(0.75 n) and the rest (Tang 2025 §3.8.1), and a tenth of the first held out.
        cut = 3 * len(mine) // 4
        assert len(share.train) + len(share.validation) == cut
        assert len(share.validation) == round(cut / 10)


def test_cyclic_label_sets_are_ten_contexts_of_four_clients() -> None:
    own = MNIST3Class().own_classes(0)
    assert own[:3] == [(0, 1, 2), (1, 2, 3), (2, 3, 4)]
    assert own[8] == (8, 9, 0)
    assert set(Counter(own).values()) == {4}
    assert len(set(own)) == 10
    assert Counter(label for classes in own for label in classes) == dict.fromkeys(range(10), 12)
    assert own == MNIST3Class().own_classes(1)


def test_random_label_sets_depend_on_the_seed() -> None:
    scenario = MNIST3Class(label_sets="random")
    assert scenario.own_classes(0) == scenario.own_classes(0)
    assert scenario.own_classes(0) != scenario.own_classes(1)


def test_the_three_parts_have_the_same_distribution() -> None:
    for share in MNIST3Class().shares(0, MNIST):
        part_of = {}
        for name, index in (("train", share.train), ("test", share.test)):
            part_of[name] = np.bincount(MNIST.labels[torch.from_numpy(index)], minlength=10) / len(index)
        # Each share of a class differs by four standard errors of the smaller part at most.
        assert np.abs(part_of["train"] - part_of["test"]).max() < 4 * 0.5 / np.sqrt(len(share.test))


def test_sizes_differ_much_between_clients() -> None:
    sizes = [len(share.train) for share in MNIST3Class().shares(0, MNIST)]
    assert max(sizes) > 4 * min(sizes)


def test_cifar_takes_the_official_test_part_too() -> None:
    raw = raw_of([5000] * 10, 1000)
    shares = CIFAR3Class().shares(0, raw)
    used = np.concatenate([part for own in shares for part in (own.train, own.validation, own.test)])
    assert sorted(used.tolist()) == list(range(60_000))


@pytest.mark.parametrize("seed", range(3))
def test_the_subset_has_its_bounds_in_proportion(seed: int) -> None:
    shares = CIFAR3ClassSubset().shares(seed, raw_of([2000] * 10, 500))
    sizes = [len(own.train) + len(own.validation) + len(own.test) for own in shares]
    assert sum(sizes) == 25_000
    assert 167 <= min(sizes) <= max(sizes) <= 2083


@pytest.mark.parametrize("seed", range(6))
def test_the_bundled_digits_are_all_shared_out(seed: int) -> None:
    shares = Digits3Class().shares(seed, load("digits"))
    used = np.concatenate([part for own in shares for part in (own.train, own.validation, own.test)])
    assert sorted(used.tolist()) == list(range(1797))
    sizes = [len(own.train) + len(own.validation) + len(own.test) for own in shares]
    assert 12 <= min(sizes) <= max(sizes) <= 150
    assert all(len(own.validation) >= 1 for own in shares)


def test_the_bundled_digits_have_mean_zero_and_deviation_one() -> None:
    scenario = Digits3Class()
    clients = [splits(scenario.client_data(client, 0, None)) for client in range(scenario.clients)]
    pixels = torch.cat([part.x for parts in clients for part in parts.values()])
    assert pixels.shape == (1797, 1, 8, 8)
    assert pixels.mean().abs() < 1e-3
    assert abs(pixels.std() - 1) < 1e-3


def test_clients_of_a_context_see_the_digits_from_the_same_side() -> None:
    turned, straight = DigitsContexts(), DigitsContexts(contexts=1)
    for client in (0, 3, 7, 38):
        own, plain = (splits(scenario.client_data(client, 0, None)) for scenario in (turned, straight))
        for name, part in own.items():
            assert torch.equal(part.y, plain[name].y)
            assert torch.equal(part.x, torch.rot90(plain[name].x, client % 4, dims=(2, 3)))
    # All digits at every client, a few of each.
    sizes = [len(part.train) + len(part.validation) + len(part.test) for part in turned.shares(0, load("digits"))]
    assert sum(sizes) == 1797
    assert 12 <= min(sizes) <= max(sizes) <= 150
    assert set(splits(turned.client_data(0, 0, None))["train"].y.tolist()) == set(range(10))


def test_too_few_images_are_said_in_one_sentence(miniature: Path) -> None:
    said = r"min_samples = 400 and max_samples = 5000: .*'mnist' has 1200 images here, a mean of 30 for 40 clients"
    with pytest.raises(UserError, match=said):
        MNIST3Class().client_data(0, 0, miniature)


@pytest.mark.parametrize("scenario", [MNIST3Class(**SMALL), CIFAR3Class(**SMALL)], ids=lambda one: one.name)
def test_client_data(scenario: LabelSkew, miniature: Path) -> None:
    raw = load(scenario.dataset, miniature)
    for client, share in enumerate(scenario.shares(0, raw)):
        data = scenario.client_data(client, 0, miniature)
        assert tuple(data.test) == scenario.test_environments == ("own",)
        for split, index in (("train", share.train), ("validation", share.validation), ("own", share.test)):
            examples = splits(data)[split]
            assert (examples.x.dtype, examples.y.dtype) == (torch.float32, torch.int64)
            assert examples.x.shape == (len(index), *scenario.input_shape)
            assert torch.equal(examples.y, raw.labels[torch.from_numpy(index)])
            environment = -1 if split == "own" else 0
            assert torch.equal(examples.environment, torch.full((len(index),), environment))
            pixels = raw.images[torch.from_numpy(index)].reshape(-1, *scenario.input_shape).double() / 255
            for channel, (mean, std) in enumerate(zip(scenario.mean, scenario.std, strict=True)):
                restored = examples.x[:, channel].double() * std + mean
                assert torch.allclose(restored, pixels[:, channel], atol=1e-6)


def test_data_depend_on_the_seed_and_on_nothing_else(miniature: Path) -> None:
    scenario = MNIST3Class(**SMALL)
    before = scenario.client_data(3, 0, miniature).train.x
    all_shares.cache_clear()
    np.random.seed(1)
    assert torch.equal(scenario.client_data(3, 0, miniature).train.x, before)
    other = scenario.client_data(3, 1, miniature).train.x
    assert other.shape != before.shape or not torch.equal(other, before)


def test_the_partition_never_changes() -> None:
    """Every draw is keyed; a change of a key, an order or a library's stream changes this number."""
    digest = hashlib.sha256()
    for share in MNIST3Class().shares(0, MNIST):
        for part in (share.train, share.validation, share.test):
            digest.update(part.tobytes())
    assert digest.hexdigest()[:16] == "6dc2443a62733200"


def test_models_are_the_papers() -> None:
    floats = {}
    for name, preset in PRESETS.items():
        net = network(model_settings(preset.model), preset.input_shape, preset.classes)
        floats[name] = sum(tensor.numel() for tensor in net.initial(0).values())
    assert floats == {
        "digits-3class": 650,
        "digits-contexts": 650,
        "mnist-3class": 7850,
        "mnist-3class-dnn": 101_770,
        "fmnist-3class": 7850,
        "fmnist-3class-dnn": 101_770,
        "cifar10-3class": 52_202,
        "cifar10-3class-subset": 52_202,
    }


def test_the_presets() -> None:
    assert {name: (one.clients, one.rounds, one.participation) for name, one in PRESETS.items()} == {
        "digits-3class": (40, 200, 1.0),
        "digits-contexts": (40, 200, 1.0),
        "mnist-3class": (40, 200, 1.0),
        "mnist-3class-dnn": (40, 200, 1.0),
        "fmnist-3class": (40, 200, 1.0),
        "fmnist-3class-dnn": (40, 200, 1.0),
        "cifar10-3class": (40, 300, 1.0),
        "cifar10-3class-subset": (40, 300, 1.0),
    }
    # There is no shortcut to remove.
    assert not any(isinstance(one, Spurious) for one in PRESETS.values())
    assert not any(f"{name}-oracle" in SCENARIOS for name in PRESETS)


@pytest.mark.parametrize(
    "field", ["classes_per_client=11", "test_fraction=1.0", "validation_fraction=1.0", "concentration=0"]
)
def test_a_setting_out_of_bounds_is_refused(field: str) -> None:
    name, value = field.split("=")
    with pytest.raises(ValidationError, match=name):
        MNIST3Class.model_validate({name: float(value)})


@needs_mnist
@pytest.mark.parametrize("scenario", [MNIST3Class(), FMNIST3Class()], ids=lambda one: one.name)
def test_the_real_images_have_mean_zero_and_deviation_one(scenario: LabelSkew) -> None:
    clients = [splits(scenario.client_data(client, 0, REAL)) for client in range(scenario.clients)]
    pixels = torch.cat([part.x for parts in clients for part in parts.values()])
    assert len(pixels) == 60_000
    assert pixels.mean().abs() < 1e-3
    assert abs(pixels.std() - 1) < 1e-3


@pytest.mark.slow
@pytest.mark.skipif(
    not (REAL / "cifar10").exists(), reason="needs the packed CIFAR-10 in PERENNIAL_DATA or ../shared/data"
)
def test_the_real_subset() -> None:
    scenario = CIFAR3ClassSubset()
    clients = [splits(scenario.client_data(client, 0, REAL)) for client in range(scenario.clients)]
    pixels = torch.cat([part.x for parts in clients for part in parts.values()])
    assert len(pixels) == 25_000
    # The constants are the full set's.
    assert pixels.mean((0, 2, 3)).abs().max() < 0.05
    assert (pixels.std((0, 2, 3)) - 1).abs().max() < 0.05
