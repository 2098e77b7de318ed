"""From a snapshot to the models that are served, through the client half that evaluated them."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perennial.client.host import client_half, pick_device, site_data, site_of
from perennial.client.snapshot import FILE, Snapshot, file_name, link_over, modified, snapshots_in
from perennial.client.trainer import Predictor, Received, in_pieces
from perennial.common.config import parse_task
from perennial.common.data.examples import ClientData
from perennial.common.data.scenario import Scenario
from perennial.common.models.network import Network
from perennial.common.tasks import PredictionTask
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import blank

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
    task: PredictionTask
    version: str
    """The round in which they were evaluated."""
    device: torch.device
    headline: str
    """The name of the method's main model."""
    method: str
    snapshot: Snapshot
    """Without its tensors."""
    written: float
    """When, in seconds since 1970."""
    network: Network
    """That the models share."""

    def outputs(self, name: str, x: Tensor) -> Tensor:
        """Outputs (n, `task.outputs`) for samples (n, *input_shape) in the units of the site's data, on the CPU.

        Not for two threads at once: the models may share a network.
        """
        return in_pieces(self.models[name], self.scenario.prepare(x).to(self.device)).cpu()

    def check(self) -> None:
        """Raises `ValueError` unless each model gives as many finite outputs as its task takes."""
        sample, wanted = blank(self.scenario.input_shape), self.task.outputs
        for name in self.models:
            outputs = self.outputs(name, sample)
            if outputs.shape != (1, wanted) or not outputs.isfinite().all():
                raise ValueError(f"model {name!r} does not give {wanted} finite outputs")


@dataclass(frozen=True)
class Choice:
    """Which snapshot below a site's state folder is served."""

    folder: Path
    run: str | None = None
    """None: any."""
    client: str | None = None
    round: int | None = None
    """A fixed one; None: the newest, unless an operator has gone back."""

    def path(self) -> Path | None:
        """The snapshot's. Raises `UserError` where several clients have one and none is named."""
        found = newest(self.folder, self.run, self.client)
        if self.round is not None:
            return self.fixed
        if found and (pin := self.pin(found.parent.name)).exists():
            return pin
        return found

    @property
    def fixed(self) -> Path:
        """The name under which a fixed round outlasts the training."""
        return self.folder / str(self.run) / str(self.client) / f"fixed-{self.round}.safetensors"

    def fix(self) -> None:
        """Keep the fixed round, if there is one. Raises `UserError` where it is not there any more."""
        if self.round is None or self.fixed.exists():
            return
        source = self.fixed.with_name(file_name(self.round))
        if not source.exists():
            there = ", ".join(str(round_of(path)) for path in snapshots_in(source.parent)) or "none"
            raise UserError(f"{source.parent} holds no round {self.round}; there are: {there}")
        link_over(source, self.fixed)

    def pin(self, client: str) -> Path:
        """Where the snapshot lies to which an operator has gone back."""
        return self.folder / (self.run or "") / f"{client}.pinned.safetensors"

    def go_back(self, to: int | None = None) -> Path:
        """Serve the snapshot before the one that is served now, or the last one of a round, until `go_on`.

        Raises `UserError` where there is none.
        """
        now = self.path()
        if now is None:
            raise UserError(f"{self.folder} has no model that could be served")
        client = (newest(self.folder, self.run, self.client) or now).parent.name
        places = (path for path in self.folder.glob(f"*/{client}") if self.run in (None, path.parent.name))
        every = sorted((path for place in places for path in snapshots_in(place)), key=modified)
        if to is not None:
            found = [path for path in every if round_of(path) == to]
        else:
            found = [path for path in every if modified(path) < modified(now)]
        if not found:
            wanted = f"of round {to}" if to is not None else "before the one that is served"
            rounds = ", ".join(str(round_of(path)) for path in every)
            raise UserError(f"{self.folder} holds no model of {client} {wanted}; it holds those of round {rounds}")
        link_over(found[-1], self.pin(client))
        return found[-1]

    def go_on(self) -> bool:
        """Serve the newest one again; whether that is a change."""
        found = newest(self.folder, self.run, self.client)
        pin = self.pin(found.parent.name) if found else None
        if not pin or not pin.exists():
            return False
        pin.unlink()
        return True


def round_of(path: Path) -> int:
    """The round that is in a snapshot's name."""
    return int(path.stem.partition("-")[2])


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
    return max(found, key=modified, default=None)


