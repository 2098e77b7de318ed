"""FedProx, and that CONTRIBUTING.md prints it as it is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedprox import FedProxClient
from perennial.client.trainer import Received
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedprox import FedProx
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL

ROOT = Path(__file__).parents[2]
SITE = toy_site()
HOW: dict[str, Any] = {
    "local_steps": 6,
    "batch_size": 16,
    "learning_rate": 0.1,
    "momentum": 0.5,
    "weight_decay": 0.01,
}


def start() -> Tensors:
    return SITE.network.initial(0)


def test_the_worked_example_is_the_code() -> None:
    """Both files of code word for word; the page is shown in part."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"`([\w/]+fedprox\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert [path for path, _ in blocks] == [
        "common/methods/fedprox.py", "client/methods/fedprox.py",
    ]  # fmt: skip
    for path, code in blocks:
        assert (ROOT / path).read_text() == code


def test_without_proximity_it_is_fedavg_bit_for_bit() -> None:
    ours = FedProxClient(SITE, FedProx(proximity=0, **HOW), {}).train(Received(2, {MODEL: start()}))
    theirs = FedAvgClient(SITE, FedAvg(**HOW), {}).train(Received(2, {MODEL: start()}))
    assert all(torch.equal(ours.arrays[MODEL][name], tensor) for name, tensor in theirs.arrays[MODEL].items())


def test_the_steps_are_the_papers() -> None:
    client = FedProxClient(SITE, FedProx(proximity=0.7, local_steps=4, batch_size=16, learning_rate=0.1), {})
    reply = client.train(Received(3, {MODEL: start()}))
    w, distances = start(), []
    for batch in client.batches(4, 3):
        gradient = torch.func.grad(lambda p, b=batch: F.cross_entropy(SITE.network.predict(p, b.x), b.y))(w)
        distances.append(sum((w[name] - start()[name]).square().sum().item() for name in w))
        w = {name: w[name] - 0.1 * (gradient[name] + 0.7 * (w[name] - start()[name])) for name in w}
    for name, tensor in w.items():
        torch.testing.assert_close(reply.arrays[MODEL][name], tensor, rtol=1e-5, atol=1e-7)
    assert reply.metrics["distance"] == pytest.approx(sum(distances) / 4)


def test_the_stronger_the_pull_the_nearer_the_model_stays() -> None:
    def moved(proximity: float) -> float:
        hparams = FedProx(proximity=proximity, local_steps=30, learning_rate=0.1)
        reached = FedProxClient(SITE, hparams, {}).train(Received(1, {MODEL: start()})).arrays[MODEL]
        return sum((reached[name] - tensor).norm().item() for name, tensor in start().items())

    assert moved(0) > 1.2 * moved(1) > 1.2**2 * moved(5)
