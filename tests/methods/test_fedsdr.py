"""FedSDR; its combinations with FedAvg and pFedMe are in test_fedsdr_combined.py.

The figures of the numeric checks are from other programs.
"""

from collections.abc import Callable
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_clients import ScriptedGrid, content, one_round
from tiny_runs import toy_site
from torch import Tensor

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedsdr import FedSDRClient
from perennial.client.methods.local import LocalClient
from perennial.client.methods.shortcut import within_classes
from perennial.client.objectives import class_means, conditional_dependence, disagreement
from perennial.client.trainer import Received, Site
from perennial.common.config import load_config
from perennial.common.data.examples import ClientData, Examples, join
from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios.synthetic import SHORTCUT as SHORTCUT_FEATURES
from perennial.common.data.scenarios.synthetic import SyntheticSCM
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedsdr import FedSDR
from perennial.common.methods.local import Local
from perennial.common.methods.shortcut import SHORTCUT, environment_head
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors, part
from perennial.common.wire import MODEL, NUM_EXAMPLES, PERSONAL, to_record
from perennial.strategies.methods.fedsdr import FedSDRStrategy
from perennial.testing.tiny_federation import Toy, toy_config

NET = toy_site().network
HEADS = [environment_head(0), environment_head(1)]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_logits(log_odds: Tensor) -> Tensor:
    """Centred logits of a binary classifier from its log-odds."""
    return torch.stack([-log_odds / 2, log_odds / 2], dim=-1)


# ---------------------------------------------------------------------- disagreement, (4.3) and (4.5)


def pairwise(logits: Tensor, divergence: str) -> float:
    """The double sum over environments, as it is written."""
    p, total = logits.softmax(-1), 0.0
    shifted = logits - logits.mean(-1, keepdim=True)
    for i, j in product(range(len(logits)), repeat=2):
        if divergence == "kl":
            d = (p[i] * (p[i] / p[j]).log()).sum(-1)
        else:
            a = shifted if divergence == "logits" else p
            d = (a[i] - a[j]).square().sum(-1) / 2
        total += float(d.mean())
    return total


@pytest.mark.parametrize("divergence", ["logits", "probabilities", "kl"])
@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4), st.integers(0, 1000))
def test_the_disagreement_is_the_sum_over_pairs(divergence: str, e: int, n: int, classes: int, seed: int) -> None:
    logits = rows(e, n, classes, seed=seed)
    found = disagreement(logits, divergence).item()
    assert found == pytest.approx(pairwise(logits, divergence), rel=1e-9, abs=1e-12)
    assert disagreement(logits.flip(0), divergence).item() == pytest.approx(found)  # whatever the order
    # A softmax does not see what is added to all classes of a sample.
    assert disagreement(logits + rows(e, n, 1, seed=seed + 1), divergence).item() == pytest.approx(found)


@pytest.mark.parametrize("divergence", ["logits", "probabilities", "kl"])
def test_one_classifier_or_equal_ones_do_not_disagree(divergence: str) -> None:
    one = rows(1, 5, 3)
    assert disagreement(one, divergence).item() == 0
    assert disagreement(one.expand(4, 5, 3), divergence).item() == pytest.approx(0, abs=1e-15)


def test_of_two_environments_it_is_the_squared_distance() -> None:
    logits = torch.tensor([[[1.0, -1.0]], [[0.0, 0.0]]])
    assert disagreement(logits).item() == 2


class Linear:
    """Ψ = A Z_C + B Z_S of the linear model (thesis (4.7)) and its best classifiers, by their moments alone."""

    def __init__(self, a: Tensor, b: Tensor, causal: Tensor, shortcut: Tensor, deviations: tuple[float, float]):
        means = causal @ a.T + shortcut @ b.T  # (E, d)
        within = deviations[0] ** 2 * a @ a.T + deviations[1] ** 2 * b @ b.T
        self.weights = 2 * means @ torch.linalg.pinv(within)
        moment = within + means.T @ means / len(means)
        values, vectors = torch.linalg.eigh(moment)
        # d samples with exactly this second moment.
        self.samples = (vectors * (len(moment) * values.clamp(min=0)).sqrt()).T

    def disagreement(self) -> float:
        """The figures are for one log-odds; two centred logits give half of it."""
        return 2 * disagreement(two_logits(self.weights @ self.samples.T)).item()


