"""WILDS: hospitals, identities and reviewers as sites, tested on others."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import PHOTOS, unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import IDENTITIES, Raw
from perennial.common.data.scenario import Partitioned, Scenario, all_shares
from perennial.common.data.texts import BUCKETS, LONGEST_TEXT, text_ids
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.samples import SampleShape
from perennial.common.utils.seeding import numpy_generator

if TYPE_CHECKING:
    from torch import Tensor

TRAINED, TESTED = (0, 3, 4), (1, 2)
"""Hospitals as WILDS counts them: 1 is its `val`, 2 its `test`."""
TRAIN, HELD_OUT = 0, 1
"""WILDS' splits `train` and `id_val`, both of the hospitals that are trained on."""
HELD_OUT_SHARE = 9
"""WILDS has 302,436 patches for training and 33,560 of the same hospitals held out, which is one for nine."""

OF_COMMENTS = {"train": 0, "val": 1, "test": 2}
OF_REVIEWS = {"train": 0, "val": 1, "id_val": 2, "test": 3, "id_test": 4}
"""WILDS' numbers of its splits."""


class Camelyon17(Partitioned):
    """A client is one of the three hospitals that WILDS trains on, which is also its environment.

    It holds out WILDS' own `id_val`. Each patch of the two other hospitals is tested by one of the clients, so the
    pooled accuracy of `hospital-2` is WILDS' test accuracy, where `test_samples` is 0. WILDS may choose the round
    on `hospital-1`; here it is an environment for testing as well.
    """

    title = "Camelyon17-WILDS: tissue with or without a tumour, three hospitals, tested on two others"
    source = "Koh et al. 2021 (WILDS); Bándi et al. 2018"
    dataset = "camelyon17"

    name: Literal["wilds:camelyon17"] = "wilds:camelyon17"
    clients: Literal[3] = knob(3, "the hospitals of WILDS' training split", symbol="N")
    side: int = knob(96, "height and width of a patch in pixels", ge=16, le=96)
    samples: int = knob(
        5000, "most patches that a hospital trains on, drawn at random; 0: all, which are 33 GB together", ge=0,
    )  # fmt: skip
    test_samples: int = knob(5000, "most patches of each test hospital; 0: all, which are 13 GB together", ge=0)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, self.side, self.side)

    @property
    def classes(self) -> int:
        return 2

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("normal", "tumor")

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "resnet18"}

    @property
    def standardised(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return PHOTOS

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"hospital-{number}" for number in TRAINED)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return tuple(f"hospital-{number}" for number in TESTED)

    @cached_property
    def client_ids(self) -> tuple[str, ...]:
        return self.train_environments

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        import numpy as np

        hospital, split = raw.tags["hospital"].numpy(), raw.tags["split"].numpy()
        rng = numpy_generator(seed, "partition", "pictures")
        tests = []
        for number in TESTED:
            own = rng.permutation(np.flatnonzero(hospital == number))[: self.test_samples or None]
            tests.append(np.array_split(own, len(TRAINED)))
        shares = []
        for place, number in enumerate(TRAINED):
            parts = [
                rng.permutation(np.flatnonzero((hospital == number) & (split == kind)))
                for kind in (TRAIN, HELD_OUT)
            ]
            if not len(parts[0]):
                raise UserError(f"data set {self.dataset!r} has no training patches of hospital {number}")
            most = self.samples or None
            held_out = -(-self.samples // HELD_OUT_SHARE) or None
            test = np.concatenate([own[place] for own in tests])
            shares.append(Share(parts[0][:most], parts[1][:held_out], test, (place,)))
        return shares

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root).at(self.side)
        share = all_shares(self, seed, root)[client]

        def examples(index: torch.Tensor, environment: int) -> Examples:
            images = self.prepare(unit_range(raw.images[index]))
            return Examples(images, raw.labels[index], torch.full((len(index),), environment))

        train, validation, test = map(torch.from_numpy, (share.train, share.validation, share.test))
        where = raw.tags["hospital"][test]
        tests = {
            name: examples(test[where == number], -1)
            for name, number in zip(self.test_environments, TESTED, strict=True)
        }
        return ClientData(examples(train, client), examples(validation, client), tests)


class Texts(Partitioned, ABC):
    """Texts of WILDS, whose words are hashed. A client's number is that of its training environment."""

    length: int = knob(300, "words of a text that count, from its beginning", ge=1, le=LONGEST_TEXT)

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "embedding-bag"}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return SampleShape((self.length,), BUCKETS, padded=True)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def client_ids(self) -> tuple[str, ...]:
        return self.train_environments

    @abstractmethod
    def inside(self, raw: Raw) -> "dict[str, Tensor]":
        """By test environment, which of all samples (n,) are of it."""

    def ids(self, texts: Sequence[str]) -> "Tensor":
        """Texts as a model takes them."""
        return text_ids(texts, self.length, BUCKETS)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root)
        share = all_shares(self, seed, root)[client]

        def examples(index: torch.Tensor, environment: int) -> Examples:
            ids = self.ids([raw.texts[number] for number in index.tolist()])
            return Examples(ids, raw.labels[index], torch.full((len(index),), environment))

        train, validation, test = map(torch.from_numpy, (share.train, share.validation, share.test))
        tests = {name: test[own[test]] for name, own in self.inside(raw).items()}
        return ClientData(
            examples(train, client),
            examples(validation, client),
            {name: examples(index, -1) for name, index in tests.items() if len(index)},
        )


