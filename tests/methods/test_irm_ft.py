"""IRM-FT: federated IRM's shared model, FTFA's personal one."""

from typing import Any

import pytest
import torch
from tiny_runs import toy_site

from perennial.client.methods.ftfa import FtfaClient
from perennial.client.methods.irm import IrmClient
from perennial.client.methods.irm_ft import IrmFtClient
from perennial.client.trainer import Received
from perennial.common.methods.ftfa import Ftfa
from perennial.common.methods.irm import Irm
from perennial.common.methods.irm_ft import IrmFt
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL


@pytest.mark.parametrize("preset", ["paper", "code"])
def test_each_half_is_the_other_methods(preset: Any) -> None:
    site = toy_site()
    request = Received(13, {MODEL: site.network.initial(0)})
    shared = [
        kind(site, hparams, {}).train(request).arrays[MODEL]
        for kind, hparams in ((IrmFtClient, IrmFt(preset=preset)), (IrmClient, Irm(preset=preset)))
    ]
    assert all(torch.equal(shared[0][name], tensor) for name, tensor in shared[1].items())

    def personal(client: FtfaClient[Any]) -> Tensors:
        client.train(request)
        return client.fine_tuned(request) if preset == "paper" else client.kept[PERSONAL]

    # With one local step the personal steps of the code, too, start at the same v, the received model.
    ours = personal(IrmFtClient(site, IrmFt(preset=preset, local_steps=1), {}))
    ftfas = personal(FtfaClient(site, Ftfa(preset=preset, local_steps=1), {}))
    assert all(torch.equal(ours[name], tensor) for name, tensor in ftfas.items())
    assert any(not torch.equal(ours[name], tensor) for name, tensor in request[MODEL].items())


def test_the_code_values_are_those_of_both() -> None:
    hparams = IrmFt(preset="code")
    assert (hparams.penalty, hparams.weight_decay, hparams.fine_tuning_steps) == (1e9, 0.0022, 2)
    assert (hparams.learning_rate, hparams.personal_learning_rate, hparams.optimizer) == (5e-4, 1e-4, "adam")
