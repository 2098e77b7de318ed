"""FedPIN and its ablations: objectives, the steps of Algorithm 5, what travels and what stays."""

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_runs import toy_site
from torch import Tensor

from perennial.client.methods.ditto import DittoClient
from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedpin import PLAIN, FedPINClient
from perennial.client.methods.fedpin_gm import FedPINGMClient
from perennial.client.methods.fedpin_gm_ft import FedPINGMFTClient
from perennial.client.methods.fedpin_gm_l2 import FedPINGML2Client
from perennial.client.methods.local import LocalClient
from perennial.client.objectives import anchored, client_information, contrastive_loss, total_variance
from perennial.client.trainer import Received, Reply, Site
from perennial.common.config import RunConfig
from perennial.common.data.examples import ClientData, Examples
from perennial.common.mathematics.auxiliary_classifier import (
    AUXILIARY,
    OFFSET,
    OWN,
    SCALE,
    WIDTH,
    auxiliary_logits,
    initial_auxiliary,
    initial_scale,
    scaled_logits,
)
from perennial.common.methods.ditto import Ditto
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedpin import FedPIN, FedPINGM, FedPINGMFT, FedPINGML2
from perennial.common.methods.local import Local
from perennial.common.utils.errors import RunStopped
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES, PERSONAL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.mean import StreamingMean
from perennial.strategies.methods.fedpin import FedPINStrategy
from perennial.strategies.methods.fedpin_gm import FedPINGMStrategy
from perennial.testing.tiny_federation import Toy, toy_config

Kept = dict[str, Tensors]
FEATURES = 8
"""The toy model's."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def request(round_: int = 1, alpha: float = 25.0, seed: int = 0) -> Received:
    """What a client of the toy scenario receives."""
    arrays = {MODEL: toy_site().network.initial(seed), AUXILIARY: initial_auxiliary(FEATURES, 2, seed)}
    return Received(round_, arrays, {"independence": alpha, "personal": True})


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def copy(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


# ---------------------------------------------------------------------- L_con


def naive_contrast(z: Tensor, p: Tensor, n: Tensor, tau: float) -> float:
    total = 0.0
    for anchor, positive in zip(z, p, strict=True):

        def cosine(other: Tensor, anchor: Tensor = anchor) -> float:
            return float(anchor @ other) / float(anchor.norm() * other.norm())

        pull = math.exp(cosine(positive) / tau)
        total -= math.log(pull / (pull + sum(math.exp(cosine(negative) / tau) for negative in n)))
    return total / len(z)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.1, 0.5, 1.0]))
def test_contrast_is_its_definition_within_bounds_and_blind_to_scale_and_order(
    seed: int, n: int, d: int, tau: float
) -> None:
    z, p, q = normal(3, n, d, seed=seed)
    value = float(contrastive_loss(z, p, q, tau))
    assert value == pytest.approx(naive_contrast(z, p, q, tau), rel=1e-9)
    assert math.log(1 + n * math.exp(-2 / tau)) - 1e-9 <= value <= math.log(1 + n * math.exp(2 / tau)) + 1e-9
    assert float(contrastive_loss(3 * z, 0.1 * p, 7 * q, tau)) == pytest.approx(value, rel=1e-9)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert float(contrastive_loss(z[order], p[order], q[order], tau)) == pytest.approx(value, rel=1e-9)
    assert float(contrastive_loss(z, p, q[order], tau)) == pytest.approx(value, rel=1e-9)


def test_contrast_of_equal_similarities_counts_the_negatives() -> None:
    """log(1 + B), with the sample's own negative among the B."""
    ones = torch.ones(64, 5)
    assert float(contrastive_loss(ones, ones, ones, 0.5)) == pytest.approx(math.log(65), rel=1e-6)


def test_contrast_falls_as_the_positive_nears_and_rises_as_a_negative_does() -> None:
    z, away, near = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    assert contrastive_loss(z, near, away, 0.5) < contrastive_loss(z, away, away, 0.5)
    assert contrastive_loss(z, away, near, 0.5) > contrastive_loss(z, away, away, 0.5)


def test_contrast_of_one_sample_by_hand() -> None:
    """Positive at 60°, negative at 90°: log(1 + e^{(0 − 0.5)/τ})."""
    positive = torch.tensor([[0.5, math.sqrt(0.75)]])
    found = contrastive_loss(torch.tensor([[2.0, 0.0]]), positive, torch.tensor([[0.0, 3.0]]), 0.5)
    assert float(found) == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)


def test_contrast_ranks_features_that_follow_the_anchor_above_independent_ones() -> None:
    anchors, negatives, noise, other = normal(4, 64, 10)
    values = [float(contrastive_loss(z, anchors, negatives, 0.5)) for z in (anchors + noise, other)]
    assert values[0] < values[1] - 0.5


