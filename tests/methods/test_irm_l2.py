"""IRM-L2: its authors' code, which without penalty is their Ditto; Ditto itself as a special case."""

from typing import Any

import pytest
import torch
from float64_federations import LITERAL, Squares, federate
from tiny_runs import quadratic_site, theta, toy_site

from perennial.client.methods.ditto import DittoClient
from perennial.client.methods.irm import IrmClient
from perennial.client.methods.irm_l2 import IrmL2Client
from perennial.client.trainer import Received
from perennial.common.methods.ditto import Ditto
from perennial.common.methods.irm import Irm
from perennial.common.methods.irm_l2 import IrmL2
from perennial.common.wire import MODEL, PERSONAL


class SquaresIrmL2(Squares, IrmL2Client[IrmL2]):
    """On quadratics, without penalty."""


def test_golden_ditto_of_the_authors_code() -> None:
    """From another program: prox steps from v before every Adam step of v, μ = 0.001, λ = 2β = 1."""
    hparams = IrmL2(
        preset="code",
        weight_decay=0,
        learning_rate=0.2,
        personal_learning_rate=0.1,
        local_steps=2,
        personal_steps=2,
    )
    assert (hparams.proximity, hparams.personal_steps) == (0.5, 2)
    sites = [quadratic_site([[c]]) for c in (1.0, -2.0)]
    nu, kept = federate(lambda site, own: SquaresIrmL2(site, hparams, own), sites, theta(0.0), 2, mixing=0.5)
    assert nu["theta"].item() == pytest.approx(-0.0009563327, abs=5e-11)
    assert [own[PERSONAL]["theta"].item() for own in kept] == pytest.approx(
        [0.3428520334, -0.5240891741], abs=5e-11
    )


def test_with_one_local_step_and_no_penalty_it_is_ditto() -> None:
    """Bit for bit over three rounds: β = λ/2, the anchor v is then w^t."""
    how: dict[str, Any] = {"local_steps": 1, "personal_steps": 1, "batch_size": 16}
    site = toy_site()
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    model = site.network.initial(0)
    for number in (1, 2, 3):
        request = Received(number, {MODEL: model})
        l2 = IrmL2Client(site, IrmL2(penalty=0, proximity=0.35, **how), ours)
        ditto = DittoClient(site, Ditto(proximity=0.7, **how), theirs)
        sent, expected = l2.train(request).arrays[MODEL], ditto.train(request).arrays[MODEL]
        ours, theirs = l2.kept, ditto.kept
        assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
        assert all(torch.equal(ours[PERSONAL][name], tensor) for name, tensor in theirs[PERSONAL].items())
        model = sent


@pytest.mark.parametrize("preset", ["paper", "code"])
def test_the_shared_model_is_federated_irms(preset: Any) -> None:
    site = toy_site()
    request = Received(13, {MODEL: site.network.initial(0)})
    found = IrmL2Client(site, IrmL2(preset=preset), {}).train(request).arrays[MODEL]
    irm = IrmClient(site, Irm(preset=preset), {}).train(request).arrays[MODEL]
    assert all(torch.equal(found[name], tensor) for name, tensor in irm.items())


def test_the_anchor_moves_with_the_local_copy() -> None:
    """With R = 2 the second personal step is pulled to v after its first step, by hand: c = 1, η = γ = β = 0.1."""
    hparams = IrmL2(
        penalty=0, local_steps=2, personal_steps=1, learning_rate=0.1, personal_learning_rate=0.1, proximity=0.1,
        **LITERAL,
    )  # fmt: skip
    client = SquaresIrmL2(quadratic_site([[1.0]]), hparams, {PERSONAL: theta(2.0)})
    client.train(Received(1, {MODEL: theta(0.0)}))
    # θ: 2 − 0.1 (1 + 0.2 · 2) = 1.86; v: 0.1; θ: 1.86 − 0.1 (0.86 + 0.2 · 1.76)
    assert client.kept[PERSONAL]["theta"].item() == pytest.approx(1.86 - 0.1 * (0.86 + 0.352))