@pytest.mark.parametrize(("a", "expected"), [(0.0, 1.625), (0.3, 1.898), (1.0, 1.281)])
def test_n7_a_little_of_the_cause_makes_classifiers_disagree_more(a: float, expected: float) -> None:
    one, causal = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    shortcut = torch.tensor([[1.0], [0.5]], dtype=torch.float64)
    assert Linear(a * one, one, causal, shortcut, (1, 1)).disagreement() == pytest.approx(expected, abs=5e-4)


def test_n4_n5_the_disagreement_does_not_see_causes_beside_the_shortcut() -> None:
    causal, shortcut = 1.5 * rows(6), 0.75 * rows(10, 6, seed=1)
    nothing, eye = torch.zeros(6, 6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)

    def found(a: Tensor, b: Tensor) -> float:
        return Linear(a, b, causal, shortcut, (2, 1)).disagreement()

    alone = found(nothing, eye)
    assert found(eye, nothing) == pytest.approx(0, abs=1e-9 * alone)
    assert found(torch.cat([eye, nothing]), torch.cat([nothing, eye])) == pytest.approx(alone, rel=1e-9)
    assert found(rows(6, 6, seed=2), eye) < alone  # but not mixed with it


def test_n10_few_environments_leave_directions_unseen() -> None:
    """The differences of E classifiers span E − 1 directions; features may move along all others."""
    weights, samples = rows(3, 6), rows(20, 6, seed=1)
    differences = weights[1:] - weights[0]
    unseen = torch.eye(6, dtype=torch.float64) - torch.linalg.pinv(differences) @ differences
    assert torch.linalg.matrix_rank(unseen) == 4
    before, after = (disagreement(two_logits(weights @ x.T)) for x in (samples, samples + 3 * samples @ unseen))
    assert after.item() == pytest.approx(before.item())


def miniature() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CMNIST in four inputs, 160 equally likely samples for each environment: shape, colour, label, environment.

    Shape agrees with y with probability 0.75, colour with 0.9 or 0.8; all ±1.
    """
    found = []
    for environment, agreement in enumerate((18, 16)):  # of 20
        for y, shape_agrees, colour_agrees in product((1, -1), (True, False), (True, False)):
            count = (3 if shape_agrees else 1) * (agreement if colour_agrees else 20 - agreement)
            row = [y if shape_agrees else -y, y if colour_agrees else -y, y, environment]
            found += [row] * count
    return torch.tensor(found).unbind(1)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("uses_shape", "risk", "squares", "divergence"),
    [(False, 0.4227, 0.3288, 0.0811), (True, 0.3545, 0.3288, 0.0696)],
)
def test_n9_only_the_divergence_prefers_the_colour_alone(
    uses_shape: bool, risk: float, squares: float, divergence: float
) -> None:
    shape, colour, y, environment = miniature()
    cells = (2 * (shape + 1) * uses_shape + (colour + 1)).long()  # a value of the feature

    def best(samples: Tensor) -> Tensor:
        """Log-odds of the best classifier on some of the samples, for every sample's cell."""
        right = torch.bincount(cells[samples], (y[samples] > 0).double(), 7)
        return torch.logit(right / torch.bincount(cells[samples], minlength=7))[cells]

    label_head = two_logits(best(torch.ones_like(y, dtype=torch.bool)))
    assert F.cross_entropy(label_head, (y > 0).long()).item() == pytest.approx(risk, abs=5e-5)
    heads = two_logits(torch.stack([best(environment == e) for e in (0, 1)]))
    assert disagreement(heads).item() == pytest.approx(squares, abs=5e-5)
    assert disagreement(heads, "kl").item() == pytest.approx(divergence, abs=5e-5)


# ---------------------------------------------------------------------- dependence given the label, (4.8)


def deviations(features: Tensor, labels: Tensor) -> Tensor:
    return features - class_means(features, labels, 3)[0][labels]


def estimate(outputs: Tensor, features: Tensor, labels: Tensor) -> float:
    """The thesis's formula as it is written, with its sum over q_n^m."""
    total = torch.zeros(outputs.shape[1], features.shape[1], dtype=outputs.dtype)
    for m, label in enumerate(labels):
        q = (labels == label).to(outputs)
        total += torch.outer(outputs[m], features[m] - (q[:, None] * features).sum(0) / q.sum())
    return float((total / len(labels)).abs().sum())


LABELS = torch.tensor([0, 1, 2, 0, 1, 1, 0, 0, 2, 1, 2])


