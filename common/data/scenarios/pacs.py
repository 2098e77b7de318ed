"""Pictures of several domains, of which one is left out of training: PACS, VLCS, Office-Home."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from perennial.common.data.datasets import load, resolve_root
from perennial.common.data.environments import PHOTOS, unit_range
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Indices, Share, by_domain, iid
from perennial.common.data.raw_data import OFFICE_HOME, PACS, VLCS, Raw
from perennial.common.data.scenario import Partitioned, Scenario, all_shares
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.seeding import numpy_generator


class LeaveOneOut(Partitioned):
    """A client has pictures of one domain, which is its training environment, and is tested on the one left out.

    A subclass says how domains are split over clients.
    """

    domains: ClassVar[tuple[str, ...]]
    """In the order that the data set's tag `domain` counts them."""

    held_out: str
    side: int = knob(64, "height and width of a picture in pixels; 224 in FedIIR", ge=16, le=512)
    validation_fraction: float = knob(
        0.1,
        "part of the training pictures that is held out for validation",
        source="FedIIR §5.1",
        ge=0,
        lt=1,
    )

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, self.side, self.side)

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "resnet18"}

    @property
    def standardised(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return PHOTOS

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(domain for domain in self.domains if domain != self.held_out)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return (self.held_out,)

    def of_domain(self, raw: Raw, domain: str) -> Indices:
        """The pictures (n,) of a domain. Raises `UserError` where there are fewer than clients."""
        import numpy as np

        found = np.flatnonzero(raw.tags["domain"].numpy() == self.domains.index(domain))
        if len(found) < self.clients:
            raise UserError(
                f"clients = {self.clients} is too many: {self.dataset!r} has {len(found)} pictures of {domain!r}"
            )
        return found

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        import torch

        root = resolve_root(data_root)
        raw = load(self.dataset, root).at(self.side)
        share = all_shares(self, seed, root)[client]
        (own,) = share.environments

        def examples(index: Indices, environment: int) -> Examples:
            chosen = torch.from_numpy(index)
            images = self.prepare(unit_range(raw.images[chosen]))
            return Examples(images, raw.labels[chosen], torch.full((len(index),), environment))

        test = {self.held_out: examples(share.test, -1)}
        return ClientData(examples(share.train, own), examples(share.validation, own), test)


HALVES = ((0, 1, 2), (3, 4, 5, 6))
"""Dog, elephant, giraffe; guitar, horse, house, person."""


class PacsPairs(LeaveOneOut):
    """The thesis' recipe: each training domain is two clients, of three and of four classes.

    A client is tested on all pictures of its own classes in the domain left out, the same as the two clients
    of the other domains with these classes. With 60 clients each of the six, test data included, is split over
    ten.
    """

    title = "PACS: one domain and three or four of seven classes per client, tested on the domain left out"
    source = "FedSDR and FedPIN, Tang 2025 §4.5.2 and §5.6.1"
    dataset = "pacs"
    domains = PACS

    name: Literal["pacs"] = "pacs"
    clients: Literal[6, 60] = knob(
        6, "number of clients; with 60, each of the six is split over ten", symbol="N", source="Tang 2025 §4.5.2"
    )
    held_out: Literal["art_painting", "cartoon", "photo", "sketch"] = knob(
        "art_painting", "the domain that is left out and tested on", source="Tang 2025 §4.5.2: each in turn"
    )

    @property
    def classes(self) -> int:
        return 7

    @property
    def rounds(self) -> int:
        return 600

    @property
    def participation(self) -> float:
        return 0.1 if self.clients == 60 else 1.0

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        import numpy as np

        rng, labels, each = numpy_generator(seed, "partition", "pictures"), raw.labels.numpy(), self.clients // 6

        def split(domain: str, half: tuple[int, ...]) -> list[Indices]:
            own = self.of_domain(raw, domain)
            own = own[np.isin(labels[own], half)]
            return [own[piece] for piece in iid(len(own), each, rng)]

        shares = []
        for environment, domain in enumerate(self.train_environments):
            for half in HALVES:
                for own, test in zip(split(domain, half), split(self.held_out, half), strict=True):
                    cut = round(self.validation_fraction * len(own))
                    shares.append(Share(own[cut:], own[:cut], test, (environment,)))
        return shares


class _FedIIR(LeaveOneOut):
    """FedIIR's recipe: all classes, and each training domain split over as many clients as its size demands.

    The test domain is dealt to all clients, so the pooled accuracy is that on the whole of it.
    """

    source = "FedIIR §5.1, Alg 2"

    clients: int = knob(
        3, "number of clients: 3 in the small setting, 50 in the large", symbol="P", source="FedIIR §5.1",
        ge=3, le=500,
    )  # fmt: skip

    @property
    def rounds(self) -> int:
        return 100

    @property
    def participation(self) -> float:
        return 3 / self.clients

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "resnet18", "head_hidden": 256}

    def shares(self, seed: int, raw: Raw) -> list[Share]:
        rng = numpy_generator(seed, "partition", "pictures")
        train = [self.of_domain(raw, domain) for domain in self.train_environments]
        test = self.of_domain(raw, self.held_out)
        return by_domain(train, test, self.clients, self.validation_fraction, rng)


class PacsDomains(_FedIIR):
    """FedIIR's PACS."""

    title = "PACS by domain: one of three domains per client, all classes, tested on the domain left out"
    dataset = "pacs"
    domains = PACS

    name: Literal["pacs-domains"] = "pacs-domains"
    held_out: Literal["art_painting", "cartoon", "photo", "sketch"] = knob(
        "art_painting", "the domain that is left out and tested on", source="FedIIR §5.1: each in turn"
    )

    @property
    def classes(self) -> int:
        return 7


class Vlcs(_FedIIR):
    """FedIIR's VLCS."""

    title = "VLCS by domain: one of three photo collections per client, tested on the one left out"
    dataset = "vlcs"
    domains = VLCS

    name: Literal["vlcs"] = "vlcs"
    held_out: Literal["Caltech101", "LabelMe", "SUN09", "VOC2007"] = knob(
        "Caltech101", "the domain that is left out and tested on", source="FedIIR §5.1: each in turn"
    )

    @property
    def classes(self) -> int:
        return 5


class OfficeHome(_FedIIR):
    """FedIIR's Office-Home."""

    title = "Office-Home by domain: 65 classes, one of three domains per client, tested on the domain left out"
    dataset = "office-home"
    domains = OFFICE_HOME

    name: Literal["office-home"] = "office-home"
    held_out: Literal["Art", "Clipart", "Product", "Real World"] = knob(
        "Art", "the domain that is left out and tested on", source="FedIIR §5.1: each in turn"
    )

    @property
    def classes(self) -> int:
        return 65


PRESETS: dict[str, Scenario] = {
    "pacs": PacsPairs(),
    "pacs-60": PacsPairs(clients=60),
    "pacs-domains": PacsDomains(),
    "pacs-domains-50": PacsDomains(clients=50),
    "vlcs": Vlcs(),
    "vlcs-50": Vlcs(clients=50),
    "office-home": OfficeHome(),
    "office-home-50": OfficeHome(clients=50),
}
