"""CGPFL-Heur: how many contexts it chooses, and that it is CGPFL with that many."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quadratic_clients import QuadraticRisk, Trace, run_quadratics
from torch import Tensor

from perennial.client.methods.cgpfl import CGPFLClient
from perennial.client.methods.cgpfl_heur import CGPFLHeurClient
from perennial.client.objectives import largest_eigenvalue
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.cgpfl_heur import CGPFLHeur
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.wire import MODEL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config


class Quadratic(QuadraticRisk, CGPFLHeurClient):
    pass


class QuadraticCGPFL(QuadraticRisk, CGPFLClient):
    pass


def planted(groups: int, each: int, within: float = 0.5, d: int = 10) -> Tensor:
    """Centres in groups that lie s.d. 3 apart."""
    generator = torch.Generator().manual_seed(groups)
    middles = 3 * torch.randn(groups, d, generator=generator, dtype=torch.float64)
    points = middles.repeat_interleave(each, dim=0)
    return points + within * torch.randn(*points.shape, generator=generator, dtype=torch.float64)


def run(path: Path, centres: Any, *settings: str, rounds: int = 1) -> Trace:
    quick = ("local_steps=1", "personal_steps=1")
    return run_quadratics(Quadratic, path, "cgpfl-heur", centres, *quick, *settings, rounds=rounds)


def chosen(trace: Trace) -> dict[str, Any]:
    (row,) = trace.rows("heuristic")
    return row


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize("true", [2, *(pytest.param(own, marks=pytest.mark.slow) for own in (1, 5, 10))])
def test_planted_groups_are_counted_and_found(true: int, tmp_path: Path) -> None:
    each = 40 // true
    trace = run(tmp_path / "run", planted(true, each, d=50), rounds=2)
    row = chosen(trace)
    assert row["contexts"] == true
    assert (row["round"], len(row["cost"])) == (1, 20)  # K up to N/2
    assert row["cost"] == sorted(row["cost"], reverse=True)
    for labels in trace.labels:
        members = list(labels.values())
        groups = [members[i * each : (i + 1) * each] for i in range(true)]
        assert all(len(set(group)) == 1 for group in groups)
        assert len({group[0] for group in groups}) == true


def test_equal_uploads_are_one_context(tmp_path: Path) -> None:
    """λ = 0: nothing moves, whatever the centres."""
    assert chosen(run(tmp_path / "one", planted(3, 2), "proximity=0"))["contexts"] == 1
    assert chosen(run(tmp_path / "two", planted(1, 1).repeat(7, 1)))["contexts"] == 1


@pytest.mark.parametrize(("mu", "contexts"), [("0", 1), ("1e12", 3)])
def test_a_given_mu_from_nothing_to_everything(mu: str, contexts: int, tmp_path: Path) -> None:
    """Three different centres, each four times: the least cost, zero, is first reached with three contexts."""
    row = chosen(run(tmp_path / "run", planted(3, 4, within=0.0), f"mu={mu}"))
    assert (row["contexts"], row["mu"]) == (contexts, float(mu))
    assert row["cost"][2] == pytest.approx(0, abs=1e-20)


def test_a_given_mu_is_weighed_against_the_bounds_factor(tmp_path: Path) -> None:
    """d = 11, m = 8: `c = √((11/8) log(8e/11))`, and K minimises c √K + μ cost(K)."""
    trace = run(tmp_path / "run", planted(4, 2), "mu=0.9", "learning_rate=0.05")
    row = chosen(trace)
    assert row["capacity"] == pytest.approx(((11 / 8) * (1 + torch.tensor(8 / 11).log().item())) ** 0.5)
    errors = [row["capacity"] * (k + 1) ** 0.5 + 0.9 * row["cost"][k] for k in range(4)]
    assert row["contexts"] == errors.index(min(errors)) + 1
    uploads = torch.stack([trace.uploaded[0][f"client-{i}"] for i in range(8)])
    spread = (uploads - uploads.mean(dim=0)).square().sum() / 8
    assert row["cost"][0] == pytest.approx(float(spread))


@pytest.mark.parametrize("mu", ["auto", "lambda", "0.5"])
def test_more_parameters_than_the_bound_can_take_are_no_trouble(mu: str, tmp_path: Path) -> None:
    """d > e·m, where (3.27) has no value."""
    config = toy_config("cgpfl-heur", f"mu={mu}", "model.hidden=[512]", "rounds=2", "local_steps=2")
    LocalRuntime(config).run(folder := RunFolder.create(tmp_path / "run", config))
    (row,) = [row for row in folder.rows() if row["kind"] == "heuristic"]
    assert row["capacity"] == 1.0
    assert row["contexts"] in (1, 2)
    assert all(value >= 0 for value in (row["mu"], *row["cost"]))


@pytest.mark.slow
def test_no_more_contexts_than_allowed_or_than_half_of_the_clients_that_answered(tmp_path: Path) -> None:
    centres = planted(6, 2)
    assert len(chosen(run(tmp_path / "all", centres))["cost"]) == 6
    assert len(chosen(run(tmp_path / "few", centres, "contexts=2"))["cost"]) == 2
    assert len(chosen(run(tmp_path / "many", centres, "contexts=9"))["cost"]) == 6
    assert len(chosen(run(tmp_path / "half", centres, "participation=0.5"))["cost"]) == 3
    assert chosen(run(tmp_path / "one", centres, "participation=0.05"))["contexts"] == 1


def test_the_choice_is_made_once_unless_more_rounds_are_asked_for(tmp_path: Path) -> None:
    once = run(tmp_path / "once", planted(3, 2), rounds=4)
    assert {len(set(labels.values())) for labels in once.labels} == {chosen(once)["contexts"]}
    twice = run(tmp_path / "twice", planted(3, 2), "heur_rounds=2", rounds=4)
    assert [row["round"] for row in twice.rows("heuristic")] == [1, 2]
    assert all(
        torch.equal(one[c], other[c]) for one, other in zip(once.sent, twice.sent, strict=True) for c in one
    )


def test_contexts_of_another_number_start_from_the_mean_model(tmp_path: Path) -> None:
    """Half of the clients answer: first one context of two, then more; α = 0 shows where contexts start."""
    settings = ("participation=0.34", "heur_rounds=9", "mixing=0")
    trace = run(tmp_path / "run", planted(3, 2), *settings, rounds=9)
    assert len({row["contexts"] for row in trace.rows("heuristic")}) > 1
    assert not any(omega.any() for part in trace.sent for omega in part.values())


# ---------------------------------------------------------------------- then it is CGPFL


def test_it_is_cgpfl_with_the_number_that_it_chose(tmp_path: Path) -> None:
    """Bit for bit, from the same seed."""
    settings = ("mixing=0.5", "participation=0.8", "local_steps=1", "personal_steps=1")
    heur = run(tmp_path / "heur", planted(3, 3), *settings, rounds=5)
    number = chosen(heur)["contexts"]
    plain = run_quadratics(
        QuadraticCGPFL, tmp_path / "plain", "cgpfl", planted(3, 3), *settings, f"contexts={number}", rounds=5
    )
    assert number > 1
    assert heur.labels == plain.labels
    for one, other in zip(
        heur.sent + heur.uploaded + heur.personal, plain.sent + plain.uploaded + plain.personal, strict=True
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[client], other[client]) for client in one)


@pytest.mark.slow
def test_on_a_network_it_is_cgpfl_too(tmp_path: Path) -> None:
    ends = {}
    for place, method, settings in (("one", "cgpfl-heur", ("mu=1e9",)), ("other", "cgpfl", ("contexts=2",))):
        config = toy_config(method, *settings)
        LocalRuntime(config).run(folder := RunFolder.create(tmp_path / place, config))
        ends[place] = folder.load_checkpoint()
    assert ends["one"].strategy.keys() == ends["other"].strategy.keys()
    for record, tensors in ends["one"].strategy.items():
        assert all(torch.equal(tensor, ends["other"].strategy[record][name]) for name, tensor in tensors.items())


# ---------------------------------------------------------------------- smoothness


def test_largest_eigenvalue_of_a_symmetric_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    start = torch.randn(12, generator=generator, dtype=torch.float64)
    for matrix in (half @ half.T, half + half.T, -half @ half.T):
        expected = float(torch.linalg.eigvalsh(matrix).abs().max())
        found = largest_eigenvalue(lambda v, m=matrix: m @ v, start, tolerance=1e-7, most=10_000)
        assert found == pytest.approx(expected, rel=1e-3)
        assert found <= expected * (1 + 1e-12)
    assert largest_eigenvalue(lambda v: 0 * v, start) == 0


def logistic_client(**hparams: Any) -> tuple[CGPFLHeurClient, Examples]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(30, 4, generator=generator), torch.randint(0, 3, (30,), generator=generator)
    data = Examples(x, y, torch.zeros_like(y))
    net = network(model_settings({"name": "logistic"}), (4,), 3)
    return CGPFLHeurClient(Site("client-0", ClientData(data, data, {}), net, 0), CGPFLHeur(**hparams), {}), data


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_a_client_reports_the_largest_curvature_of_its_risk(weight_decay: float) -> None:
    """Softmax regression: the Hessian is the mean of (diag p − p pᵀ) ⊗ x xᵀ, x with a 1 for the bias."""
    half, data = logistic_client(mu="lambda", weight_decay=weight_decay)
    model = half.network.initial(5)
    p = F.softmax(half.network.predict(model, data.x), dim=1)
    x = torch.cat([data.x, torch.ones(30, 1)], dim=1)
    blocks = [torch.kron(torch.diag(p[i]) - torch.outer(p[i], p[i]), torch.outer(x[i], x[i])) for i in range(30)]
    expected = float(torch.linalg.eigvalsh(torch.stack(blocks).mean(dim=0))[-1]) + weight_decay
    found = half.train(Received(1, {MODEL: model})).metrics["smoothness"]
    assert found == pytest.approx(expected, rel=0.02)


def test_smoothness_is_reported_while_it_is_wanted() -> None:
    for hparams, round_, wanted in (
        ({"mu": "lambda"}, 1, True),
        ({"mu": "lambda"}, 2, False),
        ({"mu": "lambda", "heur_rounds": 2}, 2, True),
        ({"mu": "auto"}, 1, False),
        ({"mu": 0.5}, 1, False),
    ):
        half, _ = logistic_client(**hparams)
        metrics = half.train(Received(round_, {MODEL: half.network.initial(0)})).metrics
        assert ("smoothness" in metrics) is wanted


def test_mu_from_the_smoothness_of_the_risks(tmp_path: Path) -> None:
    """μ = λ + L/2, and quadratics have L = 1."""
    assert chosen(run(tmp_path / "run", planted(2, 2), "mu=lambda"))["mu"] == pytest.approx(12.5)


@pytest.mark.parametrize("setting", ["mu=-1", "mu=much", "mu=inf", "heur_rounds=0", "contexts=-1", "contexts=5"])
def test_values_out_of_bounds_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"method.{setting.partition('=')[0]}"):
        toy_config("cgpfl-heur", setting)
