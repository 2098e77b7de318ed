"""FedIIR: golden vectors and invariants, the anchor between rounds, messages, special cases."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.torch import load_file
from scripted_clients import ScriptedGrid, content, one_round, payload
from tiny_runs import toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fediir import FedIIRClient
from perennial.client.objectives import gradient_alignment
from perennial.client.trainer import Received, Site
from perennial.common.config import load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fediir import ANCHOR, FedIIR
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, MODEL, NUM_EXAMPLES, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.methods.fediir import FedIIRStrategy
from perennial.testing.tiny_federation import Toy, toy_config

Risk = Callable[[Tensors], torch.Tensor]

PLAIN: dict[str, Any] = {"local_steps": 1, "anchor_ema": 0.0}


class Given(FedIIRClient):
    """A client whose risk is a function of the parameters alone."""

    def __init__(self, site: Site, hparams: FedIIR, function: Risk) -> None:
        super().__init__(site, hparams, {})
        self.function = function

    def risk(self, params: Tensors, batch: Examples, training: bool) -> Any:
        value = self.function(params)
        return value, {"risk": value}


class Federation:
    """Both halves, without messages; all clients in every round."""

    def __init__(
        self, risks: Sequence[Risk], head: Sequence[str], sizes: Sequence[int] = (), **hparams: Any
    ) -> None:
        settings = [f"{key}={str(value).lower()}" for key, value in hparams.items()]
        self.server = FedIIRStrategy(toy_config("fediir", *settings), "run")
        self.clients = []
        for number, (risk, size) in enumerate(zip(risks, sizes or [1] * len(risks), strict=True)):
            zeros = torch.zeros(size, dtype=torch.long)
            data = Examples(torch.zeros(size, 1), zeros, zeros)
            net: Any = SimpleNamespace(parameter_names=("phi", "omega"), classifier_names=tuple(head))
            site = Site(f"client-{number}", ClientData(data, data, {}), net, 0)
            self.clients.append(Given(site, FedIIR(**hparams), risk))
        self.rounds = 0

    def round(self, model: Tensors) -> Tensors:
        """One round; the clients need nothing of the one before."""
        self.rounds += 1
        for client in self.clients:
            client.network.parameter_names = tuple(model)
        answers = [
            client.answer("train.gradient", Received(self.rounds, {MODEL: model})) for client in self.clients
        ]
        replies = [
            AcceptedReply(client.client, answer.arrays, MetricRecord(dict(answer.metrics)), ConfigRecord())
            for client, answer in zip(self.clients, answers, strict=True)
        ]
        like = {name: model[name] for name in answers[0].arrays[GRADIENT]}
        self.server.follow(self.rounds, replies, like)
        request = Received(self.rounds, {MODEL: model, ANCHOR: self.server.corrected()})
        trained = [client.answer("train", request).arrays[MODEL] for client in self.clients]
        assert not any(client.kept for client in self.clients)
        return {name: torch.stack([each[name] for each in trained]).mean(dim=0) for name in model}

    def run(self, model: Tensors, rounds: int) -> Tensors:
        for _ in range(rounds):
            model = self.round(model)
        return model


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------- golden vectors


def scalars(y: float) -> Risk:
    """½ (ωφ − y)² at x = 1."""
    return lambda params: (params["omega"] * params["phi"] - y).square().sum() / 2


@pytest.mark.parametrize(
    ("hparams", "anchor", "new"),
    [
        ({"penalty": 0.0, "anchor_ema": 0.0}, -1.0, (1.100, 2.050)),
        ({"penalty": 0.1, "anchor_ema": 0.0}, -1.0, (1.100, 2.005)),
        ({"penalty": 0.1, "anchor_ema": 0.0, "halved": False}, -1.0, (1.100, 1.960)),
        ({"penalty": 0.2, "anchor_ema": 0.0}, -1.0, (1.100, 1.960)),
        ({"penalty": 0.1, "anchor_ema": 0.95}, -0.05, (1.138, 2.01925)),
        ({"penalty": 0.1, "anchor_ema": 0.95, "bias_correction": True}, -1.0, (1.100, 2.005)),
    ],
)
def test_golden_round_of_two_scalars(hparams: dict[str, Any], anchor: float, new: tuple[float, float]) -> None:
    """By hand; the last row: one round's correction is exact."""
    both = Federation([scalars(1), scalars(4)], ["omega"], local_steps=1, learning_rate=0.1, **hparams)
    found = both.round({"phi": f64(2), "omega": f64(1)})
    assert both.server.corrected()["omega"].item() == pytest.approx(anchor, abs=1e-12)
    assert (found["omega"].item(), found["phi"].item()) == pytest.approx(new, abs=1e-12)