def test_contrast_is_no_bound_on_information() -> None:
    """Constants share nothing, and log(65) − L_con claims 4.17 nats."""
    constant = torch.ones(64, 3, dtype=torch.float64)
    value = float(contrastive_loss(constant, constant, -constant, 0.1))
    assert value == pytest.approx(1.3e-7, rel=0.02)
    assert math.log(65) - value == pytest.approx(4.17, abs=0.005)


def test_contrast_of_a_sample_without_features_is_finite() -> None:
    """All units of a rectified layer may be off: such a sample has cosine 0 with all."""
    zeros = torch.zeros(1, 4, requires_grad=True)
    value = contrastive_loss(zeros, torch.ones(1, 4), torch.ones(3, 4), 0.5)
    assert value.item() == pytest.approx(math.log(4), rel=1e-6)
    assert torch.isfinite(torch.autograd.grad(value, zeros)[0]).all()


# ---------------------------------------------------------------------- Var


def test_variance_is_the_trace_of_the_biased_covariance() -> None:
    z = normal(9, 4)
    found = total_variance(z)
    deviations = z - z.sum(0) / 9
    assert float(found) == pytest.approx(float((deviations.T @ deviations / 9).trace()))
    assert float(total_variance(z + 5)) == pytest.approx(float(found))
    assert float(total_variance(3 * z)) == pytest.approx(9 * float(found))
    assert float(total_variance(torch.full((6, 3), 2.5))) == 0
    assert float(total_variance(z[:1])) == 0


def test_entropy_may_exceed_the_variance() -> None:
    """Of Gaussians with variance ½ and 1 it does; the bound is Var + 0.573 a dimension."""
    for variance, entropy in ((0.5, 1.072), (1.0, 1.419)):
        pair = torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * math.sqrt(variance)
        found = float(total_variance(pair))
        assert found == pytest.approx(variance)
        assert found < entropy == pytest.approx(0.5 * math.log(2 * math.pi * math.e * variance), abs=5e-4)
        assert entropy <= found + 0.573


# ---------------------------------------------------------------------- I(E, U; Y | Φ)


def test_information_is_a_difference_of_risks_and_nothing_if_the_client_is_ignored() -> None:
    logits, labels = normal(7, 3), torch.arange(7) % 3
    assert float(client_information(F.cross_entropy, logits, logits, labels)) == 0
    aware = normal(7, 3, seed=1)
    nats = [torch.log_softmax(scores, 1)[torch.arange(7), labels].mean() for scores in (aware, logits)]
    assert float(client_information(F.cross_entropy, logits, aware, labels)) == pytest.approx(
        float(nats[0] - nats[1])
    )


@given(st.floats(0, 500))
def test_the_global_objective_is_the_thesiss_over_one_plus_alpha(alpha: float) -> None:
    blind, aware = 0.6, 0.45
    found = anchored(torch.tensor(blind), torch.tensor(blind - aware), alpha)
    assert float(found) == pytest.approx(((1 + alpha) * blind - alpha * aware) / (1 + alpha), rel=1e-5)


def told(linear: bool) -> float:
    """I(U; Y | z) found by ω_a alone, z = ±1 fixed: at client 0 the label is z in 90 %, at client 1 it is −z."""
    z = torch.tensor([1.0] * 10 + [-1.0] * 10)[:, None]
    y = [torch.tensor(([1] * 9 + [0]) + ([0] * 9 + [1])), torch.tensor(([0] * 9 + [1]) + ([1] * 9 + [0]))]
    shared = initial_auxiliary(1, 2, 0)
    start = [torch.zeros(2, 1), torch.zeros(2), torch.zeros(2)] if linear else list(shared.values())
    own = [torch.zeros(2 if linear else WIDTH) for _ in y]
    params = [tensor.requires_grad_() for tensor in (*start, *own)]

    def logits(number: int) -> Tensor:
        if linear:
            return F.linear(z, params[0], params[1] + params[3 + number])
        return auxiliary_logits({**dict(zip(shared, params, strict=False)), OWN: params[4 + number]}, z)

    for _ in range(400):
        risk = torch.stack([F.cross_entropy(logits(number), y[number]) for number in (0, 1)]).sum()
        for tensor, step in zip(params, torch.autograd.grad(risk, params, materialize_grads=True), strict=True):
            tensor.data -= 0.5 * step
    blind = torch.zeros(20, 2)  # the best without the client: y is even given z
    return (
        sum(client_information(F.cross_entropy, blind, logits(number), y[number]).item() for number in (0, 1)) / 2
    )


def test_the_auxiliary_classifier_sees_a_relation_that_changes_with_the_client() -> None:
    """ln 2 − H(0.9) = 0.368 nats; a linear one sees nothing."""
    truth = math.log(2) + 0.9 * math.log(0.9) + 0.1 * math.log(0.1)
    assert truth == pytest.approx(0.368, abs=5e-4)
    assert told(linear=False) == pytest.approx(truth, rel=0.05)
    assert abs(told(linear=True)) < 0.01


