from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scripted_clients import ScriptedGrid, content, one_round

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedsr import EVALUATION_SAMPLES, FedSRClient
from perennial.client.objectives import gaussian_divergence
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedsr import (
    ADDED,
    DISTRIBUTION_BIAS,
    DISTRIBUTION_WEIGHT,
    REFERENCE_MEAN,
    REFERENCE_SCALE,
    FedSR,
)
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.methods.fedsr import FedSRStrategy, initial
from perennial.testing.tiny_federation import toy_config

NET = network(model_settings({"name": "mlp", "hidden": [5]}), (4,), 3)


def examples(count: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return Examples(x, y, torch.zeros(count, dtype=torch.long))


def client(name: str = "client-0", **hparams: Any) -> FedSRClient:
    data = ClientData(examples(20), examples(5, 1), {"one": examples(7, 2)})
    return FedSRClient(Site(name, data, NET, 3), FedSR(batch_size=8, **hparams), {})


def model() -> Tensors:
    """References away from their start, so that each plays a part."""
    generator = torch.Generator().manual_seed(4)
    added = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in initial(NET, 7).items()}
    return {**NET.initial(7), **added}


def deterministic() -> Tensors:
    """p(z|x) is all but a point, at the features."""
    return {
        **model(),
        DISTRIBUTION_WEIGHT: torch.cat([torch.eye(5), torch.zeros(5, 5)]),
        DISTRIBUTION_BIAS: torch.cat([torch.zeros(5), torch.full((5,), -20.0)]),
    }


