"""From a snapshot to the models that are served, through the client half that evaluated them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from client.host import client_half, pick_device, site_data
from client.serving.snapshot import FILE, Snapshot
from client.trainer import Predictor, Site, in_pieces
from common.config import parse_task
from common.data.examples import ClientData
from common.data.scenario import Scenario
from common.errors import UserError
from common.models import Network

NAME = "perennial"
"""The model of this name is the method's headline one; each also has its own name, e.g. "personal"."""
POLL, RETRY = 1.0, 30.0
"""Seconds between two looks for a newer snapshot, and between two attempts to load one that failed."""
Say = Callable[[str], object]
"""Tells the operator a sentence."""


class OnDemand(ClientData):
    """A client's data, read when a method first asks for them; most make their models without."""

    def __init__(self, read: Callable[[], ClientData]) -> None:
        self.__dict__["_read"] = cache(read)  # frozen, as all `ClientData`

    def __getattr__(self, part: str) -> Any:
        return getattr(self._read(), part)


@dataclass(frozen=True)
class Served:
    """The models of one snapshot."""

    models: Mapping[str, Predictor]
    scenario: Scenario
    version: str
    """The round in which they were evaluated."""
    device: torch.device

    def logits(self, name: str, x: Tensor) -> Tensor:
        """Logits (n, classes) of samples (n, *input_shape) in the units of the site's data, on the CPU.

        Not for two threads at once: the models may share a network.
        """
        return in_pieces(self.models[name], self.scenario.prepare(x).to(self.device)).cpu()

    def check(self) -> None:
        """Raises `ValueError` unless each model says something finite of every class."""
        sample = torch.zeros(1, *self.scenario.input_shape)
        for name in self.models:
            logits = self.logits(name, sample)
            if logits.shape != (1, self.scenario.classes) or not logits.isfinite().all():
                raise ValueError(f"model {name!r} does not give {self.scenario.classes} finite logits")


def newest(folder: Path, run: str | None, client: str | None) -> Path | None:
    """The newest snapshot below a state folder, of a run and a client where they are named.

    Raises `UserError` where several clients have one and none is named.
    """
    found = [
        path
        for path in folder.glob(f"*/*/{FILE}")
        if run in (None, path.parent.parent.name) and client in (None, path.parent.name)
    ]
    clients = sorted({path.parent.name for path in found})
    if len(clients) > 1:
        raise UserError(
            f"{folder} has models of {len(clients)} clients; choose with --client: {', '.join(clients)}"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


@torch.no_grad()
def load(path: Path, data_root: Path | None, device: torch.device) -> Served:
    """Make the models of a snapshot as the client's evaluation made them.

    Raises `UserError` where a method makes them from the site's data, which are not there, and nearly anything
    for a damaged file.
    """
    snapshot = Snapshot.load(path, device)
    task = parse_task(snapshot.task)
    scenario = task.scenario
    number, root = scenario.client_ids.index(snapshot.client), data_root or snapshot.data_root
    data = OnDemand(lambda: site_data(task, number, snapshot.own, root).to(device))
    # A network of its own: the one before goes on serving while this one may be fine-tuned.
    net = Network(task.model, scenario.input_shape, scenario.classes, device)
    site = Site(snapshot.client, data, net, task.seed)
    models = client_half(task, site, snapshot.kept).models(snapshot.received)
    models[NAME] = models[task.method.evaluates[-1]]
    served = Served(models, scenario, str(snapshot.received.round), device)
    served.check()
    return served


class Models:
    """What is served: the models of the newest snapshot that could be loaded."""

    def __init__(
        self,
        folder: Path,
        say: Say,
        *,
        run: str | None = None,
        client: str | None = None,
        data_root: Path | None = None,
        device: str = "auto",
    ) -> None:
        """Raises `UserError` for a device that cannot be used, or where a choice of clients is left open."""
        self.folder, self.run, self.client, self.data_root = folder, run, client, data_root
        self.device = pick_device(device)
        self.served: Served | None = None
        self._say, self._said = say, ""
        self._tried: tuple[object, ...] = ()
        self._again = float("inf")
        """When what has been tried is to be tried again."""
        newest(folder, run, client)

    def refresh(self) -> None:
        """Load the newest snapshot, unless that has been done; if it fails, the old models stay.

        It is tried again when the file has changed, and after `RETRY` seconds: what was amiss may be beside it,
        the site's data for one.
        """
        path = None
        try:
            path = newest(self.folder, self.run, self.client)
            if path is None:
                self._tell(f"waiting for a model below {self.folder}; {self._others()}")
                return
            status = path.stat()
            found = path, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
            if found != self._tried or time.monotonic() >= self._again:
                self._tried, self._again = found, time.monotonic() + RETRY
                self.served = load(path, self.data_root, self.device)
                self._again = float("inf")
                self._tell(
                    f"serving round {self.served.version} of {path.parent}: {', '.join(self.served.models)}"
                )
        except Exception as error:  # whatever is wrong with the new one, the old one can be served
            kept = f"still serving round {self.served.version}" if self.served else "no model is served"
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._tell(f"{path or self.folder} cannot be served ({' '.join(reason.split())}); {kept}")

    def _others(self) -> str:
        places = sorted(
            path.parent.relative_to(self.folder).as_posix() for path in self.folder.glob(f"*/*/{FILE}")
        )
        there = f"there are {', '.join(places)}" if places else "there is none"
        return f"a client writes it when it evaluates ({there})"

    def _tell(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._say(sentence)