def softmax_example() -> tuple[Tensors, Tensors, torch.Tensor]:
    """Parameters with features Z, the anchor, labels."""
    params = {
        "classifier.weight": torch.tensor([[0.5, -0.5], [0, 1], [-1, 0.5]], dtype=torch.float64),
        "classifier.bias": f64(0.1, 0, -0.1),
        "z": torch.tensor([[1, 2], [-1, 0.5]], dtype=torch.float64),
    }
    anchor = {
        "classifier.weight": torch.tensor([[0.1, 0], [0, -0.1], [0.05, 0.05]], dtype=torch.float64),
        "classifier.bias": f64(0.02, -0.01, -0.01),
    }
    return params, anchor, torch.tensor([0, 2])


def test_golden_penalty_of_a_linear_softmax_classifier() -> None:
    params, anchor, labels = softmax_example()
    for tensor in params.values():
        tensor.requires_grad_()
    logits = F.linear(params["z"], params["classifier.weight"], params["classifier.bias"])
    risk = F.cross_entropy(logits, labels)
    alignment = gradient_alignment(risk, params, anchor)
    weight, bias, z = torch.autograd.grad(risk + 0.3 / 2 * alignment, list(params.values()))
    assert risk.item() == pytest.approx(1.558198, abs=1e-6)
    assert alignment.item() == pytest.approx(2.840457, abs=1e-6)
    expected = (
        [-0.563232, -1.014241, 0.308146, 1.097477, 0.255086, -0.083236],
        [-0.473454, 0.693094, -0.219640],
        [-0.157093, 1.016733, 0.250294, 0.087706],
    )
    for found, numbers in zip((weight, bias, z), expected, strict=True):
        assert found.flatten().tolist() == pytest.approx(numbers, abs=1e-6)


def test_the_double_backward_is_the_closed_form_and_needs_the_features() -> None:
    """With features detached in the penalty, Z has the risk's gradient alone."""
    params, anchor, labels = softmax_example()
    w, b, z = (tensor.requires_grad_() for tensor in params.values())
    n, p = len(z), (z @ w.T + b).softmax(dim=1)
    d = p - F.one_hot(labels, 3)
    u, u_b = d.T @ z / n - anchor["classifier.weight"], d.mean(dim=0) - anchor["classifier.bias"]
    v = z @ u.T + u_b
    j = p * (v - (p * v).sum(dim=1, keepdim=True))
    closed = 2 * (j.T @ z) / n, 2 * j.mean(dim=0), 2 * (j @ w + d @ u) / n
    risk = F.cross_entropy(F.linear(z, w, b), labels)
    found = torch.autograd.grad(gradient_alignment(risk, params, anchor), (w, b, z), retain_graph=True)
    torch.testing.assert_close(found, closed)

    detached = F.cross_entropy(F.linear(z.detach(), w, b), labels)
    total = risk + gradient_alignment(detached, params, anchor)
    assert torch.equal(*(torch.autograd.grad(value, z, retain_graph=True)[0] for value in (total, risk)))


def test_without_requires_grad_of_the_anchor_and_of_zero_gradients() -> None:
    """An all-zero gradient has a distance to the anchor like any other; the penalty's gradient stays finite."""
    w = torch.zeros(2, requires_grad=True)
    risk = (0 * w).sum()
    assert gradient_alignment(risk, {"w": w}, {"w": torch.tensor([3.0, 4.0])}).item() == 25
    square = w.square().sum()
    alignment = gradient_alignment(square, {"w": w}, {"w": torch.zeros(2)})
    assert torch.autograd.grad(alignment, w)[0].tolist() == [0, 0]


# ---------------------------------------------------------------------- what a round minimises