def test_the_auxiliary_classifier_is_one_of_features_and_one_hot_client() -> None:
    """The own bias is a column of the weights on (z, one-hot u), and at first it ignores the client."""
    shared, z = initial_auxiliary(FEATURES, 3, seed=4), normal(5, FEATURES).float()
    columns = normal(WIDTH, 4, seed=1).float()  # of four clients
    one_hot = torch.eye(4)[torch.full((5,), 2)]
    layer = torch.cat([shared["hidden.weight"], columns], dim=1)
    hidden = (torch.cat([z, one_hot], dim=1) @ layer.T + shared["hidden.bias"]).clamp(min=0)
    expected = hidden @ shared["output.weight"].T + shared["output.bias"]
    assert torch.allclose(auxiliary_logits({**shared, OWN: columns[:, 2]}, z), expected, atol=1e-6)
    count = sum(tensor.numel() for tensor in shared.values())
    assert count == WIDTH * FEATURES + WIDTH + 3 * WIDTH + 3
    assert same(initial_auxiliary(FEATURES, 3, seed=4), shared)
    assert not same(initial_auxiliary(FEATURES, 3, seed=5), shared)


# ---------------------------------------------------------------------- the global side


def gm(kept: Kept | None = None, site: Site | None = None, **hparams: Any) -> FedPINGMClient[FedPINGM]:
    return FedPINGMClient(site or toy_site(), FedPINGM(**hparams), {} if kept is None else kept)


def test_without_independence_the_global_model_is_fedavgs() -> None:
    """Bit for bit, whatever the auxiliary classifier."""
    how: dict[str, Any] = {"batch_size": 16, "momentum": 0.5, "weight_decay": 0.01}
    plain = FedAvgClient(toy_site(), FedAvg(**how), {}).train(request()).arrays[MODEL]
    for seed in (0, 1):
        asked = request(alpha=0)
        asked = Received(1, {**asked.arrays, AUXILIARY: initial_auxiliary(FEATURES, 2, seed)}, asked.settings)
        assert same(gm(**how).train(asked).arrays[MODEL], plain)
    assert same(gm(**how, auxiliary="scale").train(request(alpha=0)).arrays[MODEL], plain)


@pytest.mark.parametrize("literal", [False, True])
def test_one_step_is_the_saddles_or_the_thesiss(literal: bool) -> None:
    """Gradients by autograd of the written-out risks; ω_a's features are those before the step of Φ_g."""
    alpha, asked = 7.0, request(alpha=7.0)
    client = gm(
        literal=literal, local_steps=1, batch_size=40, learning_rate=0.1, auxiliary_learning_rate=0.3,
        auxiliary_steps=1,
    )  # fmt: skip
    reply = client.train(asked)
    data, net = client.data.train, client.network
    model = {name: tensor.clone().requires_grad_() for name, tensor in asked[MODEL].items()}
    zeros = {OWN: torch.zeros(WIDTH)}
    auxiliary = {name: tensor.clone().requires_grad_() for name, tensor in {**asked[AUXILIARY], **zeros}.items()}
    z = net.features(model, data.x)
    blind = F.cross_entropy(net.classify(model, z), data.y)
    aware = F.cross_entropy(auxiliary_logits(auxiliary, z), data.y)
    total = ((1 + alpha) * blind - alpha * aware) / (1 + alpha)
    down = torch.autograd.grad(total, list(model.values()), retain_graph=True)
    for (name, tensor), step in zip(model.items(), down, strict=True):
        assert torch.allclose(reply.arrays[MODEL][name], (tensor - 0.1 * step).detach(), atol=1e-6)
    value, rate = (total, 0.1) if literal else (aware, 0.3)
    reached = {**reply.arrays[AUXILIARY], **client.kept[AUXILIARY]}
    for (name, tensor), step in zip(
        auxiliary.items(), torch.autograd.grad(value, list(auxiliary.values())), strict=True
    ):
        assert torch.allclose(reached[name], (tensor - rate * step).detach(), atol=1e-6)
    after = F.cross_entropy(auxiliary_logits(reached, z.detach()), data.y)
    assert (after > aware) if literal else (after < aware)
    assert reply.metrics["risk"] == pytest.approx(blind.item())
    assert reply.metrics["information"] == pytest.approx((blind - aware).item(), abs=1e-6)


def test_a_scale_and_an_offset_for_each_client_start_as_the_global_classifier() -> None:
    logits = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    assert torch.equal(scaled_logits(initial_scale(2, torch.device("cpu")), logits), logits)
    assert {tensor.device.type for tensor in initial_scale(2, torch.device("meta")).values()} == {"meta"}
    found = scaled_logits({SCALE: torch.tensor([-0.5]), OFFSET: torch.tensor([1.0, 0.0])}, logits)
    assert found.tolist() == [[1.5, -0.5], [1.25, 1.0]]


