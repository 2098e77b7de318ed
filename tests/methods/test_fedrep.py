from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from perennial.client.methods.fedrep import FedRepClient
from perennial.client.trainer import Metrics, Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.fedrep import FedRep
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors, part
from perennial.common.wire import HEAD, MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.mean import StreamingMean
from perennial.strategies.methods.fedrep import FedRepStrategy
from perennial.testing.tiny_federation import toy_config

NET = network(model_settings({"name": "mlp", "hidden": [5]}), (4,), 3)


def examples(count: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return Examples(x, y, torch.zeros(count, dtype=torch.long))


def client(kept: dict[str, Tensors] | None = None, **hparams: Any) -> FedRepClient[FedRep]:
    data = ClientData(examples(20), examples(5, 1), {"one": examples(7, 2)})
    return FedRepClient(
        Site("client-0", data, NET, 0), FedRep(batch_size=8, **hparams), {} if kept is None else kept
    )


def shared() -> Tensors:
    return part(NET.initial(7), "featurizer")


class Scalar(FedRepClient[FedRep]):
    """f(x) = w φ x with the loss ½(f(1) − y)²."""

    def loss(self, params: Tensors, batch: Examples, received: Received) -> tuple[torch.Tensor, Metrics]:
        output = params["classifier.w"] * params["featurizer.phi"]
        risk = (output - batch.y).square().mean() / 2
        return risk, {"risk": risk}

    def initial(self) -> Tensors:
        return {"featurizer.phi": torch.ones(()), "classifier.w": torch.ones(())}


def test_two_scalar_clients_by_hand() -> None:
    """From φ = w = 1 at rate ½: y=2 gives w=1.5, φ=1.375; y=0 gives w=0.5, φ=0.875; the mean φ is 1.125."""
    names = {"featurizer_names": ("featurizer.phi",), "classifier_names": ("classifier.w",)}
    mean = StreamingMean()
    for y, head, body in ((2, 1.5, 1.375), (0, 0.5, 0.875)):
        one = Examples(torch.ones(1), torch.tensor([y]), torch.zeros(1))
        site = Site("client-0", ClientData(one, one, {}), type("Scalar", (), names)(), 0)  # type: ignore[arg-type]
        here = Scalar(site, FedRep(learning_rate=0.5, head_steps=1, local_steps=1), {})
        reply = here.train(Received(1, {MODEL: {"featurizer.phi": torch.ones(())}}))
        assert {name: tensor.item() for name, tensor in here.kept[HEAD].items()} == {"classifier.w": head}
        assert {name: tensor.item() for name, tensor in reply.arrays[MODEL].items()} == {"featurizer.phi": body}
        mean.add(reply.arrays[MODEL])
    assert mean.result()["featurizer.phi"].item() == 1.125


def test_the_head_is_stepped_on_the_received_featurizer_and_the_featurizer_under_the_new_head() -> None:
    own = part(NET.initial(9), "classifier")
    here = client({HEAD: own}, head_steps=4, local_steps=3, momentum=0.5, weight_decay=0.01)
    reply = here.train(Received(2, {MODEL: shared()}))

    params = {name: tensor.clone().requires_grad_() for name, tensor in {**shared(), **own}.items()}
    for names, steps, purpose in ((NET.classifier_names, 4, "head"), (NET.featurizer_names, 3, "batches")):
        optimizer = torch.optim.SGD([params[n] for n in names], lr=0.05, momentum=0.5, weight_decay=0.01)
        risks = []
        for batch in here.batches(steps, 2, purpose):
            optimizer.zero_grad()
            risk = F.cross_entropy(NET.predict(params, batch.x), batch.y)
            risk.backward()
            optimizer.step()
            risks.append(risk.item())
    for record, name in ((here.kept[HEAD], "classifier"), (reply.arrays[MODEL], "featurizer")):
        expected = part(params, name)  # type: ignore[arg-type]
        assert record.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(record[key], tensor.detach())
    assert reply.metrics["risk"] == pytest.approx(sum(risks) / 3)
    assert here.kept[HEAD] is not own


def test_nothing_of_the_head_is_sent_and_what_was_received_is_left_as_it_was() -> None:
    here, sent = client(), shared()
    reply = here.train(Received(1, {MODEL: sent}))
    assert set(reply.arrays) == {MODEL}
    assert set(reply.arrays[MODEL]) == set(NET.featurizer_names)
    assert all(torch.equal(sent[name], tensor) for name, tensor in shared().items())


def test_the_personal_model_is_the_own_head_on_the_received_featurizer() -> None:
    x, own = examples(6).x, part(NET.initial(9), "classifier")
    for kept, head in (({HEAD: own}, own), ({}, part(NET.initial(0), "classifier"))):
        found = client(kept).models(Received(1, {MODEL: shared()}))["personal"](x)
        assert torch.equal(found, NET.predict({**shared(), **head}, x))


def run(path: Path, **options: Any) -> tuple[LocalRuntime, RunFolder]:
    config = toy_config("fedrep", **options)
    here, folder = LocalRuntime(config), RunFolder.create(path, config)
    here.run(folder)
    return here, folder


def test_only_the_featurizer_travels_and_a_client_that_was_not_drawn_keeps_its_head(tmp_path: Path) -> None:
    here, folder = run(tmp_path / "run", participation=0.5, rounds=2)
    floats = 2 * 8 + 8  # Linear(2, 8)
    rows = [row for row in folder.rows() if row["kind"] == "round"]
    assert [(row["bytes_down"], row["bytes_up"]) for row in rows] == [(2 * 4 * floats, 2 * 4 * floats)] * 2
    saved = load_file(folder.path / "models" / "global.safetensors")
    assert set(saved) == {"featurizer.1.weight", "featurizer.1.bias"}
    strategy = FedRepStrategy(here.config, "any")
    clients = here.config.scenario.client_ids
    strategy.roster.nodes = dict.fromkeys(clients, 0)
    strategy.enrol = lambda *_: None  # type: ignore[method-assign]
    drawn = {name for number in (1, 2) for name in strategy.sample(number, None)}  # type: ignore[arg-type]
    assert {place.split("/")[1] for place in here.states} == drawn


def test_a_model_without_a_featurizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"model 'logistic' has no featurizer .* --set model.name=mlp"):
        FedRepStrategy(toy_config("fedrep", model={"name": "logistic"}), "any")
