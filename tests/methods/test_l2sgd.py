from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from tiny_runs import Quadratic, quadratic_site, theta, toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.l2sgd import L2SGDClient
from perennial.client.methods.local import LocalClient
from perennial.client.trainer import Received
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.l2sgd import L2SGD
from perennial.common.methods.local import Local
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES, PERSONAL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.methods.l2sgd import L2SGDStrategy
from perennial.testing.tiny_federation import Toy, toy_config


class QuadraticClient(Quadratic, L2SGDClient):
    pass


class Pair:
    """Two clients with the optima 2 and −1, and a server that takes the uniform mean."""

    def __init__(self, **hparams: Any) -> None:
        self.hparams = L2SGD(**hparams)
        sites = [quadratic_site([[centre]], client=f"client-{i}") for i, centre in enumerate((2.0, -1.0))]
        self.clients = [QuadraticClient(site, self.hparams, {}) for site in sites]
        self.mean, self.round = theta(0.5), 0

    def train(self) -> list[float]:
        """A round; what the clients sent."""
        self.round += 1
        replies = [client.train(Received(self.round, {MODEL: self.mean})) for client in self.clients]
        sent = [reply.arrays[MODEL]["theta"] for reply in replies]
        self.mean = {"theta": (sent[0] + sent[1]) / 2}
        return [tensor.item() for tensor in sent]

    def personal(self) -> list[float]:
        """What the clients would evaluate now."""
        received = Received(self.round, {MODEL: self.mean})
        return [client.pulled(received, self.round)["theta"].item() for client in self.clients]

    def coins(self) -> tuple[int, int]:
        zeros, ones = {client.coins(self.round) for client in self.clients}.pop()
        return zeros, ones


def toy(**hparams: Any) -> L2SGDClient:
    return L2SGDClient(toy_site(), L2SGD(**hparams), {})


def model(seed: int = 7) -> Tensors:
    return toy_site().network.initial(seed)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---------------------------------------------------------------------- step sizes and coins


@pytest.mark.parametrize(
    ("steps", "rate", "proximity", "n"), [(10, 0.05, 1.0, 8), (1, 0.3, 0.1, 40), (4, 0.01, 7, 2)]
)
def test_the_pull_is_the_papers_whatever_the_number_of_clients(
    steps: int, rate: float, proximity: float, n: int
) -> None:
    hparams = L2SGD(local_steps=steps, learning_rate=rate, proximity=proximity)
    p = hparams.averaging_probability
    assert p == pytest.approx(1 / (steps + 1))
    a = rate * n * (1 - p)  # so that a local step, a/(n(1 − p)), is the learning rate
    assert hparams.pull == pytest.approx(a * proximity / (n * p))


def test_a_pull_past_the_mean_is_warned_of() -> None:
    assert L2SGD().caution(Toy()) == ""
    assert "is 5, so that" in L2SGD(proximity=10).caution(Toy())


def test_the_coins_show_one_with_probability_p_and_are_the_same_for_all() -> None:
    clients = [L2SGDClient(toy_site(number), L2SGD(local_steps=4), {}) for number in (0, 1)]
    zeros, ones = np.array([clients[0].coins(round_) for round_ in range(3000)]).T
    assert [clients[1].coins(round_) for round_ in range(50)] == list(zip(zeros[:50], ones[:50], strict=True))
    assert zeros.min() == ones.min() == 1
    # Of all draws, one in five; and in a run of zeros each one is followed by a one with probability p.
    assert ones.sum() / (ones.sum() + zeros.sum()) == pytest.approx(0.2, rel=0.05)
    for length in range(1, 8):
        assert (zeros > length).sum() / (zeros >= length).sum() == pytest.approx(0.8, abs=0.05)
    assert (ones > 1).mean() == pytest.approx(0.2, abs=0.03)
    other = L2SGDClient(toy_site(seed=1), L2SGD(local_steps=4), {})
    assert [other.coins(round_) for round_ in range(50)] != list(zip(zeros[:50], ones[:50], strict=True))


# ---------------------------------------------------------------------- the algorithm