# ---------------------------------------------------------------------- the divergence


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.1, 3))
def test_the_divergence_is_torchs(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mean, other_mean = (scale * torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    sigma, other_sigma = (torch.rand(4, 3, generator=generator, dtype=torch.float64) + 0.1 for _ in range(2))
    one, other = (
        torch.distributions.Independent(torch.distributions.Normal(m, s), 1)
        for m, s in ((mean, sigma), (other_mean, other_sigma))
    )
    expected = torch.distributions.kl_divergence(one, other)
    torch.testing.assert_close(gaussian_divergence(mean, sigma, other_mean, other_sigma), expected)


def test_the_divergence_by_hand() -> None:
    """½ (ln 4 + (1 + 9)/4 − 1) for N(0, 1) to N(3, 2²), and none of a distribution to itself."""
    one, three = torch.ones(1, 1), torch.full((1, 1), 3.0)
    assert gaussian_divergence(0 * one, one, three, 2 * one).item() == pytest.approx((1.3862944 + 2.5 - 1) / 2)
    assert gaussian_divergence(three, one, three, one).tolist() == [0]


# ---------------------------------------------------------------------- the client


def test_the_loss_is_risk_norm_and_divergence_of_one_draw_per_sample() -> None:
    here, params, batch = client(norm_weight=0.2, information_weight=0.3), model(), examples(6, 9)
    here.noise = torch.Generator().manual_seed(11)
    value, metrics = here.loss(params, batch, Received(1))

    epsilon = torch.randn(6, 5, generator=torch.Generator().manual_seed(11))
    hidden = F.relu(F.linear(batch.x, params["featurizer.1.weight"], params["featurizer.1.bias"]))
    output = hidden @ params[DISTRIBUTION_WEIGHT].T + params[DISTRIBUTION_BIAS]
    mean, sigma = output[:, :5], (1 + output[:, 5:].exp()).log()
    z = mean + sigma * epsilon
    risk = F.cross_entropy(F.linear(z, params["classifier.weight"], params["classifier.bias"]), batch.y)
    norm = sum(row @ row for row in z) / 6
    information = torch.zeros(())
    for row, label in enumerate(batch.y):
        reference = params[REFERENCE_MEAN][label], (1 + params[REFERENCE_SCALE][label].exp()).log()
        normals = torch.distributions.Normal(mean[row], sigma[row]), torch.distributions.Normal(*reference)
        information += torch.distributions.kl_divergence(*normals).sum() / 6
    assert metrics["risk"].item() == pytest.approx(risk.item(), rel=1e-5)
    assert metrics["norm"].item() == pytest.approx(float(norm), rel=1e-5)
    assert metrics["information"].item() == pytest.approx(information.item(), rel=1e-5)
    assert value.item() == pytest.approx(float(risk + 0.2 * norm + 0.3 * information), rel=1e-5)


def test_everything_is_trained_and_sent() -> None:
    before = model()
    reply = client().train(Received(1, {MODEL: before}))
    assert reply.arrays.keys() == {MODEL}
    assert list(reply.arrays[MODEL]) == list(before)
    assert not any(torch.equal(reply.arrays[MODEL][name], tensor) for name, tensor in before.items())
    assert all(torch.equal(tensor, model()[name]) for name, tensor in before.items())


def test_the_noise_depends_on_seed_client_and_round() -> None:
    def trained(name: str = "client-0", round_: int = 1) -> Tensors:
        # All samples in each mini-batch, so that their order is all else that the key decides.
        here = client(name, local_steps=1)
        here.hparams = FedSR(batch_size=20, local_steps=1)
        return here.train(Received(round_, {MODEL: model()})).arrays[MODEL]

    weight = "classifier.weight"
    assert torch.equal(trained()[weight], trained()[weight])
    for other in (trained("client-1"), trained(round_=2)):
        assert (other[weight] - trained()[weight]).abs().max() > 1e-4


def test_without_regularisers_and_noise_the_first_step_is_fedavgs() -> None:
    received = Received(1, {MODEL: deterministic()})
    mine = client(norm_weight=0, information_weight=0, local_steps=1).train(received).arrays[MODEL]
    plain = FedAvgClient(Site("client-0", client().data, NET, 3), FedAvg(batch_size=8, local_steps=1), {}).train(
        Received(1, {MODEL: NET.initial(7)})
    )
    for name, tensor in plain.arrays[MODEL].items():
        torch.testing.assert_close(mine[name], tensor)
    for name in (REFERENCE_MEAN, REFERENCE_SCALE):
        assert torch.equal(mine[name], deterministic()[name])


# ---------------------------------------------------------------------- evaluation


def test_predictions_are_averaged_over_fixed_draws() -> None:
    params, x = model(), examples(6, 9).x
    predict = client().models(Received(1, {MODEL: params}))["global"]
    noise = torch.randn(EVALUATION_SAMPLES, 5, generator=torch_generator(3, "evaluation", "noise"))
    mean, scale = F.linear(NET.features(params, x), params[DISTRIBUTION_WEIGHT], params[DISTRIBUTION_BIAS]).split(
        5, 1
    )
    draws = [NET.classify(params, mean + F.softplus(scale) * draw).softmax(1) for draw in noise]
    torch.testing.assert_close(predict(x).exp(), sum(draws) / EVALUATION_SAMPLES)
    # The same in another round, at another client, and for a sample on its own.
    again = client("client-1").models(Received(9, {MODEL: params}))["global"]
    assert torch.equal(again(x), predict(x))
    torch.testing.assert_close(torch.cat([predict(row[None]) for row in x]), predict(x))


def test_where_nothing_is_random_the_prediction_is_the_plain_models() -> None:
    x = examples(6, 9).x
    found = client().models(Received(1, {MODEL: deterministic()}))["global"](x)
    torch.testing.assert_close(found, NET.predict(NET.initial(7), x).log_softmax(1), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- the server


def test_the_server_adds_its_tensors_once_and_averages_all_by_sample_count() -> None:
    strategy = FedSRStrategy(toy_config("fedsr"), "run")
    first = strategy.payload({"featurizer.w": torch.zeros(2)})[MODEL]
    assert set(first) == {"featurizer.w", *ADDED}

    def answer(name: str, message: Message) -> RecordDict:
        u = float(name.removeprefix("client-"))
        return content({MODEL: {key: torch.full_like(t, u) for key, t in first.items()}}, int(u) + 1)

    arrays = one_round(strategy, ScriptedGrid(strategy, answer), to_record({"featurizer.w": torch.zeros(2)}))
    assert arrays is not None
    found = from_record(arrays)
    assert set(found) == set(first)
    for tensor in found.values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10))
    assert all(
        torch.equal(tensor, found[key]) for key, tensor in strategy.payload(from_record(arrays))[MODEL].items()
    )


def test_the_start_is_drawn_from_the_seed() -> None:
    one, same, other = (initial(NET, seed) for seed in (0, 0, 1))
    assert torch.equal(one[DISTRIBUTION_WEIGHT], same[DISTRIBUTION_WEIGHT])
    assert not torch.equal(one[DISTRIBUTION_WEIGHT], other[DISTRIBUTION_WEIGHT])
    assert one[DISTRIBUTION_WEIGHT].shape == (10, 5)
    assert one[DISTRIBUTION_WEIGHT].abs().max() <= 5**-0.5
    assert (one[REFERENCE_MEAN] == 0).all()
    assert (one[REFERENCE_SCALE] == 1).all()


def test_traffic(tmp_path: Path) -> None:
    """The model, a layer of d to 2 d features, and two numbers for each class and feature; d = 8, C = 2."""
    config = toy_config("fedsr", rounds=2)
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder)
    size = 4 * ((2 * 8 + 8 + 8 * 2 + 2) + (2 * 8 * 8 + 2 * 8) + 2 * 2 * 8)
    assert size == 4 * sum(t.numel() for t in load_file(folder.path / "models" / "global.safetensors").values())
    rows = [row for row in folder.rows() if row["kind"] == "round"]
    assert [(row["bytes_down"], row["bytes_up"]) for row in rows] == [(4 * size, 4 * size)] * 2