def test_one_step_with_a_scale_for_each_client_is_in_closed_form() -> None:
    """Where ω_a is ω_g it is 1/(1 + α) of FedAvg's, and (a_u, b_u) go down `Σ_k (p_k − 1{y = k}) (z_k, e_k)`.
    From other (a_u, b_u) the model's gradient is autograd's of the written-out risks, through both logits."""
    alpha, asked = 7.0, Received(1, {MODEL: request()[MODEL]}, {"independence": 7.0})
    how: dict[str, Any] = {"local_steps": 1, "batch_size": 40, "learning_rate": 0.1}
    client = gm(auxiliary="scale", auxiliary_learning_rate=0.3, auxiliary_steps=1, **how)
    reply = client.train(asked)
    plain = FedAvgClient(toy_site(), FedAvg(**how), {}).train(asked).arrays[MODEL]
    for name, tensor in reply.arrays[MODEL].items():
        assert torch.allclose(tensor, torch.lerp(asked[MODEL][name], plain[name], 1 / (1 + alpha)), atol=1e-6)
    assert reply.metrics["information"] == 0
    assert reply.arrays.keys() == {MODEL}
    data, net = client.data.train, client.network
    logits = net.predict(asked[MODEL], data.x)
    error = logits.softmax(dim=1) - F.one_hot(data.y, 2)
    own = client.kept[AUXILIARY]
    assert own.keys() == {SCALE, OFFSET}
    assert torch.allclose(own[SCALE], -0.3 * (error * logits).sum(dim=1).mean(), atol=1e-6)
    assert torch.allclose(own[OFFSET], -0.3 * error.mean(dim=0), atol=1e-6)

    second = client.train(asked)
    model = {name: tensor.clone().requires_grad_() for name, tensor in asked[MODEL].items()}
    logits = net.predict(model, data.x)
    aware = logits * (1 + own[SCALE]) + own[OFFSET]
    total = ((1 + alpha) * F.cross_entropy(logits, data.y) - alpha * F.cross_entropy(aware, data.y)) / (1 + alpha)
    for (name, tensor), step in zip(model.items(), torch.autograd.grad(total, list(model.values())), strict=True):
        assert torch.allclose(second.arrays[MODEL][name], (tensor - 0.1 * step).detach(), atol=1e-6)


def test_with_a_scale_negative_information_counts_as_none() -> None:
    """Where ω_a is worse than ω_g the step is 1/(1 + α) of FedAvg's; the log has what was found."""
    asked = request(alpha=7.0)
    how: dict[str, Any] = {"local_steps": 1, "batch_size": 40, "learning_rate": 0.1}
    behind = {SCALE: torch.tensor([-3.0]), OFFSET: torch.zeros(2)}
    reply = gm({AUXILIARY: behind}, auxiliary="scale", **how).train(asked)
    plain = FedAvgClient(toy_site(), FedAvg(**how), {}).train(asked).arrays[MODEL]
    assert reply.metrics["information"] < 0  # type: ignore[operator]
    for name, tensor in reply.arrays[MODEL].items():
        assert torch.allclose(tensor, torch.lerp(asked[MODEL][name], plain[name], 1 / 8), atol=1e-6)


def test_more_steps_of_the_auxiliary_classifier_bring_it_further_down_and_leave_the_first_step_as_it_is() -> None:
    once, often = (gm(local_steps=1, batch_size=40, auxiliary_steps=n).train(request()) for n in (1, 30))
    assert same(once.arrays[MODEL], often.arrays[MODEL])
    z = toy_site().network.features(request()[MODEL], toy_site().data.train.x)

    def risk(reply: Reply) -> float:
        zeros = {OWN: torch.zeros(WIDTH)}
        return float(
            F.cross_entropy(auxiliary_logits({**reply.arrays[AUXILIARY], **zeros}, z), toy_site().data.train.y)
        )

    assert risk(often) < risk(once)


def test_the_own_bias_stays_and_goes_on_from_where_it_was() -> None:
    client = gm()
    reply = client.train(request())
    assert reply.arrays[AUXILIARY].keys() == request()[AUXILIARY].keys()
    first = client.kept[AUXILIARY]
    assert list(first) == [OWN]
    assert first[OWN].abs().max() > 0
    other = gm({AUXILIARY: {OWN: torch.ones(WIDTH)}})
    assert not same(other.train(request()).arrays[AUXILIARY], reply.arrays[AUXILIARY])


