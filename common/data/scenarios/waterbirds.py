"""Birds whose background gives away whether they are waterbirds."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import PHOTOS, unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Indices, Share, iid
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Agreeing, Partitioned, Probability, all_shares, with_oracle
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator

KINDS = ("landbirds", "waterbirds")
PLACES = ("land", "water")

ON_WATER = 0.7
"""Part of either kind of birds that is on water under `oracle`; of the published waterbirds 69 % are."""

GROUPS = 4
"""Groups of species that no two clients of different groups share, but for FedSDR's common ones."""


class WaterbirdsScenario(Agreeing, Partitioned):
    """Published pictures, chosen such that a bird's kind and its background agree as often as wanted.

    The papers paste CUB's birds on backgrounds anew. Only the result of that is published, one background for
    each bird, so an agreement p is had by choice of pictures: of each kind exactly p, up to rounding, are on the
    background that agrees. The three published splits are one pool, from which no picture is taken twice. Both
    kinds are equally many, so a constant answer is right in half of the cases.

    A client has `test_per_class` test places for each kind. A place holds a picture that agrees where p is above
    the place's rank, and one that does not elsewhere, so two test environments have as many pictures in common
    as they can. Under `oracle`, `ON_WATER` of both kinds are on water, in training and in every test environment.
    """

    dataset = "waterbirds"
    subsets: ClassVar[tuple[tuple[int, int], ...]]
    """Group of species and training environment of each subset; each is one client or split over several."""

    side: int = knob(64, "height and width of a picture in pixels; the papers do not say", ge=16, le=512)
    train_per_class: int
    test_per_class: int
    validation_fraction: float = knob(
        0.1, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, self.side, self.side)

    @property
    def standardised(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return PHOTOS

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "resnet18"}

    @abstractmethod
    def groups(self, seed: int, raw: Raw) -> Indices:
        """The group (n,) that each picture is in by its species; -1 for one that is not used."""

    def agreeing(self, kind: int, p: float, count: int) -> int:
        """How many of `count` birds of a kind (1: waterbirds) are on the background that agrees."""
        if self.oracle:
            p = ON_WATER if kind == 1 else 1 - ON_WATER
        return round(p * count)

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        """As `Partitioned` says; `test` is (2, 2, places) flat: by kind, by whether it agrees, by place."""
        import numpy as np

        rng = numpy_generator(seed, "partition", "pictures")
        groups, labels, places = self.groups(seed, raw), raw.labels.numpy(), raw.tags["place"].numpy()
        pools: dict[tuple[int, int, bool], Indices] = {}
        for group in range(GROUPS):
            for kind in (0, 1):
                own, agrees = (groups == group) & (labels == kind), places == kind
                pools[group, kind, True] = rng.permutation(np.flatnonzero(own & agrees))
                pools[group, kind, False] = rng.permutation(np.flatnonzero(own & ~agrees))

        def take(group: int, kind: int, agrees: bool, count: int) -> Indices:
            pool = pools[group, kind, agrees]
            if count > len(pool):
                raise UserError(
                    f"train_per_class = {self.train_per_class} and test_per_class = {self.test_per_class} need "
                    f"more {KINDS[kind]} on {PLACES[kind if agrees else 1 - kind]} than a client's species have; "
                    "make them smaller"
                )
            pools[group, kind, agrees] = pool[count:]
            return pool[:count]

        each = self.clients // len(self.subsets)
        shares = []
        for group, environment in self.subsets:
            train, test = [], []
            for kind in (0, 1):
                most = self.agreeing(kind, self.train_agreement[environment], self.train_per_class)
                train.append(take(group, kind, True, most))
                train.append(take(group, kind, False, self.train_per_class - most))
                counts = [self.agreeing(kind, p, self.test_per_class) for p in self.test_agreement]
                low, high = min(counts), max(counts)
                agree, differ = take(group, kind, True, high), take(group, kind, False, self.test_per_class - low)
                # Places before `low` always agree and those from `high` on never do: they have but one picture.
                test.append([np.concatenate([agree[:low], differ]), np.concatenate([agree, differ[high - low :]])])
            own = rng.permutation(np.concatenate(train))
            for piece in range(each):
                mine = own[piece::each]
                held_out = round(self.validation_fraction * len(mine))
                held_places = np.array(test)[:, :, piece::each].ravel()
                shares.append(Share(mine[held_out:], mine[:held_out], held_places, (environment,)))
        return shares

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import numpy as np
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root).at(self.side)
        share = all_shares(self, seed, root)[client]

        def examples(index: Indices, environment: int) -> Examples:
            chosen = torch.from_numpy(index)
            images = self.prepare(unit_range(raw.images[chosen]))
            return Examples(images, raw.labels[chosen], torch.full((len(index),), environment))

        # All test pictures once, and then for each environment the places' pictures among them.
        needed, position = np.unique(share.test, return_inverse=True)
        pictures, position = examples(needed, -1), position.reshape(2, 2, -1)
        each = self.clients // len(self.subsets)
        rank = client % each + each * np.arange(position.shape[2])
        test = {}
        for name, p in zip(self.test_environments, self.test_agreement, strict=True):
            agrees = [(rank < self.agreeing(kind, p, self.test_per_class)).astype(int) for kind in (0, 1)]
            index = [position[kind, agrees[kind], np.arange(len(rank))] for kind in (0, 1)]
            test[name] = pictures[torch.from_numpy(np.concatenate(index))]
        own = share.environments[0]
        return ClientData(examples(share.train, own), examples(share.validation, own), test)


