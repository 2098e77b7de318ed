"""Binary tasks whose label a colour gives away."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import (
    binary_label,
    colourise,
    downsample,
    draw_colour,
    flip,
    grey,
    rotate_quarter,
    unit_range,
)
from perennial.common.data.examples import ClientData, Examples, join
from perennial.common.data.partition import Indices, Share, by_environment, by_label, class_pairs, iid
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Agreeing, Partitioned, Probability, all_shares, with_oracle
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator, torch_generator

if TYPE_CHECKING:
    from torch import Tensor


class ColoredScenario(Agreeing, Partitioned):
    """A binary label that a colour gives away, in training more reliably than the shape does.

    The label is the class group, flipped with probability `label_noise`; the flipped label is the target.
    The colour agrees with it with the environment's probability p, and is the channel that holds the image.
    A client's test environments are the same images with the same labels, coloured anew for each p. Under
    `oracle` both channels hold the image, and all else is the same.
    """

    ones: ClassVar[Sequence[int]]
    """The classes with label 1."""
    side: ClassVar[int]
    """Height and width of a sample, after taking every `stride`-th row and column of the raw image."""
    stride: ClassVar[int]

    label_noise: float = knob(
        0.25, "probability that a label is flipped, in training and test alike",
        source="Arjovsky et al. 2019; not given in Tang 2025 and PerInvFL", ge=0, le=1,
    )  # fmt: skip

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (2, self.side, self.side)

    def quarter_turns(self, client: int) -> int:
        """How often a client's images are turned by 90 degrees."""
        return 0

    def noise(self, split: str) -> float:
        """Probability that a label of a split is flipped."""
        return self.label_noise

    def pictures(self, raw: "Tensor") -> "Tensor":
        """Raw images (n, ...) as they are before they get a colour."""
        return downsample(unit_range(raw), self.stride)

    def marked(self, pictures: "Tensor", colour: "Tensor") -> "Tensor":
        """Samples (n, *input_shape) of pictures and colour bits (n,)."""
        return colourise(pictures, colour)

    def unmarked(self, pictures: "Tensor") -> "Tensor":
        """Samples that say nothing about a colour."""
        return grey(pictures)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root)
        share = all_shares(self, seed, root)[client]
        client_id = self.client_ids[client]

        def labelled(split: str, index: Indices) -> "tuple[Tensor, Tensor]":
            chosen = torch.from_numpy(index)
            images = self.pictures(raw.images[chosen])
            clean = binary_label(raw.labels[chosen], self.ones)
            generator = torch_generator(seed, client_id, split, "label-noise")
            return images, flip(clean, self.noise(split), generator)

        def coloured(split: str, images: "Tensor", labels: "Tensor", p: float, environment: int) -> Examples:
            if self.oracle:
                x = self.unmarked(images)
            else:
                generator = torch_generator(seed, client_id, split, "colour", f"p={p}")
                x = self.marked(images, draw_colour(labels, p, generator))
            x = rotate_quarter(x, self.quarter_turns(client))
            return Examples(x, labels, torch.full_like(labels, environment))

        def dealt(split: str, index: Indices) -> Examples:
            """The samples dealt in turn to the client's training environments, each coloured as its own says."""
            images, labels = labelled(split, index)
            turn = torch.arange(len(labels)) % len(share.environments)
            parts = [
                coloured(split, images[turn == place], labels[turn == place], self.train_agreement[own], own)
                for place, own in enumerate(share.environments)
            ]
            return join(parts)[turn.argsort(stable=True).argsort()]  # the samples in their own order again

        images, labels = labelled("test", share.test)
        test = {
            name: coloured("test", images, labels, p, -1)
            for name, p in zip(self.test_environments, self.test_agreement, strict=True)
        }
        return ClientData(dealt("train", share.train), dealt("validation", share.validation), test)


SUBSETS = 8
"""Digit subsets of the thesis; with 80 clients each of them is split over ten."""


