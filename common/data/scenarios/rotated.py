"""Digits turned by one of several angles, of which one is left out of training."""

from pathlib import Path
from typing import Any, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import rotate, unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Indices, Share, by_domain
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Partitioned, Scenario, all_shares
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator

ANGLES = (0, 15, 30, 45, 60, 75)
"""In degrees, counter-clockwise."""


class RotatedMnist(Partitioned):
    """A client has digits at one angle, which is its training environment, and is tested at the one left out.

    Every digit is turned by one angle only. Each training angle is split over as many clients as its size demands;
    the angle left out is dealt to all clients, so the pooled accuracy is that on the whole of it.
    """

    title = "MNIST turned by six angles: one of five angles per client, tested on the angle left out"
    source = "FedIIR §5.1, App F.1"
    dataset = "mnist"

    name: Literal["rotated-mnist"] = "rotated-mnist"
    clients: int = knob(
        5, "number of clients: 5 in the small setting, 50 in the large", symbol="P", source="FedIIR §5.1",
        ge=5, le=500,
    )  # fmt: skip
    held_out: Literal[0, 15, 30, 45, 60, 75] = knob(
        0, "the angle in degrees that is left out and tested on", source="FedIIR §5.1: each in turn"
    )
    images: int = knob(
        70_000, "how many of the images are used, drawn at random", source="FedIIR App F.1", ge=60, le=70_000
    )
    validation_fraction: float = knob(
        0.1,
        "part of the training images that is held out for validation",
        source="FedIIR §5.1",
        ge=0,
        lt=1,
    )

    @property
    def participation(self) -> float:
        return 5 / self.clients

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "convnet"}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, 28, 28)

    @property
    def classes(self) -> int:
        return 10

    @property
    def train_angles(self) -> tuple[int, ...]:
        """In the order of the training environments."""
        return tuple(angle for angle in ANGLES if angle != self.held_out)

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"angle={angle}" for angle in self.train_angles)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return (f"angle={self.held_out}",)

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        rng = numpy_generator(seed, "partition", "images")
        order = rng.permutation(len(raw))[: self.images]
        turned = {angle: order[place :: len(ANGLES)] for place, angle in enumerate(ANGLES)}
        test = turned.pop(self.held_out)
        if len(test) < self.clients:
            raise UserError(
                f"scenario.clients: {self.clients} is too many for {len(order)} images, {len(test)} at each angle"
            )
        return by_domain(list(turned.values()), test, self.clients, self.validation_fraction, rng)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root)
        share = all_shares(self, seed, root)[client]
        (own,) = share.environments

        def examples(index: Indices, angle: int, environment: int) -> Examples:
            chosen = torch.from_numpy(index)
            images = rotate(unit_range(raw.images[chosen]).unsqueeze(1), angle)
            return Examples(images, raw.labels[chosen], torch.full((len(index),), environment))

        angle = self.train_angles[own]
        test = {self.test_environments[0]: examples(share.test, self.held_out, -1)}
        return ClientData(examples(share.train, angle, own), examples(share.validation, angle, own), test)


class RotatedDigits(RotatedMnist):
    """The large setting in small, from scikit-learn's digits."""

    title = "8x8 digits turned by six angles: rotated-mnist-50 in small, no download"
    dataset = "digits"

    name: Literal["rotated-digits"] = "rotated-digits"  # type: ignore[assignment]
    clients: int = knob(50, "number of clients, five of whom are asked in a round", symbol="P", ge=5, le=250)
    images: int = knob(1797, "how many of the images are used, drawn at random", ge=60, le=1797)

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (64,)}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, 8, 8)


PRESETS: dict[str, Scenario] = {
    "rotated-digits": RotatedDigits(),
    "rotated-mnist": RotatedMnist(),
    "rotated-mnist-50": RotatedMnist(clients=50),
}