def test_nothing_received_or_kept_is_changed_in_place_and_nothing_needs_a_gradient() -> None:
    asked, before = request(), request()
    kept: Kept = {}
    for round_ in (1, 2):
        client = FedPINClient(toy_site(), FedPIN(weight_decay=0.1, momentum=0.5), dict(kept))
        was = {name: copy(tensors) for name, tensors in kept.items()}
        reply = client.train(Received(round_, asked.arrays, asked.settings))
        assert all(same(kept[name], was[name]) for name in was)
        kept = client.kept
        everything = [*reply.arrays.values(), *kept.values(), *asked.arrays.values()]
        assert not any(
            tensor.requires_grad or tensor.grad_fn for record in everything for tensor in record.values()
        )
    assert all(same(asked[name], before[name]) for name in asked.arrays)
    assert kept.keys() == {AUXILIARY, PLAIN, PERSONAL}


# ---------------------------------------------------------------------- the personal side


def test_one_personal_step_is_the_thesiss_with_received_anchor_and_new_negatives() -> None:
    """(5.11) written out: Φ_g as received, Ψ_u after this round's step, both constants."""
    asked = request(seed=3)
    how: dict[str, Any] = {"contrast": 2.0, "variance": 0.3, "temperature": 0.4}
    client = FedPINClient(
        toy_site(), FedPIN(**how, batch_size=40, personal_steps=1, personal_learning_rate=0.2, local_steps=5), {}
    )
    client.train(asked)
    data, net = client.data.train, client.network
    start = net.initial(0)
    params = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    names = list(params)
    risk = F.cross_entropy(net.predict(params, data.x), data.y)
    plain = {
        name: (params[name] - 0.2 * step).detach()
        for name, step in zip(names, torch.autograd.grad(risk, list(params.values())), strict=True)
    }
    assert all(torch.allclose(client.kept[PLAIN][name], plain[name], atol=1e-6) for name in names)
    z = net.features(params, data.x)
    p, n = net.features(asked[MODEL], data.x), net.features(plain, data.x)
    cosine = torch.nn.CosineSimilarity(dim=-1)
    pull, push = (cosine(z, p) / 0.4).exp(), (cosine(z[:, None], n[None]) / 0.4).exp()
    contrast = -(pull / (pull + push.sum(1))).log().mean()
    variance = z.var(0, correction=0).sum()
    value = F.cross_entropy(net.classify(params, z), data.y) + 2.0 * contrast + 0.3 * variance
    for name, step in zip(names, torch.autograd.grad(value, list(params.values())), strict=True):
        expected = (params[name] - 0.2 * step).detach()
        assert torch.allclose(client.kept[PERSONAL][name], expected, rtol=1e-4, atol=1e-6)


def test_without_contrast_and_variance_the_personal_model_is_local_training() -> None:
    """Bit for bit over three rounds, whatever the server sends; and it is (Ψ_u, ω_ψu)."""
    how: dict[str, Any] = {"batch_size": 16, "momentum": 0.5, "weight_decay": 0.01}
    local = LocalClient(toy_site(), Local(local_steps=4, **how), {})
    kept: Kept = {}
    for round_ in (1, 2, 3):
        client = FedPINClient(toy_site(), FedPIN(contrast=0, variance=0, personal_steps=4, **how), kept)
        asked = request(seed=round_)
        client.train(Received(round_, asked.arrays, asked.settings))
        kept = client.kept
        local.train(Received(round_))
        assert same(kept[PERSONAL], local.kept[PERSONAL])
        assert same(kept[PLAIN], local.kept[PERSONAL])


@pytest.mark.parametrize(("off", "on"), [("contrast", "variance"), ("variance", "contrast")])
def test_each_weight_at_zero_leaves_the_other_term_alone(off: str, on: str) -> None:
    """PM (λ = 0) does not depend on what the server sends or on τ; PM (γ = 0) depends on both."""

    def personal(seed: int, temperature: float) -> Tensors:
        weights: dict[str, Any] = {off: 0.0, on: 1.0}
        client = FedPINClient(toy_site(), FedPIN(**weights, temperature=temperature), {})
        client.train(request(seed=seed))
        return client.kept[PERSONAL]

    base = personal(1, 0.5)
    assert same(personal(2, 0.5), base) is (off == "contrast")
    assert same(personal(1, 0.1), base) is (off == "contrast")
    assert not same(base, FedPINClient(toy_site(), FedPIN(), {}).initial())


