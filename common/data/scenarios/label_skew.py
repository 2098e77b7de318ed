"""Ten-class tasks whose clients have three classes each, and tests on a client's own distribution."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import rotate_quarter, unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Indices, Share, dirichlet
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Partitioned, Scenario, all_shares
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator

DRAWS = 500
"""Partitions to try. With CGPFL's numbers one in four fits."""


class LabelSkew(Partitioned):
    """CGPFL's recipe: few classes per client, very different amounts, and no shift between training and test.

    Each class is shared out to the clients that have it in Dirichlet proportions, all of it anew until every
    client's total is within bounds: independent draws of sizes between the bounds would need more images than
    there are. A quarter of a client's images are its test data. Held-out data are a part of its other three
    quarters, so it trains on fewer images than the paper's clients do.
    """

    source = "CGPFL, Tang 2025 §3.8.1"
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    """Mean and standard deviation of each channel over the published training part, for images in [0, 1]."""
    merged: ClassVar[bool] = False
    """Whether the official test part is shared out as well, or left unused."""

    clients: int = knob(40, "number of clients", symbol="N", source="Tang 2025 §3.8.1", ge=1, le=10_000)
    classes_per_client: int = knob(3, "classes of a client", source="Tang 2025 §3.8.1", ge=1, le=10)
    label_sets: Literal["cyclic", "random"] = knob(
        "cyclic",
        "client u has the classes u, u+1, … modulo 10, or classes at random",
        source="after pFedMe's public code",
    )
    concentration: float = knob(
        1.0,
        "of the Dirichlet distribution that a class is shared out with",
        source="ours; not given in Tang 2025",
        gt=0,
    )
    min_samples: int = knob(400, "images of a client, at least", source="Tang 2025 §3.8.1", ge=0)
    max_samples: int = knob(5000, "images of a client, at most", source="Tang 2025 §3.8.1", ge=1)
    test_fraction: float = knob(
        0.25, "part of a client's images for testing", source="Tang 2025 §3.8.1", gt=0, lt=1
    )
    validation_fraction: float = knob(
        0.1, "part of a client's other images that is held out for validation", ge=0, lt=1
    )

    @property
    def rounds(self) -> int:
        return 200

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, 28, 28)

    @property
    def classes(self) -> int:
        return 10

    @property
    def train_environments(self) -> tuple[str, ...]:
        return ("all",)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return ("own",)

    def own_classes(self, seed: int) -> list[tuple[int, ...]]:
        """Every client's classes. Clients with equal ones are the latent contexts that CGPFL is to find."""
        if self.label_sets == "cyclic":
            first = range(self.clients)
            return [tuple((u + step) % 10 for step in range(self.classes_per_client)) for u in first]
        rng = numpy_generator(seed, "partition", "classes")
        drawn = [rng.choice(10, self.classes_per_client, replace=False) for _ in range(self.clients)]
        return [tuple(sorted(own.tolist())) for own in drawn]

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        labels = raw.labels.numpy()[: None if self.merged else raw.train_size]
        wanted, rng = self.own_classes(seed), numpy_generator(seed, "partition", "images")
        for _ in range(DRAWS):
            dealt = dirichlet(labels, wanted, self.concentration, rng)
            if all(self.min_samples <= len(own) <= self.max_samples for own in dealt):
                return [self._split(own) for own in dealt]
        raise UserError(
            f"min_samples = {self.min_samples} and max_samples = {self.max_samples}: in each of {DRAWS} draws "
            f"some client had fewer or more; the data set {self.dataset!r} has {len(labels)} images here, "
            f"a mean of {len(labels) // self.clients} for {self.clients} clients"
        )

    def _split(self, own: Indices) -> Share:
        """A client's images, which are in random order, in three."""
        cut = int((1 - self.test_fraction) * len(own))
        held_out = round(self.validation_fraction * cut)
        return Share(own[held_out:cut], own[:held_out], own[cut:])

    @property
    def standardised(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.mean, self.std

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root)
        share = all_shares(self, seed, root)[client]

        def examples(index: Indices, environment: int) -> Examples:
            chosen = torch.from_numpy(index)
            images = unit_range(raw.images[chosen]).view(-1, *self.input_shape)
            labels = raw.labels[chosen]
            return Examples(self.prepare(images), labels, torch.full_like(labels, environment))

        return ClientData(
            examples(share.train, 0), examples(share.validation, 0), {"own": examples(share.test, -1)}
        )