@torch.no_grad()
def load(path: Path, data_root: Path | None, device: torch.device) -> Served:
    """Make the models of a snapshot as the client's evaluation made them.

    Raises `UserError` where a method makes them from the site's data, which are not there, and nearly anything
    for a damaged file.
    """
    snapshot = Snapshot.load(path, device)
    task = parse_task(snapshot.task)
    scenario = task.scenario.at(snapshot.client)
    number, root = scenario.client_ids.index(snapshot.client), data_root or snapshot.data_root
    data = OnDemand(lambda: site_data(task, number, snapshot.own, root).to(device))
    # A network of its own: the one before goes on serving while this one may be fine-tuned.
    net = Network(task.model, scenario.input_shape, task.predicts.outputs, device)
    site = site_of(task, snapshot.client, data, net)
    with site.drawing(snapshot.received.round, "evaluate"):
        models = client_half(task, site, snapshot.kept).evaluated(snapshot.received)
    if not models:
        raise UserError(f"{snapshot.client} only tests in this run, and has no model of its own to be served")
    if net.adapter_names:  # merged once, in place of at each request
        models = {
            name: net.module(own.args[0]) if isinstance(own, partial) else own for name, own in models.items()
        }
    headline = task.method.evaluates[-1]
    served = Served(
        models,
        scenario,
        task.model_copy(update={"scenario": scenario}).predicts,
        str(snapshot.received.round),
        device,
        headline if headline in models else next(iter(models)),
        task.method.name,
        replace(snapshot, received=Received(snapshot.received.round), kept={}),
        path.stat().st_mtime,
        net,
    )
    served.check()
    return served


class Models:
    """What is served of one choice: the models of its newest snapshot that could be loaded."""

    def __init__(
        self, choice: Choice, say: Say, *, name: str = "", data_root: Path | None = None, device: str = "auto"
    ) -> None:
        """`name`: what the headline model is called, and the others' names begin with; empty: as the method says.

        Raises `UserError` for a device that cannot be used, or where a choice of clients is left open.
        """
        self.choice, self.data_root, self.name = choice, data_root, name
        self.device = pick_device(device)
        self.served: Served | None = None
        self.since = 0.0
        """When the present models came into service, in seconds since 1970."""
        self._say, self._said = say, ""
        self._tried: tuple[object, ...] = ()
        self._again = float("inf")
        """When what has been tried is to be tried again."""
        choice.fix()
        choice.path()

    def names(self) -> dict[str, str]:
        """The names under which the models are served, and those that the method has for them."""
        if not self.served:
            return {}
        prefix = f"{self.name}." if self.name else ""
        own = {f"{prefix}{name}": name for name in self.served.models}
        return {**own, self.name or NAME: self.served.headline}

    def refresh(self) -> None:
        """Load the newest snapshot, unless that has been done; if it fails, the old models stay.

        It is tried again when the file has changed, and after `RETRY` seconds: what was amiss may be beside it,
        the site's data for one.
        """
        path, folder = None, self.choice.folder
        try:
            path = self.choice.path()
            if path is None:
                self._tell(f"waiting for a model below {folder}; {self._others()}")
                return
            status = path.stat()
            found = path, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
            if found != self._tried or time.monotonic() >= self._again:
                self._tried, self._again = found, time.monotonic() + RETRY
                self.served = load(path, self.data_root, self.device)
                self.since = time.time()
                self._again = float("inf")
                where = path.parent if path.name == FILE else path
                self._tell(f"serving round {self.served.version} of {where}: {', '.join(self.names())}")
        except Exception as error:  # whatever is wrong with the new one, the old one can be served
            kept = f"still serving round {self.served.version}" if self.served else "no model is served"
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._tell(f"{path or folder} cannot be served ({' '.join(reason.split())}); {kept}")

    def _others(self) -> str:
        folder = self.choice.folder
        places = sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob(f"*/*/{FILE}"))
        there = f"there are {', '.join(places)}" if places else "there is none"
        return f"a client writes it when it evaluates ({there})"

    def _tell(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._say(sentence)


class Catalogue:
    """All that a server serves, by name."""

    def __init__(self, entries: Sequence[Models]) -> None:
        self.entries = entries

    def refresh(self) -> None:
        """Look for newer snapshots of each."""
        for entry in self.entries:
            entry.refresh()

    @property
    def ready(self) -> bool:
        """Whether all have a model."""
        return all(entry.served for entry in self.entries)

    def find(self, name: str) -> tuple[Served, str] | None:
        """The snapshot that a model is of, and the method's name for it."""
        for entry in self.entries:
            if entry.served and (own := entry.names().get(name)):
                return entry.served, own
        return None

    def names(self) -> list[str]:
        """Of all models."""
        return [name for entry in self.entries for name in entry.names()]


NAMED = re.compile(r"(?P<name>[A-Za-z0-9_-]{1,64})=(?P<run>[^/@]+)(/(?P<client>[^/@]+))?(@(?P<round>\d{1,9}))?")


def named_choice(text: str, folder: Path) -> tuple[str, Choice]:
    """The name and the choice of `NAME=RUN[/CLIENT][@ROUND]`. Raises `UserError`."""
    if not (found := NAMED.fullmatch(text)):
        raise UserError(f"--model {text!r} is not NAME=RUN/CLIENT or NAME=RUN/CLIENT@ROUND")
    run, client, number = found["run"], found["client"], found["round"]
    if number and not client:
        only = newest(folder, run, None)
        if only is None:
            raise UserError(f"--model {text!r}: {folder} has no model of run {run}")
        client = only.parent.name
    return found["name"], Choice(folder, run, client, int(number) if number else None)