def test_a_late_personal_model_is_the_global_one_until_it_starts_from_it() -> None:
    """Then as ever: the first steps are those of a client that has kept the received model for both."""
    hparams = FedPIN(personal_start=0.5, batch_size=16)
    client, asked = FedPINClient(toy_site(), hparams, {}), request(seed=3)
    early = Received(1, asked.arrays, {**asked.settings, "personal": False})
    reply, alone = client.train(early), gm(batch_size=16).train(asked)
    assert client.kept.keys() == {AUXILIARY}
    assert all(same(reply.arrays[name], alone.arrays[name]) for name in (MODEL, AUXILIARY))
    assert reply.metrics == alone.metrics
    x = client.data.train.x
    scores = {name: predict(x) for name, predict in client.models(asked).items()}
    assert torch.equal(scores["personal"], scores["global"])

    later = request(round_=2, seed=4)
    client.train(later)
    kept = {name: copy(later[MODEL]) for name in (PLAIN, PERSONAL)}
    other = FedPINClient(toy_site(), FedPIN(batch_size=16), kept)
    other.train(later)
    assert same(client.kept[PERSONAL], other.kept[PERSONAL])
    assert same(client.kept[PLAIN], other.kept[PLAIN])
    assert not same(client.kept[PERSONAL], later[MODEL])


def test_personal_models_are_trained_in_the_rounds_after_their_start() -> None:
    def trained(*settings: str) -> list[Any]:
        server = FedPINStrategy(toy_config("fedpin", *settings, rounds=5), "run")
        return [server.settings(number)["personal"] for number in range(1, 6)]

    assert trained("personal_start=0.5") == [False, False, True, True, True]
    assert trained() == [True] * 5


def test_the_anchor_is_the_received_model_not_the_one_trained_this_round() -> None:
    """The personal side does not depend on how the global side trains."""
    kept = []
    for how in ({"local_steps": 1}, {"local_steps": 9, "learning_rate": 0.3, "auxiliary_steps": 3}):
        client = FedPINClient(toy_site(), FedPIN(**how), {})  # type: ignore[arg-type]
        client.train(request())
        kept.append(client.kept)
    assert same(kept[0][PERSONAL], kept[1][PERSONAL])
    assert same(kept[0][PLAIN], kept[1][PLAIN])


# ---------------------------------------------------------------------- odd data


@pytest.mark.parametrize("labels", [[1] * 6, [0, 1], [1]], ids=["one class", "one sample of each", "one sample"])
def test_odd_clients_train_like_others(labels: list[int]) -> None:
    """No term needs two classes or two samples: of one sample Var is 0 and L_con has one negative."""
    site, y = toy_site(), torch.tensor(labels)
    data = Examples(normal(len(y), 2).float(), y, torch.zeros(len(y), dtype=torch.long))
    odd = Site("client-0", ClientData(data, data, {"one": data}), site.network, 0)
    client = FedPINClient(odd, FedPIN(), {})
    reply = client.train(request())
    assert all(math.isfinite(value) for value in reply.metrics.values())  # type: ignore[arg-type]
    assert reply.metrics[NUM_EXAMPLES] == len(labels)
    if len(labels) == 1:
        assert reply.metrics["variance"] == 0
        assert 0 < reply.metrics["contrast"] < math.log(1 + math.exp(2 / 0.5))  # type: ignore[operator]


def test_a_weight_that_overflows_is_named_and_the_models_kept_are_the_last_finite_ones(tmp_path: Path) -> None:
    client = FedPINClient(toy_site(), FedPIN(variance=1e6), {})
    with pytest.raises(FloatingPointError, match=r"overflowed; one of .*contrast=1, variance=1e\+06 is too large"):
        client.train(request())
    assert not client.kept.keys() & {PERSONAL, PLAIN}
    config = toy_config("fedpin", "variance=1e6", rounds=2)
    with pytest.raises(RunStopped, match=r"only 0 of 4 clients .* personal model overflowed"):
        LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))


@pytest.mark.slow
def test_the_letter_of_algorithm_5_comes_with_a_warning_and_ends_without_finite_numbers(tmp_path: Path) -> None:
    assert "overflow" in FedPIN(literal=True).caution(Toy())
    assert FedPIN().caution(Toy()) == ""
    assert "one client" in FedPINGM().caution(Toy(clients=1))
    config = toy_config("fedpin-gm", "literal=true", "learning_rate=2", "local_steps=200", rounds=4)
    with pytest.raises(RunStopped, match=r"not finite|largest=1e|'risk' is nan"):
        LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))


# ---------------------------------------------------------------------- ablations


def test_the_global_model_is_the_same_with_and_without_personal_ones() -> None:
    how: dict[str, Any] = {"independence": 5.0, "batch_size": 16}
    expected = gm(**how).train(request(alpha=5.0))
    others: list[Callable[[], FedPINGMClient[Any]]] = [
        lambda: FedPINClient(toy_site(), FedPIN(**how), {}),
        lambda: FedPINGMFTClient(toy_site(), FedPINGMFT(**how), {}),
        lambda: FedPINGML2Client(toy_site(), FedPINGML2(**how), {}),
    ]
    for make in others:
        reply = make().train(request(alpha=5.0))
        assert all(same(reply.arrays[name], expected.arrays[name]) for name in (MODEL, AUXILIARY))
        assert reply.metrics.items() >= expected.metrics.items()


