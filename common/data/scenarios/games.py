"""FL Games' tasks: two or more clients that differ in nothing but how often a shortcut agrees with the label."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from perennial.common.data.environments import colourise, grey, unit_range
from perennial.common.data.partition import Indices, Share, iid
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Probability, with_oracle
from perennial.common.data.scenarios.colored import ColoredScenario
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator

if TYPE_CHECKING:
    from torch import Tensor
PATCH = 5
"""Pixels of a black patch along each side."""


class Game(ColoredScenario):
    """All training images are dealt to the clients at random, likewise all test images.

    The test images' shortcut is turned round: it agrees with the label in one of ten cases.
    """

    source = "FL Games §5.1, §5.3.1, after IRM Games' code"
    used: ClassVar[Collection[int]] = range(10)
    """The classes that are shown at all."""
    stride = 1
    test_agreement = (0.1,)

    clients: int = knob(2, "number of clients, each with an environment of its own", symbol="m", ge=1, le=100)
    train_agreement: tuple[Probability, ...] = knob(
        (0.8, 0.9), "P(the shortcut agrees with the label) at each client", symbol="1 − p_k",
        source="IRM Games' code",
    )  # fmt: skip
    train_samples: int = knob(
        0, "training images that are shared out, those held out included; 0: all there are", ge=0
    )
    validation_fraction: float = knob(
        0.05, "part of a client's training images that is held out for validation", ge=0, lt=1
    )

    @model_validator(mode="after")
    def _one_for_each(self) -> "Game":
        if len(self.train_agreement) != self.clients:
            raise ValueError(
                f"train_agreement has {len(self.train_agreement)} values for {self.clients} clients; "
                "give one for each"
            )
        return self

    @property
    def rounds(self) -> int:
        return 600

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": (390, 390), "activation": "elu", "init": "xavier", "head_layers": 1}

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        import numpy as np

        shown = np.flatnonzero(np.isin(raw.labels.numpy(), list(self.used)))
        train, test = shown[shown < raw.train_size], shown[shown >= raw.train_size]
        if self.train_samples > len(train):
            raise UserError(
                f"train_samples = {self.train_samples}, but {self.dataset!r} has {len(train)} training images"
            )

        def deal(part: str, pool: Indices, count: int) -> list[Indices]:
            rng = numpy_generator(seed, "partition", part)
            chosen = rng.permutation(pool)[: count or None]
            return [chosen[own] for own in iid(len(chosen), self.clients, rng)]

        shares = []
        for client, (own, own_test) in enumerate(
            zip(deal("train", train, self.train_samples), deal("test", test, 0), strict=True)
        ):
            held_out = round(self.validation_fraction * len(own))
            shares.append(Share(own[held_out:], own[:held_out], own_test, (client,)))
        return shares


class ColoredDigitsGames(Game):
    """The game on scikit-learn's digits, in their shades of grey."""

    title = "Colored MNIST of FL Games in small: 8x8 digits, 2 clients with p = 0.8 and 0.9, no download"
    dataset = "digits"
    ones = range(5, 10)
    side = 8

    name: Literal["colored-digits-games"] = "colored-digits-games"

    @property
    def model(self) -> dict[str, Any]:
        return {**super().model, "hidden": (64, 64)}


class CMNISTGames(Game):
    """Colored MNIST as IRM Games draws it: 28x28 pixels of which each is ink or not."""

    title = "Colored MNIST of FL Games: 2 clients with p = 0.8 and 0.9, tested at p = 0.1"
    dataset = "mnist"
    ones = range(5, 10)
    side = 28

    name: Literal["cmnist-games"] = "cmnist-games"

    def pictures(self, raw: "Tensor") -> "Tensor":
        return (raw > 0).float()


class CFMNISTGames(Game):
    """Colored Fashion-MNIST as IRM Games draws it: footwear or not, without bags."""

    title = "Colored Fashion-MNIST of FL Games: footwear or not, 2 clients with p = 0.8 and 0.9, tested at p = 0.1"
    dataset = "fashion-mnist"
    used = frozenset(range(10)) - {8}
    ones = (5, 7, 9)
    side = 28

    name: Literal["cfmnist-games"] = "cfmnist-games"
    dim: Literal["both", "own"] = knob(
        "both", "pixels of at most 0.5 are in both channels, as in IRM Games' code, or only in the colour's own",
        source="IRM Games' code",
    )  # fmt: skip

    def marked(self, pictures: "Tensor", colour: "Tensor") -> "Tensor":
        bright = pictures > 0.5
        if self.dim == "own":
            return colourise(pictures.masked_fill(bright, 1.0), colour)
        return colourise(bright.float(), colour) + grey(pictures.masked_fill(bright, 0.0))

    def unmarked(self, pictures: "Tensor") -> "Tensor":
        return grey(pictures.masked_fill(pictures > 0.5, 1.0))


class SpuriousCIFAR10(Game):
    """CIFAR-10 in two groups, with a black patch in one of two corners."""

    title = "Spurious CIFAR-10 of FL Games: a black patch whose corner gives the label away, 2 clients"
    dataset = "cifar10"
    ones = range(5, 10)
    side = 32

    name: Literal["spurious-cifar10"] = "spurious-cifar10"

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, self.side, self.side)

    def pictures(self, raw: "Tensor") -> "Tensor":
        return unit_range(raw)

    def marked(self, pictures: "Tensor", colour: "Tensor") -> "Tensor":
        samples = pictures.clone()
        samples[colour == 0, :, :PATCH, :PATCH] = 0
        samples[colour == 1, :, -PATCH:, -PATCH:] = 0
        return samples

    def unmarked(self, pictures: "Tensor") -> "Tensor":
        return pictures


class SpuriousCIFAR10Subset(SpuriousCIFAR10):
    """The same on the packed part of CIFAR-10."""

    title = "Spurious CIFAR-10 on 25,000 of its images"
    dataset = "cifar10-subset"

    name: Literal["spurious-cifar10-subset"] = "spurious-cifar10-subset"  # type: ignore[assignment]


class ColoredDSprites(Game):
    """Squares and ellipses, rendered like those of dSprites."""

    title = "Colored dSprites of FL Games: squares or ellipses, rendered here, 2 clients, tested at p = 0.1"
    dataset = "sprites"
    used = range(2)
    ones = (1,)
    side = 64

    name: Literal["colored-dsprites"] = "colored-dsprites"


def _evenly(clients: int) -> dict[str, Any]:
    """§5.3.1: agreement between 0.7 and 0.9."""
    agreement = [round(0.7 + 0.2 * number / (clients - 1), 3) for number in range(clients)]
    return {"clients": clients, "train_agreement": agreement}


PRESETS = with_oracle(
    {
        "colored-digits-games": ColoredDigitsGames(),
        "cmnist-games": CMNISTGames(),
        "cmnist-games-5": CMNISTGames(**_evenly(5)),
        "cmnist-games-10": CMNISTGames(**_evenly(10)),
        "cfmnist-games": CFMNISTGames(),
        "cfmnist-games-5": CFMNISTGames(**_evenly(5)),
        "cfmnist-games-10": CFMNISTGames(**_evenly(10)),
        "spurious-cifar10": SpuriousCIFAR10(),
        "spurious-cifar10-subset": SpuriousCIFAR10Subset(),
        "colored-dsprites": ColoredDSprites(),
    }
)
