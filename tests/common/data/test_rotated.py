"""Rotation by any angle, and FedIIR's digits at six angles."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from real_data import REAL
from torch import Tensor
from torchvision.transforms.functional import InterpolationMode
from torchvision.transforms.functional import rotate as torchvision_rotate

from perennial.common.data.datasets import load
from perennial.common.data.environments import rotate, rotate_quarter
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import all_shares
from perennial.common.data.scenarios.rotated import ANGLES, PRESETS, RotatedDigits, RotatedMnist
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.seeding import torch_generator


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch_generator(0, "images"))


# --- Rotation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
@pytest.mark.parametrize("shape", [(3, 2, 8, 8), (2, 1, 7, 7)])
def test_by_quarters_it_is_exact(interpolation: str, shape: tuple[int, ...]) -> None:
    x = images(*shape)
    for turns in range(-1, 5):
        found = rotate(x, 90.0 * turns, interpolation)
        torch.testing.assert_close(found, rotate_quarter(x, turns), rtol=0, atol=2e-6)


@settings(max_examples=20)
@given(st.floats(-180, 180))
def test_by_any_angle_it_is_torchvisions(degrees: float) -> None:
    x = images(2, 3, 12, 9)
    found = rotate(x, degrees)
    torch.testing.assert_close(
        found, torchvision_rotate(x, degrees, InterpolationMode.BILINEAR), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("degrees", [15, 30, 45, 60, 75])
def test_on_digits_it_is_pils_to_the_rounding_of_a_byte(degrees: int) -> None:
    """The authors turn PIL images. Digits have an empty border, beyond which the two differ."""
    byte = torch.zeros(28, 28, dtype=torch.uint8)
    byte[6:22, 8:20] = (256 * images(16, 12)).byte()
    theirs = Image.fromarray(byte.numpy()).rotate(degrees, Image.Resampling.BILINEAR)
    ours = 255 * rotate(byte.float()[None, None] / 255, degrees)
    assert (ours[0, 0] - torch.from_numpy(np.array(theirs)).float()).abs().max() < 1.01


def test_each_image_may_have_an_angle_of_its_own() -> None:
    x, degrees = images(4, 1, 9, 9), torch.tensor([0.0, 10.0, -37.0, 90.0])
    together = rotate(x, degrees, "nearest")
    for number, angle in enumerate(degrees.tolist()):
        assert torch.equal(together[number], rotate(x[number : number + 1], angle, "nearest")[0])


def test_what_comes_in_from_outside_is_zero_and_the_argument_stays() -> None:
    x = torch.ones(1, 1, 20, 20)
    found = rotate(x, 45.0)
    assert found[0, 0, 0, 0] == 0
    assert found[0, 0, 10, 10] == 1
    assert torch.equal(x, torch.ones_like(x))
    # A square and the same turned by 45 degrees have an octagon in common.
    assert found.mean().item() == pytest.approx(2 * (2**0.5 - 1), abs=0.01)


# --- Who has which images ------------------------------------------------------------------------------


def published() -> Raw:
    """Labels alone."""
    labels = torch.from_numpy(np.arange(70_000) % 10)
    return Raw(torch.zeros(70_000, 1, 1, dtype=torch.uint8), labels, 60_000)


def parts(share: Share) -> np.ndarray:
    return np.concatenate([share.train, share.validation])


@pytest.mark.parametrize("held_out", ANGLES)
@pytest.mark.parametrize("clients", [5, 50])
def test_angles_have_the_papers_sizes_and_clients(held_out: int, clients: int) -> None:
    """FedIIR App F.1, Alg 2; no digit is in two places."""
    scenario = RotatedMnist(clients=clients, held_out=held_out)
    shares = scenario.shares(0, published())
    sizes = dict(zip(ANGLES, [11_667] * 4 + [11_666] * 2, strict=True))
    assert len(shares) == clients
    assert sum(len(share.test) for share in shares) == sizes[held_out]
    for environment, angle in enumerate(scenario.train_angles):
        own = [share for share in shares if share.environments == (environment,)]
        assert len(own) == clients // 5
        assert sum(len(share.validation) for share in own) == 1166
        assert sum(len(share.train) for share in own) == sizes[angle] - 1166
        if clients == 50:
            # The paper's remainder is one client's; here sizes differ by one at most.
            assert {len(share.train) for share in own} <= {1050, 1051}
    everything = np.concatenate([np.concatenate([parts(share), share.test]) for share in shares])
    assert sorted(everything.tolist()) == list(range(70_000))


def test_the_partition_depends_on_the_seed_alone() -> None:
    def draw(seed: int, **fields: int) -> list[list[int]]:
        return [share.train.tolist() for share in RotatedMnist(**fields).shares(seed, published())]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    fewer = draw(0, images=600)
    assert [len(own) for own in fewer] == [90] * 5


def test_too_many_clients_are_said_in_one_sentence() -> None:
    with pytest.raises(UserError, match="clients: 50 is too many for 120 images, 20 at each angle"):
        RotatedMnist(clients=50, images=120).shares(0, published())


@pytest.mark.parametrize("field", [{"clients": 4}, {"held_out": 20}, {"images": 59}, {"validation_fraction": 1}])
def test_a_setting_out_of_bounds_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(field))):
        RotatedMnist.model_validate(field)


def test_the_presets() -> None:
    sizes = {name: (one.clients, one.rounds, one.participation * one.clients) for name, one in PRESETS.items()}
    assert sizes == {
        "rotated-digits": (50, 100, 5),
        "rotated-mnist": (5, 100, 5),
        "rotated-mnist-50": (50, 100, 5),
    }
    scenario = PRESETS["rotated-mnist"]
    net = network(model_settings(scenario.model), scenario.input_shape, scenario.classes)
    tensors = net.initial(0)
    assert sum(tensors[name].numel() for name in net.parameter_names) == 371_850
    assert sum(tensors[name].numel() for name in net.classifier_names) == 1_290


# --- The data ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST's files with 200 and 40 images of noise in an empty border."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 40)):
        pixels = np.zeros((count, 28, 28), np.uint8)
        pixels[:, 6:22, 6:22] = rng.integers(0, 256, (count, 16, 16), np.uint8)
        labels = rng.integers(0, 10, count, np.uint8)
        for stem, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (folder / f"{part}-{stem}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes(), 1))
    return root


def test_client_data(miniature: Path) -> None:
    scenario, raw = RotatedMnist(clients=10, held_out=30), load("mnist", miniature)
    for client, share in enumerate(scenario.shares(3, raw)):
        data = scenario.client_data(client, 3, miniature)
        assert list(data.test) == ["angle=30"]
        own = scenario.train_angles[client // 2]
        for examples, index, angle, environment in (
            (data.train, share.train, own, client // 2),
            (data.validation, share.validation, own, client // 2),
            (data.test["angle=30"], share.test, 30, -1),
        ):
            chosen = torch.from_numpy(index)
            assert examples.x.shape == (len(index), 1, 28, 28)
            assert (examples.x.dtype, examples.y.dtype) == (torch.float32, torch.int64)
            assert torch.equal(examples.y, raw.labels[chosen])
            assert torch.equal(examples.environment, torch.full_like(examples.y, environment))
            pictures = [Image.fromarray(raw.images[number].numpy()) for number in chosen]
            turned = [np.array(picture.rotate(angle, Image.Resampling.BILINEAR)) for picture in pictures]
            difference = 255 * examples.x[:, 0] - torch.from_numpy(np.stack(turned)).float()
            assert difference.abs().max() < 1.01


def test_client_data_depend_on_the_seed_alone(miniature: Path) -> None:
    scenario = RotatedMnist()
    before = scenario.client_data(2, 0, miniature).train.x
    all_shares.cache_clear()
    torch.manual_seed(1)
    assert torch.equal(scenario.client_data(2, 0, miniature).train.x, before)
    assert not torch.equal(scenario.client_data(2, 1, miniature).train.x, before)


@pytest.mark.parametrize("held_out", [0, 45])
def test_on_the_bundled_digits(held_out: int) -> None:
    """All of them, once each: 300 or 299 at an angle, ten clients for each angle but the one left out."""
    scenario, raw = RotatedDigits(held_out=held_out), load("digits")
    shares = scenario.shares(0, raw)
    everything = np.concatenate([np.concatenate([parts(share), share.test]) for share in shares])
    assert sorted(everything.tolist()) == list(range(1797))
    assert {(len(share.train), len(share.validation)) for share in shares} <= {(27, 3), (27, 2), (26, 3)}
    assert sum(len(share.test) for share in shares) in (299, 300)
    for client in (0, 49):
        data, share = scenario.client_data(client, 0, None), shares[client]
        for examples, index, angle in (
            (data.train, share.train, scenario.train_angles[client // 10]),
            (data.test[f"angle={held_out}"], share.test, held_out),
        ):
            chosen = torch.from_numpy(index)
            assert torch.equal(examples.y, raw.labels[chosen])
            expected = torchvision_rotate(raw.images[chosen].unsqueeze(1), angle, InterpolationMode.BILINEAR)
            torch.testing.assert_close(examples.x, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not (REAL / "MNIST").exists(), reason="needs MNIST in PERENNIAL_DATA or ../shared/data")
def test_on_the_published_digits() -> None:
    data = RotatedMnist(clients=50, held_out=75).client_data(49, 0, REAL)
    assert (len(data.train), len(data.validation)) == (1050, 116)
    assert 0 <= data.train.x.min() < data.train.x.max() <= 1 + 1e-6
    assert set(data.train.y.tolist()) == set(range(10))
