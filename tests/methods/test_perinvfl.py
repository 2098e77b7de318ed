"""PerInvFL: golden numbers of both presets, what the shared model depends on, special cases, the pull."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from float64_federations import (
    K2,
    LITERAL,
    Kept,
    Squares,
    accuracy,
    close,
    federate,
    logistic_site,
    logistic_sites,
    logits,
    population,
)
from tiny_runs import quadratic_site, taken_up, theta, toy_site
from torch import Tensor

from perennial.client.methods.irm import IrmClient
from perennial.client.methods.irm_l2 import IrmL2Client
from perennial.client.methods.perinvfl import AUXILIARY, PerInvFLClient
from perennial.client.objectives import contrast
from perennial.client.steps import Working
from perennial.client.trainer import Received, Site
from perennial.common.config import load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.methods.irm import Irm
from perennial.common.methods.irm_l2 import IrmL2
from perennial.common.methods.perinvfl import PerInvFL
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.methods import files
from perennial.testing.tiny_federation import Toy, toy_config

FLOAT: dict[str, Any] = {"dtype": torch.float64}
START = {"theta": torch.tensor([0.1, 0.1, 0.0], **FLOAT)}


class SquaresPerInvFL(Squares, PerInvFLClient):
    """On quadratics, without penalty."""


class AnchoredAtTheReceived(SquaresPerInvFL):
    """A wrong variant: the pull is to the received model."""

    def personal_loss(self, params: Tensors, anchor: Tensors, contexts: Any, received: Received) -> Tensor:
        return super().personal_loss(params, received[MODEL], contexts, received)


def values(tensors: Tensors) -> list[float]:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).tolist()


# ---------------------------------------------------------------------- golden numbers


def scalars(
    rounds: int, client: type[PerInvFLClient] = SquaresPerInvFL, forget: bool = False, **how: Any
) -> tuple[float, list[float]]:
    """ν and the θ_i of two clients: `L^i(x) = ½ (x − c_i)²`, c = (1, −2)."""
    settings = {"learning_rate": 0.2, "personal_learning_rate": 0.1, "local_steps": 2, "personal_steps": 2}
    hparams = PerInvFL(proximity=0.5, **LITERAL | settings | how)
    sites = [quadratic_site([[c]]) for c in (1.0, -2.0)]
    nu, kept = federate(
        lambda site, kept: client(site, hparams, {} if forget else kept), sites, theta(0.0), rounds, 0.5
    )
    return nu["theta"].item(), [own[PERSONAL]["theta"].item() for own in kept]


def test_golden_order_and_persistence() -> None:
    """From another program, after one and after two rounds, and two wrong variants."""
    assert scalars(1) == (pytest.approx(-0.09), pytest.approx([0.3312, -0.6624]))
    assert scalars(2) == (pytest.approx(-0.1638), pytest.approx([0.44353152, -0.95704704], abs=5e-9))
    assert scalars(2, forget=True)[1] == pytest.approx([0.271008, -0.722592])
    assert scalars(2, AnchoredAtTheReceived)[1] == pytest.approx([0.38954592, -0.85879584])


def test_golden_irm() -> None:
    """From another program: two environments per client."""
    hparams = PerInvFL(
        penalty=10, personal_penalty=10, proximity=0.1, local_steps=2, personal_steps=2, learning_rate=0.05,
        personal_learning_rate=0.05, **LITERAL,
    )  # fmt: skip
    nu, kept = federate(
        lambda site, own: PerInvFLClient(site, hparams, own), logistic_sites(K2), START, 3, mixing=0.5
    )
    assert values(nu) == pytest.approx([0.10509172, 0.10504327, 8.283e-6], abs=6e-9)
    expected = [
        (0.13001453, 0.08872612, 0.00344866), (0.13540193, 0.09692330, 0.01106897),
        (0.13533836, 0.08346149, -0.01101375), (0.12997692, 0.10158851, -0.00336006),
    ]  # fmt: skip
    for own, numbers in zip(kept, expected, strict=True):
        assert values(own[PERSONAL]) == pytest.approx(numbers, abs=6e-9)


CONTRASTIVE: Any = SimpleNamespace(
    parameter_names=("W", "c"),
    buffer_names=(),
    outputs=2,
    features=lambda params, x, training=False: x @ params["W"].T,
    classify=lambda params, z, training=False: logits({"theta": params["c"]}, z),
    predict=lambda params, x, training=False: logits({"theta": params["c"]}, x @ params["W"].T),
    initial=lambda seed: contrastive_start(),
)
POINTS = (
    (((1, 0), (0, 1), (1, 1), (-1, 0.5)), (1, 0, 1, 0)),
    (((1, 0.5), (0.5, -1), (-1, 1), (0, -1)), (1, 1, 0, 0)),
)


def contrastive_start() -> Tensors:
    return {"W": torch.tensor([[0.5, -0.2], [0.1, 0.4]], **FLOAT), "c": torch.tensor([0.3, -0.6], **FLOAT)}


def contrastive_sites() -> list[Site]:
    sites = []
    for number, (x, y) in enumerate(POINTS):
        data = Examples(torch.tensor(x, **FLOAT), torch.tensor(y), torch.zeros(4, dtype=torch.long))
        sites.append(Site(f"client-{number}", ClientData(data, data, {}), CONTRASTIVE, 0))
    return sites


def contrastive(rounds: int = 2, **how: Any) -> tuple[Tensors, list[Kept]]:
    settings: dict[str, Any] = {
        "preset": "code", "local_steps": 2, "personal_steps": 2, "learning_rate": 0.1, "penalty": 100,
        "personal_learning_rate": 0.05, "anneal_rounds": 1,
    }  # fmt: skip
    hparams = PerInvFL(**settings | how)
    return federate(
        lambda site, kept: PerInvFLClient(site, hparams, kept), contrastive_sites(), contrastive_start(), rounds
    )


def test_golden_public_code() -> None:
    """From another program: order of the three models, and the Adam that v and h share."""
    nu, kept = contrastive()
    assert values(nu) == pytest.approx(
        [0.84856117, -0.43009010, -0.24656737, 0.61278014, 0.65174758, -0.40437001], abs=6e-9
    )
    expected = {
        PERSONAL: (
            (0.82829666, -0.35795579, -0.22276121, 0.55371843, 0.62875429, -0.43656159),
            (0.83233858, -0.31117905, -0.22315117, 0.50038912, 0.63269701, -0.40079913),
        ),
        AUXILIARY: (
            (0.86014647, -0.55662260, -0.25246498, 0.73835113, 0.66068675, -0.51665810),
            (0.86834216, -0.21808877, -0.25575169, 0.41292401, 0.66991568, -0.46924897),
        ),
    }
    for model, numbers in expected.items():
        for own, those in zip(kept, numbers, strict=True):
            assert values(own[model]) == pytest.approx(those, abs=6e-9)


def test_golden_public_code_without_rescaling() -> None:
    """From another program, without division by the weight: the setting rescale=false."""
    nu, kept = contrastive(rescale=False)
    assert nu["W"][0, 0].item() == pytest.approx(0.59971934, abs=6e-9)
    assert kept[0][PERSONAL]["W"][0, 0].item() == pytest.approx(0.70299920, abs=6e-9)


# ---------------------------------------------------------------------- what depends on what


@pytest.mark.parametrize("how", [{}, {"optimizer": "adam"}, {"invariance": "groupdro"}])
def test_the_shared_model_never_sees_the_personal_one(how: dict[str, Any]) -> None:
    """Bit-identical for any β, η, S, local λ and θ^0."""
    site = toy_site()
    model = site.network.initial(0)
    shared = Received(13, {MODEL: model, "group": {"weight": torch.tensor(1.3)}})

    def trained(kept: Kept, **others: Any) -> Tensors:
        return PerInvFLClient(site, PerInvFL(batch_size=16, **how, **others), kept).train(shared).arrays[MODEL]

    expected = trained({})
    for others in (
        {"proximity": 3},
        {"personal_learning_rate": 0.3},
        {"personal_steps": 4},
        {"personal_penalty": 0},
    ):
        assert all(torch.equal(expected[name], tensor) for name, tensor in trained({}, **others).items())
    far = {PERSONAL: {name: tensor + 1 for name, tensor in model.items()}}
    assert values(trained(far)) == values(expected)


def test_in_the_code_the_shared_model_depends_on_no_personal_setting_but_on_h() -> None:
    nu, _ = contrastive()
    for how in ({"contrast": 0}, {"personal_steps": 1}, {"personal_learning_rate": 0.5}):
        assert torch.equal(contrastive(**how)[0]["W"], nu["W"])
    hparams = Irm(preset="code", local_steps=2, learning_rate=0.1, penalty=100, anneal_rounds=1)
    irm, _ = federate(
        lambda site, kept: IrmClient(site, hparams, kept), contrastive_sites(), contrastive_start(), 2
    )
    assert not torch.allclose(irm["W"], nu["W"], atol=1e-2)


def test_with_the_irm_loss_the_shared_model_is_federated_irms() -> None:
    site = toy_site()
    shared = Received(13, {MODEL: site.network.initial(0)})
    ours = PerInvFLClient(site, PerInvFL(), {}).train(shared).arrays[MODEL]
    irm = IrmClient(site, Irm(), {}).train(shared).arrays[MODEL]
    assert all(torch.equal(ours[name], tensor) for name, tensor in irm.items())


def test_without_a_local_penalty_it_is_irm_l2() -> None:
    """Bit for bit, with two environments, too."""
    site, how = logistic_site(0, (0.95, 0.7), 1), {"batch_size": 50, "personal_steps": 3}
    shared = Received(13, {MODEL: START})
    for reduction in ("sum", "mean"):
        ours = PerInvFLClient(site, PerInvFL(personal_penalty=0, context_reduction=reduction, **how), {})
        l2 = IrmL2Client(site, IrmL2(context_reduction=reduction, **how), {})
        assert values(ours.train(shared).arrays[MODEL]) == values(l2.train(shared).arrays[MODEL])
        assert values(ours.kept[PERSONAL]) == values(l2.kept[PERSONAL]) != values(START)


@pytest.mark.slow
def test_without_the_pull_a_personal_model_depends_on_its_own_data_alone() -> None:
    others = [(0.6,), (0.9, 0.7), (0.5,)]
    found = []
    for contexts in (K2[1:], others):
        sites = [logistic_site(0, K2[0], 1), *(logistic_site(i, own, -1) for i, own in enumerate(contexts))]
        hparams = PerInvFL(proximity=0, penalty=7 if contexts is others else 3, **LITERAL)
        nu, kept = federate(lambda site, own, h=hparams: PerInvFLClient(site, h, own), sites, START, 3)
        found.append((values(nu), values(kept[0][PERSONAL])))
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


def test_clients_are_alike_but_for_their_data() -> None:
    """Permuting them permutes the θ_i and leaves ν; equal data give equal θ_i."""
    hparams = PerInvFL(personal_penalty=10, penalty=10, **LITERAL)

    def go(order: list[int]) -> tuple[list[float], list[list[float]]]:
        sites = [logistic_site(0, K2[i], 1) for i in order]
        nu, kept = federate(lambda site, own: PerInvFLClient(site, hparams, own), sites, START, 2)
        return values(nu), [values(own[PERSONAL]) for own in kept]

    (nu, own), (permuted_nu, permuted) = go([0, 1, 2, 2]), go([2, 0, 2, 1])
    assert permuted_nu == pytest.approx(nu, abs=1e-15)
    assert permuted == [own[2], own[0], own[3], own[1]]
    assert own[2] == own[3] != own[0]


# ---------------------------------------------------------------------- the personal loss


def test_the_personal_loss_is_the_sum_over_environments() -> None:
    """Line 8 of Algorithm 1, unlike line 9, does not pool them."""
    point = {"theta": torch.tensor([0.3, 0.7, -0.2], **FLOAT)}
    site = logistic_site(0, (0.95, 0.70), 1)
    contexts = site.data.train.by_environment()
    assert [len(part) for part in contexts] == [800, 800]

    def loss(**how: Any) -> float:
        client = PerInvFLClient(site, PerInvFL(**LITERAL | {"personal_penalty": 10, "proximity": 0} | how), {})
        return client.personal_loss(point, START, contexts, Received(1)).item()

    assert loss() == pytest.approx(1.39366359, abs=5e-9)
    assert loss(context_reduction="mean") == pytest.approx(1.39366359 / 2, abs=5e-9)
    away = 0.2**2 + 0.6**2 + 0.2**2
    assert loss(proximity=0.5) - loss() == pytest.approx(0.5 * away)
    assert loss(weight_decay=0.1) - loss() == pytest.approx(0.05 * (0.3**2 + 0.7**2 + 0.2**2))
    assert loss(rescale=True, proximity=0.5) == pytest.approx(loss(proximity=0.5) / 10)
    risks = [F.cross_entropy(logits(point, part.x), part.y).item() for part in contexts]
    assert loss(invariance="groupdro", rescale=True) == pytest.approx(max(risks))


def test_on_one_environment_the_penalty_moves_no_minimum() -> None:
    """The risk's minimiser is one of `risk + λ g²` for every λ; on two it is not."""
    erm = {"theta": torch.tensor([math.log(3), math.log(19), math.log(4)], **FLOAT)}
    for contexts, moves in (((0.95,), False), ((0.95, 0.70), True)):
        site = logistic_site(0, contexts, 1)
        client = PerInvFLClient(site, PerInvFL(proximity=0, personal_penalty=1e4, **LITERAL), {})
        model = Working(erm, ["theta"])
        parts = [population(p, 1) for p in contexts]
        gradient = model.gradient(client.personal_loss(model.tensors, START, parts, Received(1)))[0]
        assert (gradient.norm() > 1) == moves
        if not moves:
            assert gradient.norm() < 1e-9