def moments(a: float) -> Risk:
    """Population risk of y = x₁ + noise, x₂ = a y + noise, as a function of θ."""
    sigma = torch.tensor([[1, a], [a, 1.1 * a**2 + 0.1]], dtype=torch.float64)
    b = f64(1, 1.1 * a)
    return lambda params: params["theta"] @ sigma @ params["theta"] / 2 - b @ params["theta"] + 0.55


TRAINING = (0.5, 1.0, 1.5)


@pytest.mark.parametrize(
    ("penalty", "ema", "rate", "rounds", "theta", "far", "middle"),
    [
        (0, 0, 0.5, 120, (0.7391, 0.2609), 0.2190, 0.0874),
        (0.1, 0, 0.5, 120, (0.7572, 0.2398), 0.1962, 0.0824),
        (1, 0, 0.5, 120, (0.8367, 0.1516), 0.1171, 0.0645),
        pytest.param(10, 0, 0.12, 250, (0.9643, 0.0561), 0.0601, 0.0508, marks=pytest.mark.slow),
        pytest.param(1, 0.95, 0.1, 350, (0.8367, 0.1516), 0.1171, 0.0645, marks=pytest.mark.slow),
    ],
)
def test_toy_of_an_invariant_and_a_spurious_input(
    penalty: float, ema: float, rate: float, rounds: int, theta: tuple[float, float], far: float, middle: float
) -> None:
    """The more alignment, the less weight on the spurious input."""
    how: dict[str, Any] = {"penalty": penalty, "anchor_ema": ema, "learning_rate": rate, "local_steps": 1}
    three = Federation([moments(a) for a in TRAINING], ["theta"], **how)
    found = three.run({"theta": f64(0, 0)}, rounds)
    assert found["theta"].tolist() == pytest.approx(theta, abs=1e-3)
    assert moments(-1)(found).item() == pytest.approx(far, abs=1e-3)
    assert moments(0)(found).item() == pytest.approx(middle, abs=1e-3)


@pytest.mark.parametrize(("penalty", "limit"), [(0, 0.678472), (0.1, 0.756359), (1, 1.060742)])
def test_it_goes_to_a_stationary_point_of_risk_and_dispersion_not_of_the_risk(
    penalty: float, limit: float
) -> None:
    """R_c = a_c log cosh(w − b_c), for which Theorem 5 of the paper does not hold as printed."""

    def risk(a: float, b: float) -> Risk:
        return lambda params: a * (params["omega"] - b).cosh().log().sum()

    both = Federation([risk(1, -1), risk(3, 1)], ["omega"], penalty=penalty, learning_rate=0.4, **PLAIN)
    assert both.run({"omega": f64(0)}, 120)["omega"].item() == pytest.approx(limit, abs=1e-6)


@pytest.mark.parametrize(
    ("penalty", "steps", "ratio"), [(0, 1, 0.9604), (0.5, 1, 0.9604), (0, 5, 0.817073), (0.5, 5, 0.820515)]
)
def test_linear_rate_on_quadratics_of_equal_curvature(penalty: float, steps: int, ratio: float) -> None:
    """Per-round ratio of R − R*, which here is w²/2."""

    def risk(b: float) -> Risk:
        return lambda params: (params["omega"] - b).square().sum() / 2

    how: dict[str, Any] = {"local_steps": steps, "anchor_ema": 0, "learning_rate": 0.02, "penalty": penalty}
    both = Federation([risk(-1), risk(1)], ["omega"], **how)
    before = both.run({"omega": f64(3)}, 2)
    after = both.round(before)
    assert (after["omega"] / before["omega"]).square().item() == pytest.approx(ratio, abs=1e-6)


@pytest.mark.parametrize("align", ["classifier", "all"])
def test_one_full_step_is_gradient_descent_on_risk_and_dispersion(align: str) -> None:
    """For all of θ; a gradient through the mean makes no difference. `all` is IGA's objective."""
    functions = [scalars(1), scalars(4), scalars(-2)]
    head = ["omega"] if align == "classifier" else ["phi", "omega"]
    start = {"phi": f64(2.0), "omega": f64(-0.7)}
    three = Federation(functions, ["omega"], penalty=0.3, learning_rate=0.05, align=align, **PLAIN)
    found = three.round(start)

    params = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    risks = [function(params) for function in functions]
    gradients = [
        torch.cat(torch.autograd.grad(risk, [params[name] for name in head], create_graph=True)) for risk in risks
    ]
    mean = torch.stack(gradients).mean(dim=0)
    dispersion = torch.stack([(gradient - mean).square().sum() for gradient in gradients]).mean()
    slope = torch.autograd.grad(torch.stack(risks).mean() + 0.3 / 2 * dispersion, list(params.values()))
    for (name, tensor), part in zip(start.items(), slope, strict=True):
        torch.testing.assert_close(found[name], tensor - 0.05 * part)
    assert set(three.server.anchor) == set(head)


