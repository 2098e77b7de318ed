from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Message, RecordDict
from pydantic import ValidationError
from safetensors.torch import load_file
from scripted_clients import ScriptedGrid, content, one_round
from torch import Tensor

from perennial.client.methods.fedilc import FedILCClient
from perennial.client.methods.fedsgd import FedSGDClient
from perennial.client.trainer import Received, Reply, Site
from perennial.common.config import RunConfig
from perennial.common.data.examples import ClientData, Examples
from perennial.common.mathematics.geometric_mean import GeometricMean
from perennial.common.mathematics.gradient_variance import gradient_sums, spread, variance
from perennial.common.methods import METHODS
from perennial.common.methods.fedilc import PULL, VARIANCE, FedILC
from perennial.common.methods.fedsgd import FedSGD
from perennial.common.models.memory import model_bytes
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.tasks import Classes
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, MODEL, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.methods.fedilc import FedILCStrategy
from perennial.testing.tiny_federation import SpoilingGrid, Toy, toy_config

MODEL_TABLE = {"name": "mlp", "hidden": [5], "one_logit": True}
NET = network(model_settings(MODEL_TABLE), (3,), 2)
FISHR = ("fedcurv", "fishr-inter-geo", "fishr-intra-geo", "fishr-intra-arith", "fishr")


# ---------------------------------------------------------------------- clients, in float64


def doubled(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


START = doubled(NET.initial(3))


def examples(count: int, seed: int, labels: tuple[int, ...] = (0, 1)) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor(labels)[torch.randint(len(labels), (count,), generator=generator)]
    return Examples(x, y, torch.zeros_like(y))


def site(number: int, train: Examples) -> Site:
    return Site(f"client-{number}", ClientData(train, train, {}), NET, 0)


# Of different sizes, more than one piece, one without a class.
SITES = (site(0, examples(300, 0)), site(1, examples(9, 1)), site(2, examples(20, 2, labels=(1,))))


def client(method: str, where: Site, kept: dict[str, Tensors] | None = None, **fields: Any) -> FedILCClient:
    return FedILCClient(where, METHODS[method](**fields), {} if kept is None else kept)  # type: ignore[arg-type]


def variance_by_autograd(params: Tensors, part: Examples) -> Tensor:
    """c_e from the gradient of every sample on its own, differentiable in all parameters."""
    params = {name: t if t.requires_grad else t.clone().requires_grad_() for name, t in params.items()}
    head, gradients = [params["classifier.weight"], params["classifier.bias"]], []
    for h, y in zip(NET.features(params, part.x), part.y.double(), strict=True):
        loss = F.binary_cross_entropy_with_logits(F.linear(h, *head), y[None])
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, head, create_graph=True)]))
    return torch.stack(gradients).var(dim=0, correction=0)


def spread_by_autograd(params: Tensors, sites: tuple[Site, ...] = SITES) -> Tensor:
    variances = torch.stack([variance_by_autograd(params, where.data.train) for where in sites])
    return ((variances - variances.mean(dim=0)) ** 2).sum() / len(sites)


def two_phases(method: str, sites: tuple[Site, ...], **fields: Any) -> tuple[list[Reply], list[Tensors]]:
    """The clients' first replies, and their pulls once they know the mean of the variances."""
    clients = [client(method, where, **fields) for where in sites]
    first = [own.answer("train", Received(1, {MODEL: START})) for own in clients]
    mean = torch.stack([reply.arrays[VARIANCE][VARIANCE] for reply in first]).mean(dim=0)
    second = Received(1, {VARIANCE: {VARIANCE: mean}})
    return first, [own.answer("train.fishr", second).arrays[PULL] for own in clients]


def gradient_by_autograd(params: Tensors) -> Tensors:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
    return dict(zip(leaves, torch.autograd.grad(spread_by_autograd(leaves), list(leaves.values())), strict=True))


