"""FedILC's picture tasks: silos whose colours or angles differ, and a test set that has neither."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import rotate, unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Indices, Share
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Partitioned, Probability, Scenario, all_shares, with_oracle
from perennial.common.data.scenarios.colored import ColoredScenario
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator, torch_generator

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def cut(raw: Raw, images: int, training: float, outside: float, rng: "np.random.Generator") -> tuple[Indices, ...]:
    """The first `images` of the training file in three: to train, held out, and the last ones to test.

    `training` and `outside` are the parts of the first and the last. The first two are one pool, shuffled. Raises
    `UserError` where there are not so many images.
    """
    import numpy as np

    if images > raw.train_size:
        raise UserError(f"scenario.images: {images} is too many; the training file has {raw.train_size} images")
    ends = round(training * images), images - round(outside * images)
    mixed = rng.permutation(ends[1])
    return mixed[: ends[0]], mixed[ends[0] :], np.arange(ends[1], images)


class ColorMNIST(ColoredScenario):
    """FedILC's Color-MNIST: the colour misleads in three silos of five, in one almost as often as outside.

    Labels are clean in the silos and flipped with probability `label_noise` outside. The last 10,000 images of the
    training file are for testing; they are dealt to the silos, so pooled accuracy and areas are those on all.
    """

    title = "Color-MNIST of FedILC: five silos with p = 0.85 to 0.25, tested at p = 0.1"
    source = "FedILC §5.1.1"
    dataset = "mnist"
    ones = range(5)
    side, stride = 14, 2
    test_agreement = (0.1,)

    name: Literal["color-mnist-ilc"] = "color-mnist-ilc"
    clients: Literal[5] = knob(5, "number of clients", symbol="E")
    train_agreement: tuple[Probability, Probability, Probability, Probability, Probability] = knob(
        (0.85, 0.7, 0.55, 0.4, 0.25), "P(colour agrees with the label) in each silo", symbol="1 − p_color",
        source="FedILC §5.1.1",
    )  # fmt: skip
    label_noise: float = knob(
        0.15, "probability that a test label is flipped; those of the silos are clean", symbol="p_label",
        source="FedILC §5.1.1; 0 in the silos: authors' code", ge=0, le=1,
    )  # fmt: skip
    images: int = knob(
        60_000, "how many images of the training file are used: 4/6 to train, 1/6 held out, 1/6 to test",
        source="FedILC §5.1.1", ge=60, le=60_000,
    )  # fmt: skip

    @property
    def rounds(self) -> int:
        return 301

    @property
    def ranking_batch(self) -> int:
        return 32

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (390, 390), "init": "xavier", "one_logit": True}

    def noise(self, split: str) -> float:
        return self.label_noise if split == "test" else 0.0

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        parts = cut(raw, self.images, 4 / 6, 1 / 6, numpy_generator(seed, "partition", "images"))
        dealt = [[part[number :: self.clients] for part in parts] for number in range(self.clients)]
        return [Share(train, held, test, (number,)) for number, (train, held, test) in enumerate(dealt)]


class ColorDigits(ColorMNIST):
    """Color-MNIST in small, from scikit-learn's digits; they are one file, whose last images are for testing."""

    title = "Color-MNIST of FedILC in small: coloured 8x8 digits in five silos, no download"
    dataset = "digits"
    side, stride = 8, 1

    name: Literal["color-digits-ilc"] = "color-digits-ilc"  # type: ignore[assignment]
    images: int = knob(
        1797, "how many of the images are used: 4/6 to train, 1/6 held out, 1/6 to test", ge=60, le=1797
    )

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (64, 64), "init": "xavier", "one_logit": True}

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        return super().shares(seed, replace(raw, train_size=len(raw)))


ANGLES = ((10, 25, 40), (60, 75, 90), (-10, -40, -90))
"""Of each silo's environments, in degrees, counter-clockwise."""
FLAT = tuple(angle for own in ANGLES for angle in own)