# ---------------------------------------------------------------------- the anchor


def linear(slope: float) -> Risk:
    """A constant gradient."""
    return lambda params: slope * params["omega"].sum() + 0 * params["omega"].square().sum()


@pytest.mark.parametrize("v", [0.0, 0.5, 0.95])
def test_the_anchor_is_kept_between_rounds(v: float) -> None:
    """`g̃^t = (1 − v^t) ḡ` of a constant ḡ; corrected, it is ḡ from the first round on."""
    both = Federation([linear(1), linear(5)], ["omega"], anchor_ema=v, bias_correction=True, local_steps=1)
    model = {"omega": f64(0)}
    for t in (1, 2, 3, 4):
        both.round(model)
        assert both.server.anchor["omega"].item() == pytest.approx(3 * (1 - v**t))
        assert both.server.corrected()["omega"].item() == pytest.approx(3)


def test_the_anchor_goes_on_in_another_process() -> None:
    hparams = {"anchor_ema": 0.9, "bias_correction": True, "local_steps": 1}
    whole, first, second = (Federation([linear(1), linear(5)], ["omega"], **hparams) for _ in range(3))
    model = {"omega": f64(0)}
    whole.run(model, 3)
    first.run(model, 2)
    second.server.load_state_dict(first.server.state_dict())
    second.round(model)
    assert torch.equal(second.server.anchor["omega"], whole.server.anchor["omega"])
    assert torch.equal(second.server.corrected()["omega"], whole.server.corrected()["omega"])
    fresh = Federation([linear(1)], ["omega"])
    fresh.server.load_state_dict(
        {"updates": {"count": torch.tensor(0)}}
    )  # before the first round there is no anchor
    assert fresh.server.anchor == {}


def test_the_anchor_averages_clients_or_their_mini_batches() -> None:
    """Clients of 1 and of 130 samples, of which mini-batches of 64 make 1 and 3."""
    how: dict[str, Any] = {"anchor_ema": 0, "local_steps": 1}
    by_client, by_batch = (
        Federation([linear(1), linear(5)], ["omega"], sizes=[1, 130], anchor_average=average, **how)
        for average in ("clients", "batches")
    )
    model = {"omega": f64(0)}
    reached = [both.round(model) for both in (by_client, by_batch)]
    assert by_client.server.anchor["omega"].item() == pytest.approx(3)
    assert by_batch.server.anchor["omega"].item() == pytest.approx((1 + 3 * 5) / 4)
    # The models' mean is the clients' either way.
    assert reached[0]["omega"].item() == pytest.approx(-0.05 * 3, abs=1e-3)
    assert reached[1]["omega"].item() == pytest.approx(-0.05 * 3, abs=1e-3)


def test_the_log_says_how_far_the_clients_are_apart() -> None:
    """`1 − ‖ḡ‖² / mean ‖g_c‖²` and invariant 13: mean ‖g_c − ḡ‖² is half the mean over pairs."""
    slopes = (1.0, 5.0, -2.0)
    three = Federation([linear(slope) for slope in slopes], ["omega"], **PLAIN)
    three.round({"omega": f64(0)})
    (note,) = three.server.notes
    squares, pairs = sum(g**2 for g in slopes) / 3, sum((g - h) ** 2 for g, h in itertools.product(slopes, slopes))
    assert note["gradient"] == pytest.approx(math.sqrt(squares))
    assert note["dispersion"] * squares == pytest.approx(pairs / (2 * 9))
    assert note["norm"] == pytest.approx(4 / 3)
    silent = Federation([linear(0), linear(0)], ["omega"], **PLAIN)
    silent.round({"omega": f64(0)})
    assert silent.server.notes[0]["dispersion"] == 0


