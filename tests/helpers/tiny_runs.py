"""Clients whose models are known in closed form, and runs that are broken off."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from perennial.client.trainer import Metrics, Received, Site
from perennial.common.config import RunConfig
from perennial.common.data.examples import ClientData, Examples
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.tensors import Tensors
from perennial.server.local import LocalRuntime
from perennial.server.papers.kept import Kept
from perennial.server.run.folder import Checkpoint, RunFolder
from perennial.testing.tiny_federation import Toy


class Killed(Exception):  # noqa: N818
    """What ends a run that is broken off."""


def broken_off(config: RunConfig, path: Path, after: int) -> tuple[RunFolder, Checkpoint]:
    """The folder of a run that is killed after so many rounds, cut as for a resume, and where it goes on."""

    def kill(progress: Any) -> None:
        if progress.round == after:
            raise Killed

    folder = RunFolder.create(path, config)
    with pytest.raises(Killed):
        LocalRuntime(config).run(folder, None, kill)
    origin = folder.load_checkpoint()
    folder.cut_log(origin.log_bytes)
    return folder, origin


def taken_up(config: RunConfig, path: Path, after: int) -> RunFolder:
    """The folder of a run that was broken off and taken up again: to the bit the same as one that was not."""
    LocalRuntime(config).run(whole := RunFolder.create(path / "whole", config))
    folder, origin = broken_off(config, path / "broken", after)
    LocalRuntime(config).run(folder, origin)
    assert whole.rows() == folder.rows()
    one, other = whole.load_checkpoint().arrays, folder.load_checkpoint().arrays
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    return folder


def toy_site(number: int = 0, seed: int = 0) -> Site:
    """Client `number` of the toy scenario, to be given to a client half."""
    toy = Toy()
    net = network(model_settings(toy.model), toy.input_shape, toy.classes)
    return Site(toy.client_ids[number], toy.client_data(number, seed, None), net, seed)


class Quadratic:
    """Mixed into a client half: `R(θ; B) = ½ mean_j (θ − c_j)ᵀ diag(h_j) (θ − c_j)`, samples x_j = (c_j, h_j)."""

    def loss(self, params: Tensors, batch: Examples, _: Received) -> tuple[Tensor, Metrics]:
        centre, curvature = batch.x.chunk(2, dim=1)
        risk = (curvature * (params["theta"] - centre).square()).sum(dim=1).mean() / 2
        return risk, {"risk": risk}


def quadratic_site(centres: Any, curvatures: Any = None, client: str = "client-0") -> Site:
    """A client of a `Quadratic`, in float64; one sample per row of `centres` (n, d), curvature 1 unless given."""
    c = torch.tensor(centres, dtype=torch.float64)
    h = torch.ones_like(c) if curvatures is None else torch.tensor(curvatures, dtype=torch.float64)
    nothing = torch.zeros(len(c), dtype=torch.long)
    data = Examples(torch.cat([c, h], dim=1), nothing, nothing)
    net: Any = SimpleNamespace(parameter_names=("theta",), buffer_names=())
    return Site(client, ClientData(data, data, {}), net, 0)


def theta(*values: float) -> Tensors:
    """A model of a `Quadratic`."""
    return {"theta": torch.tensor(values, dtype=torch.float64)}


SMALL_TABLE = """
title = "T"
source = "S"
scenario = "toy"
rounds = 4
seeds = 2
trials = 1
columns = ["worst", "average"]
claims = [{ row = "FedAvg", than = "Ditto", column = "worst" }]

[quick]
rounds = 2
"""
"""A paper's table, without its rows."""
TWO_ROWS = """
[[rows]]
title = "FedAvg"
method = "fedavg"
paper = { worst = 60.0, average = 60.0 }

[[rows]]
title = "Ditto"
method = "ditto"
paper = { worst = 50.0, average = 50.0 }
"""
"""Of a paper's table with the columns `worst` and `average`."""


def made_line(**changes: Any) -> Kept:
    """A line of `results/T.jsonl`."""
    line = {"selection": "final", "rounds": 4, "trials": 1, "by": "held-out", "quick": False}
    return Kept.model_validate({"row": "FedAvg", "settings": {}, "measures": {}, "runs": [], **line, **changes})
