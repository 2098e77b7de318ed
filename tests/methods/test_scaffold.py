"""SCAFFOLD against its equations in numpy, and its fixed point on quadratic risks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import Quadratic, quadratic_site, theta, toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.scaffold import CONTROL, ScaffoldClient
from perennial.client.trainer import Received
from perennial.common.config import load_config
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.scaffold import Scaffold
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.methods.scaffold import ScaffoldStrategy
from perennial.testing.tiny_federation import toy_config

CENTRES, CURVATURES = ([4.0, -1.0], [-2.0, 3.0], [0.0, 1.0]), ([1.0, 3.0], [4.0, 0.5], [2.0, 1.0])
HOW: dict[str, Any] = {"local_steps": 5, "batch_size": 4, "learning_rate": 0.05}
OPTIMUM = np.sum(np.multiply(CENTRES, CURVATURES), axis=0) / np.sum(CURVATURES, axis=0)


class QuadraticScaffold(Quadratic, ScaffoldClient):
    pass


class QuadraticFedAvg(Quadratic, FedAvgClient):
    pass


def clients(kind: Any, hparams: Any) -> list[Any]:
    pairs = zip(CENTRES, CURVATURES, strict=True)
    return [kind(quadratic_site([c], [h], client=f"client-{i}"), hparams, {}) for i, (c, h) in enumerate(pairs)]


class Server:
    """The server half without a run: its update, and how many of all clients answered."""

    def __init__(self, hparams: Scaffold, of: int = 3) -> None:
        self.half = ScaffoldStrategy.__new__(ScaffoldStrategy)
        self.half.hparams, self.of = hparams, of
        self.half.__dict__["network"] = type("Net", (), {"parameter_names": ("theta",), "buffer_names": ()})

    def round(self, number: int, model: Tensors, answering: list[ScaffoldClient]) -> Tensors:
        sent = self.half.training_payload(model)
        replies = [client.train(Received(number, dict(sent))).arrays for client in answering]
        means = {name: {"theta": torch.stack([one[name]["theta"] for one in replies]).mean(0)} for name in sent}
        exchange = type("Exchange", (), {"samples": dict.fromkeys(range(len(replies)), 1)})
        self.half.exchanges = [exchange]  # type: ignore[list-item]
        scenario = type("Scenario", (), {"client_ids": range(self.of)})
        self.half.run = type("Run", (), {"scenario": scenario})  # type: ignore[assignment]
        return self.half.update(model, means)


@pytest.mark.parametrize("mixing", [1.0, 0.5])
def test_the_fixed_point_is_the_optimum_of_all_and_fedavgs_is_not(mixing: float) -> None:
    hparams = Scaffold(mixing=mixing, **HOW)
    server, own, model = Server(hparams), clients(QuadraticScaffold, hparams), theta(9.0, -9.0)
    drifting, plain = theta(9.0, -9.0), clients(QuadraticFedAvg, FedAvg(**HOW))
    for number in range(1, 400):
        model = server.round(number, model, own)
        replies = [client.train(Received(number, {MODEL: drifting})) for client in plain]
        drifting = {"theta": torch.stack([one.arrays[MODEL]["theta"] for one in replies]).mean(0)}
    np.testing.assert_allclose(model["theta"].numpy(), OPTIMUM, atol=1e-9)
    assert np.abs(drifting["theta"].numpy() - OPTIMUM).max() > 0.05
    for client, centre, curvature in zip(own, CENTRES, CURVATURES, strict=True):
        slope = np.multiply(curvature, OPTIMUM - np.array(centre))
        np.testing.assert_allclose(client.kept[CONTROL]["theta"].numpy(), slope, atol=1e-8)
    assert server.half.control["theta"].abs().max() < 1e-9


def test_rounds_with_some_of_the_clients_are_the_papers() -> None:
    """Algorithm 1, option II, in numpy: two of three clients answer in each round."""
    hparams = Scaffold(mixing=0.7, **HOW)
    server, own, model = Server(hparams), clients(QuadraticScaffold, hparams), theta(1.0, 2.0)
    w, c, each = np.array([1.0, 2.0]), np.zeros(2), np.zeros((3, 2))
    for number in range(1, 8):
        who = [(number + 1) % 3, (number + 2) % 3]
        model = server.round(number, model, [own[i] for i in who])
        moves, changes = [], []
        for i in who:
            y = w.copy()
            for _ in range(5):
                y = y - 0.05 * (np.multiply(CURVATURES[i], y - np.array(CENTRES[i])) - each[i] + c)
            new = each[i] - c + (w - y) / (5 * 0.05)
            moves.append(y - w)
            changes.append(new - each[i])
            each[i] = new
        w, c = w + 0.7 * np.mean(moves, axis=0), c + np.sum(changes, axis=0) / 3
        np.testing.assert_allclose(model["theta"].numpy(), w, atol=1e-12)
        np.testing.assert_allclose(server.half.control["theta"].numpy(), c, atol=1e-12)


def test_the_first_round_is_fedavgs() -> None:
    """As long as all control variates are 0."""
    site = toy_site()
    start = site.network.initial(0)
    zeros = {name: torch.zeros_like(start[name]) for name in site.network.parameter_names}
    how: dict[str, Any] = {**HOW, "local_steps": 2, "local_unit": "epoch"}
    ours = ScaffoldClient(site, Scaffold(**how), {}).train(Received(1, {MODEL: start, CONTROL: zeros}))
    theirs = FedAvgClient(site, FedAvg(**how), {}).train(Received(1, {MODEL: start}))
    for name, tensor in theirs.arrays[MODEL].items():
        torch.testing.assert_close(ours.arrays[MODEL][name], tensor, rtol=0, atol=0)
    client = ScaffoldClient(site, Scaffold(**how), {})
    steps = client.mini_batches(2)
    assert steps == 2 * client.per_pass
    for name, c in client.train(Received(1, {MODEL: start, CONTROL: zeros})).arrays[CONTROL].items():
        torch.testing.assert_close(c, (start[name] - theirs.arrays[MODEL][name]) / (steps * 0.05))


def test_the_servers_control_variate_is_the_mean_of_what_the_clients_keep(tmp_path: Path) -> None:
    config = toy_config("scaffold", rounds=3)
    runtime = LocalRuntime(config)
    runtime.run(folder := RunFolder.create(tmp_path / "run", config))
    kept = [versions[-1].kept[CONTROL] for versions in runtime.states.values()]
    control = folder.load_checkpoint().strategy[CONTROL]
    assert control.keys() == kept[0].keys()
    for name, tensor in control.items():
        torch.testing.assert_close(tensor, torch.stack([own[name] for own in kept]).mean(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["momentum=0.9"], "momentum: 0.9 is not possible"),
        (
            ["optimizer.name=adam"],
            "optimizer.name: 'adam' is not possible with method 'scaffold', whose control variates",
        ),
    ],
)
def test_steps_that_are_not_plain_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        load_config(options={"method": {"name": "scaffold"}}, settings=settings)
    assert words in str(raised.value)