def test_gm_l2_has_dittos_personal_model() -> None:
    """Bit for bit, with the same received models."""
    how: dict[str, Any] = {"batch_size": 16, "proximity": 0.7, "personal_steps": 5}
    ours, theirs = FedPINGML2Client(toy_site(), FedPINGML2(**how), {}), DittoClient(toy_site(), Ditto(**how), {})
    for round_ in (1, 2):
        asked = request(seed=round_)
        asked = Received(round_, asked.arrays, asked.settings)
        ours.train(asked)
        theirs.train(asked)
        assert same(ours.kept[PERSONAL], theirs.kept[PERSONAL])


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_gm_ft_takes_passes_over_the_local_risk_at_each_evaluation(unit: Any) -> None:
    """3 passes of 40 samples in batches of 16, from the received model, by hand."""
    hparams = FedPINGMFT(fine_tuning_epochs=3, batch_size=16, personal_learning_rate=0.2, local_unit=unit)
    client = FedPINGMFTClient(toy_site(), hparams, {})
    asked, net = request(4), client.network
    with torch.no_grad():  # as `evaluate` does
        found = client.fine_tuned(asked)
    params = asked[MODEL]
    stream = client.stream(client.data.train, 4, "fine-tuning")
    for batch in (next(stream) for _ in range(9)):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
        steps = torch.autograd.grad(F.cross_entropy(net.predict(leaves, batch.x), batch.y), list(leaves.values()))
        params = {name: params[name] - 0.2 * step for name, step in zip(leaves, steps, strict=True)}
    for name, tensor in params.items():
        assert torch.allclose(found[name], tensor, atol=1e-6)
    assert same(asked[MODEL], request(4)[MODEL])
    assert client.kept == {}
    logits = client.models(asked)["personal"](client.data.validation.x)
    assert torch.allclose(logits, net.predict(found, client.data.validation.x), atol=1e-6)


# ---------------------------------------------------------------------- the server


def strategy(method: str = "fedpin-gm", *settings: str, **options: Any) -> FedPINGMStrategy[Any]:
    return FedPINGMStrategy(toy_config(method, *settings, **options), "run")


def test_the_mean_is_uniform_over_those_who_answered() -> None:
    """By hand: two clients with 30 and 10 samples, both means are (1 + 4)/2; in another order the same."""

    def reply(client: str, value: float, count: int) -> Any:
        arrays = {name: {"t": torch.tensor([value])} for name in (MODEL, AUXILIARY)}
        return SimpleNamespace(
            client=client, arrays=arrays, metrics={"risk": value, NUM_EXAMPLES: count}, num_examples=count
        )

    two = [reply("client-0", 1.0, 30), reply("client-1", 4.0, 10)]
    for replies in (two, two[::-1]):
        server = strategy()
        server.accepted_together = lambda given: iter(given)  # type: ignore[method-assign,assignment]
        arrays, metrics = server.aggregate_train(1, replies)
        assert arrays is not None
        assert arrays["t"].numpy().tolist() == [2.5]
        assert server.state_dict()[AUXILIARY]["t"].tolist() == [2.5]
        assert metrics is not None
        assert metrics["risk"] == pytest.approx(1.75)  # of all samples
    server, before = strategy(), strategy().auxiliary
    server.accepted_together = lambda given: iter(())  # type: ignore[method-assign,assignment]
    assert server.aggregate_train(1, [])[0] is None
    assert same(server.auxiliary, before)


def test_sampling_error_of_the_uniform_mean_is_lemma_5_5_1s() -> None:
    """E‖mean_S g − ḡ‖² = (N/M − 1)/(N − 1) · mean ‖g_u − ḡ‖², over all subsets."""
    g = normal(7, 5)
    spread = float(total_variance(g))
    for size in (1, 3, 5, 7):
        errors = []
        for subset in combinations(range(7), size):
            mean = StreamingMean()
            for number in subset:
                mean.add({"g": g[number]})
            errors.append(float((mean.result()["g"] - g.mean(0)).square().sum()))
        assert sum(errors) / len(errors) == pytest.approx((7 / size - 1) / 6 * spread, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("alpha", "first", "later"), [(25.0, 1.0, 25.0), (0.3, 0.3, 0.3)])
def test_independence_warms_up(alpha: float, first: float, later: float) -> None:
    server = strategy("fedpin-gm", f"independence={alpha}", "warm_up=0.2", rounds=10)
    assert [server.settings(number)["independence"] for number in (1, 2, 3, 10)] == [first, first, later, later]
    assert (
        strategy("fedpin-gm", f"independence={alpha}", "warm_up=0", rounds=10).settings(1)["independence"] == alpha
    )