@pytest.mark.parametrize("method", ["fedcurv", "fishr-intra-geo"])
def test_the_clients_variances_are_those_of_per_sample_gradients(method: str) -> None:
    first, _ = two_phases(method, SITES)
    for where, reply in zip(SITES, first, strict=True):
        expected = variance_by_autograd(START, where.data.train)
        torch.testing.assert_close(reply.arrays[VARIANCE][VARIANCE], expected.detach(), rtol=1e-6, atol=1e-9)


def test_the_sum_of_the_pulls_is_the_gradient_of_the_spread() -> None:
    """By autograd through all clients at once, and by differences; it is not zero in the featurizer."""
    _, pulls = two_phases("fedcurv", SITES)
    expected = gradient_by_autograd(START)
    generator = torch.Generator().manual_seed(9)
    slope, direction = 0.0, {}
    for name, want in expected.items():
        found = 2 / len(SITES) * torch.stack([pull[name] for pull in pulls]).sum(dim=0)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-12)
        assert found.abs().max() > 0
        direction[name] = torch.randn(want.shape, generator=generator, dtype=torch.float64)
        slope += float((found * direction[name]).sum())
    step = 1e-5
    ahead, behind = (
        spread_by_autograd({name: START[name] + sign * step * direction[name] for name in START})
        for sign in (1, -1)
    )
    assert float((ahead - behind).detach()) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_clients_with_the_same_data_and_a_client_alone_have_no_spread() -> None:
    for sites in (SITES[:1], (SITES[0], site(5, SITES[0].data.train))):
        for pull in two_phases("fedcurv", sites)[1]:
            assert not any(part.any() for part in pull.values())
        assert not spread_by_autograd(START, sites).any()


def test_nothing_received_is_changed_and_nothing_stays_after_a_round() -> None:
    before = {name: tensor.clone() for name, tensor in START.items()}
    kept: dict[str, Tensors] = {}
    own = client("fishr-intra-geo", SITES[0], kept)
    variances = own.answer("train", Received(1, {MODEL: START})).arrays[VARIANCE]
    assert kept
    own.answer("train.fishr", Received(1, {VARIANCE: variances}))
    assert kept == {}
    assert all(torch.equal(START[name], tensor) for name, tensor in before.items())


# ---------------------------------------------------------------------- mini-batches


def gradient_of(method: str, where: Site, round_: int = 1, **fields: Any) -> Tensors:
    reply = client(method, where, **fields).answer("train", Received(round_, {MODEL: START}))
    return reply.arrays[GRADIENT]


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def full(where: Site) -> Tensor:
    return flat(FedSGDClient(where, FedSGD(), {}).answer("train", Received(1, {MODEL: START})).arrays[GRADIENT])


def test_equal_mini_batches_have_the_mean_of_all_data() -> None:
    """Intra-Arith is then FedCurv, which it also is with one batch; so is Intra-Geo."""
    for fields in ({"batch_size": 30}, {"batch_size": 300}, {"batch_size": 9000}):
        assert torch.allclose(
            flat(gradient_of("fishr-intra-arith", SITES[0], **fields)), full(SITES[0]), atol=1e-9
        )
    whole = flat(gradient_of("fishr-intra-geo", SITES[0], batch_size=300))
    torch.testing.assert_close(whole, full(SITES[0]), rtol=1e-9, atol=1e-15)


def test_a_short_last_batch_counts_as_much_as_the_others() -> None:
    """Nine samples in batches of four: the mean over the three batches, whatever samples are in them."""
    train, seen = SITES[1].data.train, []

    class Watching(FedILCClient):
        def loss(self, params: Tensors, batch: Examples, received: Received) -> Any:
            seen.append(batch)
            return super().loss(params, batch, received)

    own = Watching(SITES[1], METHODS["fishr-intra-arith"](batch_size=4), {})  # type: ignore[arg-type]
    found = flat(own.answer("train", Received(1, {MODEL: START})).arrays[GRADIENT])
    assert [len(batch) for batch in seen] == [4, 4, 1]
    assert sorted(torch.cat([batch.x[:, 0] for batch in seen]).tolist()) == sorted(train.x[:, 0].tolist())
    torch.testing.assert_close(found, torch.stack([full(site(1, batch)) for batch in seen]).mean(dim=0))
    geometric = GeometricMean()
    for batch in seen:
        geometric.add({"g": full(site(1, batch))})
    found = flat(gradient_of("fishr-intra-geo", SITES[1], batch_size=4))
    torch.testing.assert_close(found, geometric.result()["g"])