def test_few_clients_in_a_round_see_less_dispersion() -> None:
    """(1 − 1/C) N/(N − 1) of the whole, over all cohorts of C of N."""
    g = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for c in (1, 3):
        own = torch.stack([torch.stack(few).var(correction=0) for few in itertools.combinations(g, c)]).mean()
        assert (own / g.var(correction=0)).item() == pytest.approx((1 - 1 / c) * 7 / 6)


# ---------------------------------------------------------------------- special cases


def final_model(path: Path, method: str, *settings: str, **options: Any) -> Tensors:
    config = toy_config(method, *settings, rounds=3, **options)
    LocalRuntime(config).run(RunFolder.create(path, config))
    return load_file(path / "models" / "global.safetensors")


@pytest.mark.parametrize(
    "settings",
    [
        ["anchor_ema=0", "local_steps=1", "batch_size=100"],
        ["preset=code", "align=all"],
        [
            "frozen_statistics=true",
            "anchor_average=batches",
            "batch_size=7",
            "weight_decay=0.01",
            "participation=0.5",
        ],
    ],
)
def test_without_penalty_it_is_fedavg_bit_for_bit(settings: list[str], tmp_path: Path) -> None:
    """Whatever the anchor; clients have equally many samples."""
    ours = final_model(tmp_path / "ours", "fediir", "penalty=0", *settings)
    code = "preset=code" in settings
    kept = [setting for setting in settings if setting.split("=")[0] in {*FedAvg.model_fields, "participation"}]
    same = ["local_unit=epoch", "local_steps=1", "momentum=0.9", "learning_rate=0.01"] if code else kept
    theirs = final_model(tmp_path / "theirs", "fedavg", *same)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("model", ["model.name=convnet", "model.norm=batch"])
def test_without_penalty_its_step_is_fedavgs_for_other_networks(model: str) -> None:
    """The double backward of convolutions and of BatchNorm adds exactly nothing."""
    settings = {"name": "convnet"} if "convnet" in model else {"name": "mlp", "hidden": (5,), "norm": "batch"}
    net = network(model_settings(settings), (1, 6, 6), 3)
    generator = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(12, 1, 6, 6, generator=generator), torch.arange(12) % 3, torch.zeros(12).long())
    site = Site("client-0", ClientData(data, data, {}), net, 0)
    start = net.initial(0)
    anchor = {name: torch.randn(start[name].shape, generator=generator) for name in net.classifier_names}
    how: dict[str, Any] = {"local_steps": 3, "batch_size": 8}
    ours = FedIIRClient(site, FedIIR(penalty=0, **how), {}).train(Received(1, {MODEL: start, ANCHOR: anchor}))
    theirs = FedAvgClient(site, FedAvg(**how), {}).train(Received(1, {MODEL: start}))
    assert all(torch.equal(ours.arrays[MODEL][name], tensor) for name, tensor in theirs.arrays[MODEL].items())
    other = FedIIRClient(site, FedIIR(penalty=1, **how), {}).train(Received(1, {MODEL: start, ANCHOR: anchor}))
    for name in net.parameter_names:  # the featurizer feels the classifier's penalty
        if name not in {"featurizer.1.bias"}:  # a bias before BatchNorm has no gradient at all
            assert not torch.equal(other.arrays[MODEL][name], theirs.arrays[MODEL][name]), name


def trained(site: Site, anchor: Tensors, steps: int, **hparams: Any) -> Tensors:
    how: dict[str, Any] = {"local_steps": steps, "batch_size": 1000, **hparams}
    request = Received(1, {MODEL: site.network.initial(0), ANCHOR: anchor})
    return FedIIRClient(site, FedIIR(**how), {}).train(request).arrays[MODEL]


def test_with_itself_alone_a_client_has_nothing_to_align_in_its_first_step() -> None:
    """One client, or all alike; from the second step on it differs from FedAvg."""
    site = toy_site()
    start = site.network.initial(0)
    client = FedIIRClient(site, FedIIR(batch_size=1000), {})
    anchor = client.train_gradient(Received(1, {MODEL: start})).arrays[GRADIENT]
    for steps in (1, 3):
        plain = FedAvgClient(site, FedAvg(local_steps=steps, batch_size=1000), {})
        theirs = plain.train(Received(1, {MODEL: start})).arrays[MODEL]
        ours = trained(site, anchor, steps, penalty=1)
        equal = all(torch.allclose(ours[name], tensor, rtol=0, atol=1e-7) for name, tensor in theirs.items())
        assert equal == (steps == 1)
    assert "no other gradient" in FedIIR().caution(Toy(clients=1))
    assert FedIIR().caution(Toy()) == ""


