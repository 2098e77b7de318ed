"""What a site evaluated last, on its disk: all from which `perennial serve` makes the same models again."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from client.node.site import OwnSite
from client.state import Kept, own_folder
from client.trainer import Received
from common.files import PRIVATE, load_with_facts, save_tensors
from common.models import Tensors, divided, joined

FILE = "serving.safetensors"
"""Its name, in the client's folder beside the versions of what it keeps."""


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

    def save(self, folder: Path) -> None:
        """Write it in a client's folder, in place of the one before; nobody but its owner reads it."""
        own_folder(folder)
        facts = {
            "task": self.task,
            "client": self.client,
            "data_root": str(self.data_root.absolute()) if self.data_root else "",
            "own": {**asdict(self.own), "data": str(self.own.data.absolute())} if self.own else None,
            "round": self.received.round,
            "settings": dict(self.received.settings),
            "records": list(self.received.arrays),  # a record without tensors has no other trace
        }
        tensors = joined({"received": joined(self.received.arrays), "kept": joined(self.kept)})
        save_tensors(folder / FILE, tensors, {name: json.dumps(fact) for name, fact in facts.items()}, PRIVATE)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "Snapshot":
        """Raises `OSError`, `SafetensorError`, `KeyError` or `ValueError` for a file that is damaged."""
        tensors, texts = load_with_facts(path)
        facts = {name: json.loads(text) for name, text in texts.items()}
        parts = divided({name: tensor.to(device) for name, tensor in tensors.items()})
        nothing: dict[str, Tensors] = {name: {} for name in facts["records"]}
        arrays = nothing | divided(parts.get("received", {}))
        return cls(
            facts["task"],
            facts["client"],
            Path(facts["data_root"]) if facts["data_root"] else None,
            Received(facts["round"], arrays, facts["settings"]),
            divided(parts.get("kept", {})),
            OwnSite(**{**facts["own"], "data": Path(facts["own"]["data"])}) if facts["own"] else None,
        )
