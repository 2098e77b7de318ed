"""pFedMe against the paper's equations, written out here."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quadratic_clients import QuadraticRisk, run_quadratics, stacked

from perennial.client.methods.pfedme import PFedMeClient
from perennial.client.objectives import proximal
from perennial.client.trainer import Received, Site
from perennial.common.config import load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.pfedme import PFedMe
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_tensors
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config

NET = network(model_settings({"name": "mlp", "hidden": [5]}), (4,), 3)


class Quadratic(QuadraticRisk, PFedMeClient):
    pass


def client(kept: dict[str, Tensors] | None = None, **hparams: Any) -> PFedMeClient:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(23, 4, generator=generator), torch.randint(0, 3, (23,), generator=generator)
    data = Examples(x, y, torch.zeros_like(y))
    return PFedMeClient(Site("client-0", ClientData(data, data, {}), NET, 0), PFedMe(**hparams), kept or {})


def test_the_gradient_of_the_proximal_problem() -> None:
    generator = torch.Generator().manual_seed(1)
    theta, anchor = (torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    theta.requires_grad_()
    (risk,) = torch.autograd.grad(theta.pow(3).sum(), theta)
    whole = theta.pow(3).sum() + 0.7 / 2 * (theta - anchor).square().sum()
    (expected,) = torch.autograd.grad(whole, theta)
    (found,) = proximal([risk], [theta.detach()], [anchor], 0.7)
    torch.testing.assert_close(found, expected)
    assert torch.equal(risk, theta.detach().square() * 3)  # left as it was


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.5, 0.01)])
def test_a_round_is_the_papers(momentum: float, weight_decay: float) -> None:
    """R mini-batches; on each, S SGD steps on the proximal problem by autograd; then a step on the envelope."""
    how = {"momentum": momentum, "weight_decay": weight_decay, "batch_size": 8}
    how |= {"personal_learning_rate": 0.1}
    half = client(local_steps=4, personal_steps=3, proximity=2.0, learning_rate=0.1, **how)
    received, own = NET.initial(1), NET.initial(2)
    half.kept[PERSONAL] = own
    reply = half.train(Received(3, {MODEL: received}))

    theta = {name: tensor.clone().requires_grad_() for name, tensor in own.items()}
    w = {name: tensor.clone() for name, tensor in received.items()}
    optimizer = torch.optim.SGD(theta.values(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for batch in half.batches(4, 3):
        for _ in range(3):
            optimizer.zero_grad()
            near = sum((theta[name] - w[name]).square().sum() for name in w)
            (F.cross_entropy(NET.predict(theta, batch.x), batch.y) + near).backward()  # λ/2 = 1
            optimizer.step()
        w = {name: w[name] - 0.1 * 2.0 * (w[name] - theta[name].detach()) for name in w}
    for name in w:
        torch.testing.assert_close(reply.arrays[MODEL][name], w[name])
        torch.testing.assert_close(half.kept[PERSONAL][name], theta[name].detach())
    fresh = NET.initial(1), NET.initial(2)
    assert all(torch.equal(received[n], fresh[0][n]) and torch.equal(own[n], fresh[1][n]) for n in w)
    assert reply.metrics["num-examples"] == 23


def test_two_clients_by_hand(tmp_path: Path) -> None:
    """c = 0, 8; λ = 1, η = ½ solves θ = (c + w)/2; w moves by lr·λ = ½ towards θ; β = ½.

    From w = 2: θ = 1, 5; w_i = 1.5, 3.5; their mean, whatever the sample counts, is 2.5; w = 2.25.
    Then θ = 1.125, 5.125; w_i = 1.6875, 3.6875; mean 2.6875; w = 2.46875.
    """
    settings = ("proximity=1", "personal_learning_rate=0.5", "personal_steps=1", "local_steps=1",
                "learning_rate=0.5", "mixing=0.5")  # fmt: skip
    trace = run_quadratics(
        Quadratic, tmp_path / "run", "pfedme", [[0.0], [8.0]], *settings, rounds=3, start=[2.0], sizes=(1, 3)
    )
    assert [stacked(part).flatten().tolist() for part in trace.personal[:2]] == [[1, 5], [1.125, 5.125]]
    assert [stacked(part).flatten().tolist() for part in trace.uploaded[:2]] == [[1.5, 3.5], [1.6875, 3.6875]]
    assert [stacked(part).flatten().tolist() for part in trace.sent] == [[2, 2], [2.25] * 2, [2.46875] * 2]


@pytest.mark.slow
def test_beyond_the_mean_no_variance_is_negative(tmp_path: Path) -> None:
    """BatchNorm's running variances fall from 1, and β = 2 would take as much off again."""
    settings = ("mixing=2", "model.norm=batch", "learning_rate=0.01", "local_steps=20", "evaluate_every=1")
    config = load_config(
        options={"method": "pfedme", "scenario": "colored-digits", "rounds": 2}, settings=settings
    )
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder)
    model = load_tensors(folder.path / "models" / "global.safetensors")
    (variance,) = (tensor for name, tensor in model.items() if name.endswith("running_var"))
    assert 0 <= float(variance.min()) < 0.5  # so 2 v − 1 would be below 0


def test_a_round_begins_at_the_kept_personal_model_and_the_first_at_the_received() -> None:
    half = client(local_steps=1, personal_steps=1, personal_learning_rate=1e-9)
    received = Received(1, {MODEL: NET.initial(1)})
    half.train(received)
    for name, tensor in half.kept[PERSONAL].items():
        torch.testing.assert_close(tensor, received[MODEL][name])
    own = NET.initial(2)
    half.kept[PERSONAL] = own
    half.train(received)
    for name, tensor in half.kept[PERSONAL].items():
        torch.testing.assert_close(tensor, own[name])


def test_both_models_are_evaluated() -> None:
    own, shared = NET.initial(2), NET.initial(1)
    models = client({PERSONAL: own}).models(Received(1, {MODEL: shared}))
    x = torch.ones(2, 4)
    assert torch.equal(models["global"](x), NET.predict(shared, x))
    assert torch.equal(models["personal"](x), NET.predict(own, x))


@pytest.mark.parametrize(
    ("settings", "fine"),
    [
        (["proximity=100"], False),
        (["proximity=100", "momentum=0.5"], True),
        (["proximity=100", "personal_learning_rate=0.019"], True),
        (["proximity=99.9", "weight_decay=0.1"], False),
    ],
)
def test_personal_steps_that_would_diverge_are_refused(settings: list[str], fine: bool) -> None:
    if fine:
        toy_config("pfedme", *settings)
        return
    with pytest.raises(UserError, match=r"personal_learning_rate: 0\.02 .* = 100, .* must be below 0\.02"):
        toy_config("pfedme", *settings)


@pytest.mark.parametrize("method", ["ditto", "fedpin-gm-l2"])
def test_so_are_those_of_a_model_that_is_pulled_to_the_global_one(method: str) -> None:
    toy_config(method, "proximity=19", "learning_rate=0.1")
    with pytest.raises(UserError, match=r"learning_rate: 0\.1 .* = 20, .* must be below 0\.1"):
        toy_config(method, "proximity=20", "learning_rate=0.1")