class DigitPairs(ColoredScenario):
    """CMNIST's recipe: a client has two of the five classes of each label, and one training environment."""

    source = "FedSDR and FedPIN, Tang 2025 §4.5.2 and §5.6.1"
    ones = range(5, 10)
    test_agreement = tuple(tenths / 10 for tenths in range(11))

    train_agreement: tuple[Probability, ...] = knob(
        (0.9, 0.8), "P(colour agrees with the label) in each training environment; a client has one of them",
        symbol="p^e", source="Tang 2025 §4.5.2", min_length=1, max_length=SUBSETS,
    )  # fmt: skip
    train_per_class: int
    test_per_class: int
    validation_fraction: float = knob(
        0.1, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        labels, cut, each = raw.labels.numpy(), raw.train_size, max(1, self.clients // SUBSETS)
        pairs = numpy_generator(seed, "partition", "classes")
        low, high = class_pairs(range(5), pairs), class_pairs(range(5, 10), pairs)
        classes = [zero + one for zero, one in zip(low, high, strict=True)]
        deal = numpy_generator(seed, "partition", "environments")
        environments = by_environment(SUBSETS, len(self.train_agreement), deal)

        def split(part: str, part_labels: Indices, count: int) -> list[Indices]:
            rng = numpy_generator(seed, "partition", part)
            subsets = by_label(part_labels, classes, count, rng)
            return [subset[piece] for subset in subsets for piece in iid(len(subset), each, rng)]

        shares = []
        train = split("train", labels[:cut], self.train_per_class)
        test = split("test", labels[cut:], self.test_per_class)
        for client, (own, own_test) in enumerate(zip(train, test, strict=True)):
            held_out = round(self.validation_fraction * len(own))
            environment = environments[client // each]
            shares.append(Share(own[held_out:], own[:held_out], own_test + cut, (environment,)))
        return shares


class SmallPairs(DigitPairs):
    """The ones for a small network and few rounds, with the sizes of scikit-learn's digits."""

    clients: int = knob(
        8, "number of clients; fewer than 8 take the first of the 8 digit subsets", symbol="N", ge=1, le=SUBSETS
    )
    train_per_class: int = knob(30, "training and validation images of each of a client's digits", ge=1)
    test_per_class: int = knob(13, "test images of each of a client's digits", ge=1)

    @property
    def rounds(self) -> int:
        return 60

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (64,)}


class ColoredDigits(SmallPairs):
    """CMNIST in small, from scikit-learn's digits."""

    title = "coloured 8x8 digits, two digits per label and client: CMNIST in small, no download"
    dataset = "digits"
    side, stride = 8, 1

    name: Literal["colored-digits"] = "colored-digits"


class _ThesisPairs(DigitPairs):
    """The two full-sized ones."""

    side, stride = 14, 2

    clients: Literal[8, 80] = knob(
        8, "number of clients; with 80, each of the 8 digit subsets is split over ten", symbol="N",
        source="Tang 2025 §4.5.2",
    )  # fmt: skip
    train_per_class: int = knob(
        1100, "training and validation images of each class of a digit subset",
        source="ours; not given in Tang 2025", ge=1,
    )  # fmt: skip
    test_per_class: int = knob(
        200, "test images of each class of a digit subset", source="ours; not given in Tang 2025", ge=1
    )

    @property
    def rounds(self) -> int:
        return 600

    @property
    def participation(self) -> float:
        return 0.1 if self.clients == 80 else 1.0

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (390,)}


class CMNIST(_ThesisPairs):
    """Colored-MNIST of the thesis."""

    title = "Colored-MNIST: p = 0.9 or 0.8 per client, two digits per label and client, tested at p = 0 to 1"
    dataset = "mnist"

    name: Literal["cmnist"] = "cmnist"


class CFMNIST(_ThesisPairs):
    """Colored Fashion-MNIST of the thesis."""

    title = "Colored Fashion-MNIST: CMNIST's recipe on pictures of clothes"
    dataset = "fashion-mnist"

    name: Literal["cfmnist"] = "cfmnist"


ONE_EACH: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (3,))
TWO_EACH: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3), (0, 3), (1, 2))
"""The environments of the rotated clients, with one each and with two, of which one is of the higher two."""