def test_the_dependence_is_the_theses_estimate_over_its_number_of_entries() -> None:
    outputs, features = rows(11, 2), rows(11, 4, seed=1)
    found = conditional_dependence(outputs, deviations(features, LABELS)).item()
    assert found == pytest.approx(estimate(outputs, features, LABELS) / 8)
    covariance = sum(
        (c == LABELS).double().mean()
        * torch.cov(torch.cat([outputs, features], 1)[c == LABELS].T, correction=0)[:2, 2:]
        for c in range(3)
    )
    assert found == pytest.approx(torch.as_tensor(covariance).abs().mean().item())


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(-5, 5))
def test_what_the_label_says_of_either_side_is_no_dependence(seed: int, scale: float) -> None:
    outputs, features = rows(11, 2, seed=seed), rows(11, 4, seed=seed + 1)
    found = conditional_dependence(outputs, deviations(features, LABELS)).item()
    one, other = rows(3, 2, seed=seed + 2)[LABELS], rows(3, 4, seed=seed + 3)[LABELS]
    moved = conditional_dependence(scale * outputs + one, deviations(features + other, LABELS)).item()
    assert moved == pytest.approx(abs(scale) * found, abs=1e-12)


def test_one_sample_of_a_class_says_nothing() -> None:
    outputs, features = rows(3, 2), rows(3, 4, seed=1)
    labels = torch.tensor([0, 1, 2])
    assert conditional_dependence(outputs, deviations(features, labels)).item() == 0


def test_opposite_covariances_of_two_classes_cancel() -> None:
    features, labels = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([0, 0, 1, 1])
    outputs = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]])
    assert conditional_dependence(outputs, deviations(features, labels)).item() == 0