@pytest.mark.parametrize(("steps", "rate", "proximity"), [(4, 0.1, 0.7), (1, 0.3, 2.0), (3, 0.2, 3.0)])
def test_rounds_are_algorithm_l2gd_with_the_same_coins(steps: int, rate: float, proximity: float) -> None:
    """All coins in a row, tossed over the models of both clients at once: exact gradients, n = 2."""
    pair = Pair(local_steps=steps, learning_rate=rate, proximity=proximity)
    n, p, centres = 2, 1 / (steps + 1), np.array([2.0, -1.0])
    a = rate * n * (1 - p)
    x, before, switches = np.array([0.5, 0.5]), 1, 0
    for _ in range(25):
        sent = pair.train()
        zeros, ones = pair.coins()
        for coin in [0] * zeros + [1] * ones:
            if coin and not before:
                switches += 1
                assert sent == pytest.approx(x.tolist(), rel=1e-12)
                assert pair.mean["theta"].item() == pytest.approx(x.mean(), rel=1e-12)
            if coin:
                x = (1 - a * proximity / (n * p)) * x + a * proximity / (n * p) * x.mean()
            else:
                x = x - a / (n * (1 - p)) * (x - centres)
            before = coin
        assert pair.personal() == pytest.approx(x.tolist(), rel=1e-12)
    assert switches == pair.round == 25  # one exchange for each change from 0 to 1


def test_with_small_steps_it_ends_near_the_objectives_optimum() -> None:
    """Of (1/n) Σ ½ (x_i − c_i)² + (λ/2n) Σ (x_i − x̄)²: x_i = (c_i + λ c̄)/(1 + λ)."""
    pair = Pair(local_steps=3, learning_rate=0.02, proximity=2.0)
    late = []
    for round_ in range(250):
        pair.train()
        if round_ >= 150:
            late.append(pair.personal())
    assert np.mean(late, axis=0) == pytest.approx([(2 + 2 * 0.5) / 3, (-1 + 2 * 0.5) / 3], abs=0.1)


def test_without_proximity_it_is_local_training_for_as_long_as_the_coins_say() -> None:
    how: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "batch_size": 7}
    found, local = toy(proximity=0, **how), LocalClient(toy_site(), Local(**how), {})
    own = found.kept[PERSONAL] = model()
    for round_ in (1, 2, 3):
        zeros, _ = found.coins(round_)
        reply = found.train(Received(round_, {MODEL: model(round_)}))
        own, metrics = local.descend(own, local.loss, Received(round_), steps=zeros)
        assert_equal(found.kept[PERSONAL], own)
        assert reply.metrics == {NUM_EXAMPLES: len(local.data.train), **metrics}


def test_all_the_way_to_the_mean_it_is_fedavg_with_that_many_steps() -> None:
    found = toy(learning_rate=0.05, local_steps=10, proximity=2.0)
    assert found.hparams.pull == 1
    found.kept[PERSONAL] = model(8)
    received = Received(4, {MODEL: model()})
    plain = FedAvgClient(toy_site(), FedAvg(local_steps=found.coins(4)[0]), {})
    assert_equal(found.train(received).arrays[MODEL], plain.train(received).arrays[MODEL])


# ---------------------------------------------------------------------- client and server


def test_a_client_starts_from_the_mean_it_first_receives() -> None:
    found, received = toy(), Received(6, {MODEL: model()})
    assert_equal(found.pulled(received, 5), model())
    plain = FedAvgClient(toy_site(), FedAvg(local_steps=found.coins(6)[0]), {}).train(received)
    assert_equal(found.train(received).arrays[MODEL], plain.arrays[MODEL])


def test_what_is_kept_is_what_was_sent_and_evaluation_pulls_a_copy() -> None:
    found = toy()
    kept = found.kept[PERSONAL] = model(8)
    sent = found.train(Received(1, {MODEL: model()})).arrays[MODEL]
    assert_equal(kept, model(8))
    assert_equal(found.kept[PERSONAL], sent)
    before = {name: tensor.clone() for name, tensor in sent.items()}
    received = Received(1, {MODEL: model(9)})
    assert found.evaluate(received) == found.evaluate(received)
    assert_equal(found.kept[PERSONAL], before)
    assert_equal(received[MODEL], model(9))


def test_clients_count_the_same_in_the_mean() -> None:
    server = L2SGDStrategy(toy_config("l2sgd"), "run")
    weights = [
        server.weight(AcceptedReply("a", {}, MetricRecord({NUM_EXAMPLES: n}), ConfigRecord())) for n in (1, 100)
    ]
    assert weights == [1, 1]


def test_a_model_goes_down_and_up_in_a_round(tmp_path: Path) -> None:
    config = toy_config("l2sgd", rounds=3)
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    size = 4 * sum(tensor.numel() for tensor in model().values())
    assert summary["bytes_per_client_and_round"] == {"down": size, "up": size}