@pytest.mark.parametrize("method", ["fishr-intra-geo", "fishr-intra-arith"])
def test_a_gpu_takes_mini_batches_together_to_the_same_mean(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 samples in batches of 32, nine of which are equal: on a processor one by one, then together."""
    sizes: list[list[int]] = []

    class Watching(FedILCClient):
        def groups(self, order: Tensor, size: int) -> list[Tensor]:
            groups = super().groups(order, size)
            sizes.append([len(group) for group in groups])
            return groups

    def reply() -> Reply:
        return Watching(SITES[0], METHODS[method](batch_size=32), {}).train(Received(1, {MODEL: START}))  # type: ignore[arg-type]

    alone = reply()
    monkeypatch.setattr(FedILCClient, "in_bulk", True)
    together = reply()
    monkeypatch.setattr(
        "perennial.client.methods.fedilc.GROUP_BYTES", 4 * model_bytes(NET.settings, NET.input_shape, NET.outputs)
    )
    fours = reply()
    assert sizes == [[1] * 10, [9, 1], [4, 4, 1, 1]]
    for other in (together, fours):
        torch.testing.assert_close(
            flat(other.arrays[GRADIENT]), flat(alone.arrays[GRADIENT]), rtol=1e-9, atol=1e-15
        )
        assert other.metrics == pytest.approx(dict(alone.metrics))


def test_mini_batches_are_drawn_anew_in_every_round() -> None:
    one, again, other = (flat(gradient_of("fishr-intra-geo", SITES[0], number)) for number in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)


def test_a_batch_of_one_is_the_papers_per_sample_geometric_mean() -> None:
    geometric = GeometricMean()
    for place in range(9):
        geometric.add({"g": full(site(1, SITES[1].data.train[torch.tensor([place])]))})
    found = flat(gradient_of("fishr-intra-geo", SITES[1], batch_size=1))
    torch.testing.assert_close(found, geometric.result()["g"])


# ---------------------------------------------------------------------- running means


def test_running_means_by_hand() -> None:
    """γ = 0.75: r_1 = c/4 and r_2 = 3/16 c + c/4 for the same c, and what is sent is four times that."""
    kept: dict[str, Tensors] = {}
    c = variance_by_autograd(START, SITES[1].data.train).detach()
    for round_, share in ((1, 1.0), (2, 1.75)):
        own = client("fishr", SITES[1], kept, smoothing=0.75)
        sent = own.answer("train", Received(round_, {MODEL: START})).arrays[VARIANCE]
        torch.testing.assert_close(sent[VARIANCE], share * c)
        own.answer("train.fishr", Received(round_, {VARIANCE: sent}))
        kept = own.kept
        assert len(kept) == 1
    plain = two_phases("fishr", SITES, smoothing=0)
    for found, expected in zip(plain[1], two_phases("fedcurv", SITES)[1], strict=True):
        assert torch.equal(flat(found), flat(expected))


# ---------------------------------------------------------------------- the server


def strategy(method: str, *settings: str, **options: Any) -> FedILCStrategy:
    return FedILCStrategy(toy_config(method, *settings, **options), "run")


ARRAYS = toy_config("fedcurv")
TOY_NET = network(ARRAYS.model, (2,), 2)
WEIGHTS = TOY_NET.initial(0)
HEAD = sum(tensor.numel() for name, tensor in WEIGHTS.items() if name.startswith("classifier"))


def filled(value: float) -> Tensors:
    return {name: torch.full_like(tensor, value) for name, tensor in WEIGHTS.items()}


def answer(gradients: dict[str, float]) -> Any:
    """Clients whose gradients are full of a number, variances of its square, and pulls of a tenth of it."""

    def reply(name: str, message: Message) -> RecordDict:
        value = gradients[name]
        if message.metadata.message_type == "train.fishr":
            return content({PULL: filled(value / 10)})
        arrays = {GRADIENT: filled(value), VARIANCE: {VARIANCE: torch.full((HEAD,), value**2)}}
        if "variance" not in message.content.array_records and name.endswith("nothing"):
            arrays.pop(VARIANCE)
        return content(arrays, risk=1.0)

    return reply


GRADIENTS = {"client-0": 1.0, "client-1": 4.0, "client-2": -2.0, "client-3": 0.0}


def moved(method: FedILCStrategy, grid: ScriptedGrid) -> float:
    """How far down all parameters went."""
    found = one_round(method, grid, to_record(filled(0)))
    assert found is not None
    steps = {round(-float(value), 5) for tensor in from_record(found).values() for value in tensor.flatten()}
    assert len(steps) == 1
    return steps.pop()


PLAIN = ("optimizer=sgd", "learning_rate=1", "weight_decay=0")


@pytest.mark.parametrize(
    ("method", "settings", "step"),
    [
        # Mean gradient 3/4; wgeo 2/4 · 2 − 1/4 · 2 = 1/2; mean pull 0.075, times 2λ or 8λ.
        ("fedcurv", ("penalty=0.5",), 0.75 + 0.075),
        ("fedcurv", ("penalty=0.5", "reduction=sum"), 0.75 + 4 * 0.075),
        ("fishr-inter-geo", ("penalty=0.5",), 0.5 + 0.075),
        ("fishr-inter-geo", ("penalty=0.5", "agreement=0.3"), 0.075),
        ("fishr-inter-geo", ("penalty=0.5", "zeros=paper"), 0.075),
        ("fishr-intra-geo", ("penalty=0.5",), 0.75 + 0.075),
        ("fishr-intra-arith", ("penalty=0.5",), 0.75 + 0.075),
        ("fishr", ("penalty=0.5",), 0.75 + 0.075),
    ],
)
def test_a_step_by_hand(method: str, settings: tuple[str, ...], step: float) -> None:
    half = strategy(method, *PLAIN, *settings)
    grid = ScriptedGrid(half, answer(GRADIENTS))
    assert moved(half, grid) == pytest.approx(step)
    # Variances 1, 16, 4, 0: mean 21/4, spread (17² + 43² + 5² + 21²)/64 in each coordinate.
    expected = {"kind": "fishr", "round": 1, "spread": pytest.approx(HEAD * 2604 / 64)}
    assert expected in half.notes
    assert all(sent.keys() == {VARIANCE} for sent in grid.of("train.fishr").values())
    for sent in grid.of("train.fishr").values():
        assert sent[VARIANCE][VARIANCE].tolist() == pytest.approx([21 / 4] * HEAD)


def test_the_geometric_mean_is_compared_with_the_plain_one() -> None:
    half = strategy("fishr-inter-geo", *PLAIN)
    one_round(half, ScriptedGrid(half, answer(GRADIENTS)), to_record(filled(0)))
    (note,) = [note for note in half.notes if note["kind"] == "geometric"]
    assert note["cosine"] == pytest.approx(1)
    assert note["ratio"] == pytest.approx(0.5 / 0.75)
    half = strategy("fishr-inter-geo", *PLAIN)
    # Uphill: (1, 1e-6, -0.5, 0) has a positive mean and a negative geometric mean.
    uphill = dict(zip(GRADIENTS, (1.0, 1e-6, -0.5, 0.0), strict=True))
    one_round(half, ScriptedGrid(half, answer(uphill)), to_record(filled(0)))
    assert half.notes[0]["cosine"] == pytest.approx(-1)


def test_without_gradients_nothing_moves() -> None:
    """All are zero; with the code's rule for zeros they are -1e-10."""
    zero = dict.fromkeys(GRADIENTS, 0.0)
    for settings in ((), ("zeros=official",), ("zeros=paper",)):
        half = strategy("fishr-inter-geo", *PLAIN, *settings)
        assert moved(half, ScriptedGrid(half, answer(zero))) == 0


def test_who_fails_in_the_second_exchange_has_a_gradient_and_no_pull() -> None:
    def fails(name: str, message: Message) -> RecordDict:
        if name == "client-1" and message.metadata.message_type == "train.fishr":
            raise RuntimeError("out of memory")
        return answer(GRADIENTS)(name, message)

    half = strategy("fedcurv", *PLAIN, "penalty=0.5")
    assert moved(half, ScriptedGrid(half, fails)) == pytest.approx(0.75 + (0.1 - 0.2) / 3, abs=1e-5)
    assert half.exchanges[-1].left_out.keys() == {"client-1"}


def test_who_fails_in_the_first_is_not_asked_again() -> None:
    def fails(name: str, message: Message) -> RecordDict:
        if name == "client-2":
            raise RuntimeError("out of memory")
        return answer(GRADIENTS)(name, message)

    half = strategy("fedcurv", *PLAIN, "penalty=0.5")
    grid = ScriptedGrid(half, fails)
    assert moved(half, grid) == pytest.approx(5 / 3 + 0.5 / 3, abs=1e-5)
    assert list(grid.of("train.fishr")) == ["client-0", "client-1", "client-3"]


def test_when_nobody_answers_nothing_changes() -> None:
    def fails(name: str, message: Message) -> RecordDict:
        raise RuntimeError

    for method in ("fedcurv", "geometric"):
        half = strategy(method, "quorum=0")
        assert one_round(half, ScriptedGrid(half, fails), to_record(filled(0))) is None
        assert half.adam.state() == {}


# ---------------------------------------------------------------------- whole runs


def run(config: RunConfig, path: Path) -> RunFolder:
    folder = RunFolder.create(path, config)
    LocalRuntime(config).run(folder)
    return folder


def trained(method: str, path: Path, *settings: str, **options: Any) -> Tensors:
    folder = run(toy_config(method, *settings, **{"rounds": 3, **options}), path)
    return load_file(folder.path / "models" / "global.safetensors")


def same(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("fishr-inter-geo", "penalty=0"), ("geometric",)),
        # The uniform FedSGD under another name.
        (("fedcurv", "penalty=0"), ("and-mask", "agreement=0", "optimizer=adam", "weight_decay=0.01")),
        (("fishr", "penalty=0"), ("fedcurv", "penalty=0")),
        (("fishr", "smoothing=0"), ("fedcurv",)),
        (("fedcurv", "penalty=2", "reduction=sum"), ("fedcurv", "penalty=8")),
    ],
)
def test_what_must_be_the_same_to_the_last_bit(
    one: tuple[str, ...], other: tuple[str, ...], tmp_path: Path
) -> None:
    rate = "learning_rate=0.05"
    assert same(
        trained(*one[:1], tmp_path / "a", rate, *one[1:]), trained(*other[:1], tmp_path / "b", rate, *other[1:])
    )