EXCLUSIVE, COMMON = (34, 10), (17, 5)
"""Species of landbirds and of waterbirds that one group alone has, and that all groups share."""


class Waterbirds(WaterbirdsScenario):
    """FedSDR's recipe: species of a client's own, and one of two training environments.

    Ten waterbird species of each client's own and five in common cannot be had for eight clients from 46
    species. For four groups of two clients they can, and for landbirds as well.
    """

    title = "Waterbirds: p = 0.95 or 0.85 per client, species of its own, tested at p = 0 to 1"
    source = "FedSDR and FedPIN, Tang 2025 §4.5.2 and §5.6.1"
    test_agreement = tuple(tenths / 10 for tenths in range(11))
    subsets = tuple((group, environment) for group in range(GROUPS) for environment in (0, 1))

    name: Literal["waterbirds"] = "waterbirds"
    clients: Literal[8, 80] = knob(
        8, "number of clients, two for each group of species; with 80, each of the 8 is split over ten",
        symbol="N", source="Tang 2025 §4.5.2",
    )  # fmt: skip
    train_agreement: tuple[Probability, Probability] = knob(
        (0.95, 0.85), "P(background agrees with the bird) in each training environment; a client has one of them",
        symbol="p^e", source="Tang 2025 §4.5.2",
    )  # fmt: skip
    train_per_class: int = knob(160, "training and validation pictures of each kind, for one of 8 clients", ge=1)
    test_per_class: int = knob(50, "pictures of each kind in each test environment, for one of 8 clients", ge=1)

    @property
    def rounds(self) -> int:
        return 600

    @property
    def participation(self) -> float:
        return 0.1 if self.clients == 80 else 1.0

    def groups(self, seed: int, raw: Raw) -> Indices:
        import numpy as np

        rng = numpy_generator(seed, "partition", "species")
        labels, species = raw.labels.numpy(), raw.tags["species"].numpy()
        group = np.full(len(raw), -1)
        for kind in (0, 1):
            known = rng.permutation(np.unique(species[labels == kind]))
            cut = GROUPS * EXCLUSIVE[kind]
            if len(known) < cut + COMMON[kind]:
                raise UserError(
                    f"the data set {self.dataset!r} has {len(known)} species of {KINDS[kind]}, "
                    f"but {cut + COMMON[kind]} are needed"
                )
            for number, own in enumerate(np.split(known[:cut], GROUPS)):
                group[np.isin(species, own)] = number
            common = np.flatnonzero(np.isin(species, known[cut : cut + COMMON[kind]]))
            for number, part in enumerate(iid(len(common), GROUPS, rng)):
                group[common[part]] = number
        return group


LAST_SPECIES = (57, 97, 128, 200)
"""CUB's number of the last species of each client: PerInvFL's bounds 1716, 2909 and 3845 in CUB's list of 5,994
training pictures, 30 of each species or a few less, moved to where one species ends."""


class WaterbirdsPerInvFL(WaterbirdsScenario):
    """PerInvFL's recipe: each client has a stretch of CUB's species and a training environment of its own.

    The third client's species have few waterbirds, so sizes are less than the paper's 400 and 100.
    """

    title = "Waterbirds of PerInvFL: p = 0.95 to 0.8, one stretch of species per client, tested at p = 0.1 to 0.5"
    source = "PerInvFL §5.1, A.4, Tab 6"
    test_agreement = (0.1, 0.2, 0.3, 0.4, 0.5)
    subsets = tuple((client, client) for client in range(GROUPS))

    name: Literal["waterbirds-perinvfl"] = "waterbirds-perinvfl"
    clients: Literal[4] = knob(4, "number of clients", symbol="N", source="PerInvFL A.4")
    train_agreement: tuple[Probability, Probability, Probability, Probability] = knob(
        (0.95, 0.9, 0.85, 0.8), "P(background agrees with the bird) in each client's training environment",
        symbol="p^e", source="PerInvFL Tab 6",
    )  # fmt: skip
    train_per_class: int = knob(120, "training and validation pictures of each kind; 200 in the paper", ge=1)
    test_per_class: int = knob(50, "pictures of each kind in each test environment", source="PerInvFL A.4", ge=1)

    @property
    def rounds(self) -> int:
        return 201

    def groups(self, seed: int, raw: Raw) -> Indices:
        import numpy as np

        return np.searchsorted(LAST_SPECIES, raw.tags["species"].numpy())


PRESETS = with_oracle(
    {
        "waterbirds": Waterbirds(),
        "waterbirds-80": Waterbirds(clients=80),
        "waterbirds-perinvfl": WaterbirdsPerInvFL(),
    }
)
