from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import broken_off
from torch import Tensor

from perennial.client.methods.fl_games import FLGamesClient
from perennial.client.methods.local import LocalClient
from perennial.client.trainer import EVALUATION_BATCH, Received, Site
from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.mathematics.adam import Adam
from perennial.common.methods.fl_games import (
    ANSWERED,
    OTHERS,
    PLAYED,
    PLAYERS,
    PREDICTOR,
    FFLGames,
    FLGames,
    VFLGames,
)
from perennial.common.methods.local import Local
from perennial.common.models.network import Network, network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, METRICS, MODEL, NUM_EXAMPLES, PERSONAL, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.strategies.exchange import Exchange
from perennial.strategies.methods.fl_games import FLGamesStrategy, oscillation
from perennial.strategies.registry import strategy_for
from perennial.testing.tiny_federation import SpoilingGrid, Toy, WireGrid, toy_config

MLP = ("model.hidden=[6, 5]", "model.head_layers=1")
LINEAR = ("model.name=logistic",)


class Table:
    """A game that is played a round at a time, as `server/run/loop.py` does."""

    def __init__(
        self, config: RunConfig, spoil: Callable[[Message, Message], Message | None] | None = None
    ) -> None:
        self.runtime = LocalRuntime(config)
        self.grid = SpoilingGrid(self.runtime.grid, spoil or (lambda _, reply: reply))
        self.strategy = FLGamesStrategy(config, "run")
        self.arrays, self.number = to_record(start(config).arrays), 0
        self.metrics: dict[str, Any] = {}
        self.notes: list[dict[str, Any]] = []
        """Of all rounds."""

    def round(self) -> dict[str, Tensors]:
        """Plays a round; the ensemble after it."""
        self.number += 1
        requests = self.strategy.configure_train(self.number, self.arrays, ConfigRecord(), self.grid)
        arrays, metrics = self.strategy.aggregate_train(self.number, self.grid.send_and_receive(requests))
        self.notes += self.strategy.notes
        self.arrays, self.metrics = arrays or self.arrays, dict(metrics or {})
        return dict(self.strategy.payload(from_record(self.arrays)))

    def rounds(self, count: int) -> list[dict[str, Tensors]]:
        return [self.round() for _ in range(count)]

    @property
    def work(self) -> Exchange:
        (exchange,) = (exchange for exchange in self.strategy.exchanges if exchange.action != "query")
        return exchange

    def kept(self, client: int) -> dict[str, Tensors]:
        versions = self.runtime.states.get(f"run/client-{client}")
        return versions[-1].kept if versions else {}


def same(one: dict[str, Tensors], other: dict[str, Tensors]) -> bool:
    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_close(one: Tensors, other: Tensors, tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)


def gradient(risk: Callable[[Tensors], Tensor], at: Tensors) -> list[Tensor]:
    """The plain way."""
    params = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
    return list(torch.autograd.grad(risk(params), list(params.values())))


def game(name: str, *settings: str, **scenario: Any) -> RunConfig:
    """A game on the toy scenario, in few and large steps."""
    quick = [
        "local_steps=1",
        "learning_rate=0.05",
        "batch_size=16",
        *(["representation_rate=0.05"] if name[0] == "v" else []),
    ]
    return toy_config(name, *quick, *settings, rounds=9, scenario={"name": "toy", **scenario})


# ---------------------------------------------------------------------- quadratic games, worked by hand

CENTRES = torch.tensor([1.0, 3.0, -2.0, 4.0])


class Tug(Toy):
    """Client k has `R^k = ½ (w̄ − c_k)²`, where w̄ is the ensemble's first output: x = 0, so biases alone play."""

    name: Literal["tug"] = "tug"  # type: ignore[assignment]
    clients: int = 2
    alike: bool = False

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "logistic"}

    @property
    def classes(self) -> int:
        return 4

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        y = torch.full((5,), 0 if self.alike else client)
        data = Examples(torch.zeros(5, 2), y, torch.zeros_like(y))
        return ClientData(data, data, {name: data for name in self.test_environments})


def pull(logits: Tensor, y: Tensor) -> Tensor:
    return (logits[:, 0] - CENTRES[y]).square().mean() / 2


def pull_apart(logits: Tensor, y: Tensor) -> Tensor:
    """A separable game: nobody's risk depends on what another can change."""
    return (logits.gather(1, y[:, None])[:, 0] - CENTRES[y]).square().mean() / 2


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody starts at 0."""
    drawn = Network.initial
    monkeypatch.setattr(Network, "initial", lambda *key: {n: t * 0 for n, t in drawn(*key).items()})


def tug(monkeypatch: pytest.MonkeyPatch, *settings: str, risk: Any = pull, **scenario: Any) -> Table:
    """A quadratic game in plain gradient steps."""
    monkeypatch.setattr(FLGamesClient, "criterion", lambda _, logits, y: risk(logits, y))
    options = {"method": "f-fl-games", "scenario": {"name": "tug", **scenario}}
    return Table(load_config(options=options, settings=["optimizer=sgd", "termination=0", *settings]))


def bars(ensembles: list[dict[str, Tensors]]) -> list[float]:
    """w̄ after each round."""
    return [float(sum(w["classifier.bias"][0] for w in e.values()) / len(e)) for e in ensembles]


def biases(ensemble: dict[str, Tensors]) -> list[float]:
    return [float(w["classifier.bias"][0]) for w in ensemble.values()]


EXACT = "learning_rate=4"
"""From w a step of size m² along (w̄ − c) / m ends at m c − Σ_{q≠k} w^q: the exact best response."""


def test_sequential_best_responses_chase_each_other_for_ever(zeros: None, monkeypatch: pytest.MonkeyPatch) -> None:
    played = tug(monkeypatch, "order=sequential", "buffer=0", EXACT).rounds(8)
    assert bars(played) == pytest.approx([1, 3] * 4)
    assert biases(played[-1]) == pytest.approx([-10, 16])


def test_parallel_best_responses_swing_with_period_two(zeros: None, monkeypatch: pytest.MonkeyPatch) -> None:
    played = tug(monkeypatch, "buffer=0", EXACT).rounds(8)
    assert bars(played) == pytest.approx([4, 0] * 4)
    assert biases(played[-1]) == pytest.approx([-16, 16])


@pytest.mark.parametrize("space", ["function", "parameter"])
def test_smooth_best_responses_to_the_past_reach_the_equilibrium(
    zeros: None, monkeypatch: pytest.MonkeyPatch, space: str
) -> None:
    found = bars(tug(monkeypatch, "smoothing=replace", "buffer=5", f"space={space}", EXACT).rounds(30))
    assert [found[6], found[11], found[29]] == pytest.approx([2.4000, 1.9672, 2.0002], abs=1e-4)


def test_smooth_lowers_the_oscillation_of_a_game_that_cycles(zeros: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = oscillation(bars(tug(monkeypatch, "buffer=0", EXACT).rounds(30)))
    smooth = oscillation(bars(tug(monkeypatch, "smoothing=replace", "buffer=5", EXACT).rounds(30)))
    assert plain == {"variation": pytest.approx(4), "deviation": pytest.approx(2), "period": 2}
    assert smooth["variation"] < plain["variation"] / 4
    assert smooth["deviation"] < plain["deviation"] / 2


def test_one_past_action_is_no_smoothing(zeros: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bars(tug(monkeypatch, "smoothing=replace", "buffer=1", EXACT).rounds(8)) == pytest.approx([4, 0] * 4)


@pytest.mark.parametrize("space", ["function", "parameter"])
def test_best_responses_to_equation_5_as_printed_diverge(
    zeros: None, monkeypatch: pytest.MonkeyPatch, space: str
) -> None:
    found = bars(tug(monkeypatch, "smoothing=paper", f"space={space}", EXACT).rounds(6))
    assert found == pytest.approx([4, -4, 8, -6.67, 10.33, -8.67], abs=5e-3)


@pytest.mark.slow
def test_small_steps_reach_the_equilibrium_while_single_actions_drift(
    zeros: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pulls with (w̄ − c_k) / 2; at the mean of the c_k alone the pulls cancel: the equilibrium of w̄."""
    played = tug(monkeypatch, "buffer=0", "learning_rate=0.1").rounds(400)
    found = bars(played)
    assert [found[49], found[99], found[399]] == pytest.approx([1.8461, 1.9882, 2.0], abs=1e-4)
    assert biases(played[-1]) == pytest.approx([-18, 22], abs=1e-2)