class CivilComments(Texts):
    """A client has comments in which one identity is mentioned, which is its environment.

    WILDS has no clients, so this partition is ours: a comment with several identities is one client's of these, at
    random, and one without any is any client's. Test comments are dealt at random, and a test environment has all
    that mention its identity, or none. WILDS' worst group is the worst class of the worst of the first eight.
    """

    title = "CivilComments-WILDS: comments that are toxic or not, a client for each identity that they mention"
    source = "Koh et al. 2021 (WILDS); Borkan et al. 2019"
    dataset = "civilcomments"

    name: Literal["wilds:civilcomments"] = "wilds:civilcomments"
    clients: Literal[8] = knob(8, "the identities", symbol="N")
    samples: int = knob(5000, "most comments that a client trains on, drawn at random; 0: all", ge=0)
    test_samples: int = knob(2000, "most comments that a client tests; 0: all, about 16,700", ge=0)

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("civil", "toxic")

    @property
    def train_environments(self) -> tuple[str, ...]:
        return IDENTITIES

    @property
    def test_environments(self) -> tuple[str, ...]:
        return (*IDENTITIES, "none")

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        import numpy as np

        rng, split = numpy_generator(seed, "partition", "texts"), raw.tags["split"].numpy()
        identities = np.stack([raw.tags[name].numpy() == 1 for name in IDENTITIES], axis=1)
        may_have = identities | ~identities.any(axis=1, keepdims=True)
        client = (rng.random(may_have.shape) * may_have).argmax(axis=1)
        tests = np.array_split(rng.permutation(np.flatnonzero(split == OF_COMMENTS["test"])), self.clients)
        shares = []
        for place, name in enumerate(IDENTITIES):
            train, held_out = (
                rng.permutation(np.flatnonzero((client == place) & (split == OF_COMMENTS[part])))
                for part in ("train", "val")
            )
            if not len(train):
                raise UserError(f"data set {self.dataset!r} has no training comments for client {name}")
            most, test = self.samples or None, tests[place][: self.test_samples or None]
            shares.append(
                Share(train[:most], held_out[: -(-self.samples // HELD_OUT_SHARE) or None], test, (place,))
            )
        return shares

    def inside(self, raw: Raw) -> "dict[str, Tensor]":
        import torch

        mentioned = {name: raw.tags[name] == 1 for name in IDENTITIES}
        return {**mentioned, "none": ~torch.stack(list(mentioned.values())).any(dim=0)}


class Amazon(Texts):
    """A client is a reviewer of WILDS' training split, which is also its environment. It holds out `id_val`.

    The test environments are the reviewer's own later reviews (`id_test`, which half of them have), and those of
    others, WILDS' `val` and `test`, each of whom one client tests.
    """

    title = "Amazon-WILDS: stars of reviews, a client for each reviewer, tested on other reviewers"
    source = "Koh et al. 2021 (WILDS); Ni et al. 2019"
    dataset = "amazon"

    name: Literal["wilds:amazon"] = "wilds:amazon"
    clients: int = knob(100, "reviewers that take part, the first of WILDS' 1,252", symbol="N", ge=2, le=1252)
    test_reviewers: int = knob(200, "most other reviewers of each test environment; 0: all 1,334 of each", ge=0)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(f"{stars} star{'s' * (stars > 1)}" for stars in range(1, 6))

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"reviewer-{number}" for number in range(self.clients))

    @property
    def test_environments(self) -> tuple[str, ...]:
        return ("own", "val", "test")

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        import numpy as np

        rng = numpy_generator(seed, "partition", "texts")
        split, user = raw.tags["split"].numpy(), raw.tags["user"].numpy()
        others = []
        for name in ("val", "test"):
            reviewers = rng.permutation(np.unique(user[split == OF_REVIEWS[name]]))[: self.test_reviewers or None]
            parts = np.array_split(reviewers, self.clients)
            others.append([(split == OF_REVIEWS[name]) & np.isin(user, own) for own in parts])
        shares = []
        for place in range(self.clients):
            train, held_out = (
                np.flatnonzero((user == place) & (split == OF_REVIEWS[part])) for part in ("train", "id_val")
            )
            if not len(train):
                raise UserError(f"data set {self.dataset!r} has no training reviews of reviewer {place}")
            own = (user == place) & (split == OF_REVIEWS["id_test"])
            test = np.flatnonzero(own | others[0][place] | others[1][place])
            shares.append(Share(rng.permutation(train), held_out, test, (place,)))
        return shares

    def inside(self, raw: Raw) -> "dict[str, Tensor]":
        parts = {"own": "id_test", "val": "val", "test": "test"}
        return {name: raw.tags["split"] == OF_REVIEWS[part] for name, part in parts.items()}


PRESETS: dict[str, Scenario] = {
    "wilds:camelyon17": Camelyon17(),
    "wilds:civilcomments": CivilComments(),
    "wilds:amazon": Amazon(),
}
