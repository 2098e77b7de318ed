import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scripted_clients import ScriptedGrid, content, one_round

from perennial.client.methods.fedpac import FedPACClient
from perennial.client.methods.fedrep import FedRepClient
from perennial.client.objectives import centroid_distance, class_means
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.fedpac import CENTROIDS, STATISTICS, FedPAC
from perennial.common.methods.fedrep import FedRep
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors, part
from perennial.common.wire import HEAD, MODEL, NUM_EXAMPLES, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.methods.fedpac import FedPACStrategy, combination, combined, merged
from perennial.strategies.screening import Rejected
from perennial.testing.tiny_federation import toy_config

NET = network(model_settings({"name": "mlp", "hidden": [5]}), (4,), 3)

# ---------------------------------------------------------------------- the quadratic programme


def programme(means: Any, variances: Any, own: int) -> Any:
    """Its matrix P, term by term: (s_u − s_j)·(s_u − s_k), and V_j besides on the diagonal."""
    count = len(variances)
    found = np.diag(variances).astype(float)
    for j in range(count):
        for k in range(count):
            found[j, k] += sum((means[own] - means[j]) * (means[own] - means[k]))
    return found


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(-4, 4), st.booleans())
def test_the_weights_meet_the_conditions_of_the_optimum(seed: int, count: int, scale: float, twin: bool) -> None:
    """KKT on the simplex: no slope is below the mean slope 2 aᵀPa, and on the support all are equal to it."""
    rng = np.random.default_rng(seed)
    means, variances = rng.normal(size=(count, 7)), rng.uniform(0, 10**scale, count)
    if twin:  # two clients of the same statistics, and one without variance
        means[-1], variances[0] = means[0], 0
    for own in range(count):
        weights, matrix = combination(own, means, variances), programme(means, variances, own)
        assert (weights >= 0).all()
        assert weights.sum() == pytest.approx(1)
        slopes, level = 2 * matrix @ weights, 2 * weights @ matrix @ weights
        tolerance = 1e-9 * np.abs(matrix).max()
        assert (slopes >= level - tolerance).all()
        assert slopes[weights > 0] == pytest.approx(level, abs=tolerance)


def test_two_clients_by_hand() -> None:
    """`a² V_0 + (1 − a)² (V_1 + δ²)` is least at a = (V_1 + δ²)/(V_0 + V_1 + δ²)."""
    means, variances = np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([2.0, 3.0])
    assert combination(0, means, variances) == pytest.approx([28 / 30, 2 / 30])
    assert combination(1, means, variances) == pytest.approx([3 / 30, 27 / 30])


def test_clients_alike_are_weighed_by_their_variances_and_a_far_one_gets_nothing() -> None:
    means = np.array([[1.0], [1.0], [1e6]])
    assert combination(0, means, np.array([1.0, 3.0, 1e-9])) == pytest.approx([0.75, 0.25, 0], abs=1e-6)
    assert combination(0, means[:1], np.array([0.0])).tolist() == [1]
    assert combination(1, means[:2], np.zeros(2)).sum() == pytest.approx(1)  # anything is optimal


