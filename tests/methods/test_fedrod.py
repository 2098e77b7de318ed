from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedrod import BIAS, WEIGHT, FedRoDClient
from perennial.client.objectives import balanced_cross_entropy
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedrod import FedRoD
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import HEAD, MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config

NET = network(model_settings({"name": "mlp", "hidden": [5]}), (4,), 3)
LABELS = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1]  # three of class 0, seven of class 1, none of class 2


def examples(labels: list[int], seed: int = 0) -> Examples:
    y = torch.tensor(labels)
    return Examples(torch.randn(len(y), 4, generator=torch.Generator().manual_seed(seed)), y, torch.zeros_like(y))


def site(labels: list[int]) -> Site:
    return Site(
        "client-0", ClientData(examples(labels), examples([0, 1], 1), {"one": examples([0, 1], 2)}), NET, 0
    )


def client(labels: list[int], kept: dict[str, Tensors] | None = None, **hparams: Any) -> FedRoDClient:
    return FedRoDClient(site(labels), FedRoD(**{"batch_size": 4, **hparams}), {} if kept is None else kept)


def head() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {WEIGHT: torch.randn(3, 5, generator=generator), BIAS: torch.randn(3, generator=generator)}


def received(round_: int = 1) -> Received:
    return Received(round_, {MODEL: NET.initial(7)})


def test_the_balanced_risk_is_its_closed_form() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0], [1.5, 0.2, 0.0]])
    counts, labels = torch.tensor([6, 3, 1]), torch.tensor([1, 0])
    exp, n = logits.double().exp(), counts.double()
    share = [n[1] * exp[0, 1] / (n * exp[0]).sum(), n[0] * exp[1, 0] / (n * exp[1]).sum()]
    found = balanced_cross_entropy(logits, labels, counts)
    assert found.item() == pytest.approx(-float(sum(torch.stack(share).log())) / 2)
    # The scale of the counts is of no account, so equal ones give the plain risk.
    torch.testing.assert_close(balanced_cross_entropy(logits, labels, 10 * counts), found)
    torch.testing.assert_close(
        balanced_cross_entropy(logits, labels, torch.tensor([4, 4, 4])), F.cross_entropy(logits, labels)
    )


def test_a_class_that_the_client_lacks_is_left_out_of_the_sum() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    found = balanced_cross_entropy(logits, torch.tensor([1]), torch.tensor([6, 3, 0]))
    two = balanced_cross_entropy(logits[:, :2], torch.tensor([1]), torch.tensor([6, 3]))
    torch.testing.assert_close(found, two)
    (gradient,) = torch.autograd.grad(found, logits)
    assert gradient[0, 2] == 0
    assert gradient.isfinite().all()


def test_each_risk_trains_its_own_part_alone() -> None:
    here, batch = client(LABELS), examples(LABELS)
    params = {name: tensor.requires_grad_() for name, tensor in {**NET.initial(7), **head()}.items()}
    value, metrics = here.loss(params, batch, received())
    gradient = dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True))

    z = NET.features(params, batch.x)
    generic = NET.classify(params, z)
    balanced = F.cross_entropy(generic + torch.tensor([3.0, 7.0, 0.0]).log(), batch.y)
    own = torch.autograd.grad(balanced, [params[name] for name in NET.parameter_names], retain_graph=True)
    for name, expected in zip(NET.parameter_names, own, strict=True):
        torch.testing.assert_close(gradient[name], expected)
    empirical = F.cross_entropy(generic + z @ params[WEIGHT].T + params[BIAS], batch.y)
    for name, expected in zip(
        (WEIGHT, BIAS), torch.autograd.grad(empirical, [params[WEIGHT], params[BIAS]]), strict=True
    ):
        torch.testing.assert_close(gradient[name], expected)
    assert metrics == {"risk": balanced, "personal_risk": empirical}


def test_the_generic_model_is_fedavgs_when_classes_are_balanced_whatever_the_head() -> None:
    labels = [0, 1, 2] * 4
    plain = FedAvgClient(site(labels), FedAvg(batch_size=4), {}).train(received())
    for kept in ({}, {HEAD: head()}):
        reply = client(labels, kept).train(received())
        assert reply.arrays.keys() == {MODEL}
        assert reply.arrays[MODEL].keys() == plain.arrays[MODEL].keys()
        for name, tensor in plain.arrays[MODEL].items():
            torch.testing.assert_close(reply.arrays[MODEL][name], tensor)


def test_the_head_takes_sgd_steps_on_features_and_logits_of_the_moving_generic_model() -> None:
    own = head()
    here = client(LABELS, {HEAD: own}, local_steps=6, momentum=0.5, weight_decay=0.1)
    reply = here.train(received(2))

    generic = {name: tensor.clone().requires_grad_() for name, tensor in NET.initial(7).items()}
    weight, bias = (own[name].clone().requires_grad_() for name in (WEIGHT, BIAS))
    optimizers = [
        torch.optim.SGD(params, lr=0.05, momentum=0.5, weight_decay=0.1)
        for params in (generic.values(), (weight, bias))
    ]
    for batch in here.batches(6, 2):
        z = NET.features(generic, batch.x)
        logits = NET.classify(generic, z)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(logits + torch.tensor([3.0, 7.0, 0.0]).log(), batch.y).backward()
        F.cross_entropy(logits.detach() + F.linear(z.detach(), weight, bias), batch.y).backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(here.kept[HEAD], {WEIGHT: weight.detach(), BIAS: bias.detach()})
    torch.testing.assert_close(reply.arrays[MODEL], {name: tensor.detach() for name, tensor in generic.items()})
    assert here.kept[HEAD] is not own


def test_the_personal_predictor_adds_logits_and_starts_as_the_generic_one() -> None:
    x, own = examples([0] * 6).x, head()
    generic = NET.predict(NET.initial(7), x)
    fresh, used = client(LABELS).models(received()), client(LABELS, {HEAD: own}).models(received())
    assert list(fresh) == ["global", "personal"]
    assert torch.equal(fresh["personal"](x), generic)
    for models in (fresh, used):
        assert torch.equal(models["global"](x), generic)
    z = NET.features(NET.initial(7), x)
    torch.testing.assert_close(used["personal"](x), generic + z @ own[WEIGHT].T + own[BIAS])


def test_traffic_is_fedavgs(tmp_path: Path) -> None:
    config = toy_config("fedrod", rounds=2)
    here, folder = LocalRuntime(config), RunFolder.create(tmp_path / "run", config)
    here.run(folder)
    size = 4 * sum(t.numel() for t in load_file(folder.path / "models" / "global.safetensors").values())
    assert size == 4 * (2 * 8 + 8 + 8 * 2 + 2)
    rows = [row for row in folder.rows() if row["kind"] == "round"]
    assert [(row["bytes_down"], row["bytes_up"]) for row in rows] == [(4 * size, 4 * size)] * 2
    assert all(versions[-1].kept.keys() == {HEAD} for versions in here.states.values())
