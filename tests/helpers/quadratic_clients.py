"""Clients with quadratic risks, for which methods have closed forms, and a run of which every model is seen."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from flwr.app import Message

from perennial.client.trainer import Metrics, Received
from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Scenario
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL, from_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import Checkpoint, RunFolder
from perennial.server.run.loop import run_rounds
from perennial.testing.tiny_federation import SpoilingGrid


class Centres(Scenario):
    """Client i's samples are `sizes[i]` (default 1) copies of its centre c_i."""

    title = "a point for each client"
    source = "tests"
    dataset = "generated"

    name: Literal["centres"] = "centres"
    clients: int
    centres: tuple[tuple[float, ...], ...]
    sizes: tuple[int, ...] = ()

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "logistic"}

    @property
    def classes(self) -> int:
        return 1

    @property
    def train_environments(self) -> tuple[str, ...]:
        return ("all",)

    @property
    def test_environments(self) -> tuple[str, ...]:
        return ("all",)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (len(self.centres[0]),)

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        size = self.sizes[client] if self.sizes else 1
        x = torch.tensor(self.centres[client], dtype=torch.float64).expand(size, -1)
        zeros = torch.zeros(size, dtype=torch.long)
        examples = Examples(x, zeros, zeros)
        return ClientData(examples, examples, {"all": examples})


class QuadraticRisk:
    """`R_i(θ) = ½ ‖θ − c_i‖²`, in place of a client half's risk; θ is the weight, the bias stays at 0."""

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[torch.Tensor, Metrics]:
        away = params["classifier.weight"][0] - batch.x.mean(dim=0)
        risk = (away.square().sum() + params["classifier.bias"].square().sum()) / 2
        return risk, {"risk": risk}


@dataclass
class Trace:
    """What travelled and what was kept in each round, as vectors by client id."""

    config: RunConfig
    folder: RunFolder
    sent: list[dict[str, torch.Tensor]] = field(default_factory=list)
    uploaded: list[dict[str, torch.Tensor]] = field(default_factory=list)
    personal: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.folder.rows() if row["kind"] == kind]

    @property
    def labels(self) -> list[dict[str, int]]:
        return [row["labels"] for row in self.rows("clusters")]


def run_quadratics(
    half: type,
    path: Path,
    method: str,
    centres: Any,
    *settings: str,
    rounds: int,
    start: Any = None,
    sizes: tuple[int, ...] = (),
    spoil: Callable[[int, Message, Message], Message | None] = lambda number, request, reply: reply,
) -> Trace:
    """A run in float64 from `start` (default 0); `half` is the client half, with `QuadraticRisk`."""
    centres = torch.as_tensor(centres, dtype=torch.float64)
    scenario = {"name": "centres", "clients": len(centres), "centres": centres.tolist(), "sizes": sizes}
    options = {"method": method, "scenario": scenario, "rounds": rounds, "checkpoint_every": 10**6}
    config = load_config(options=options, settings=["evaluate_every=1000000", *settings])
    trace = Trace(config, RunFolder.create(path, config))
    here = LocalRuntime(config)

    def watch(request: Message, reply: Message) -> Message | None:
        if request.metadata.message_type == "train":
            number = int(request.metadata.group_id)
            client = config.scenario.client_ids[request.metadata.dst_node_id - 1]
            while len(trace.sent) < number:
                for part in (trace.sent, trace.uploaded, trace.personal):
                    part.append({})
            trace.sent[-1][client] = vector(from_record(request.content.array_records[MODEL]))
            trace.uploaded[-1][client] = vector(from_record(reply.content.array_records[MODEL]))
            trace.personal[-1][client] = vector(here.states[f"run/{client}"][-1].kept[PERSONAL])
            return spoil(number, request, reply)
        return reply

    here.grid = SpoilingGrid(here.grid, watch)  # type: ignore[assignment]
    weight = torch.zeros_like(centres[:1]) if start is None else torch.tensor([start], dtype=torch.float64)
    arrays = {"classifier.weight": weight, "classifier.bias": torch.zeros(1, dtype=torch.float64)}
    with patch("perennial.client.host.client_class", return_value=half):
        run_rounds(config, trace.folder, here.grid, Checkpoint(0, "run", arrays, {}))
    return trace


def vector(tensors: Tensors) -> torch.Tensor:
    """The weight of a model as a vector."""
    assert not tensors["classifier.bias"].any()
    return tensors["classifier.weight"][0].clone()


def stacked(vectors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Vectors by client as rows, in the order of client ids."""
    return torch.stack([vectors[client] for client in sorted(vectors)])
