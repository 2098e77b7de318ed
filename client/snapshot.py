"""What a site evaluated last, on its disk: all from which `perennial serve` makes the same models again."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from perennial.client.site_data import OwnSite
from perennial.client.state import Kept, own_folder
from perennial.client.trainer import Received, Reply
from perennial.common.data.dialect import Dialect
from perennial.common.tasks import PredictionTask, checked_sums, values_of
from perennial.common.utils.files import PRIVATE, load_with_facts, save_tensors
from perennial.common.utils.parsing import from_json
from perennial.common.utils.tensors import Tensors, flattened, unflattened

FILE = "serving.safetensors"
"""The newest one's name, in the client's folder beside the versions of what it keeps."""
HELD = 3
"""How many are held, the newest among them, for going back; each also has the name of its round."""
Results = Mapping[str, Mapping[str, Sequence[float]]]
"""By `MODEL/SPLIT` and environment: how many samples there were, and the task's headline measure of them."""


def results_of(reply: Reply, task: PredictionTask) -> Results:
    """What an evaluation has found at this client, of each environment that has the headline measure."""
    metrics: dict[str, Any] = dict(reply.metrics)
    splits: dict[str, Any] = dict(reply.settings)
    found: dict[str, dict[str, tuple[int, float]]] = {}
    for key, counts in metrics.items():
        place, _, name = key.rpartition("/")
        if name != "count" or (split := place.split("/")[-1]) not in splits:
            continue
        sums = checked_sums(task, {column: metrics[f"{place}/{column}"] for column in task.columns}, counts)
        values = values_of(task, {**sums, "environment": splits[split], "count": counts})
        samples = dict(zip(splits[split], counts, strict=True))
        found[place] = {environment: (samples[environment], value) for environment, value in values.items()}
    return found


def file_name(round_: int) -> str:
    """The name of a round's snapshot."""
    return f"serving-{round_}.safetensors"


def snapshots_in(folder: Path) -> list[Path]:
    """The snapshots of a client's folder, oldest first."""
    return sorted(folder.glob("serving-*.safetensors"), key=modified)


def modified(path: Path) -> int:
    """When a file was written, in nanoseconds since 1970."""
    return path.stat().st_mtime_ns


def link_over(source: Path, target: Path) -> None:
    """Give a file a second name, in place of what has had it."""
    beside = target.with_name(f".new-{target.name}")
    with suppress(FileNotFoundError):
        beside.unlink()  # of a process that was killed here
    os.link(source, beside)
    os.replace(beside, target)


def _own_site(facts: dict[str, Any]) -> OwnSite:
    """From JSON; older files say nothing of the dialect."""
    return OwnSite(**{**facts, "data": Path(facts["data"]), "dialect": Dialect(**facts.get("dialect", {}))})


@dataclass(frozen=True)
class Snapshot:
    """A request to evaluate, what the client keeps, and which data these go with."""

    task: str
    """JSON."""
    client: str
    data_root: Path | None
    received: Received
    kept: Kept
    own: OwnSite | None = None
    run: str = ""
    results: Results = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it in a client's folder, as the newest; of the others the oldest goes. Only its owner reads it."""
        own_folder(folder)
        facts = {
            "task": self.task,
            "client": self.client,
            "data_root": str(self.data_root.absolute()) if self.data_root else "",
            "own": {**asdict(self.own), "data": str(self.own.data.absolute())} if self.own else None,
            "round": self.received.round,
            "settings": dict(self.received.settings),
            "records": list(self.received.arrays),  # a record without tensors has no other trace
            "run": self.run,
            "measured": self.results,  # older files have "results", which are counts of right answers
        }
        tensors = flattened({"received": flattened(self.received.arrays), "kept": flattened(self.kept)})
        path = folder / file_name(self.received.round)
        others = folder.parents[1].glob(f"*/{folder.name}/serving-*.safetensors")
        newest = max(map(modified, others), default=0)
        save_tensors(path, tensors, {name: json.dumps(fact) for name, fact in facts.items()}, PRIVATE)
        if modified(path) <= newest:  # the clock was set back
            os.utime(path, ns=(newest + 1, newest + 1))
        link_over(path, folder / FILE)
        for old in snapshots_in(folder)[:-HELD]:
            old.unlink()

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "Snapshot":
        """Raises `OSError`, `SafetensorError`, `KeyError` or `ValueError` for a file that is damaged."""
        tensors, texts = load_with_facts(path)
        facts = {name: from_json(text) for name, text in texts.items()}
        parts = unflattened({name: tensor.to(device) for name, tensor in tensors.items()})
        nothing: dict[str, Tensors] = {name: {} for name in facts["records"]}
        arrays = nothing | unflattened(parts.get("received", {}))
        return cls(
            facts["task"],
            facts["client"],
            Path(facts["data_root"]) if facts["data_root"] else None,
            Received(facts["round"], arrays, facts["settings"]),
            unflattened(parts.get("kept", {})),
            _own_site(facts["own"]) if facts["own"] else None,
            facts.get("run", ""),
            facts.get("measured", {}),
        )