@pytest.mark.parametrize("proximity", [0.05, 0.5, 5.0])
def test_the_pull_ends_where_its_stationarity_says(proximity: float) -> None:
    """`θ* = (c + 2βν)/(1 + 2β)` on ½(x − c)², so `2β(θ* − ν) = −∇L(θ*)`."""
    rate = 0.5 / (1 + 2 * proximity)
    hparams = PerInvFL(
        proximity=proximity, personal_steps=60, personal_learning_rate=rate, local_steps=1, **LITERAL
    )
    client = SquaresPerInvFL(quadratic_site([[3.0]]), hparams, {})
    client.train(Received(1, {MODEL: theta(1.0)}))
    found = client.kept[PERSONAL]["theta"].item()
    assert found == pytest.approx((3 + 2 * proximity) / (1 + 2 * proximity))
    assert 2 * proximity * (found - 1.0) == pytest.approx(3 - found)


@pytest.mark.slow
def test_with_two_environments_local_invariance_beats_the_best_global_model() -> None:
    """β = 0 and λ = 100 on client 1 of `K2`.

    At P(colour = label) = 0.1 the shape alone has accuracy 0.75, shape and the client's own feature 0.80.
    """
    found = {}
    for penalty in (0, 100):
        hparams = PerInvFL(
            proximity=0, personal_penalty=penalty, local_steps=1, personal_steps=400, personal_learning_rate=0.05,
            **LITERAL,
        )  # fmt: skip
        client = PerInvFLClient(logistic_site(0, K2[0], 1), hparams, {})
        client.train(Received(1, {MODEL: START}))
        found[penalty] = accuracy(client.kept[PERSONAL], 0.1, 1)
    assert found[100] > 0.75 > found[0]