class _Grey(LabelSkew):
    """Those of one colour, which CGPFL runs with a convex and a non-convex model."""

    network: Literal["mlr", "dnn"] = knob(
        "mlr", "multinomial logistic regression, or one hidden layer of 128 units", source="Tang 2025 §3.8.1"
    )

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "logistic"} if self.network == "mlr" else {"name": "mlp", "hidden": (128,)}


class Digits3Class(_Grey):
    """MNIST's recipe in small, from all of scikit-learn's digits, with bounds in proportion."""

    title = "8x8 digits, three digits per client: mnist-3class in small, no download"
    dataset = "digits"
    merged = True
    mean, std = (0.3053,), (0.3760,)

    name: Literal["digits-3class"] = "digits-3class"
    min_samples: int = knob(12, "images of a client, at least", source="Tang 2025 §3.8.1, times 1797/60000", ge=0)
    max_samples: int = knob(150, "images of a client, at most", source="Tang 2025 §3.8.1, times 1797/60000", ge=1)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, 8, 8)


class DigitsContexts(Digits3Class):
    """Clients that have all digits but see them from different sides: the contexts that CGPFL is to find.

    Client u's images are turned by u modulo `contexts` quarter turns, in training and test alike.
    """

    title = "8x8 digits turned by a client's own number of quarter turns, few images per client, no download"
    source = "ours; the turns after IFCA, Ghosh et al. 2020 §6"

    name: Literal["digits-contexts"] = "digits-contexts"  # type: ignore[assignment]
    contexts: Literal[1, 2, 4] = knob(4, "kinds of clients; 1: no image is turned", symbol="K")
    classes_per_client: int = knob(10, "classes of a client", ge=1, le=10)
    concentration: float = knob(10.0, "of the Dirichlet distribution that a class is shared out with", gt=0)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        data = super().client_data(client, seed, data_root)

        def turned(part: Examples) -> Examples:
            return Examples(rotate_quarter(part.x, client % self.contexts), part.y, part.environment)

        test = {name: turned(part) for name, part in data.test.items()}
        return ClientData(turned(data.train), turned(data.validation), test)


class MNIST3Class(_Grey):
    """CGPFL's MNIST."""

    title = "MNIST, three digits per client, 400 to 5,000 images each, tested on the client's own distribution"
    dataset = "mnist"
    mean, std = (0.1307,), (0.3081,)

    name: Literal["mnist-3class"] = "mnist-3class"


class FMNIST3Class(_Grey):
    """CGPFL's Fashion-MNIST."""

    title = "Fashion-MNIST, three classes per client: mnist-3class's recipe on pictures of clothes"
    dataset = "fashion-mnist"
    mean, std = (0.2860,), (0.3530,)

    name: Literal["fmnist-3class"] = "fmnist-3class"


class _CIFAR(LabelSkew):
    """CGPFL's CIFAR-10: training and test part in one."""

    merged = True
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    @property
    def rounds(self) -> int:
        return 300

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, 32, 32)

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "cnn-small"}


class CIFAR3Class(_CIFAR):
    """The full set."""

    title = "CIFAR-10, three classes per client: mnist-3class's recipe on colour pictures"
    dataset = "cifar10"

    name: Literal["cifar10-3class"] = "cifar10-3class"


class CIFAR3ClassSubset(_CIFAR):
    """25,000 of the 60,000 images, with bounds in proportion. Its results differ from the full set's."""

    title = "25,000 images of CIFAR-10, three classes per client, 167 to 2,083 images each"
    dataset = "cifar10-subset"

    name: Literal["cifar10-3class-subset"] = "cifar10-3class-subset"
    min_samples: int = knob(167, "images of a client, at least", source="Tang 2025 §3.8.1, times 25/60", ge=0)
    max_samples: int = knob(2083, "images of a client, at most", source="Tang 2025 §3.8.1, times 25/60", ge=1)


PRESETS: dict[str, Scenario] = {
    "digits-3class": Digits3Class(),
    "digits-contexts": DigitsContexts(),
    "mnist-3class": MNIST3Class(),
    "mnist-3class-dnn": MNIST3Class(network="dnn"),
    "fmnist-3class": FMNIST3Class(),
    "fmnist-3class-dnn": FMNIST3Class(network="dnn"),
    "cifar10-3class": CIFAR3Class(),
    "cifar10-3class-subset": CIFAR3ClassSubset(),
}