def test_without_penalty_it_is_fedsgd(tmp_path: Path) -> None:
    """But for rounding: FedSGD weighs by samples, of which all clients here have as many."""
    settings = ("optimizer=sgd", "learning_rate=0.5", "weight_decay=0.01")
    plain = trained("fedsgd", tmp_path / "plain", *settings)
    found = trained("fedcurv", tmp_path / "found", *settings, "penalty=0")
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "norm"), [("fedcurv", "none"), ("fishr-inter-geo", "none"), ("fishr-intra-arith", "batch")]
)
def test_two_phases_are_one_process(method: str, norm: str, tmp_path: Path) -> None:
    """The exact mode and autograd through all clients at once, at a penalty that matters."""
    settings = ("optimizer=sgd", "learning_rate=0.5", "penalty=5", f"model.norm={norm}")
    exact = trained(method, tmp_path / "exact", *settings)
    central = trained(method, tmp_path / "central", *settings, "fishr_mode=central")
    without = trained(method, tmp_path / "without", *settings, "penalty=0")
    for name in exact:
        torch.testing.assert_close(exact[name], central[name], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(exact["featurizer.1.weight"], without["featurizer.1.weight"], atol=1e-3)


def floats(row: dict[str, Any]) -> tuple[float, float]:
    """Down and up, per client."""
    return row["bytes_down"] / 4 / row["asked"], row["bytes_up"] / 4 / row["asked"]


@pytest.mark.parametrize("method", ["geometric", *FISHR])
def test_floats_per_client_and_round(method: str, tmp_path: Path) -> None:
    """As on its page, with n and d_c of the toy model; no second exchange without a penalty."""
    n, d = sum(tensor.numel() for tensor in WEIGHTS.values()), HEAD
    fishr, inter = method in FISHR, method == "fishr-inter-geo"
    cases: dict[tuple[str, ...], list[tuple[int, int]]] = {(): [(n + d, 2 * n + d) if fishr else (n, n)] * 2}
    if fishr:
        cases[("penalty=0",)] = [(n, n)] * 2
        cases[("fishr_mode=stale",)] = [(n, n + d), (n + d, (2 * n if inter else n) + d)]
    if fishr and method != "fishr":
        cases[("fishr_mode=central",)] = [(n, n)] * 2
    for place, (settings, expected) in enumerate(cases.items()):
        folder = run(toy_config(method, *settings, rounds=2), tmp_path / str(place))
        rows = [row for row in folder.rows() if row["kind"] == "round"]
        assert [floats(row) for row in rows] == expected
        exchanges = ["train", "train.fishr"] if fishr and not settings else ["train"]
        assert [row["exchanges"] for row in rows] == [exchanges] * 2


def test_one_step_of_adam_per_round(tmp_path: Path) -> None:
    folder = run(toy_config("fishr-intra-geo", rounds=4), tmp_path / "run")
    assert int(folder.load_checkpoint().strategy["adam"]["steps"]) == 4


@pytest.mark.parametrize("method", ["fedcurv", "fishr-inter-geo"])
def test_the_stale_form_takes_the_mean_variance_of_the_round_before(method: str, tmp_path: Path) -> None:
    """Round 1 is without penalty; round 2 has the pulls at the c̄ of round 1, by hand from the clients."""
    settings = ("optimizer=sgd", "learning_rate=0.5", "weight_decay=0", "penalty=3", "reduction=sum")
    config, config_of_two = (toy_config(method, *settings, "fishr_mode=stale", rounds=rounds) for rounds in (1, 2))
    before = run(config, tmp_path / "one").load_checkpoint()
    folder = run(config_of_two, tmp_path / "two")
    first = trained(method, tmp_path / "first", *settings, "penalty=0", rounds=1)
    assert same(before.arrays, first)
    scenario, mean = config.scenario, before.strategy["before"][VARIANCE]
    gradients, pulls = [], []
    for number, name in enumerate(scenario.client_ids):
        where = Site(name, scenario.client_data(number, 0, None), TOY_NET, 0)
        own = client(method, where, penalty=3)
        gradients.append(own.answer("train", Received(2, {MODEL: first})).arrays[GRADIENT])
        pulls.append(own.answer("train.fishr", Received(2, {VARIANCE: {VARIANCE: mean}})).arrays[PULL])
    for name, start in first.items():
        geometric = GeometricMean()
        for gradient in gradients:
            geometric.add({name: gradient[name]})
        plain = torch.stack([gradient[name] for gradient in gradients]).mean(dim=0)
        combined = plain if method == "fedcurv" else geometric.result()[name]
        step = combined + 2 * 3 * torch.stack([pull[name] for pull in pulls]).sum(dim=0)
        found = load_file(folder.path / "models" / "global.safetensors")[name]
        torch.testing.assert_close(found, start - 0.5 * step, rtol=1e-5, atol=1e-6)


def test_the_central_form_does_not_see_an_environment_that_is_left_out() -> None:
    environment = Toy().train_environments[0]
    method = strategy("fedcurv", "fishr_mode=central", f"left_out={environment}")
    whole = strategy("fedcurv", "fishr_mode=central")
    for number, client in enumerate(Toy().client_ids):
        own = Toy().client_data(number, 0, None).train
        assert len(whole._data[client]) == len(own)
        assert torch.equal(method._data[client].y, own.y[own.environment != 0])


def test_a_client_alone_has_fedsgds_steps(tmp_path: Path) -> None:
    one = {"scenario": {"name": "toy", "clients": 1}}
    plain = trained("fedcurv", tmp_path / "plain", "penalty=0", **one)
    assert same(trained("fedcurv", tmp_path / "curv", **one), plain)
    assert "no spread" in METHODS["fedcurv"]().caution(toy_config("fedcurv", **one).scenario)


def test_a_cohort_of_one(tmp_path: Path) -> None:
    folder = run(toy_config("fishr-inter-geo", participation=0.25, rounds=3), tmp_path / "run")
    assert [row["spread"] for row in folder.rows() if row["kind"] == "fishr"] == [0, 0, 0]


def test_a_second_exchange_that_is_not_finite_does_no_harm(tmp_path: Path) -> None:
    config = toy_config("fedcurv", rounds=2)
    here = LocalRuntime(config)

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "train.fishr":
            pull = from_record(reply.content.array_records[PULL])
            reply.content[PULL] = to_record({name: part * float("nan") for name, part in pull.items()})
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    folder = RunFolder.create(tmp_path / "run", config)
    summary = here.run(folder)
    assert summary["left_out"]["client-1"]["replies"] == 2
    assert all(torch.isfinite(t).all() for t in load_file(folder.path / "models" / "global.safetensors").values())


# ---------------------------------------------------------------------- bad input


def test_what_cannot_run_is_told_in_a_sentence() -> None:
    deep = {"model": {"name": "mlp", "hidden": [4, 4], "head_layers": 1}}
    with pytest.raises(UserError, match=r"fedcurv needs a classifier of one linear layer.*head_layers=0"):
        strategy("fedcurv", **deep)
    strategy("fedcurv", "penalty=0", **deep)
    strategy("geometric", **deep)
    with pytest.raises(UserError, match=r"fishr_mode: 'central' is for runtime local.*take 'exact'"):
        strategy("fedcurv", "fishr_mode=central", runtime="deployment")
    with pytest.raises(ValidationError, match="has no running means; set smoothing to 0"):
        METHODS["fishr"](fishr_mode="central")  # type: ignore[call-arg]
    METHODS["fishr"](fishr_mode="central", smoothing=0)  # type: ignore[call-arg]


def test_every_row_of_the_papers_tables_has_a_name() -> None:
    titles = {name: METHODS[name].title for name in ("fedsgd", "geometric", *FISHR[:-1])}
    assert list(titles.values()) == [
        "FedSGD", "Geometric", "FedCurv (as FedILC runs it)", "Fishr+Inter-Geo", "Fishr+Intra-Geo",
        "Fishr+Intra-Arith",
    ]  # fmt: skip
    assert all(issubclass(METHODS[name], FedILC) for name in titles if name != "fedsgd")


# ---------------------------------------------------------------------- a population of two features


def population(first: float, second: float) -> tuple[Tensor, Tensor]:
    """400 samples (x, y) in the exact proportions: x1 agrees with y with probability `first`, x2 with `second`."""
    x, y = [], []
    for label, a, b in product((0, 1), repeat=3):
        share = 0.5 * (first if a == label else 1 - first) * (second if b == label else 1 - second)
        x += [(2.0 * a - 1, 2.0 * b - 1)] * round(400 * share)
        y += [label] * round(400 * share)
    assert len(y) == 400
    return torch.tensor(x, dtype=torch.float64), torch.tensor(y)


CLIENTS = [population(0.9, agreement) for agreement in (0.85, 0.70, 0.55, 0.40, 0.25)]
OUTSIDE = population(0.85, 0.10)


def risk(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x @ w, y.double())


def risk_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return ((x @ w).sigmoid() - y) @ x / len(y)


def population_variance(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of the two weights; there is no bias."""
    logits = torch.stack([torch.zeros(len(y), dtype=torch.float64), x @ w], dim=1)
    return variance(*gradient_sums(x, Classes(2).residuals(logits, y)[:, -1:]), len(y))[:2]


def population_spread(w: Tensor) -> Tensor:
    return spread(torch.stack([population_variance(w, *of) for of in CLIENTS]))


def spread_gradient(w: Tensor) -> tuple[float, Tensor]:
    leaf = w.clone().requires_grad_()
    value = population_spread(leaf)
    return float(value.detach()), torch.autograd.grad(value, leaf)[0]


def point(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_populations_spread_and_gradients() -> None:
    value, gradient = spread_gradient(point(0.5, 0.3))
    assert value == pytest.approx(9.1713e-4, rel=1e-4)
    assert 5 * value == pytest.approx(4.58565e-3, rel=1e-4)
    assert gradient.tolist() == pytest.approx([-0.00151, 0.00092], abs=5e-6)
    found = [risk_gradient(point(0, 0), *of).tolist() for of in CLIENTS]
    for own, second in zip(found, (-0.35, -0.2, -0.05, 0.1, 0.25), strict=True):
        assert own == pytest.approx([-0.4, second])


# Rule, λ, where 4,000 steps of 0.5 end, OOD loss.
ENDS = [
    ("plain", 0.0, (2.1972, 0.2007), 0.4721),
    ("geometric", 0.0, (2.1895, 0.0818), 0.4493),
    ("plain", 15.0, (2.2066, 0.1880), 0.4700),
    ("geometric", 15.0, (2.1934, 0.0782), 0.4488),
    ("plain", 75.0, (2.2398, 0.1518), 0.4646),
    ("geometric", 75.0, (2.2405, 0.0676), 0.4491),
]


@pytest.mark.parametrize(("rule", "penalty", "end", "loss"), ENDS)
def test_where_the_population_ends(rule: str, penalty: float, end: tuple[float, float], loss: float) -> None:
    """From the tabled end 40 steps lead nowhere else, and from 0.02 off they lead back towards it."""

    def walk(w: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            gradients = [risk_gradient(w, *of) for of in CLIENTS]
            mean = GeometricMean()
            for gradient in gradients:
                mean.add({"w": gradient})
            combined = mean.result()["w"] if rule == "geometric" else torch.stack(gradients).mean(dim=0)
            w = w - 0.5 * (combined + (penalty * spread_gradient(w)[1] if penalty else 0))
        return w

    there = point(*end)
    assert walk(there, 40).tolist() == pytest.approx(end, abs=1e-3)
    off = there + point(0.0, 0.02)
    assert (walk(off, 10) - there).norm() < (off - there).norm()
    assert float(risk(there, *OUTSIDE)) == pytest.approx(loss, abs=2e-4)


def test_a_larger_penalty_leaves_a_smaller_spread_and_both_ingredients_help() -> None:
    spreads = {(rule, penalty): float(population_spread(point(*end))) for rule, penalty, end, _ in ENDS}
    for rule in ("plain", "geometric"):
        assert spreads[rule, 0.0] > spreads[rule, 15.0] > spreads[rule, 75.0]
    losses = {(rule, penalty): loss for rule, penalty, _, loss in ENDS}
    assert losses["plain", 0.0] > losses["plain", 15.0] > losses["geometric", 0.0] > losses["geometric", 15.0]
