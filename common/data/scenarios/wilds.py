"""Camelyon17-WILDS: hospitals as sites, tested on other hospitals."""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import PHOTOS, unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import Partitioned, Scenario, all_shares
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator

TRAINED, TESTED = (0, 3, 4), (1, 2)
"""Hospitals as WILDS counts them: 1 is its `val`, 2 its `test`."""
TRAIN, HELD_OUT = 0, 1
"""WILDS' splits `train` and `id_val`, both of the hospitals that are trained on."""
HELD_OUT_SHARE = 9
"""WILDS has 302,436 patches for training and 33,560 of the same hospitals held out, which is one for nine."""


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


PRESETS: dict[str, Scenario] = {"wilds:camelyon17": Camelyon17()}