@pytest.mark.slow
def test_small_steps_on_equation_5_settle_two_thirds_of_the_way(
    zeros: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = tug(monkeypatch, "smoothing=paper", "space=parameter", "learning_rate=0.1").rounds(400)
    found = bars(played)
    assert [found[49], found[99], found[399]] == pytest.approx([1.3120, 1.3330, 1.3333], abs=2e-3)
    assert abs(biases(played[-1])[0]) == pytest.approx(2.5e4, rel=0.05)


@pytest.mark.parametrize(
    ("smoothing", "buffer", "share"),
    [("paper", 0, 1.0), ("paper", 5, 3 / 5), ("replace", 5, 1.0), ("convex", 5, 1.0)],
)
def test_where_identical_clients_settle(
    zeros: None, monkeypatch: pytest.MonkeyPatch, smoothing: str, buffer: int, share: float
) -> None:
    """Σ of all weights times w̄ is what they train: at the paper's, w̄ = m / (2m − 1) c; at m = 3, 3/5."""
    table = tug(
        monkeypatch, f"smoothing={smoothing}", f"buffer={buffer}", "learning_rate=1", clients=3, alike=True
    )
    # With convex weights w̄ itself is what they train, once the past has become the present.
    assert bars(table.rounds(50))[-1] == pytest.approx(share * CENTRES[0].item(), abs=1e-3)


@pytest.mark.parametrize("buffer", [0, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_separable_game_ends_alike_in_any_order(
    monkeypatch: pytest.MonkeyPatch, buffer: int, optimizer: str
) -> None:
    settings = [f"buffer={buffer}", f"optimizer={optimizer}", "smoothing=replace", "learning_rate=0.3"]
    parallel = tug(monkeypatch, *settings, risk=pull_apart, clients=3).rounds(6)[-1]
    sequential = tug(monkeypatch, *settings, "order=sequential", risk=pull_apart, clients=3).rounds(18)[-1]
    assert same(parallel, sequential)


# ---------------------------------------------------------------------- a client's own objective

NET = network(model_settings({"name": "mlp", "hidden": (6, 5), "head_layers": 1}), (4,), 3)


def examples(count: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return Examples(x, y, torch.zeros_like(y))


def client(
    hparams: FLGames, kept: dict[str, Tensors] | None = None, count: int = 40, number: int = 0
) -> FLGamesClient:
    data = ClientData(examples(count), examples(5, 1), {"one": examples(7, 2)})
    return FLGamesClient(Site(f"client-{number}", data, NET, 0), hparams, kept or {})


def whole(seed: int) -> Tensors:
    return NET.initial(seed)


def head(seed: int) -> Tensors:
    return VFLGames().predictor(NET.initial(seed))


def request(*played: int, own: int = 0, round_: int = 1, **arrays: Tensors) -> Received:
    players = [f"client-{number}" for number in range(len(played))]
    records = {name.replace("client", "client-"): tensors for name, tensors in arrays.items()}
    assert f"client-{own}" not in records
    return Received(round_, records, {PLAYERS: players, PLAYED: list(played)})


def test_with_one_client_the_game_is_local_training() -> None:
    how = {"local_steps": 4, "batch_size": 8, "learning_rate": 0.1, "momentum": 0.5, "weight_decay": 0.01}
    local = LocalClient(client(FFLGames()).__dict__ and _site(), Local(**how), {PERSONAL: whole(3)})
    for buffer in (0, 5):
        alone = client(FFLGames(optimizer="sgd", buffer=buffer, **how), {PREDICTOR: whole(3)})
        local.kept[PERSONAL] = whole(3)
        for round_ in (1, 2):
            reply = alone.train(request(round_ - 1, round_=round_))
            expected = local.train(Received(round_))
            assert equal(alone.kept[PREDICTOR], local.kept[PERSONAL])
            assert reply.metrics["risk"] == expected.metrics["risk"]


def _site() -> Site:
    return Site("client-0", ClientData(examples(40), examples(5, 1), {}), NET, 0)


def test_with_one_client_adam_goes_on_from_round_to_round() -> None:
    alone = client(FFLGames(batch_size=8, learning_rate=0.01, local_steps=2), {PREDICTOR: whole(3)})
    params, adam = whole(3), Adam()
    for round_ in (1, 2, 3):
        alone.train(request(round_ - 1, round_=round_))
        for batch in alone.batches(2, round_):
            step = adam.direction(gradient(lambda w, b=batch: F.cross_entropy(NET.predict(w, b.x), b.y), params))
            params = {name: w - 0.01 * d for (name, w), d in zip(params.items(), step, strict=True)}
    assert_close(alone.kept[PREDICTOR], params)


def test_the_loss_is_equation_5_and_its_gradient_a_share_of_the_ensembles() -> None:
    """Three players; player 1 has two past actions, player 2 has not played yet."""
    hparams = FFLGames(buffer=2, smoothing="paper")
    player = client(hparams, {"client-1.1": whole(11), "client-1.0": whole(12)})
    batch, own = examples(9), {name: tensor.clone().requires_grad_() for name, tensor in whole(0).items()}
    heard = request(0, 2, 0, client1=whole(12), client2=whole(2))
    value, metrics = player.loss(own, batch, heard)
    z = {seed: NET.predict(whole(seed), batch.x) for seed in (0, 2, 11, 12)}
    logits = (z[0] + z[12] + z[2] + (z[11] + z[12]) / 2) / 3
    torch.testing.assert_close(value, F.cross_entropy(logits, batch.y))
    right = (z[0] + z[12] + z[2]).argmax(dim=1) == batch.y  # the ensemble without its past
    assert metrics["accuracy"] == right.float().mean()
    found = torch.autograd.grad(value, list(own.values()))
    direct = NET.predict(own, batch.x)
    shifted = direct + (3 * logits - direct).detach()  # the same logits, the chain without 1/m
    free = torch.autograd.grad(F.cross_entropy(shifted / 3, batch.y) * 3, list(own.values()))
    for one, other in zip(found, free, strict=True):
        torch.testing.assert_close(3 * one, other)


@pytest.mark.parametrize(
    ("smoothing", "present", "divisor"), [("paper", 1, 2), ("convex", 1, 3), ("replace", 0, 2)]
)
def test_the_three_readings_of_equation_5(
    smoothing: Literal["paper", "convex", "replace"], present: int, divisor: int
) -> None:
    player = client(FFLGames(smoothing=smoothing, buffer=3), {"client-1.1": whole(11), "client-1.2": whole(12)})
    batch = examples(9)
    value, _ = player.loss(whole(0), batch, request(2, 2, client1=whole(12)))
    z = {seed: NET.predict(whole(seed), batch.x) for seed in (0, 11, 12)}
    logits = (z[0] + present * z[12] + (z[11] + z[12]) / 2) / divisor
    torch.testing.assert_close(value, F.cross_entropy(logits, batch.y))


@pytest.mark.parametrize("smoothing", ["paper", "convex", "replace"])
def test_an_empty_buffer_is_the_plain_game_bit_for_bit(smoothing: Literal["paper", "convex", "replace"]) -> None:
    heard = request(0, 0, client1=whole(1))
    past = {"client-1.0": whole(5)}
    first = client(FFLGames(smoothing=smoothing, buffer=5)).train(heard)
    plain = client(FFLGames(smoothing=smoothing, buffer=0), past).train(request(3, 3, client1=whole(1)))
    assert equal(first.arrays[PREDICTOR], plain.arrays[PREDICTOR])
    assert first.metrics == plain.metrics


def test_opponents_that_stand_still_count_twice() -> None:
    player, batch = client(FFLGames(buffer=4, smoothing="paper")), examples(9)
    for times in range(1, 7):
        player._remember(request(times, times, client1=whole(1)))
    value, _ = player.loss(whole(0), batch, request(6, 6, client1=whole(1)))
    logits = (NET.predict(whole(0), batch.x) + 2 * NET.predict(whole(1), batch.x)) / 2
    torch.testing.assert_close(value, F.cross_entropy(logits, batch.y))


def test_a_turn_changes_ones_own_predictor_and_nothing_else() -> None:
    player = client(VFLGames(buffer=2, learning_rate=0.1), {"client-1.0": head(7)})
    phi, other = whole(4), head(1)
    player.train(request(3, 3, round_=8, client1=other, **{MODEL: phi}))
    assert equal(phi, whole(4))
    assert equal(other, head(1))
    assert equal(player.kept["client-1.0"], head(7))
    assert player.kept[PREDICTOR].keys() == head(0).keys()
    assert not equal(player.kept[PREDICTOR], VFLGames().predictor(NET.initial(0, "client-0")))
    assert not any(t.requires_grad for tensors in player.kept.values() for t in tensors.values())


def test_a_step_of_plain_gradients_is_proportional_to_one_over_m() -> None:
    """At equal logits: m players of whom all but one are zero, and an own predictor m times as large."""
    zero = {name: torch.zeros_like(tensor) for name, tensor in whole(0).items()}
    linear = network(model_settings({"name": "logistic"}), (4,), 3)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in linear.initial(0).items()}
    steps = {}
    for m in (1, 2, 4):
        player = client(FFLGames(optimizer="sgd", learning_rate=1.0, batch_size=40), {PREDICTOR: nothing})
        player.network = linear
        others = {f"client{q}": nothing for q in range(1, m)}
        reply = player.train(request(*[0] * m, **others))
        steps[m] = reply.arrays[PREDICTOR]["classifier.weight"]
    assert not torch.equal(steps[1], torch.zeros_like(steps[1]))
    for m in (2, 4):
        torch.testing.assert_close(steps[m] * m, steps[1])
    assert zero.keys() == whole(0).keys()


# ---------------------------------------------------------------------- buffers


@given(st.integers(1, 6), st.integers(1, 15))
def test_a_buffer_is_the_last_actions_first_in_first_out(capacity: int, turns: int) -> None:
    player = client(FFLGames(buffer=capacity))
    actions = {turn: {"w": torch.tensor([float(turn)])} for turn in range(turns + 1)}
    for turn in range(turns + 1):  # the start has not been played
        player._remember(request(turn, turn, client1=actions[turn]))
    found = player._buffer("client-1")
    assert len(found) == min(turns, capacity)
    assert sorted(float(w["w"]) for w in found) == list(range(max(1, turns - capacity + 1), turns + 1))
    player._remember(request(turns, turns, client1=actions[turns]))  # said twice, counted once
    assert len(player._buffer("client-1")) == len(found)


@pytest.mark.parametrize("order", ["parallel", "sequential"])
def test_the_running_sum_is_the_explicit_mean_of_the_past(order: str) -> None:
    table = Table(game("f-fl-games", *LINEAR, "space=parameter", "buffer=3", f"order={order}", clients=3))
    history: dict[str, list[Tensors]] = {f"client-{k}": [] for k in range(3)}
    for number in range(10):
        before = table.strategy.ensemble
        ensemble = table.round()
        active = [f"client-{number % 3}"] if order == "sequential" else list(history)
        for player in active:
            assert player not in before or not equal(ensemble[player], before[player])
            history[player].append(ensemble[player])
        for player, actions in history.items():
            if not actions:
                assert f"{player}.sum" not in table.strategy.past
                continue
            last = actions[-3:]
            total = table.strategy.past[f"{player}.sum"]
            mean = {name: total[name].float() / len(last) for name in total}
            assert_close(mean, {n: torch.stack([w[n] for w in last]).mean(dim=0) for n in mean})


@pytest.mark.parametrize("order", ["parallel", "sequential"])
@pytest.mark.parametrize("smoothing", ["paper", "convex", "replace"])
@pytest.mark.parametrize(("name", "model"), [("f-fl-games", LINEAR), ("v-fl-games", ("model.hidden=[6]",))])
def test_linear_predictors_may_be_summed_in_either_space(
    name: str, model: tuple[str, ...], smoothing: str, order: str
) -> None:
    settings = [*model, "buffer=2", f"smoothing={smoothing}", f"order={order}", "optimizer=sgd"]
    tables = [Table(game(name, *settings, f"space={space}", clients=3)) for space in ("function", "parameter")]
    for _ in range(8):
        function, parameter = (table.round() for table in tables)
    assert function.keys() == parameter.keys()
    for player in function:
        assert_close(function[player], parameter[player])
    assert tables[0].metrics["risk"] == pytest.approx(tables[1].metrics["risk"], rel=1e-5)


# ---------------------------------------------------------------------- who plays when


@pytest.mark.parametrize("name", ["f-fl-games", "v-fl-games"])
def test_in_parallel_all_answer_to_the_round_before(name: str) -> None:
    """The same from clients that are made by hand, in another order."""
    config = game(name, *MLP, "buffer=2", clients=3)
    table, variable = Table(config), name == "v-fl-games"
    ensembles = table.rounds(5)
    for number in (3, 5) if not variable else (4,):
        before, after = ensembles[number - 2], ensembles[number - 1]
        for k in (2, 0, 1):
            site = table.runtime.host.site(config.task(), config, k)
            kept = {PREDICTOR: before[f"client-{k}"]}
            again = Table(config)
            again.rounds(number - 1)
            kept |= again.kept(k)
            heard = {player: w for player, w in before.items() if player != site.client}
            turns = number - 1 if not variable else number // 2 - 1
            settings = {PLAYERS: [f"client-{q}" for q in range(3)], PLAYED: [turns] * 3}
            player = FLGamesClient(site, config.method, kept)  # type: ignore[arg-type]
            reply = player.train(Received(number, heard, settings))  # type: ignore[arg-type]
            assert equal(reply.arrays[PREDICTOR], after[site.client])


def test_who_plays_when() -> None:
    players = ["a", "b", "c"]

    def turns(hparams: FLGames) -> str:
        return " ".join("".join(hparams.movers(number, players)) or "φ" for number in range(1, 10))

    assert turns(FFLGames(order="sequential")) == "a b c a b c a b c"
    assert turns(FFLGames()) == " ".join(["abc"] * 9)
    assert turns(VFLGames(order="sequential")) == "φ c b a φ c b a φ"
    assert turns(VFLGames(order="sequential", representation_per="turn")) == "φ a φ b φ c φ a φ"
    assert turns(VFLGames()) == "φ abc φ abc φ abc φ abc φ"
    assert turns(VFLGames(representation_per="turn")) == turns(VFLGames())


@pytest.mark.parametrize(
    ("name", "settings", "plan"),
    [
        ("f-fl-games", (), "01201201"),
        ("v-fl-games", (), "φ210φ210"),
        ("v-fl-games", ("representation_per=turn",), "φ0φ1φ2φ0"),
    ],
)
def test_in_sequence_one_plays_at_a_time_and_the_next_one_sees_it(
    name: str, settings: tuple[str, ...], plan: str
) -> None:
    table = Table(game(name, *MLP, "order=sequential", *settings, clients=3))
    seen: dict[str, Any] = {}

    def spy(request: Message, reply: Message) -> Message:
        records = request.content.array_records
        seen.update({record: from_record(records[record]) for record in records})
        return reply

    table.grid.spoil = spy
    before, last = table.round(), plan[0]
    for player in plan[1:]:
        seen.clear()
        after = table.round()
        moved = MODEL if player == "φ" else f"client-{player}"
        assert {record for record in after if not equal(after[record], before[record])} == {moved}
        if player != "φ":
            assert table.work.clients.keys() == {int(player) + 1}
            mover = MODEL if last == "φ" else f"client-{last}"
            assert equal(seen[mover], before[mover])
        before, last = after, player


def test_every_player_draws_its_own_first_predictor() -> None:
    table = Table(game("f-fl-games", *MLP, "learning_rate=1e-9", clients=3))
    ensemble = table.round()
    for k in range(3):
        drawn = table.strategy.network.initial(0, f"client-{k}")
        assert_close(ensemble[f"client-{k}"], drawn, 1e-6)
    assert not equal(ensemble["client-0"], ensemble["client-1"])


def test_the_fixed_game_has_no_representation_and_no_empty_rounds() -> None:
    table = Table(game("f-fl-games", *MLP))
    ensembles = table.rounds(3)
    assert MODEL not in ensembles[0]
    for before, after in pairwise(ensembles):
        assert table.work.action == "train"
        assert not any(equal(before[player], after[player]) for player in before)


def test_with_linear_predictors_and_plain_gradients_the_ensemble_is_fedsgd() -> None:
    """w^av ← w^av − (η / m) · mean_k ∇R^k(w^av); nothing is invariant about it."""
    table = Table(game("f-fl-games", *LINEAR, "optimizer=sgd", "buffer=0", "batch_size=1000", "learning_rate=0.4"))
    net, toy = table.strategy.network, Toy()
    data = [toy.client_data(k, 0, None).train for k in range(4)]
    draws = [net.initial(0, f"client-{k}") for k in range(4)]
    mean = {name: torch.stack([w[name] for w in draws]).mean(dim=0) for name in draws[0]}
    for _ in range(20):
        ensemble = table.round()
        step = gradient(lambda w: sum(F.cross_entropy(net.predict(w, d.x), d.y) for d in data) / 4, mean)
        mean = {name: w - 0.4 / 4 * d for (name, w), d in zip(mean.items(), step, strict=True)}
    found = {name: torch.stack([w[name] for w in ensemble.values()]).mean(dim=0) for name in mean}
    assert_close(found, mean, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agreements", "ends"),
    [((0.9, 0.4), (np.log(3), 0.0)), ((0.8, 0.9), (1.056, 1.621))],
    ids=["opposed", "alike"],
)
def test_under_adam_opposed_clients_cancel_the_shortcut_and_others_do_not(
    zeros: None, agreements: tuple[float, float], ends: tuple[float, float]
) -> None:
    """Logistic regression on a population: x₁ agrees with y in 3 of 4 cases at both, x₂ in a_k of them. Opposed,
    the ensemble becomes (log 3, 0): 75 % wherever x₂ points, where pooling gives 10 %;
    Adam's equal steps cancel, so x₂ stays where it was at the start. With a = (0.8, 0.9) it follows x₂."""
    table = Table(game("f-fl-games", *LINEAR, "buffer=0", "batch_size=1000", "learning_rate=0.05", clients=2))
    for k, agreement in enumerate(agreements):
        grid = torch.cartesian_prod(torch.tensor([-1, 1]), torch.arange(4), torch.arange(10)).float()
        y, first, second = grid.T
        x = torch.stack([y * (2.0 * (first < 3) - 1), y * (2.0 * (second < 10 * agreement) - 1)], dim=1)
        train = Examples(x, (y > 0).long(), torch.zeros(len(y), dtype=torch.long))
        config = table.strategy.run
        site = table.runtime.host.site(config.task(), config, k)
        table.runtime.host._sites[k] = Site(site.client, ClientData(train, train, {}), site.network, site.seed)
    ensemble = table.rounds(300)[-1]
    mean = torch.stack([w["classifier.weight"] for w in ensemble.values()]).mean(dim=0)
    slope = mean[1] - mean[0]
    assert slope.tolist() == pytest.approx(ends, abs=0.05)
    own = ensemble["client-0"]["classifier.weight"]
    assert abs(float(own[1, 1] - own[0, 1] - slope[1])) > 2  # while each pulls its own way


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_shuffled_epochs_go_on_from_round_to_round(unit: Literal["step", "epoch"]) -> None:
    """40 samples in mini-batches of 16, three in a pass; two a round, or two passes."""
    hparams = FFLGames(sampling="epochs", batch_size=16, local_steps=2, local_unit=unit)
    player = client(hparams)

    def drawn(player: FLGamesClient, rounds: range) -> list[Tensor]:
        return [batch.x for round_ in rounds for batch in player.batches(2, round_)]

    found = drawn(player, range(1, 7) if unit == "step" else range(1, 3))
    assert [len(x) for x in found] == [16, 16, 8] * 4
    passes = [torch.cat(found[at : at + 3]) for at in range(0, 12, 3)]
    for x in passes:
        assert torch.equal(x.sort(dim=0).values, player.data.train.x.sort(dim=0).values)
    assert not any(torch.equal(one, other) for one, other in pairwise([player.data.train.x, *passes]))
    # They follow from the round alone, whatever ran before it, and are each client's own.
    for round_ in (5, 2):
        for one, other in zip(
            drawn(client(hparams), range(round_, round_ + 1)), player.batches(2, round_), strict=True
        ):
            assert torch.equal(one, other.x)
    assert not torch.equal(found[0], drawn(client(hparams, number=1), range(1, 2))[0])


def test_fresh_draws_are_every_methods() -> None:
    player, local = client(FFLGames(batch_size=16)), LocalClient(_site(), Local(batch_size=16), {})
    for one, other in zip(player.batches(4, 3), local.batches(4, 3), strict=True):
        assert torch.equal(one.x, other.x)


# ---------------------------------------------------------------------- the representation


def full_gradient(player: FLGamesClient, phi: Tensors, predictors: list[Tensors]) -> Tensors:
    data = player.data.train

    def risk(values: Tensors) -> Tensor:
        z = NET.features({**phi, **values}, data.x)
        return F.cross_entropy(sum(NET.classify(w, z) for w in predictors) / len(predictors), data.y)

    values = {name: phi[name] for name in NET.featurizer_names}
    return dict(zip(values, gradient(risk, values), strict=True))


@pytest.mark.parametrize("piece", [7, 40, EVALUATION_BATCH])
def test_fast_is_the_gradient_of_the_whole_risk_in_any_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perennial.client.methods.fl_games.EVALUATION_BATCH", piece)
    past = {"client-1.0": head(8), "client-1.1": head(9)}  # is not asked
    player = client(VFLGames(buffer=2), {PREDICTOR: head(0), **past})
    phi = whole(4)
    reply = player.train_gradient(request(2, 2, 2, client1=head(1), client2=head(2), **{MODEL: phi}))
    expected = full_gradient(player, phi, [head(0), head(1), head(2)])
    assert_close(reply.arrays[GRADIENT], expected)
    assert reply.metrics[NUM_EXAMPLES] == 40
    z = NET.features(phi, player.data.train.x)
    logits = sum(NET.classify(head(k), z) for k in range(3)) / 3
    assert reply.metrics["risk"] == pytest.approx(float(F.cross_entropy(logits, player.data.train.y)), rel=1e-5)
    assert reply.metrics["accuracy"] == int((logits.argmax(1) == player.data.train.y).sum()) / 40
    assert equal(phi, whole(4))
    assert player.kept.keys() == {PREDICTOR, *past}


def test_without_fast_the_gradient_is_a_mini_batchs() -> None:
    player = client(VFLGames(fast=False, batch_size=8), {PREDICTOR: head(0)})
    phi = whole(4)
    reply = player.train_gradient(request(0, 0, client1=head(1), round_=5, **{MODEL: phi}))
    (batch,) = player.batches(1, 5)
    player.data = ClientData(batch, batch, {})
    assert_close(reply.arrays[GRADIENT], full_gradient(player, phi, [head(0), head(1)]))


@pytest.mark.parametrize("fast", [True, False])
def test_weight_decay_is_part_of_the_representations_gradient(fast: bool) -> None:
    phi, received = whole(4), request(0, 0, client1=head(1), **{MODEL: whole(4)})
    plain, decayed = (
        client(VFLGames(fast=fast, batch_size=8, weight_decay=w), {PREDICTOR: head(0)}).train_gradient(received)
        for w in (0, 0.1)
    )
    expected = {name: part + 0.1 * phi[name] for name, part in plain.arrays[GRADIENT].items()}
    assert_close(decayed.arrays[GRADIENT], expected)
    assert decayed.metrics == plain.metrics


@pytest.mark.parametrize("model", [("name=user_models:Plain", "freeze=featurizer"), ("name=logistic",)])
def test_a_featurizer_without_anything_to_learn_is_refused_in_a_sentence(model: tuple[str, ...]) -> None:
    settings = [f"model.{setting}" for setting in model]
    with pytest.raises(UserError, match="has no featurizer to be trained, and method 'v-fl-games' shares one"):
        strategy_for(toy_config("v-fl-games", *settings), "run")
    strategy_for(toy_config("f-fl-games", *settings), "run")


def test_the_server_steps_along_the_sample_weighted_gradient() -> None:
    config = game("v-fl-games", *MLP, "optimizer=sgd", "representation_rate=0.5", clients=2)
    table = Table(config)
    site = table.runtime.host.site(config.task(), config, 1)
    few = ClientData(site.data.train[torch.arange(10)], site.data.validation, site.data.test)
    table.runtime.host._sites[1] = Site(site.client, few, site.network, site.seed)
    replies = {}

    def spy(request: Message, reply: Message) -> Message:
        if request.metadata.message_type != "query":
            replies[reply.metadata.src_node_id] = from_record(reply.content.array_records[GRADIENT])
        return reply

    table.grid.spoil = spy
    before, after = from_record(table.arrays), table.round()[MODEL]
    assert len(replies) == 2
    for name in table.strategy.network.featurizer_names:
        mean = (40 * replies[1][name] + 10 * replies[2][name]) / 50
        torch.testing.assert_close(after[name], before[name] - 0.5 * mean)


# ---------------------------------------------------------------------- the ensemble


def test_the_ensemble_is_the_mean_of_outputs_whoever_is_first() -> None:
    x = examples(9).x
    for hparams, own in ((FFLGames(), whole), (VFLGames(), head)):
        common = {MODEL: whole(4)} if hparams.learns else {}
        players = {f"client-{k}": own(k) for k in range(3)}
        others = {f"client-{k}": own(2 - k) for k in range(3)}
        model, permuted = (client(hparams).models(Received(1, common | p))["ensemble"] for p in (players, others))
        inner = NET.features(whole(4), x) if hparams.learns else x
        run = NET.classify if hparams.learns else NET.predict
        expected = sum(run(own(k), inner) for k in range(3)) / 3
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(permuted(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f-fl-games", "v-fl-games"])
def test_what_is_evaluated_last_stays_with_every_client(name: str, tmp_path: Path) -> None:
    config = game(name, *MLP)
    folder = RunFolder.create(tmp_path / "run", config)
    runtime = LocalRuntime(config)
    runtime.run(folder)
    ensemble = folder.load_checkpoint().arrays
    assert {key.split("/")[0] for key in ensemble} == {f"client-{k}" for k in range(4)} | (
        {MODEL} if name == "v-fl-games" else set()
    )
    for versions in runtime.states.values():
        assert equal(versions[-1].kept["ensemble"], ensemble)


# ---------------------------------------------------------------------- messages


def floats(exchange: Exchange) -> tuple[int, int]:
    return exchange.bytes_down // 4, exchange.bytes_up // 4


@pytest.mark.parametrize("buffer", [0, 5])
@pytest.mark.parametrize("m", [2, 4])
def test_what_travels_in_the_fixed_game(m: int, buffer: int) -> None:
    d = 2 * 6 + 6 + 6 * 5 + 5 + 5 * 2 + 2
    table = Table(game("f-fl-games", *MLP, f"buffer={buffer}", clients=m))
    for _ in range(4):
        table.round()
        assert floats(table.work) == (m * (m - 1) * d, m * d)  # the past is with the clients
    table = Table(game("f-fl-games", *MLP, f"buffer={buffer}", "order=sequential", clients=m))
    for _ in range(4):
        table.round()
        assert floats(table.work) == ((m - 1) * d, d)


@pytest.mark.parametrize("buffer", [0, 5])
def test_what_travels_in_the_variable_game(buffer: int) -> None:
    m, phi, w = 3, 2 * 6 + 6, 6 * 5 + 5 + 5 * 2 + 2
    table = Table(game("v-fl-games", *MLP, f"buffer={buffer}", clients=m))
    for number in range(1, 7):
        table.round()
        up = phi if number % 2 else w
        assert floats(table.work) == (m * (phi + (m - 1) * w), m * up)


@pytest.mark.parametrize(("buffer", "sums"), [(0, 1), (5, 2)])
@pytest.mark.parametrize("m", [2, 4])
def test_sums_of_parameters_grow_neither_with_players_nor_with_the_past(m: int, buffer: int, sums: int) -> None:
    d = 2 * 2 + 2
    table = Table(game("f-fl-games", *LINEAR, "space=parameter", f"buffer={buffer}", clients=m))
    for _ in range(7):
        table.round()
        assert floats(table.work) == (m * sums * d, m * d)
    heard = table.strategy._heard(past=True)("client-0")
    assert heard.keys() == ({OTHERS, ANSWERED} if buffer else {OTHERS})


# ---------------------------------------------------------------------- how a game ends


def scripted(accuracies: list[float], *settings: str) -> tuple[Table, list[dict[str, Tensors]]]:
    """A game whose clients report these accuracies."""

    def spoil(request: Message, reply: Message) -> Message:
        told = accuracies[int(request.metadata.group_id) - 1]
        content = RecordDict(dict(reply.content))
        content[METRICS] = MetricRecord({**reply.content.metric_records[METRICS], "accuracy": told})
        return Message(content, reply_to=request)

    table = Table(game("f-fl-games", *MLP, *settings), spoil)
    return table, table.rounds(len(accuracies))


def test_the_game_ends_with_the_first_low_accuracy_after_the_warm_up() -> None:
    accuracies = [0.5, 0.4, 0.9, 0.7, 0.61, 0.6, 0.59, 0.8, 0.3]
    table, ensembles = scripted(accuracies, "warm_start=3", "termination=0.6")
    assert table.strategy.ended == 7
    notes = table.notes
    assert notes[0] == {"kind": "equilibrium", "round": 7, "accuracy": pytest.approx(0.59)}
    assert notes[1] == {"kind": "oscillation", "round": 7, **oscillation(accuracies[2:7])}
    assert len(notes) == 2
    # The ensemble that had this accuracy is the one of the round before; nobody is asked any more.
    assert not same(ensembles[4], ensembles[5])
    assert all(same(ensembles[5], later) for later in ensembles[6:])
    assert table.strategy.exchanges == []
    assert table.strategy.curve == pytest.approx(accuracies[:7])


@pytest.mark.parametrize("settings", [["termination=0", "warm_start=1"], ["warm_start=10"]])
def test_a_game_may_go_on_for_ever(settings: list[str]) -> None:
    table, _ = scripted([0.0] * 9, *settings)
    assert table.strategy.ended == 0
    assert [note["kind"] for note in table.notes] == (["oscillation"] if "warm_start=1" in settings else [])


def uneven(config: RunConfig) -> Table:
    """A game in which client-1 has a quarter of its samples."""
    table = Table(config)
    site = table.runtime.host.site(config.task(), config, 1)
    few = ClientData(site.data.train[torch.arange(10)], site.data.validation, site.data.test)
    table.runtime.host._sites[1] = Site(site.client, few, site.network, site.seed)
    return table


def pooled(table: Table, ensemble: dict[str, Tensors]) -> float:
    """The ensemble's accuracy on all clients' training data, counted in one place."""
    net, config = table.strategy.network, table.strategy.run
    players = [tensors for record, tensors in ensemble.items() if record != MODEL]
    data = [table.runtime.host.site(config.task(), config, k).data.train for k in range(len(players))]
    x, y = torch.cat([d.x for d in data]), torch.cat([d.y for d in data])
    if MODEL in ensemble:
        x = net.features(ensemble[MODEL], x)
    run = net.classify if MODEL in ensemble else net.predict
    return int((sum(run(w, x) for w in players).argmax(dim=1) == y).sum()) / len(y)


NEVER = ("warm_start=3", "termination=1e-9")
"""Measured from round 3 on, and never low enough."""

RULES = [
    ("f-fl-games", ()),
    ("f-fl-games", ("order=sequential",)),
    ("v-fl-games", ("order=sequential", "fast=false", "sampling=epochs")),
    ("v-fl-games", ("order=sequential", "buffer=2")),
    ("v-fl-games", ("fast=false",)),
]


@pytest.mark.parametrize(("name", "settings"), RULES)
def test_the_ending_is_decided_on_all_training_samples(name: str, settings: tuple[str, ...]) -> None:
    table = uneven(game(name, *MLP, *NEVER, *settings, clients=3))
    ensemble = table.round()
    for number in range(2, 10):
        before, ensemble = ensemble, table.round()
        if number >= 3:
            assert table.work.clients.keys() == {1, 2, 3}
            assert table.metrics["accuracy"] == pytest.approx(pooled(table, before), abs=1e-9)
    played = [number for number in range(1, 10) if table.strategy.hparams.movers(number, table.strategy.players)]
    turns = len(played) * (1 if "order=sequential" in settings else 3)
    assert sum(table.strategy.played.values()) == turns


@pytest.mark.parametrize(("name", "settings"), RULES)
def test_to_measure_does_not_change_the_game(name: str, settings: tuple[str, ...]) -> None:
    measured, not_measured = (
        Table(game(name, *MLP, *NEVER, *settings, f"ending_share={share}", clients=3)) for share in (1, 0)
    )
    for _ in range(8):
        assert same(measured.round(), not_measured.round())
    if "order=sequential" in settings:
        d = sum(tensor.numel() for tensor in measured.strategy.ensemble["client-0"].values())
        phi = sum(tensor.numel() for tensor in measured.strategy.ensemble.get(MODEL, {}).values())
        assert floats(measured.work) == (3 * (2 * d + phi), d)
        assert floats(not_measured.work) == (2 * d + phi, d)


def test_summed_parameters_are_measured_like_outputs() -> None:
    tables = [
        Table(game("f-fl-games", *LINEAR, *NEVER, "order=sequential", f"space={s}", clients=3))
        for s in ("function", "parameter")
    ]
    for _ in range(6):
        before = tables[1].strategy.ensemble
        for table in tables:
            table.round()
    assert tables[1].metrics["accuracy"] == pytest.approx(pooled(tables[1], before), abs=1e-9)
    assert tables[0].metrics["accuracy"] == pytest.approx(tables[1].metrics["accuracy"], abs=0.02)


def test_a_share_of_the_samples_is_drawn_once() -> None:
    heard = {round_: request(3, 3, round_=round_, client1=whole(1)) for round_ in (1, 100, 101)}
    found = client(FFLGames(), {PREDICTOR: whole(0)})._measured(heard[100])["accuracy"]
    z = sum(NET.predict(whole(k), examples(40).x) for k in (0, 1))
    assert found == int((z.argmax(dim=1) == examples(40).y).sum()) / 40
    few = client(FFLGames(ending_share=0.25), {PREDICTOR: whole(0)})
    seen: list[Tensor] = []
    few.outputs = lambda predict, x: seen.append(x) or FLGamesClient.outputs(few, predict, x)  # type: ignore
    assert few._measured(heard[100]) == few._measured(heard[101])
    assert len(seen[0]) == 10
    assert torch.equal(*seen)
    assert few._measured(heard[1]) == {}
    assert client(FFLGames(ending_share=0), {PREDICTOR: whole(0)})._measured(heard[100]) == {}
    assert client(FFLGames(termination=0), {PREDICTOR: whole(0)})._measured(heard[100]) == {}


def test_fast_costs_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    outputs = FLGamesClient.outputs
    monkeypatch.setattr(FLGamesClient, "outputs", lambda *given: passes.append(1) or outputs(*given))
    for fast, expected in (("true", 0), ("false", 4)):
        table = Table(game("v-fl-games", *MLP, *NEVER, f"fast={fast}"))
        table.rounds(2)
        passes.clear()
        table.round()  # φ's
        assert len(passes) == expected


def test_the_game_ends_where_all_samples_say_so_whatever_those_of_a_round_say() -> None:
    """The accuracies by hand of a game that does not end; then the same game with a threshold between them."""
    settings = ("order=sequential", "warm_start=3", "batch_size=2", "learning_rate=0.5")
    table = Table(game("f-fl-games", *MLP, *settings, "termination=1e-9"))
    ensembles = table.rounds(9)
    truth = [pooled(table, ensemble) for ensemble in ensembles]  # of the ensemble that round t + 2 starts from
    first = next(number for number in range(3, 10) if truth[number - 2] < 0.9)
    ended = Table(game("f-fl-games", *MLP, *settings, "termination=0.9"))
    found = ended.rounds(9)
    assert ended.strategy.ended == first
    assert all(same(ensemble, ensembles[first - 2]) for ensemble in found[first - 1 :])


def test_a_client_that_cannot_measure_does_not_stop_another_ones_turn() -> None:
    def spoil(request: Message, reply: Message) -> Message | None:
        return None if request.metadata.dst_node_id == 2 and request.metadata.group_id == "4" else reply

    table = Table(game("f-fl-games", *MLP, *NEVER, "order=sequential", "quorum=1", clients=3), spoil)
    table.rounds(3)
    before = table.strategy.ensemble
    after = table.round()  # client-0's turn
    assert table.work.left_out == {"client-1": "did not answer in time"}
    assert not equal(before["client-0"], after["client-0"])
    assert table.strategy.played["client-0"] == 2


def test_an_ended_run_is_evaluated_to_its_last_round_and_summed_up(tmp_path: Path) -> None:
    config = game("f-fl-games", *MLP, "warm_start=3", "termination=1")
    folder = RunFolder.create(tmp_path / "run", config)
    summary = LocalRuntime(config).run(folder)
    rows = folder.rows()
    assert [row["round"] for row in rows if row["kind"] == "equilibrium"] == [3]
    assert [row["asked"] for row in rows if row["kind"] == "round"] == [4, 4, 4, 0, 0, 0, 0, 0, 0]
    correct = [row["correct"] for row in rows if row["kind"] == "evaluation" and row["split"] == "test"]
    assert correct[4:8] == correct[-4:]  # rounds 4 and 9
    assert summary["rounds"] == 9


def test_oscillation_by_hand() -> None:
    assert oscillation([0.5, 0.9]) == {
        "variation": pytest.approx(0.4),
        "deviation": pytest.approx(0.2),
        "period": 0,
    }
    assert oscillation([0.7] * 5) == {"variation": 0, "deviation": 0, "period": 0}
    wave = [0.6, 0.7, 0.8, 0.7] * 30
    found = oscillation(wave)
    assert found["period"] == 4
    assert found["variation"] == pytest.approx(0.1)
    windows = [np.std(wave[at : at + 50]) for at in range(len(wave) - 49)]
    assert found["deviation"] == pytest.approx(np.mean(windows))


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("order", ["parallel", "sequential"])
@pytest.mark.parametrize("space", ["function", "parameter"])
def test_a_missing_player_keeps_its_last_action(order: str, space: str) -> None:
    gone = {"node": 0}

    def spoil(request: Message, reply: Message) -> Message | None:
        return None if request.metadata.dst_node_id == gone["node"] else reply

    table = Table(game("f-fl-games", *LINEAR, f"order={order}", f"space={space}", "buffer=2", clients=3), spoil)
    before = table.rounds(3)[-1]
    gone["node"] = 1
    after = table.round()  # its turn, if there are turns
    assert table.work.left_out == {"client-0": "did not answer in time"}
    assert equal(before["client-0"], after["client-0"])
    assert equal(before["client-1"], after["client-1"]) == (order == "sequential")
    assert table.strategy.played == {
        "client-0": 3 if order == "parallel" else 1,
        "client-1": 4 if order == "parallel" else 1,
        "client-2": 4 if order == "parallel" else 1,
    }
    gone["node"] = 0
    for _ in range(3):
        later = table.round()
    assert table.work.left_out == {}
    assert not equal(later["client-0"], after["client-0"])


@pytest.mark.parametrize("told", [float("nan"), 1.5, [0.5], None])
def test_a_client_that_does_not_say_how_the_ensemble_does_is_left_out(told: Any) -> None:
    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id != 2 or request.metadata.message_type == "query":
            return reply
        metrics = {k: v for k, v in reply.content.metric_records[METRICS].items() if k != "accuracy"}
        if told is not None:
            metrics["accuracy"] = told
        return Message(RecordDict({**reply.content, METRICS: MetricRecord(metrics)}), reply_to=request)

    table = Table(game("f-fl-games", *MLP), spoil)
    table.round()
    assert table.work.left_out.keys() == {"client-1"}
    assert "accuracy" in table.work.left_out["client-1"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["buffer=-1"], "method.buffer: -1 is not possible; input should be greater than or equal to 0"),
        (["order=clockwise"], "method.order: 'clockwise' is not possible"),
        (["termination=60"], "method.termination: 60 is not possible"),
        (["local_steps=0"], "method.local_steps: 0 is not possible"),
        (["ending_share=10"], "method.ending_share: 10 is not possible"),
        (["sampling=epoch"], "method.sampling: 'epoch' is not possible"),
        (["representation_per=cycle"], "unknown setting 'representation_per'"),
    ],
)
def test_what_a_user_can_get_wrong(settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        toy_config("f-fl-games", *settings)


def test_predictors_that_are_not_linear_cannot_be_summed_as_parameters(tmp_path: Path) -> None:
    for config in (game("f-fl-games", *MLP, "space=parameter"), game("v-fl-games", *MLP, "space=parameter")):
        with pytest.raises(
            UserError, match=r"method.space: 'parameter' is for linear predictors.*take 'function'"
        ):
            LocalRuntime(config).run(RunFolder.create(tmp_path / config.method.name, config))
    FLGamesStrategy(game("v-fl-games", "model.hidden=[6]", "space=parameter"), "run")


def test_one_player_is_told_that_there_is_no_game() -> None:
    assert "local training" in FFLGames().caution(Toy(clients=1))
    assert FFLGames().caution(Toy()) == ""
    table = Table(game("f-fl-games", *MLP, clients=1))
    table.rounds(2)
    assert floats(table.work)[0] == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("f-fl-games", [*LINEAR, "space=parameter", "order=sequential", "buffer=2"]),
        ("f-fl-games", [*MLP, "order=sequential", "buffer=2"]),
        ("v-fl-games", ["model.hidden=[6]", "space=parameter", "buffer=2"]),
        ("v-fl-games", [*MLP, "optimizer=sgd", "buffer=0", "fast=false"]),
        pytest.param("f-fl-games", [*MLP, "warm_start=3", "termination=1"], marks=pytest.mark.slow),
        pytest.param(
            "v-fl-games",
            [*MLP, "order=sequential", "sampling=epochs", "fast=false", "ending_share=0.5", *NEVER],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_game_goes_on_as_it_would_have(name: str, settings: list[str], tmp_path: Path) -> None:
    config = game(name, *settings)
    whole_run = RunFolder.create(tmp_path / "whole", config)
    LocalRuntime(config).run(whole_run)
    broken, origin = broken_off(config, tmp_path / "broken", 5)
    LocalRuntime(config).run(broken, origin)
    assert equal(broken.load_checkpoint().arrays, whole_run.load_checkpoint().arrays)
    assert same(dict(broken.load_checkpoint().strategy), dict(whole_run.load_checkpoint().strategy))
    assert broken.rows() == whole_run.rows()


@pytest.mark.slow
def test_a_measured_game_over_the_wire_equals_the_local_one(tmp_path: Path) -> None:
    """Every message meets a new process, and replies of those that only measure bring no tensors."""
    config = game(
        "v-fl-games", *MLP, *NEVER, "order=sequential", "sampling=epochs", "fast=false", "ending_share=0.5"
    )
    here, there = (RunFolder.create(tmp_path / name, config) for name in ("local", "wire"))
    LocalRuntime(config).run(here)
    run_rounds(config, there, WireGrid(config, tmp_path / "sites"), start(config))
    assert here.rows() == there.rows()
    assert equal(here.load_checkpoint().arrays, there.load_checkpoint().arrays)