@pytest.mark.parametrize("seed", [333, 922])
def test_statistics_of_very_different_sizes_have_an_optimum(seed: int) -> None:
    """For which the solver's usual number of steps is too few."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(7, 12))
    means[0] = 10.0 ** rng.integers(-6, 8, 12) * rng.choice([-1, 1], 12)
    means[1:3] *= [[1e-3], [1e-20]]
    variances = np.array([6e5, 4e-21, 9e-39, *rng.uniform(0, 1, 7)[3:]])
    for own in range(7):
        weights = combination(own, means, variances)
        assert (weights >= 0).all()
        assert weights.sum() == pytest.approx(1)


def test_a_client_for_whom_no_optimum_is_found_keeps_its_own_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any, **__: Any) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("scipy.optimize.nnls", endless)
    assert combination(1, np.zeros((3, 2)), np.ones(3)).tolist() == [0, 1, 0]


def test_heads_are_combined_for_each_client() -> None:
    heads = {name: {"classifier.w": torch.full((2,), value)} for name, value in (("a", 10.0), ("b", 40.0))}
    statistics = [
        {"mean": torch.tensor([[0.0], [0.0]]), "variance": torch.tensor(2.0)},
        {"mean": torch.tensor([[3.0], [4.0]]), "variance": torch.tensor(3.0)},
    ]
    found = combined(heads, statistics)
    assert found["a"]["classifier.w"].tolist() == pytest.approx([12, 12])  # 28/30 and 2/30
    assert found["b"]["classifier.w"].tolist() == pytest.approx([37, 37])  # 3/30 and 27/30


def test_centroids_are_weighted_by_count_and_outlive_a_round_without_their_class() -> None:
    before = {"mean": torch.tensor([[1.0], [2.0], [3.0]]), "count": torch.tensor([4.0, 5.0, 0.0])}
    sent = [
        {"mean": torch.tensor([[10.0], [0.0], [0.0]]), "count": torch.tensor([3.0, 0.0, 0.0])},
        {"mean": torch.tensor([[20.0], [0.0], [0.0]]), "count": torch.tensor([1.0, 0.0, 0.0])},
    ]
    found = merged(before, sent)
    assert found["mean"].tolist() == [[12.5], [2.0], [3.0]]
    assert found["count"].tolist() == [4, 5, 0]
    assert {key: tensor.dtype for key, tensor in found.items()} == dict.fromkeys(found, torch.float32)


# ---------------------------------------------------------------------- the objective


def test_class_means_by_hand() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [7.0, 7.0]])
    means, counts = class_means(features, torch.tensor([2, 2, 0]), 4)
    assert means.tolist() == [[7, 7], [0, 0], [2, 3], [0, 0]]
    assert counts.tolist() == [1, 0, 2, 0]


def test_the_distance_is_a_mean_square_and_classes_without_a_centroid_add_nothing() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [7.0, 7.0]], requires_grad=True)
    means = torch.tensor([[0.0, 0.0], [3.0, 1.0]])
    labels = torch.tensor([0, 1, 0])
    found = centroid_distance(features, labels, means, torch.tensor([0.0, 5.0]))
    assert found.item() == pytest.approx(9 / 6)
    (gradient,) = torch.autograd.grad(found, features)
    assert gradient.tolist() == [[0, 0], [0, 1], [0, 0]]
    whole = centroid_distance(features, labels, means, torch.tensor([1.0, 5.0]))
    torch.testing.assert_close(whole, F.mse_loss(features, means[labels]))


# ---------------------------------------------------------------------- the client


def examples(labels: list[int], seed: int = 0) -> Examples:
    y = torch.tensor(labels)
    return Examples(torch.randn(len(y), 4, generator=torch.Generator().manual_seed(seed)), y, torch.zeros_like(y))


LABELS = [0, 2, 2, 0, 2, 2, 2, 0, 2, 2]  # none of class 1


def site() -> Site:
    return Site("client-0", ClientData(examples(LABELS), examples([0], 1), {"one": examples([0], 2)}), NET, 0)


def received(count: float) -> Received:
    """Featurizer, classifier, and centroids of which `count` samples are known."""
    model = NET.initial(7)
    centroids = {"mean": torch.arange(15.0).reshape(3, 5) / 10, "count": torch.full((3,), count)}
    return Received(
        2, {MODEL: part(model, "featurizer"), HEAD: part(NET.initial(9), "classifier"), CENTROIDS: centroids}
    )


def start() -> Tensors:
    return {**part(NET.initial(7), "featurizer"), **part(NET.initial(9), "classifier")}


@pytest.mark.parametrize(("alignment", "count"), [(0.0, 4.0), (5.0, 0.0)], ids=["weight 0", "no centroids"])
def test_without_alignment_its_local_training_is_fedreps(alignment: float, count: float) -> None:
    how: dict[str, Any] = {"batch_size": 4, "head_steps": 3, "local_steps": 5, "momentum": 0.5}
    found = FedPACClient(site(), FedPAC(alignment=alignment, **how), {}).train(received(count))
    fedrep = FedRepClient(site(), FedRep(**how), {HEAD: received(0)[HEAD]})
    plain = fedrep.train(Received(2, {MODEL: received(0)[MODEL]}))
    expected = {**plain.arrays[MODEL], **fedrep.kept[HEAD]}
    assert found.arrays[MODEL].keys() == expected.keys()
    assert all(torch.equal(found.arrays[MODEL][name], tensor) for name, tensor in expected.items())
    assert found.metrics["risk"] == plain.metrics["risk"]


def test_the_featurizers_steps_are_the_papers() -> None:
    here = FedPACClient(site(), FedPAC(alignment=0.7, batch_size=4, head_steps=2, local_steps=3), {})
    message = received(4)
    reply = here.train(message)
    model = start()
    for steps, names, purpose in ((2, NET.classifier_names, "head"), (3, NET.featurizer_names, "batches")):
        for batch in here.batches(steps, 2, purpose):
            params = {name: tensor.clone().requires_grad_() for name, tensor in model.items()}
            z = NET.features(params, batch.x)
            loss = F.cross_entropy(NET.classify(params, z), batch.y)
            if purpose == "batches":
                loss = loss + 0.7 * F.mse_loss(z, message[CENTROIDS]["mean"][batch.y])
            gradient = torch.autograd.grad(loss, [params[name] for name in names])
            model = model | {n: model[n] - 0.05 * g for n, g in zip(names, gradient, strict=True)}
    torch.testing.assert_close(reply.arrays[MODEL], model)


def test_statistics_are_of_the_received_featurizer_and_centroids_of_the_trained_one() -> None:
    here = FedPACClient(site(), FedPAC(batch_size=4), {})
    reply = here.train(received(4))
    n = len(LABELS)

    def of_class(model: Tensors, k: int) -> torch.Tensor:
        z = NET.features(model, here.data.train.x)
        return torch.stack([row for row, label in zip(z, LABELS, strict=True) if label == k])

    variance = 0.0
    for k in (0, 2):
        rows = of_class(start(), k)
        share, mean = len(rows) / n, sum(rows) / len(rows)
        torch.testing.assert_close(reply.arrays[STATISTICS]["mean"][k], share * mean)
        second = sum(float(row @ row) for row in rows) / len(rows)
        variance += (share * second - share**2 * float(mean @ mean)) / n
        centroid = of_class(reply.arrays[MODEL], k).mean(0)
        torch.testing.assert_close(reply.arrays[CENTROIDS]["mean"][k], centroid)
    assert reply.arrays[STATISTICS]["variance"].item() == pytest.approx(variance, rel=1e-5)
    assert variance > 0
    # The class that this client lacks.
    assert reply.arrays[STATISTICS]["mean"][1].tolist() == [0] * 5
    assert reply.arrays[CENTROIDS]["mean"][1].tolist() == [0] * 5
    assert reply.arrays[CENTROIDS]["count"].tolist() == [3, 0, 7]


def test_the_personal_model_is_the_received_classifier_on_the_received_featurizer() -> None:
    x = examples([0] * 6).x
    found = FedPACClient(site(), FedPAC(), {}).models(received(0))["personal"](x)
    assert torch.equal(found, NET.predict(start(), x))


# ---------------------------------------------------------------------- the server

MODEL_NAMES = {
    "featurizer.1.weight": (8, 2),
    "featurizer.1.bias": (8,),
    "classifier.weight": (2, 8),
    "classifier.bias": (2,),
}


def answer(name: str, message: Message) -> RecordDict:
    """Model full of u, of 1, 2, 3 or 4 samples; clients 0 and 1 are alike, and so are 2 and 3, far from them."""
    u = int(name.removeprefix("client-"))
    return content(
        {
            MODEL: {key: torch.full(shape, float(u)) for key, shape in MODEL_NAMES.items()},
            STATISTICS: {
                "mean": torch.tensor([[1e6 * (u // 2)], [0.0]]).repeat(1, 8),
                "variance": torch.tensor(1.0),
            },
            CENTROIDS: {"mean": torch.full((2, 8), float(u)), "count": torch.tensor([u + 1.0, 0.0])},
        },
        count=u + 1,
        risk=1.0,
    )


def test_a_round_by_hand() -> None:
    strategy = FedPACStrategy(toy_config("fedpac"), "run")
    grid = ScriptedGrid(strategy, answer)
    arrays = to_record({key: torch.full(shape, 9.0) for key, shape in MODEL_NAMES.items()})
    new = one_round(strategy, grid, arrays)
    for sent in grid.of("train").values():
        assert set(sent[MODEL]) == {"featurizer.1.weight", "featurizer.1.bias"}
        assert (sent[HEAD]["classifier.bias"] == 9).all()  # before its first round
        assert not sent[CENTROIDS]["count"].any()
    assert new is not None
    for tensor in from_record(new).values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10))
    assert strategy.centroids["mean"][0].tolist() == [2.0] * 8
    assert strategy.centroids["mean"][1].tolist() == [0.0] * 8
    assert strategy.centroids["count"].tolist() == [10, 0]
    # In the next round each client is sent its own mix: of its pair, half and half.
    one_round(strategy, grid, new, 2)
    for name, value in (("client-0", 0.5), ("client-1", 0.5), ("client-2", 2.5), ("client-3", 2.5)):
        head = grid.of("train")[name][HEAD]
        assert set(head) == {"classifier.weight", "classifier.bias"}
        for tensor in head.values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, value))
        assert grid.of("train")[name][CENTROIDS]["count"].tolist() == [10, 0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"variance": torch.tensor(-1e9)}, "the variance -1e\\+09 is below 0"),
        ({"mean": torch.full((2, 8), 5.0)}, "the variance 1 is below the .* between its own classes"),
        ({"count": torch.tensor([-99.0, 100.0])}, r"samples by class that are not its 1: \[-99.0, 100.0\]"),
        ({"count": torch.tensor([0.5, 0.5])}, r"samples by class that are not its 1: \[0.5, 0.5\]"),
        ({"count": torch.tensor([1.0, 1.0])}, r"samples by class that are not its 1: \[1.0, 1.0\]"),
    ],
)
def test_counts_and_variances_that_cannot_be_are_left_out(wrong: Tensors, reason: str) -> None:
    def hostile(client: str, message: Message) -> RecordDict:
        made = answer(client, message)
        if client == "client-0":
            for record in (STATISTICS, CENTROIDS):
                honest = from_record(made.array_records[record])
                made[record] = to_record({key: wrong.get(key, tensor) for key, tensor in honest.items()})
        return made

    strategy = FedPACStrategy(toy_config("fedpac"), "run")
    arrays = to_record({key: torch.zeros(shape) for key, shape in MODEL_NAMES.items()})
    one_round(strategy, ScriptedGrid(strategy, hostile), arrays)
    (left_out,) = [exchange.left_out for exchange in strategy.exchanges if exchange.action == "train"]
    assert left_out.keys() == {"client-0"}
    assert re.search(reason, left_out["client-0"])
    assert strategy.centroids["count"].tolist() == [9, 0]


@pytest.mark.parametrize("labels", [[0] * 30, [0, 1] * 15, [0, 0, 1], [0] * 99 + [1]])
def test_only_a_variance_that_its_own_classes_rule_out_is_left_out(labels: list[int]) -> None:
    """Where all samples of a class have the same features, it is the least there can be."""
    y = torch.tensor(labels)
    data = Examples(torch.tensor([[1.0, 2.0], [-3.0, 4.0]])[y], y, torch.zeros_like(y))
    strategy = FedPACStrategy(toy_config("fedpac"), "run")
    net = network(strategy.run.model, (2,), 2)
    here = FedPACClient(Site("client-0", ClientData(data, data, {}), net, 0), FedPAC(), {})
    model = net.initial(3)
    arrays = {STATISTICS: here.statistics(model), CENTROIDS: here.centroids(model)}

    def check(variance: torch.Tensor) -> None:
        sent = {**arrays, STATISTICS: {**arrays[STATISTICS], "variance": variance}}
        strategy.check(AcceptedReply("client-0", sent, MetricRecord({NUM_EXAMPLES: len(y)}), ConfigRecord()))

    check(arrays[STATISTICS]["variance"])
    if 0.1 < y.float().mean() < 0.9:
        with pytest.raises(Rejected, match="between its own classes"):
            check(torch.tensor(0.0))


def test_the_state_holds_centroids_and_combined_heads() -> None:
    one, other = (FedPACStrategy(toy_config("fedpac"), "run") for _ in range(2))
    arrays = to_record({key: torch.zeros(shape) for key, shape in MODEL_NAMES.items()})
    one_round(one, ScriptedGrid(one, answer), arrays)
    other.load_state_dict(one.state_dict())
    assert other.heads.keys() == one.heads.keys() == set(one.run.scenario.client_ids)
    torch.testing.assert_close(other.heads, one.heads, rtol=0, atol=0)
    torch.testing.assert_close(other.centroids, one.centroids, rtol=0, atol=0)


def test_when_nobody_answers_nothing_changes() -> None:
    def fail(name: str, message: Message) -> RecordDict:
        raise RuntimeError

    strategy = FedPACStrategy(toy_config("fedpac", "quorum=0"), "run")
    arrays = to_record({key: torch.zeros(shape) for key, shape in MODEL_NAMES.items()})
    assert one_round(strategy, ScriptedGrid(strategy, fail), arrays) is None
    assert strategy.heads == {}


def test_a_model_without_a_featurizer_is_refused() -> None:
    with pytest.raises(UserError, match="method 'fedpac' shares one"):
        FedPACStrategy(toy_config("fedpac", model={"name": "logistic"}), "run")


def test_traffic(tmp_path: Path) -> None:
    """Down: model and centroids (C d + C); up: model, s and V (C d + 1), class means and counts. d = 8, C = 2."""
    config = toy_config("fedpac", rounds=2, participation=0.5)
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder)
    floats = sum(t.numel() for t in load_file(folder.path / "models" / "global.safetensors").values())
    assert floats == sum(int(np.prod(shape)) for shape in MODEL_NAMES.values())
    down, up = floats + 2 * 8 + 2, floats + (2 * 8 + 1) + (2 * 8 + 2)
    rows = [row for row in folder.rows() if row["kind"] == "round"]
    assert [(row["bytes_down"], row["bytes_up"]) for row in rows] == [(2 * 4 * down, 2 * 4 * up)] * 2
    (evaluation, *_) = [row for row in folder.rows() if row["kind"] == "evaluation-traffic"]
    assert evaluation["bytes_down"] == 4 * 4 * floats
