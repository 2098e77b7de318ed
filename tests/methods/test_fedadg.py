"""FedADG: its three steps against torch's own layers and SGD, what travels and what stays, special cases."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_runs import toy_site
from torch import Tensor, nn

from perennial.client.methods.fedadg import OWN, FedADGClient, two_layers
from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData
from perennial.common.methods.fedadg import DISCRIMINATOR, GENERATOR, FedADG, layers
from perennial.common.methods.fedavg import FedAvg
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.methods.fedadg import FedADGStrategy
from perennial.testing.tiny_federation import toy_config

SITE = toy_site()
NET = SITE.network
SMALL: dict[str, Any] = {"noise_size": 5, "projection_size": 6}


def client(kept: dict[str, Tensors] | None = None, **hparams: Any) -> FedADGClient:
    return FedADGClient(SITE, FedADG(**SMALL, **hparams), {} if kept is None else kept)


def start() -> Tensors:
    """The model and a generator: 5 numbers of noise and 2 of the label, 8 hidden, 8 features."""
    return {**NET.initial(0), **layers(GENERATOR, (7, 8, 8), torch_generator(0, "test"))}


def received(round_: int = 1) -> Received:
    return Received(round_, {MODEL: start()})


def as_modules(tensors: Tensors, names: tuple[str, ...], *after: nn.Module) -> nn.Sequential:
    first, bias, second, last = (tensors[name] for name in names)
    module = nn.Sequential(nn.Linear(*first.T.shape), nn.LeakyReLU(), nn.Linear(*second.T.shape), *after)
    for parameter, value in zip(module.parameters(), (first, bias, second, last), strict=True):
        parameter.data = value.clone()
    return module


def assert_close(found: Tensors, names: tuple[str, ...], module: nn.Module) -> None:
    for name, parameter in zip(names, module.parameters(), strict=True):
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_the_steps_are_those_of_the_public_code() -> None:
    """D, then F and C, then G, for each mini-batch, each with an optimiser of its own."""
    how: dict[str, Any] = {"learning_rate": 0.1, "adversary_rate": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    ours = client(local_steps=3, batch_size=16, risk_share=0.6, label_smoothing=0.1, **how)
    d = as_modules(ours.discriminator(), DISCRIMINATOR, nn.Sigmoid())
    projection = ours.projection()
    reply = ours.train(received(4))

    g = as_modules(start(), GENERATOR, nn.ReLU())
    f, c = nn.Sequential(nn.Linear(2, 8), nn.ReLU()), nn.Linear(8, 2)
    for module, part in ((f[0], "featurizer.1"), (c, "classifier")):
        module.weight.data, module.bias.data = (start()[f"{part}.{name}"].clone() for name in ("weight", "bias"))
    fc = nn.Sequential(f, c)
    opt_fc, opt_d, opt_g = (
        torch.optim.SGD(module.parameters(), lr=rate, momentum=0.5, weight_decay=0.01)
        for module, rate in ((fc, 0.1), (d, 0.2), (g, 0.2))
    )
    noise, risks = torch_generator(0, "client-0", 4, "noise"), []

    def judged(y: Tensor, z: Tensor) -> Tensor:
        out: Tensor = d(torch.cat([z @ projection.T, y], dim=1))
        return out

    for batch in ours.batches(3, 4):
        y = torch.zeros(len(batch), 2)
        y[torch.arange(len(batch)), batch.y] = 0.7
        fake_input = torch.cat([torch.rand(len(batch), 5, generator=noise), y], dim=1)
        opt_d.zero_grad()
        ((1 - judged(y, g(fake_input))) ** 2 + judged(y, f(batch.x)) ** 2).mean().backward()
        opt_d.step()
        opt_fc.zero_grad()
        risk = F.cross_entropy(fc(batch.x), batch.y, label_smoothing=0.1)
        (0.6 * risk + 0.4 * ((1 - judged(y, f(batch.x))) ** 2).mean()).backward()
        opt_fc.step()
        opt_g.zero_grad()
        (judged(y, g(fake_input)) ** 2).mean().backward()
        opt_g.step()
        risks.append(risk.item())
    assert_close(reply.arrays[MODEL], GENERATOR, g)
    assert_close(ours.kept[OWN], DISCRIMINATOR, d)
    assert_close(reply.arrays[MODEL], NET.parameter_names, fc)
    assert reply.metrics["risk"] == pytest.approx(sum(risks) / 3)
    # The known fault of one public script, a generator that never moves, would pass unnoticed otherwise.
    assert all(not torch.equal(reply.arrays[MODEL][name], start()[name]) for name in GENERATOR)


@pytest.mark.parametrize("risk_steps", [0, 4])
def test_with_the_risk_alone_it_is_fedavg_bit_for_bit(risk_steps: int) -> None:
    how: dict[str, Any] = {"local_steps": 5, "batch_size": 16, "learning_rate": 0.1, "momentum": 0.5}
    ours = client(risk_share=1, label_smoothing=0, risk_steps=risk_steps, **how)
    plain = FedAvgClient(SITE, FedAvg(**how), {})
    model = start()
    if risk_steps:
        model, _ = plain.descend(model, plain.loss, received(), steps=4, purpose="risk")
    theirs = plain.train(Received(1, {MODEL: model})).arrays[MODEL]
    found = ours.train(received()).arrays[MODEL]
    assert all(torch.equal(found[name], theirs[name]) for name in NET.parameter_names)


def test_the_discriminator_stays_and_is_trained_on() -> None:
    kept: dict[str, Tensors] = {}
    first = client(kept, local_steps=2)
    begun = first.discriminator()
    reply = first.train(received())
    assert reply.arrays.keys() == {MODEL}
    assert not set(DISCRIMINATOR) & reply.arrays[MODEL].keys()
    assert set(kept) == {OWN}
    assert all(not torch.equal(kept[OWN][name], begun[name]) for name in DISCRIMINATOR)
    assert client(kept).discriminator() is kept[OWN]
    other = FedADGClient(toy_site(1), FedADG(**SMALL), {})
    assert not torch.equal(other.discriminator()[DISCRIMINATOR[0]], begun[DISCRIMINATOR[0]])
    assert torch.equal(other.projection(), first.projection())
    torch.testing.assert_close(first.projection().norm(dim=1), torch.ones(6))


def test_the_generator_travels_and_the_mean_is_uniform(tmp_path: Path) -> None:
    """|G| floats more than FedAvg each way."""
    settings = [f"{key}={value}" for key, value in SMALL.items()]
    config = toy_config("fedadg", *settings, rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    floats = sum(tensor.numel() for tensor in start().values())
    rows = [row for row in RunFolder(tmp_path / "run").rows() if row["kind"] == "round"]
    assert all(row["bytes_down"] == row["bytes_up"] == 4 * 4 * floats for row in rows)
    final = load_file(tmp_path / "run" / "models" / "global.safetensors")
    assert final.keys() == start().keys()
    strategy = FedADGStrategy(config, "run")
    assert not any(torch.equal(final[name], strategy.generator[name]) for name in GENERATOR)
    assert strategy.weight(None) == 1  # type: ignore[arg-type]


def test_classes_that_are_missing_at_a_client_do_no_harm() -> None:
    ones = SITE.data.train[SITE.data.train.y == 1]
    lonely = FedADGClient(Site("client-0", ClientData(ones, ones, {}), NET, 0), FedADG(**SMALL), {})
    reply = lonely.train(received())
    assert all(torch.isfinite(tensor).all() for tensor in reply.arrays[MODEL].values())


def test_layers_are_drawn_like_pytorchs() -> None:
    drawn = layers(GENERATOR, (400, 30, 20), torch_generator(1))
    theirs = as_modules(drawn, GENERATOR)
    assert [tuple(p.shape) for p in theirs.parameters()] == [(30, 400), (30,), (20, 30), (20,)]
    for name, wide in zip(GENERATOR, (400, 400, 30, 30), strict=True):
        assert drawn[name].abs().max() <= wide**-0.5
    # Uniform on ±1/√wide, whose standard deviation is that over √3.
    assert drawn[GENERATOR[0]].std().item() == pytest.approx((3 * 400) ** -0.5, rel=0.05)
    x = torch.randn(3, 400, generator=torch_generator(2))
    torch.testing.assert_close(two_layers(drawn, GENERATOR, x), theirs(x).detach())