class _RotatedCIFAR10(Partitioned):
    """FedILC's Rotated-CIFAR10: three silos with three angles each, tested on pictures at angles of their own.

    Every second row and column is dropped, then the picture is turned. The test set is a fifth of the training
    file, each picture turned by an angle of its own, up to 90° either way, and is dealt to the silos. With "silos"
    as `tested`, the test environments are the held-out pictures of the nine ones, as in the paper's tables 3, 5.
    """

    source = "FedILC §5.1.2"

    clients: Literal[3] = knob(3, "number of clients", symbol="E")
    side: Literal[16, 32] = knob(16, "height and width of a picture", source="authors' code; 32 in the paper")
    tested: Literal["ood", "silos"] = knob("ood", "the test environments: unseen angles, or the silos' own nine")
    images: int

    @property
    def rounds(self) -> int:
        return 301

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "cnn-groupnorm"}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, self.side, self.side)

    @property
    def classes(self) -> int:
        return 10

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"{angle}°" for angle in FLAT)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return ("ood",) if self.tested == "ood" else self.train_environments

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        import numpy as np

        *own, test = cut(raw, self.images, 3 / 5, 1 / 5, numpy_generator(seed, "partition", "images"))
        shares = []
        for client in range(self.clients):
            places = tuple(range(3 * client, 3 * client + 3))
            train, held_out = (part[np.isin(np.arange(len(part)) % len(FLAT), places)] for part in own)
            shares.append(Share(train, held_out, test[client :: self.clients], places))
        return shares

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root)
        share, client_id = all_shares(self, seed, root)[client], self.client_ids[client]

        def turned(index: Indices, angles: "Tensor", environments: "Tensor") -> Examples:
            chosen, step = torch.from_numpy(index), 32 // self.side
            images = rotate(unit_range(raw.images[chosen])[:, :, ::step, ::step], angles, "nearest")
            return Examples(images, raw.labels[chosen], environments)

        def dealt(index: Indices) -> Examples:
            """Sample by sample to the silo's environments in turn."""
            environments = torch.tensor(share.environments)[torch.arange(len(index)) % len(share.environments)]
            return turned(index, torch.tensor(FLAT)[environments].float(), environments)

        train, held_out = dealt(share.train), dealt(share.validation)
        if self.tested == "silos":
            test = {
                self.train_environments[own]: held_out[held_out.environment == own] for own in share.environments
            }
        else:
            draw = torch.rand(len(share.test), generator=torch_generator(seed, client_id, "test", "angle"))
            test = {"ood": turned(share.test, 180 * draw - 90, torch.full((len(draw),), -1))}
        return ClientData(train, held_out, test)


class RotatedCIFAR10(_RotatedCIFAR10):
    """On the whole training file."""

    title = "CIFAR-10 turned by nine angles in three silos, tested on angles between -90 and 90 degrees"
    dataset = "cifar10"

    name: Literal["rotated-cifar10"] = "rotated-cifar10"
    images: int = knob(
        50_000, "how many images of the training file are used: 3/5 to train, 1/5 held out, 1/5 to test",
        source="FedILC §5.1.2", ge=90, le=50_000,
    )  # fmt: skip


class RotatedCIFAR10Subset(_RotatedCIFAR10):
    """On the packed part of it, with fewer pictures; its results differ from the whole set's."""

    title = "20,000 pictures of CIFAR-10 turned by nine angles in three silos"
    dataset = "cifar10-subset"

    name: Literal["rotated-cifar10-subset"] = "rotated-cifar10-subset"
    images: int = knob(
        20_000, "how many images of the training file are used: 3/5 to train, 1/5 held out, 1/5 to test",
        source="FedILC §5.1.2, as many as there are", ge=90, le=20_000,
    )  # fmt: skip


PRESETS: dict[str, Scenario] = {
    **with_oracle({"color-digits-ilc": ColorDigits(), "color-mnist-ilc": ColorMNIST()}),
    "rotated-cifar10": RotatedCIFAR10(),
    "rotated-cifar10-silos": RotatedCIFAR10(tested="silos"),
    "rotated-cifar10-subset": RotatedCIFAR10Subset(),
    "rotated-cifar10-subset-silos": RotatedCIFAR10Subset(tested="silos"),
}