class _Rotated(ColoredScenario):
    """PerInvFL's recipe: four clients, each with a rotation of its own, and one or two environments.

    The training data are the first images of the MNIST training file and the test data its last. The paper
    holds nothing out; its unused official test file gives the validation data, in the client's training
    environment, so that the training data stay the paper's 12,500.
    """

    source = "PerInvFL §5.1, A.4"
    ones = range(5)
    side, stride = 14, 2
    test_agreement = (0.1, 0.2, 0.3, 0.4, 0.5)

    clients: Literal[4] = knob(4, "number of clients", symbol="N")
    train_agreement: tuple[Probability, Probability, Probability, Probability] = knob(
        (0.95, 0.9, 0.85, 0.8), "P(colour agrees with the label) in each client's training environment",
        symbol="p^e", source="PerInvFL Tab 6",
    )  # fmt: skip
    environments_per_client: Literal[1, 2] = knob(
        1, "1: client i has environment i; 2: clients have (0, 2), (1, 3), (0, 3), (1, 2)", symbol="K_i",
        source="PerInvFL Tab 6; 2: ours",
    )  # fmt: skip
    train_samples: int = knob(12_500, "training images of a client", source="PerInvFL A.4", ge=1)
    test_samples: int = knob(
        2_500, "test images of a client, and as many for validation", source="PerInvFL A.4", ge=1
    )

    @property
    def rounds(self) -> int:
        return 201

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (390, 390), "init": "xavier"}

    def quarter_turns(self, client: int) -> int:
        return client

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        train, test, cut = self.clients * self.train_samples, self.clients * self.test_samples, raw.train_size
        if train + test > cut or test > len(raw) - cut:
            raise UserError(
                f"train_samples = {self.train_samples} and test_samples = {self.test_samples} for "
                f"{self.clients} clients are more than {self.dataset!r} has "
                f"({cut} training and {len(raw) - cut} test images)"
            )

        def deal(part: str, first: int, count: int) -> list[Indices]:
            return [first + own for own in iid(count, self.clients, numpy_generator(seed, "partition", part))]

        parts = deal("train", 0, train), deal("validation", cut, test), deal("test", cut - test, test)
        environments = ONE_EACH if self.environments_per_client == 1 else TWO_EACH
        return [Share(*own, held) for own, held in zip(zip(*parts, strict=True), environments, strict=True)]


class RCMNIST(_Rotated):
    """Rotated Coloured MNIST of PerInvFL."""

    title = "Rotated Colored-MNIST: p = 0.95 to 0.8 and quarter turns by client, tested at p = 0.1 to 0.5"
    dataset = "mnist"

    name: Literal["rc-mnist"] = "rc-mnist"


class RCFMNIST(_Rotated):
    """Rotated Coloured Fashion-MNIST of PerInvFL."""

    title = "Rotated Colored Fashion-MNIST: RC-MNIST's recipe on pictures of clothes"
    dataset = "fashion-mnist"

    name: Literal["rc-fmnist"] = "rc-fmnist"


class RCDigits(_Rotated):
    """RC-MNIST in small, from scikit-learn's digits; all 1,240 images of our training part are used."""

    title = "Rotated coloured 8x8 digits: RC-MNIST in small, no download"
    dataset = "digits"
    side, stride = 8, 1

    name: Literal["rc-digits"] = "rc-digits"
    train_samples: int = knob(230, "training images of a client", ge=1)
    test_samples: int = knob(80, "test images of a client, and as many for validation", ge=1)

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (64, 64), "init": "xavier"}


TWO_LEVELS = (0.95, 0.9, 0.7, 0.65)
"""With `TWO_EACH`: clients with p = .95 and .70, .90 and .65, .95 and .65, .90 and .70."""

PRESETS = with_oracle(
    {
        "colored-digits": ColoredDigits(),
        "cmnist": CMNIST(),
        "cmnist-80": CMNIST(clients=80),
        "cfmnist": CFMNIST(),
        "cfmnist-80": CFMNIST(clients=80),
        "rc-digits": RCDigits(),
        "rc-digits-2env": RCDigits(train_agreement=TWO_LEVELS, environments_per_client=2),
        "rc-mnist": RCMNIST(),
        "rc-mnist-2env": RCMNIST(train_agreement=TWO_LEVELS, environments_per_client=2),
        "rc-fmnist": RCFMNIST(),
        "rc-fmnist-2env": RCFMNIST(train_agreement=TWO_LEVELS, environments_per_client=2),
    }
)