class Traffic:
    """Passes on, and remembers, what a toy run sends and answers."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        self.seen: list[tuple[str, int, dict[str, int]]] = []
        runtime = LocalRuntime(config)
        inner = runtime.grid.send_and_receive

        def counts(content: Any) -> dict[str, int]:
            return {
                name: sum(math.prod(array.shape) for array in record.values())
                for name, record in content.array_records.items()
            }

        def watch(messages: Any, *, timeout: float | None = None) -> Any:
            for message in list(messages):
                self.seen.append(
                    (message.metadata.message_type, message.metadata.dst_node_id, counts(message.content))
                )
                for reply in inner([message], timeout=timeout):
                    kind = f"{message.metadata.message_type} reply"
                    self.seen.append((kind, message.metadata.dst_node_id, counts(reply.content)))
                    yield reply

        runtime.grid.send_and_receive = watch  # type: ignore[method-assign]
        self.summary = runtime.run(RunFolder.create(path, config))
        self.states = runtime.states


@pytest.mark.parametrize("method", ["fedpin", "fedpin-gm", "fedpin-gm-ft", "fedpin-gm-l2"])
def test_what_travels(method: str, tmp_path: Path) -> None:
    """Φ, ω and ω_a without the clients' columns each way, nothing personal; no ω_a to evaluate."""
    traffic = Traffic(toy_config(method, rounds=2), tmp_path / "run")
    model = FEATURES * 2 + FEATURES + 2 * FEATURES + 2
    auxiliary = WIDTH * FEATURES + WIDTH + 2 * WIDTH + 2
    expected = {
        "train": {MODEL: model, AUXILIARY: auxiliary},
        "train reply": {MODEL: model, AUXILIARY: auxiliary},
        "evaluate": {MODEL: model},
        "evaluate reply": {},
        "query": {},
        "query reply": {},
    }
    assert {kind for kind, _, _ in traffic.seen} == expected.keys()
    assert all(counts == expected[kind] for kind, _, counts in traffic.seen)


def test_a_scale_for_each_client_neither_travels_nor_is_the_servers(tmp_path: Path) -> None:
    config = toy_config("fedpin-gm", "auxiliary=scale", rounds=2)
    traffic = Traffic(config, tmp_path / "run")
    train = [counts for kind, _, counts in traffic.seen if kind in ("train", "train reply")]
    assert len(train) == 16
    assert all(counts.keys() == {MODEL} for counts in train)
    assert not RunFolder(tmp_path / "run").load_checkpoint().strategy


def test_environment_labels_play_no_part() -> None:
    site = toy_site()
    train = site.data.train
    data = ClientData(Examples(train.x, train.y, 1 - train.environment), site.data.validation, site.data.test)
    clients = [FedPINClient(place, FedPIN(), {}) for place in (site, Site(site.client, data, site.network, 0))]
    replies = [client.train(request()) for client in clients]
    assert all(same(replies[0].arrays[name], replies[1].arrays[name]) for name in (MODEL, AUXILIARY))
    assert all(same(clients[0].kept[name], clients[1].kept[name]) for name in clients[0].kept)


def test_clients_that_are_not_asked_keep_everything(tmp_path: Path) -> None:
    """A quarter of four clients a round: exactly one client's kept state changes, and no other file of it."""
    config = toy_config("fedpin", rounds=6, participation=0.25)
    traffic = Traffic(config, tmp_path / "run")
    asked = {node for kind, node, _ in traffic.seen if kind == "train"}
    assert len([1 for kind, _, _ in traffic.seen if kind == "train"]) == 6
    assert len(traffic.states) == len(asked) < 6
    assert traffic.summary["models"]["personal"]["final"]["clients"].keys() == set(config.scenario.client_ids)
    rounds = {versions[-1].round for versions in traffic.states.values()}
    assert max(rounds) == 6
    last_asked: dict[int, int] = {}
    for number, node in enumerate((node for kind, node, _ in traffic.seen if kind == "train"), 1):
        last_asked[node] = number
    assert rounds == set(last_asked.values())


def test_a_client_that_was_never_asked_is_scored_with_the_common_initial_model() -> None:
    client = FedPINClient(toy_site(seed=5), FedPIN(), {})
    x = client.data.validation.x
    logits = client.models(Received(3, {MODEL: client.network.initial(8)}))["personal"](x)
    assert torch.equal(logits, client.network.predict(client.network.initial(5), x))


def test_the_servers_own_state_is_the_auxiliary_classifier(tmp_path: Path) -> None:
    config = toy_config("fedpin-gm", rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    checkpoint = RunFolder(tmp_path / "run").load_checkpoint()
    assert list(checkpoint.strategy) == [AUXILIARY]
    other = strategy()
    assert not same(other.auxiliary, checkpoint.strategy[AUXILIARY])
    other.load_state_dict(checkpoint.strategy)
    assert same(other.state_dict()[AUXILIARY], checkpoint.strategy[AUXILIARY])
    assert same(load_file(tmp_path / "run" / "models" / "global.safetensors"), checkpoint.arrays)