def test_the_code_has_twice_the_papers_penalty() -> None:
    site = toy_site()
    anchor = {name: torch.ones_like(site.network.initial(0)[name]) for name in site.network.classifier_names}
    one, other = trained(site, anchor, 4, penalty=0.2, halved=False), trained(site, anchor, 4, penalty=0.4)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_presets() -> None:
    """The differences of docs/methods/fediir.md; what is set by hand stays."""
    paper, code = FedIIR(), FedIIR(preset="code")
    assert (paper.halved, paper.anchor_average, paper.momentum) == (True, "clients", 0)
    assert (code.halved, code.anchor_average, code.momentum) == (False, "batches", 0.9)
    assert (code.local_unit, code.local_steps, code.learning_rate) == ("epoch", 1, 0.01)
    assert paper.penalty == code.penalty == 0.01
    assert paper.anchor_ema == code.anchor_ema == 0.95
    assert paper.bias_correction is code.bias_correction is False
    assert FedIIR(preset="code", momentum=0.5).momentum == 0.5


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_statistics_stay_while_batch_norms_weights_move(frozen: bool) -> None:
    """The gradient for the anchor never moves them."""
    net = network(model_settings({"name": "mlp", "hidden": (5,), "norm": "batch"}), (2,), 2)
    site = Site("client-0", toy_site().data, net, 0)
    start = net.initial(0)
    sent = {name: tensor.clone() for name, tensor in start.items()}
    client = FedIIRClient(site, FedIIR(frozen_statistics=frozen, local_steps=2), {})
    anchor = client.train_gradient(Received(1, {MODEL: sent})).arrays[GRADIENT]
    assert set(anchor) == set(net.classifier_names)
    reached = client.train(Received(1, {MODEL: sent, ANCHOR: anchor})).arrays[MODEL]
    assert all(torch.equal(reached[name], start[name]) == frozen for name in net.buffer_names)
    for name in set(net.batch_norm_names) - set(net.buffer_names):
        assert not torch.equal(reached[name], start[name])
    assert all(torch.equal(sent[name], tensor) for name, tensor in start.items())


def test_a_class_that_a_client_does_not_have_pulls_like_any_other() -> None:
    """The gradient of its logit is the mean probability it is given, and is averaged as it is."""
    site = toy_site()
    ones = site.data.train[site.data.train.y == 1]
    site = Site(site.client, ClientData(ones, ones, {}), site.network, 0)
    start = site.network.initial(0)
    reply = FedIIRClient(site, FedIIR(), {}).train_gradient(Received(1, {MODEL: start}))
    absent = site.network.predict(start, ones.x).softmax(dim=1)[:, 0].mean()
    assert reply.arrays[GRADIENT]["classifier.bias"].tolist() == pytest.approx([absent.item(), -absent.item()])
    assert reply.metrics[NUM_EXAMPLES] == len(ones)


# ---------------------------------------------------------------------- messages


def server(
    *settings: str, fails: Callable[[str, str], bool] = lambda client, action: False
) -> tuple[FedIIRStrategy, ScriptedGrid, Tensors]:
    """A server half, and clients whose gradients are all their number + 1 and whose models are their number."""
    strategy = FedIIRStrategy(toy_config("fediir", "anchor_ema=0.5", *settings), "run")
    model = network(strategy.run.model, (2,), 2).initial(0)

    def answer(client: str, message: Message) -> RecordDict:
        number, action = float(client[-1]), message.metadata.message_type
        if fails(client, action):
            raise RuntimeError("out of order")
        sent = payload(message)
        if action == "train.gradient":
            assert sent.keys() == {MODEL}
            return content({GRADIENT: {name: torch.full_like(model[name], number + 1) for name in strategy.names}})
        assert sent.keys() == {MODEL, ANCHOR}
        # The more samples, the higher the number: the mean must not care.
        return content(
            {MODEL: {name: torch.full_like(t, number) for name, t in model.items()}}, int(10 * number + 1)
        )

    return strategy, ScriptedGrid(strategy, answer), model