# ---------------------------------------------------------------------- the authors' code


def test_the_contrast_pushes_only_away_from_the_other_features() -> None:
    """C has no gradient at a = p = n; with a = p only the part of n remains."""
    generator = torch.Generator().manual_seed(0)
    a, n = (torch.randn(5, 4, generator=generator, **FLOAT) for _ in range(2))
    a.requires_grad_()
    same = contrast(a, a.detach(), a.detach())
    assert same.item() == pytest.approx(math.log(1.2))
    assert torch.autograd.grad(same, a)[0].norm() < 1e-15
    found = torch.autograd.grad(contrast(a, a.detach(), n), a)[0]
    cosine = (a * n).sum(1) / (a.norm(dim=1) * n.norm(dim=1))
    by_hand = -(math.e / (math.e + 0.2 * cosine.exp())).log().mean()
    assert close(contrast(a, a.detach(), n), by_hand)
    assert close(found, torch.autograd.grad(by_hand, a)[0])
    assert (found * n).sum() > 0  # a step against it turns a away from n


def test_in_the_code_the_personal_model_is_a_displacement_bounded_by_its_step_size() -> None:
    """Adam's bound: every coordinate of θ is within 7.3 η of the v that it was computed from."""

    class Watched(PerInvFLClient):
        def shared_step(self, v: Working, *rest: Any) -> Any:
            origins.append([value.clone() for value in v.values])
            return super().shared_step(v, *rest)

    origins: list[list[Tensor]] = []
    hparams = PerInvFL(
        preset="code", batch_size=3, personal_steps=3, learning_rate=0.1, personal_learning_rate=0.02
    )
    kept: Kept = {}
    for number in range(1, 20):
        client = Watched(contrastive_sites()[0], hparams, kept)
        client.train(Received(number, {MODEL: contrastive_start()}))
        kept = client.kept
        away = [(one - v).abs().max() for one, v in zip(kept[PERSONAL].values(), origins[-1], strict=True)]
        assert 0 < max(away) <= 7.3 * 0.02