def labelled(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Labels 0 and 1 in turn, and their signs."""
    y = torch.arange(count) % 2
    return y, 2.0 * y.double() - 1


def test_n13_a_nonlinear_dependence_is_not_seen() -> None:
    y, sign = labelled(200_000)
    z = sign + rows(len(y))
    outputs = z**3 - 6 * z
    found = conditional_dependence(outputs[:, None], deviations(z[:, None], y)).item()
    spread = (outputs - sign * outputs[y == 1].mean()).std()
    assert found < 0.03 * spread
    cells = (10 * outputs).long().clamp(-300, 300) + 300
    votes = torch.stack([torch.bincount(cells[y == c], minlength=601) for c in (0, 1)])
    assert votes.amax(0).sum() / len(y) == pytest.approx(0.801, abs=0.01)  # and yet it says the label


def test_n11_the_weight_above_which_the_shortcut_is_gone() -> None:
    """At w_C = 2 μ_c/σ_c², w_S = 0 the risk pulls w_S with γ* σ_s², the most that the penalty holds at γ*."""
    mu_c, mu_s = torch.tensor([1.0, 0.5]).double(), torch.tensor([0.8, 0.4]).double()
    y, sign = labelled(400_000)
    noise = rows(len(y) // 2, 4).repeat_interleave(2, 0) * sign[:, None]  # the same for both labels, mirrored
    z = sign[:, None] * torch.cat([mu_c, mu_s]) + noise * torch.tensor([2.0, 2.0, 1.0, 1.0])
    w = torch.cat([2 * mu_c / 4, torch.zeros(2).double()]).requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(two_logits(z @ w), y), w)
    assert slope[:2].abs().max() < 2e-3  # the causal weights are at their best
    tilted = (w.detach() + torch.tensor([0, 0, 0.1, 0])).requires_grad_()
    penalty = 2 * conditional_dependence((z @ tilted)[:, None], deviations(z[:, 2:], y))  # two entries
    (held,) = torch.autograd.grad(penalty, tilted)
    assert held[2].item() == pytest.approx(1.0, rel=0.01)  # σ_s²
    assert (slope[2].abs() / held[2]).item() == pytest.approx(0.30212, rel=0.01)


def test_dependent_features_rank_above_independent_ones_on_the_structural_model() -> None:
    """Given the label, mixtures with shortcut features depend on them and causal features do not (Lemma 4.4.1)."""
    scenario = SyntheticSCM(clients=20, unseen=1, train_samples=4000)
    population = scenario.population(0)
    for number in (0, 7):
        train = scenario.client_data(number, 0, None).train
        z = population.latent(train.x)
        shortcut, causal = z[:, SHORTCUT_FEATURES], z[:, :6]
        away = shortcut - class_means(shortcut, train.y, 2)[0][train.y]
        ranked = [
            conditional_dependence(column[:, None], away).item()
            for feature in (causal, causal + 0.5 * shortcut)
            for column in feature.T
        ]
        assert max(ranked[:6]) < min(ranked[6:])


def test_frozen_classifiers_that_differ_in_the_shortcut_alone_pull_causes_into_the_extractor() -> None:
    """Why Ψ holds causes on the structural model: causes and shortcut vary together, by the label."""
    scenario = SyntheticSCM(clients=20, unseen=1, common_shortcut=0.75)
    population = scenario.population(0)
    parts = [scenario.client_data(number, 0, None).train for number in range(20)]
    slopes = F.pad(population.shortcut_mean[: scenario.seen], (6, 0))  # the best classifiers of the shortcut

    def causes(z: Tensor) -> float:
        """The causes' part of the gradient in Ψ, from Ψ the identity, as a share of variance within classes."""
        extractor = torch.eye(12, requires_grad=True)
        outputs = z @ extractor.T @ slopes.T
        found = disagreement(torch.stack([-outputs, outputs], dim=2).movedim(1, 0))
        (gradient,) = torch.autograd.grad(found, extractor)
        cause, shortcut = 4 * gradient[:, :6].square().sum(), gradient[:, SHORTCUT_FEATURES].square().sum()
        return (cause / (cause + shortcut)).item()

    drawn = [population.latent(part.x) for part in parts]
    means = [class_means(z, part.y, 2)[0][part.y] for z, part in zip(drawn, parts, strict=True)]
    assert causes(torch.cat(drawn)) > 0.5
    assert causes(torch.cat(drawn) - torch.cat(means)) < 0.05  # given the label and the client there is nothing


# ---------------------------------------------------------------------- the client half


def sent(seed: int = 0, **more: Tensors) -> dict[str, Tensors]:
    heads = {name: part(NET.initial(seed, name), "classifier") for name in HEADS}
    return {SHORTCUT: NET.initial(seed, SHORTCUT), **heads, **more}


def fedsdr(site: Site | None = None, kept: Any = None, **hparams: Any) -> FedSDRClient:
    return FedSDRClient(site or toy_site(), FedSDR(**hparams), {} if kept is None else kept)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_close(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    # torch.testing.assert_close imports sympy and more, for seconds.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-7) for name in expected)


@pytest.mark.parametrize("constant", [0.0, 0.3, 0.5, 1.0])
def test_an_extractor_that_is_constant_within_each_class_has_no_shortcut_to_remove(constant: float) -> None:
    """Class means are float32, so what is left of such features is rounding, which no unit may blow up."""
    labels = torch.arange(375) % 2
    features = constant * torch.tensor([[1.0], [1.7]]).expand(2, 8)[labels]
    within = within_classes(features, labels, 2)
    units = (features - within["means"][labels]) / within["deviation"]
    assert conditional_dependence(rows(375, 2).float(), units).item() == 0
    spread = within_classes(features + 0.01 * rows(375, 8).float(), labels, 2)
    assert spread["deviation"].item() == pytest.approx(0.01, rel=0.05)


def test_an_environment_that_is_left_out_has_no_classifier() -> None:
    environment = Toy().train_environments[0]
    left = FedSDRStrategy(toy_config("fedsdr", f"left_out={environment}"), "run")
    assert set(left.heads) == {environment_head(place) for place in range(1, len(Toy().train_environments))}


def with_data(train: Examples) -> Site:
    site = toy_site()
    return Site(site.client, ClientData(train, site.data.validation, site.data.test), site.network, site.seed)


def both_environments() -> Site:
    return with_data(join([toy_site(0).data.train, toy_site(1).data.train]))


HOW: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "batch_size": 7}


def test_without_removal_the_personal_model_is_local_training() -> None:
    """Bit for bit, whatever the server sends."""
    client = fedsdr(removal=0, personal_steps=5, personal_learning_rate=0.1, learning_rate=0.3, **HOW)
    local = LocalClient(toy_site(), Local(local_steps=5, learning_rate=0.1, **HOW), {})
    for number in (1, 2, 3):
        client.train(Received(number, sent(number)))
        local.train(Received(number))
        assert_equal(client.kept[PERSONAL], local.kept[PERSONAL])


@pytest.mark.parametrize(
    "off", [{"discovery": 0}, {"discovery": 1e4, "discovery_cap": 1e-9}], ids=["zero", "capped"]
)
def test_without_discovery_the_extractor_is_fedavgs_model(off: dict[str, Any]) -> None:
    """With weight 0, and with a gain above its cap, which has no gradient."""
    records = sent()
    client = fedsdr(local_steps=5, learning_rate=0.1, **off, **HOW)
    reply = client.train(Received(2, records))
    fedavg = FedAvgClient(toy_site(), FedAvg(local_steps=5, learning_rate=0.1, **HOW), {})
    assert_equal(reply.arrays[SHORTCUT], fedavg.train(Received(2, {MODEL: records[SHORTCUT]})).arrays[MODEL])
    assert reply.metrics["capped"] == ("discovery_cap" in off)


def test_the_discovery_moves_the_extractor() -> None:
    plain, discovered = (fedsdr(discovery=value).train(Received(1, sent())) for value in (0.0, 0.5))
    assert not torch.equal(*(reply.arrays[SHORTCUT]["featurizer.1.weight"] for reply in (plain, discovered)))
    assert discovered.metrics["capped"] == 0
    assert discovered.metrics["disagreement"] > plain.metrics["disagreement"]


def relu_features(params: Tensors, x: Tensor) -> Tensor:
    return F.relu(F.linear(x, params["featurizer.1.weight"], params["featurizer.1.bias"]))


def logits(params: Tensors, features: Tensor) -> Tensor:
    return F.linear(features, params["classifier.weight"], params["classifier.bias"])


def stepped(objective: Callable[[Tensors], Tensor], start: Tensors) -> Tensors:
    """A gradient step of size 0.1."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in start.items()}
    slopes = torch.autograd.grad(objective(leaves), list(leaves.values()))
    return {name: start[name] - 0.1 * slope for name, slope in zip(start, slopes, strict=True)}


@pytest.mark.parametrize("removed_from", ["logits", "features"])
def test_the_removal_steps_by_an_independent_computation(removed_from: str) -> None:
    hparams: dict[str, Any] = {"personal_steps": 2, "personal_learning_rate": 0.1, "removal": 3.0, "batch_size": 9}
    client, records = fedsdr(removed_from=removed_from, **hparams), sent()
    train = client.data.train
    client.train(Received(4, records))

    def psi(x: Tensor) -> Tensor:
        return relu_features(records[SHORTCUT], x)

    means = {c: psi(train.x[train.y == c]).mean(0) for c in (0, 1)}
    spread = torch.cat([psi(train.x[train.y == c]) - means[c] for c in (0, 1)]).square().mean().sqrt()

    def objective(params: Tensors, batch: Examples) -> Tensor:
        features = relu_features(params, batch.x)
        out = logits(params, features)
        outputs = features if removed_from == "features" else two_logits(out[:, 1] - out[:, 0])
        away = torch.stack([psi(x) - means[int(y)] for x, y in zip(batch.x, batch.y, strict=True)])
        products = torch.stack([torch.outer(o, a) for o, a in zip(outputs, away, strict=True)])
        return F.cross_entropy(out, batch.y) + 3.0 * products.mean(0).abs().mean() / spread

    expected = NET.initial(0)
    for batch in client.batches(2, 4):
        expected = stepped(lambda params, b=batch: objective(params, b), expected)
    assert_close(client.kept[PERSONAL], expected)


def test_features_may_shrink_from_the_removal_and_logits_may_not() -> None:
    """A quarter of the features under four times the classifier is the same predictor. The removal from features
    is a quarter of what it was, that from logits what it was."""
    start, names = NET.initial(3), NET.classifier_names
    factors = {name: 0.25 if name not in names else 4.0 if "weight" in name else 1.0 for name in start}
    shrunk = {name: factors[name] * tensor for name, tensor in start.items()}
    found = {}
    for removed_from in ("logits", "features"):
        client = fedsdr(removed_from=removed_from)
        constants = client.constants(Received(1, sent()))
        for which, params in (("start", start), ("shrunk", shrunk)):
            _, metrics = client.removal_loss(params, client.data.train, constants)
            found[removed_from, which] = [metrics[name].item() for name in ("risk", "dependence")]
    (risk, of_logits), (_, of_features) = found["logits", "start"], found["features", "start"]
    assert of_features > 0
    assert found["logits", "shrunk"] == pytest.approx([risk, of_logits], rel=1e-5)
    assert found["features", "shrunk"] == pytest.approx([risk, of_features / 4], rel=1e-5)


@pytest.mark.parametrize(("make", "own"), [(toy_site, [0]), (both_environments, [0, 1])])
def test_the_discovery_steps_by_an_independent_computation(make: Callable[[], Site], own: list[int]) -> None:
    """Ψ and ω with all ω_i frozen; then each own ω_i on samples of its environment with Ψ frozen; and again."""
    site, records = make(), sent()
    client = fedsdr(site, local_steps=2, environment_steps=3, learning_rate=0.1, discovery=0.7, batch_size=8)
    reply = client.train(Received(5, records))

    shortcut, heads = records[SHORTCUT], {n: records[environment_head(n)] for n in (0, 1)}
    train = site.data.train
    parts = {n: client.stream(train[train.environment == n], 5, environment_head(n)) for n in own}
    for batch in client.batches(2, 5):
        frozen = list(heads.values())

        def objective(params: Tensors, batch: Examples = batch, frozen: list[Tensors] = frozen) -> Tensor:
            z = relu_features(params, batch.x)
            gap = (logits(frozen[0], z) - logits(frozen[1], z)) @ torch.tensor([1.0, -1.0])
            return F.cross_entropy(logits(params, z), batch.y) - 0.7 * (gap.square() / 2).mean()

        shortcut = stepped(objective, shortcut)
        for n in own:
            for few in islice(parts[n], 3):
                assert (few.environment == n).all()
                z = relu_features(shortcut, few.x)
                heads[n] = stepped(lambda w, z=z, y=few.y: F.cross_entropy(logits(w, z), y), heads[n])
    # Nothing of the personal model, and no classifier of an environment that the client does not have.
    assert reply.arrays.keys() == {SHORTCUT, *map(environment_head, own)}
    assert_close(reply.arrays[SHORTCUT], shortcut)
    for n in own:
        assert_close(reply.arrays[environment_head(n)], heads[n])


def test_what_was_received_stays_and_what_is_kept_is_new() -> None:
    records, kept = sent(), {PERSONAL: NET.initial(3)}
    client = fedsdr(kept=dict(kept))
    reply = client.train(Received(1, records))
    for name, tensors in sent().items():
        assert_equal(records[name], tensors)
    assert_equal(kept[PERSONAL], NET.initial(3))
    for tensors in (*reply.arrays.values(), client.kept[PERSONAL]):
        assert not any(tensor.requires_grad or tensor.grad_fn for tensor in tensors.values())


def test_each_side_is_blind_to_the_other() -> None:
    """No gradient of the removal reaches Ψ, none of the discovery the personal model."""
    one, other = fedsdr(removal=0.5, discovery=0), fedsdr(removal=0.5, discovery=2)
    again = fedsdr(removal=5, discovery=2)
    replies = [client.train(Received(1, sent())) for client in (one, other, again)]
    assert_equal(one.kept[PERSONAL], other.kept[PERSONAL])
    assert not torch.equal(other.kept[PERSONAL]["classifier.bias"], again.kept[PERSONAL]["classifier.bias"])
    for name in replies[1].arrays:
        assert_equal(replies[1].arrays[name], replies[2].arrays[name])


def test_without_steps_of_its_own_an_environment_classifier_stays() -> None:
    records = sent()
    reply = fedsdr(environment_steps=0).train(Received(1, records))
    assert_equal(reply.arrays[HEADS[0]], records[HEADS[0]])


def test_pairs_may_be_averaged() -> None:
    """Two environments have two ordered pairs."""
    total, mean = (fedsdr(pairs=pairs, discovery=0).train(Received(1, sent())) for pairs in ("sum", "mean"))
    assert mean.metrics["disagreement"] == pytest.approx(total.metrics["disagreement"] / 2)


@pytest.mark.parametrize("keep", ["one class", "one sample of a class", "one of each class", "one sample"])
@pytest.mark.parametrize("removed_from", ["logits", "features"])
def test_a_client_with_few_samples_trains(keep: str, removed_from: str) -> None:
    train = toy_site().data.train
    zeros, ones = torch.where(train.y == 0)[0], torch.where(train.y == 1)[0]
    index = {
        "one class": zeros,
        "one sample of a class": torch.cat([zeros, ones[:1]]),
        "one of each class": torch.stack([zeros[0], ones[0]]),
        "one sample": zeros[:1],
    }[keep]
    client = fedsdr(with_data(train[index]), removed_from=removed_from, batch_size=4)
    reply = client.train(Received(1, sent()))
    assert all(
        torch.isfinite(t).all()
        for model in (*reply.arrays.values(), *client.kept.values())
        for t in model.values()
    )
    # A lone sample is its class's mean; within one class there is a covariance.
    assert (reply.metrics["dependence"] == 0) == (keep in ("one of each class", "one sample"))


def test_a_shortcut_extractor_that_says_nothing_removes_nothing() -> None:
    silent = {name: torch.zeros_like(tensor) for name, tensor in NET.initial(0).items()}
    client, local = fedsdr(removal=1e4), LocalClient(toy_site(), Local(), {})
    reply = client.train(Received(1, sent() | {SHORTCUT: silent}))
    local.train(Received(1))
    assert reply.metrics["dependence"] == 0
    assert_equal(client.kept[PERSONAL], local.kept[PERSONAL])


def test_evaluation_leaves_the_personal_model_and_needs_nothing_from_the_server() -> None:
    client = fedsdr(kept={PERSONAL: NET.initial(4)})
    metrics = client.evaluate(Received(3)).metrics
    assert {name.split("/")[0] for name in metrics} == {"personal"}
    assert_equal(client.kept[PERSONAL], NET.initial(4))
    assert_equal(fedsdr().personal(Received(1)), NET.initial(0))  # before its first round


def test_with_the_true_shortcut_a_client_of_the_structural_model_does_without_it() -> None:
    """Tested with the shortcut's means turned round."""
    scenario = SyntheticSCM(clients=10, unseen=1)
    population = scenario.population(0)
    net = network(model_settings(scenario.model), scenario.input_shape, 2)
    psi = net.initial(0, SHORTCUT)
    psi["featurizer.1.weight"] = population.mixing[:, SHORTCUT_FEATURES].T.contiguous()
    psi["featurizer.1.bias"] = torch.zeros(6)
    heads = {environment_head(n): part(psi, "classifier") for n in range(10)}
    data = scenario.client_data(2, 0, None)

    def accuracies(removal: float) -> tuple[float, float]:
        """In the client's own environment, and with its shortcut turned round."""
        hparams = {"personal_steps": 200, "personal_learning_rate": 0.1, "local_steps": 1, "batch_size": 1000}
        client = fedsdr(Site("client-2", data, net, 0), removal=removal, **hparams)
        client.train(Received(1, {SHORTCUT: psi, **heads}))
        predict = client.models(Received(1))["personal"]
        z = population.latent(data.train.x)
        sign, mean = 2.0 * data.train.y[:, None] - 1, population.shortcut_mean[int(data.train.environment[0])]
        z[:, SHORTCUT_FEATURES] -= 2 * sign * mean
        turned = z @ population.mixing.T
        return tuple((predict(x).argmax(1) == data.train.y).double().mean().item() for x in (data.train.x, turned))  # type: ignore[return-value]

    leaning, free = accuracies(0.0), accuracies(10.0)
    assert leaning[0] - leaning[1] > 0.2
    assert abs(free[0] - free[1]) < 0.05
    assert free[1] > leaning[1] + 0.15


# ---------------------------------------------------------------------- the server half


def server(*settings: str) -> FedSDRStrategy:
    return FedSDRStrategy(toy_config("fedsdr", *settings), "run-1")


def filled(value: float, like: Tensors) -> Tensors:
    return {name: torch.full_like(tensor, value) for name, tensor in like.items()}


def answers(strategy: FedSDRStrategy, owned: dict[str, list[int]]) -> Callable[[str, Any], Any]:
    """Client number c fills Ψ with c and the ω_i of its environments with 10 c + i."""

    def answer(client: str, _: Any) -> Any:
        c = int(client[-1])
        heads = {
            environment_head(i): filled(10 * c + i, strategy.heads[environment_head(i)]) for i in owned[client]
        }
        return content({SHORTCUT: filled(c, strategy.shortcut), **heads}, count=1 + 7 * c)

    return answer


def values(tensors: Tensors) -> set[float]:
    return {float(value) for tensor in tensors.values() for value in tensor.flatten()}


def test_each_classifier_is_the_mean_over_its_owners_and_the_extractor_over_all() -> None:
    """By hand, with two owners of the first and three of the second; sample counts do not matter."""
    strategy = server()
    owned = {"client-0": [0], "client-1": [1], "client-2": [0, 1], "client-3": [1]}
    grid = ScriptedGrid(strategy, answers(strategy, owned))
    assert one_round(strategy, grid, to_record(NET.initial(0))) is None  # the global arrays stay
    assert values(strategy.shortcut) == {1.5}
    assert values(strategy.heads[HEADS[0]]) == {(0 + 20) / 2}
    assert values(strategy.heads[HEADS[1]]) == {(11 + 21 + 31) / 3}
    # The next round sends just that.
    one_round(strategy, grid, to_record(NET.initial(0)), 2)
    assert {client: records.keys() for client, records in grid.of("train").items()} == {
        client: {SHORTCUT, *HEADS} for client in owned
    }
    assert values(grid.of("train")["client-0"][HEADS[0]]) == {10}


def test_a_classifier_without_owners_stays_as_it_was() -> None:
    strategy = server()
    before = strategy.heads[HEADS[1]]
    grid = ScriptedGrid(strategy, answers(strategy, {f"client-{c}": [0] for c in range(4)}))
    one_round(strategy, grid, to_record(NET.initial(0)))
    assert strategy.heads[HEADS[1]] is before
    assert values(strategy.heads[HEADS[0]]) == {15}


def test_where_all_own_all_it_is_the_plain_mean() -> None:
    strategy = server()
    grid = ScriptedGrid(strategy, answers(strategy, {f"client-{c}": [0, 1] for c in range(4)}))
    one_round(strategy, grid, to_record(NET.initial(0)))
    assert [values(head) for head in strategy.heads.values()] == [{15}, {16}]


def test_a_reply_without_any_classifier_or_with_a_strange_one_is_left_out() -> None:
    strategy = server()
    plain = answers(strategy, {"client-0": [], "client-1": [0], "client-2": [1], "client-3": [1]})

    def answer(client: str, message: Any) -> Any:
        found = plain(client, message)
        if client == "client-1":
            found["environment-head-7"] = to_record(strategy.heads[HEADS[0]])
        return found

    one_round(strategy, ScriptedGrid(strategy, answer), to_record(NET.initial(0)))
    assert strategy.exchanges[-1].left_out == {
        "client-0": "it has no environment's classifier",
        "client-1": "unexpected record 'environment-head-7'",
    }
    assert values(strategy.shortcut) == {2.5}


def test_nobody_answers_and_all_stays() -> None:
    strategy = server("quorum=0")
    before = strategy.state_dict()

    def answer(client: str, _: Any) -> Any:
        raise RuntimeError(client)

    assert one_round(strategy, ScriptedGrid(strategy, answer), to_record(NET.initial(0))) is None
    assert all(strategy.state_dict()[name] is tensors for name, tensors in before.items())


def test_the_starts_are_all_different() -> None:
    strategy = server()
    starts = [NET.initial(0), *strategy.state_dict().values()]
    weights = [start["classifier.weight"] for start in starts]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    other = FedSDRStrategy(toy_config("fedsdr", seed=1), "run-1")
    assert not torch.equal(other.shortcut["classifier.weight"], strategy.shortcut["classifier.weight"])


def test_a_state_taken_up_is_the_state() -> None:
    one, other = server(), server()
    one_round(one, ScriptedGrid(one, answers(one, {f"client-{c}": [c % 2] for c in range(4)})), to_record({}))
    other.load_state_dict(one.state_dict())
    for name, tensors in one.state_dict().items():
        assert_equal(other.state_dict()[name], tensors)
    assert one.results(to_record({})).keys() == {"global", *one.state_dict()}


def floats(records: dict[str, Tensors]) -> int:
    return sum(tensor.numel() for tensors in records.values() for tensor in tensors.values())


def cmnist_site(net: Any) -> Site:
    x = torch.rand(6, 2, 14, 14, generator=torch_generator(0, "x"))
    data = Examples(x, torch.arange(6) % 2, torch.zeros(6, dtype=torch.long))
    return Site("client-0", ClientData(data, data, {}), net, 0)


def test_floats_of_a_message_on_cmnist() -> None:
    """Of the MLP 392-390-2."""
    config = load_config(options={"method": "fedsdr", "scenario": "cmnist"})
    strategy = FedSDRStrategy(config, "run-1")
    assert floats(strategy.state_dict()) == 155_616
    net = network(config.model, config.scenario.input_shape, config.scenario.classes)
    reply = fedsdr(cmnist_site(net), local_steps=1, personal_steps=1).train(Received(1, strategy.state_dict()))
    assert floats(dict(reply.arrays)) == 154_834
    assert reply.metrics[NUM_EXAMPLES] == 6


def test_a_model_without_an_extractor_to_be_trained_is_refused() -> None:
    config = load_config(options={"method": "fedsdr", "scenario": {"name": "toy"}, "model": {"name": "logistic"}})
    with pytest.raises(UserError, match="no featurizer to be trained"):
        FedSDRStrategy(config, "run-1")


@pytest.mark.parametrize(
    ("scenario", "pairs", "word"),
    [
        (SyntheticSCM(seen=1), "sum", "one training environment"),
        (Toy(), "sum", ""),
        (SyntheticSCM(), "sum", "pairs=mean"),
        (SyntheticSCM(), "mean", ""),
    ],
)
def test_cautions(scenario: Scenario, pairs: Any, word: str) -> None:
    found = FedSDR(pairs=pairs).caution(scenario)
    assert word in found
    assert bool(word) == bool(found)
