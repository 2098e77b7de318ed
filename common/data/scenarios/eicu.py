"""Death in hospital, with hospitals as clients."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Indices, Share, iid
from perennial.common.data.raw_data import EICU_COLUMNS, EICU_DEMO_COLUMNS, Raw
from perennial.common.data.scenario import Partitioned, Scenario, all_shares
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator

if TYPE_CHECKING:
    import numpy as np


class Hospitals(Partitioned):
    """FedILC's recipe: the hospitals with most patients train, all others are for testing.

    Every client has as many patients as the smallest of them. Of either label, 70 % are for training, where the
    rarer one is drawn again until both are equally many; the rest is held out as it is. Patients of all other
    hospitals are dealt to the clients for testing, so pooled accuracy and areas are those on all of them.
    """

    source = "FedILC §5.1.3"
    columns: ClassVar[int]

    clients: int = knob(20, "number of clients", symbol="E", source="FedILC §5.1.3", ge=1, le=50)
    hospitals_per_client: int = knob(
        1, "hospitals of a client: of the largest ones, its own and every `clients`-th after it", ge=1, le=50
    )
    validation_fraction: float = knob(
        0.3, "part of a client's patients that is held out for validation", source="FedILC §5.1.3", ge=0, lt=1
    )
    balanced: bool = knob(
        True, "draw the rarer label's training patients again, until both labels are equally many",
        source="authors' code",
    )  # fmt: skip

    @property
    def rounds(self) -> int:
        return 301

    @property
    def ranking_batch(self) -> int:
        return 64

    @property
    def model(self) -> dict[str, Any]:
        hidden = (1024, 1024, 512)
        return {"name": "mlp", "hidden": hidden, "linear_features": True, "init": "xavier", "one_logit": True}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.columns,)

    @property
    def classes(self) -> int:
        return 2

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(f"silo-{number}" for number in range(self.clients))

    @property
    def test_environments(self) -> tuple[str, ...]:
        return ("ood",)

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        import numpy as np

        hospital, died = raw.tags["hospital"].numpy(), raw.labels.numpy()
        numbers, sizes = np.unique(hospital, return_counts=True)
        largest = numbers[np.lexsort((numbers, -sizes))]
        training = self.clients * self.hospitals_per_client
        if training >= len(largest):
            raise UserError(
                f"clients = {self.clients} with hospitals_per_client = {self.hospitals_per_client} are {training} "
                f"hospitals; data set {self.dataset!r} has {len(largest)}, and some must be left for testing"
            )
        rng = numpy_generator(seed, "partition", "patients")
        own = [
            np.flatnonzero(np.isin(hospital, largest[number : training : self.clients]))
            for number in range(self.clients)
        ]
        each = min(map(len, own))
        outside = rng.permutation(np.flatnonzero(np.isin(hospital, largest[training:])))
        tests = [outside[part] for part in iid(len(outside), self.clients, rng)]
        return [
            self._split(number, rng.choice(pool, each, replace=False), died, test, rng)
            for number, (pool, test) in enumerate(zip(own, tests, strict=True))
        ]

    def _split(self, number: int, own: Indices, died: Indices, test: Indices, rng: "np.random.Generator") -> Share:
        """A client's patients, in random order, by label into held-out and training ones."""
        import numpy as np

        by_label = [own[died[own] == label] for label in (0, 1)]
        cuts = [round(self.validation_fraction * len(part)) for part in by_label]
        held_out = np.concatenate([part[:cut] for part, cut in zip(by_label, cuts, strict=True)])
        train = [part[cut:] for part, cut in zip(by_label, cuts, strict=True)]
        most = max(map(len, train))
        if self.balanced:  # a label that a client has none of stays missing
            train = [
                np.concatenate([part, rng.choice(part, most - len(part))]) if len(part) else part for part in train
            ]
        return Share(rng.permutation(np.concatenate(train)), rng.permutation(held_out), test, (number,))

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root)
        share = all_shares(self, seed, root)[client]
        assert isinstance(raw.images, torch.Tensor)
        table = raw.images

        def examples(index: Indices, environment: int) -> Examples:
            chosen = torch.from_numpy(index)
            return Examples(table[chosen].float(), raw.labels[chosen], torch.full((len(index),), environment))

        test = {"ood": examples(share.test, -1)}
        return ClientData(examples(share.train, client), examples(share.validation, client), test)


class EICU(Hospitals):
    """The paper's, from the credentialed tables."""

    title = "eICU: drugs of the first 48 hours and death, 20 hospitals train, 38 test"
    dataset = "eicu"
    columns = EICU_COLUMNS

    name: Literal["eicu"] = "eicu"


class EICUSynthetic(Hospitals):
    """A stand-in of the same shape."""

    title = "generated patients of 58 hospitals, a stand-in for eICU of the same shape"
    dataset = "eicu-synthetic"
    columns = EICU_COLUMNS

    name: Literal["eicu-synthetic"] = "eicu-synthetic"


class EICUDemo(Hospitals):
    """The open demo, whose hospitals have ten patients or fewer: a client has four of them."""

    title = "eICU's open demo: diagnoses of the first 48 hours and death, 80 hospitals in 20 silos train"
    dataset = "eicu-demo"
    columns = EICU_DEMO_COLUMNS

    name: Literal["eicu-demo"] = "eicu-demo"
    hospitals_per_client: int = knob(
        4, "hospitals of a client: of the largest ones, its own and every `clients`-th after it", ge=1, le=50
    )

    @property
    def ranking_batch(self) -> int:
        return 32  # a client has 33 patients of the others to test on

    @property
    def model(self) -> dict[str, Any]:
        return {**super().model, "hidden": (64, 64, 32)}


PRESETS: dict[str, Scenario] = {"eicu": EICU(), "eicu-demo": EICUDemo(), "eicu-synthetic": EICUSynthetic()}