@pytest.mark.slow
def test_the_code_resumes_with_its_optimizers_and_its_auxiliary_model(tmp_path: Any) -> None:
    config = toy_config("perinvfl", "preset=code", "learning_rate=0.005", "anneal_rounds=2", rounds=5)
    broken = taken_up(config, tmp_path, 3)
    assert broken.rows()[-1]["round"] == 5


# ---------------------------------------------------------------------- settings


def test_what_does_not_go_together_and_what_to_beware_of() -> None:
    with pytest.raises(UserError, match=r"method\.invariance: groupdro is not in the authors' code"):
        load_config(
            options={"method": "perinvfl", "scenario": "rc-mnist"}, settings=["preset=code", "invariance=groupdro"]
        )
    assert "one training environment" in PerInvFL().caution(SCENARIOS["rc-mnist"])
    assert "one training environment" in PerInvFL().caution(Toy())
    assert "near chance" in PerInvFL(preset="code").caution(SCENARIOS["rc-mnist-2env"])
    assert PerInvFL().caution(SCENARIOS["rc-mnist-2env"]) == ""


@pytest.mark.parametrize(
    "settings",
    [
        ("penalty_estimator=halves", "context_reduction=mean"),
        ("penalty_estimator=single",),
        pytest.param(("invariance=groupdro",), marks=pytest.mark.slow),
        pytest.param(("preset=code",), marks=pytest.mark.slow),
    ],
)
def test_clients_with_several_environments_are_a_stack(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of whose mini-batches some have no sample of an environment, or one."""
    client_data = Toy.client_data

    def mixed(self: Toy, client: int, seed: int, root: Path | None) -> ClientData:
        data = client_data(self, client, seed, root)
        few = torch.arange(len(data.train)) % 5 == 0
        return replace(data, train=replace(data.train, environment=few.long()))

    monkeypatch.setattr(Toy, "client_data", mixed)
    found = []
    for engine in ("loop", "stack"):
        config = toy_config("perinvfl", *settings, "batch_size=6", f"cohort_engine={engine}", rounds=2)
        LocalRuntime(config).run(RunFolder.create(tmp_path / engine, config))
        found.append(files(tmp_path / engine))
    assert found[0].keys() == found[1].keys()
    for name, tensors in found[0].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(found[1][name][key], tensor, rtol=1e-4, atol=1e-5)
    assert "one by one" not in caplog.text