def test_two_exchanges_with_the_same_clients_each_asked_once() -> None:
    strategy, grid, model = server("participation=0.5")
    for number in (1, 2, 3):
        one_round(strategy, grid, to_record(model), number)
        gradients, trainings = grid.of("train.gradient"), grid.of("train")
        assert len(grid.asked) == 4
        assert gradients.keys() == trainings.keys()
        assert len(gradients) == 2
        anchors = [records[ANCHOR] for records in trainings.values()]
        assert all(torch.equal(anchors[0][name], anchors[1][name]) for name in strategy.names)
        assert tuple(anchors[0]) == strategy.names


def test_the_mean_of_the_models_is_uniform_and_the_anchor_runs_on() -> None:
    strategy, grid, model = server()
    gradient = (1 + 2 + 3 + 4) / 4
    for number, share in ((1, 0.5), (2, 0.75), (3, 0.875)):
        found = one_round(strategy, grid, to_record(model), number)
        assert found is not None
        assert found["classifier.bias"].numpy().tolist() == [1.5, 1.5]
        sent = grid.of("train")["client-0"][ANCHOR]["classifier.bias"]
        assert sent.tolist() == pytest.approx([share * gradient] * 2)


def test_a_client_without_a_gradient_is_not_in_the_anchor_and_may_still_train() -> None:
    strategy, grid, model = server(fails=lambda client, action: client == "client-3" and action != "train")
    found = one_round(strategy, grid, to_record(model))
    assert strategy.anchor["classifier.bias"].tolist() == pytest.approx([0.5 * 2] * 2)
    assert found is not None
    assert found["classifier.bias"].numpy().tolist() == [1.5, 1.5]
    assert [sorted(exchange.left_out) for exchange in strategy.exchanges[-2:]] == [["client-3"], []]


def test_a_client_without_a_model_is_in_the_anchor_all_the_same() -> None:
    strategy, grid, model = server(fails=lambda client, action: client == "client-3" and action == "train")
    found = one_round(strategy, grid, to_record(model))
    assert strategy.anchor["classifier.bias"].tolist() == pytest.approx([0.5 * 2.5] * 2)
    assert found is not None
    assert found["classifier.bias"].numpy().tolist() == [1, 1]


def test_without_any_gradient_the_anchor_stays() -> None:
    broken: list[bool] = []
    strategy, grid, model = server("quorum=0", fails=lambda client, action: bool(broken) and action != "train")
    one_round(strategy, grid, to_record(model))
    before = dict(strategy.anchor)
    broken.append(True)
    found = one_round(strategy, grid, to_record(model), 2)
    assert found is not None
    assert all(torch.equal(strategy.anchor[name], before[name]) for name in before)
    assert strategy.updates == 1
    assert strategy.notes == []
    # And if that happens in the very first round, it is 0.
    strategy, grid, model = server("quorum=0", fails=lambda client, action: action != "train")
    one_round(strategy, grid, to_record(model))
    assert not any(tensor.any() for tensor in strategy.anchor.values())


@pytest.mark.parametrize(("align", "head"), [("classifier", 1_290), ("all", 371_850)])
def test_a_rounds_traffic_is_the_specs(align: str, head: int) -> None:
    """Invariants 11 and 15: |θ| + |ω| floats up, 2|θ| + |ω| down, since clients keep nothing."""
    config = load_config(options={"method": "fediir", "scenario": "rotated-mnist"}, settings=[f"align={align}"])
    strategy = FedIIRStrategy(config, "run")
    model = strategy_model = network(config.model, (1, 28, 28), 10).initial(0)

    def answer(_: str, message: Message) -> RecordDict:
        first = message.metadata.message_type == "train.gradient"
        names = strategy.names if first else strategy_model
        return content({GRADIENT if first else MODEL: {name: model[name] for name in names}})

    one_round(strategy, ScriptedGrid(strategy, answer), to_record(model))
    exchanges = [exchange for exchange in strategy.exchanges if exchange.action != "query"]
    assert sum(each.bytes_up for each in exchanges) == 4 * 5 * (371_850 + head)
    assert sum(each.bytes_down for each in exchanges) == 4 * 5 * (2 * 371_850 + head)
    if align == "classifier":
        assert sum(each.bytes_up for each in exchanges) == 4 * 1_865_700
