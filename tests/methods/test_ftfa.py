"""FTFA: fine-tuning before an evaluation (paper), or before every step of the shared model (the authors' code)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from float64_federations import Squares, federate
from tiny_runs import quadratic_site, theta, toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.ftfa import FtfaClient
from perennial.client.methods.irm_l2 import IrmL2Client
from perennial.client.trainer import Received
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.ftfa import Ftfa
from perennial.common.methods.irm_l2 import IrmL2
from perennial.common.wire import MODEL, PERSONAL


class SquaresFtfa(Squares, FtfaClient[Ftfa]):
    """On quadratics."""


class SquaresIrmL2(Squares, IrmL2Client[IrmL2]):
    """On quadratics, without penalty."""


def test_golden_ftfa_of_the_authors_code_whose_shared_model_is_dittos() -> None:
    """From another program."""
    how: dict[str, Any] = {"preset": "code", "learning_rate": 0.2, "personal_learning_rate": 0.1, "local_steps": 2}
    sites = [quadratic_site([[c]]) for c in (1.0, -2.0)]
    hparams = Ftfa(fine_tuning_steps=2, **how)
    nu, kept = federate(lambda site, own: SquaresFtfa(site, hparams, own), sites, theta(0.0), 2, mixing=0.5)
    assert nu["theta"].item() == pytest.approx(-0.0009563327, abs=5e-11)
    assert [own[PERSONAL]["theta"].item() for own in kept] == pytest.approx(
        [0.3950332393, -0.3988545613], abs=5e-11
    )
    ditto = IrmL2(weight_decay=0, **how)
    same, _ = federate(lambda site, own: SquaresIrmL2(site, ditto, own), sites, theta(0.0), 2, mixing=0.5)
    assert torch.equal(same["theta"], nu["theta"])


def test_the_shared_model_takes_fedavgs_steps_and_nothing_is_kept() -> None:
    site = toy_site()
    request = Received(2, {MODEL: site.network.initial(0)})
    client = FtfaClient(site, Ftfa(), {})
    found = client.train(request).arrays[MODEL]
    expected = FedAvgClient(site, FedAvg(), {}).train(request).arrays[MODEL]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert client.kept == {}


def test_the_personal_model_is_the_received_one_some_steps_on() -> None:
    site = toy_site()
    model = site.network.initial(0)
    client = FtfaClient(site, Ftfa(fine_tuning_steps=3, personal_learning_rate=0.2, batch_size=16), {})
    expected = {name: tensor.clone() for name, tensor in model.items()}
    for batch in client.batches(3, 4, "fine-tuning"):
        for tensor in expected.values():
            tensor.requires_grad_()
        risk = F.cross_entropy(site.network.predict(expected, batch.x), batch.y)
        slopes = torch.autograd.grad(risk, list(expected.values()))
        expected = {
            name: (tensor - 0.2 * slope).detach()
            for (name, tensor), slope in zip(expected.items(), slopes, strict=True)
        }
    found = client.fine_tuned(Received(4, {MODEL: model}))
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in expected.items())
    assert not any(tensor.requires_grad for tensor in found.values())


@pytest.mark.parametrize("how", [{}, {"optimizer": "adam"}])
def test_an_evaluation_has_no_side_effect(how: dict[str, Any]) -> None:
    """The same answer twice and after training, nothing kept, the received model left as it was."""
    site = toy_site()
    model = site.network.initial(0)
    sent = {name: tensor.clone() for name, tensor in model.items()}
    request = Received(4, {MODEL: sent})
    client = FtfaClient(site, Ftfa(**how), {})
    first = client.evaluate(request)
    assert client.kept == {}
    assert client.evaluate(request) == first
    client.train(request)
    assert FtfaClient(site, Ftfa(**how), client.kept).evaluate(request) == first
    assert all(torch.equal(sent[name], tensor) for name, tensor in model.items())
    assert first.metrics["personal/test/loss"] != first.metrics["global/test/loss"]
