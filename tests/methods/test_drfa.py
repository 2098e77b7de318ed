import math
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
from tiny_runs import taken_up

from perennial.client.methods.drfa import DRFAClient
from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.trainer import Received, Site
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.drfa import DRFA, LOSS, SNAPSHOT, SNAPSHOT_STEP
from perennial.common.methods.fedavg import FedAvg
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.wire import MODEL, NUM_EXAMPLES, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.methods.drfa import DRFAStrategy, ascend
from perennial.strategies.methods.simplex import project
from perennial.testing.tiny_federation import SpoilingGrid, toy_config

NET = network(model_settings({"name": "mlp", "hidden": [5]}), (4,), 3)

# ---------------------------------------------------------------------- the simplex


def bisected(point: list[float], mass: float) -> list[float]:
    """The projection is max(x − θ, 0) with the θ at which the mass is right; θ by bisection."""
    low, high = min(point) - mass, max(point)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(x - middle, 0) for x in point) > mass:
            low = middle
        else:
            high = middle
    return [max(x - high, 0) for x in point]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.floats(0, 3))
def test_the_projection_equals_a_bisection_for_its_threshold(point: list[float], mass: float) -> None:
    found = project(torch.tensor(point, dtype=torch.float64), mass)
    assert found.tolist() == pytest.approx(bisected(point, mass), abs=1e-9)
    assert (found >= 0).all()
    assert found.sum().item() == pytest.approx(mass, abs=1e-9)


@pytest.mark.parametrize(
    ("point", "found"),
    [([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]), ([2.0, 0.0], [1.0, 0.0]), ([5.0, 5.0], [0.5, 0.5]), ([-7.0], [1.0])],
)
def test_projections_by_hand(point: list[float], found: list[float]) -> None:
    assert project(torch.tensor(point, dtype=torch.float64)).tolist() == pytest.approx(found)


@pytest.mark.parametrize(
    ("mixture", "losses", "silent", "rate", "found"),
    [
        # (0.7, 0.58) is 0.28 too much.
        ({"a": 0.5, "b": 0.5}, {"a": 1.0, "b": 0.4}, [], 0.2, {"a": 0.56, "b": 0.44}),
        # c was asked and is silent: it keeps its third, and a and b share two.
        (
            {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 1.0, "b": 0.4}, ["c"], 0.2,
            {"a": 1 / 3 + 0.06, "b": 1 / 3 - 0.06, "c": 1 / 3},
        ),
        # b and c were not asked: v is 3/1 · 0.6 for a, and 0 for them.
        (
            {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 0.6}, [], 0.1,
            {"a": 1 / 3 + 0.12, "b": 1 / 3 - 0.06, "c": 1 / 3 - 0.06},
        ),
        ({"a": 0.5, "b": 0.5}, {"a": 9.0, "b": 0.0}, [], 1.0, {"a": 1.0, "b": 0.0}),
        ({"a": 0.0, "b": 1.0}, {"a": 1.0}, ["b"], 1.0, {"a": 0.0, "b": 1.0}),
        ({"a": 0.3, "b": 0.7}, {}, ["a", "b"], 1.0, {"a": 0.3, "b": 0.7}),
        ({"a": 0.3, "b": 0.7}, {"a": 4.0, "b": 2.0}, [], 0.0, {"a": 0.3, "b": 0.7}),
    ],
)  # fmt: skip
def test_the_mixture_by_hand(
    mixture: dict[str, float], losses: dict[str, float], silent: list[str], rate: float, found: dict[str, float]
) -> None:
    assert ascend(mixture, losses, silent, rate) == pytest.approx(found)


# ---------------------------------------------------------------------- the client


def examples(count: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return Examples(x, y, torch.zeros(count, dtype=torch.long))


def site() -> Site:
    return Site("client-0", ClientData(examples(20), examples(5, 1), {"one": examples(7, 2)}), NET, 0)


@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("last", [1, 3, 4])
def test_the_model_is_fedavgs_and_the_snapshot_is_fedavgs_after_fewer_steps(last: int, unit: Any) -> None:
    how: dict[str, Any] = {"batch_size": 8, "momentum": 0.5, "weight_decay": 0.1, "local_unit": unit}
    received = Received(3, {MODEL: NET.initial(7)}, {SNAPSHOT_STEP: last})
    reply = DRFAClient(site(), DRFA(local_steps=4, **how), {}).train(received)
    for record, steps in ((MODEL, 4), (SNAPSHOT, last)):
        plain = FedAvgClient(site(), FedAvg(local_steps=steps, **how), {}).train(received)
        assert reply.arrays[record].keys() == plain.arrays[MODEL].keys()
        assert all(torch.equal(reply.arrays[record][name], plain.arrays[MODEL][name]) for name in NET.initial(0))
        if record == MODEL:
            assert reply.metrics == plain.metrics
    assert all(torch.equal(received[MODEL][name], tensor) for name, tensor in NET.initial(7).items())


def test_the_loss_is_the_mean_over_all_training_samples() -> None:
    model, here = NET.initial(7), site()
    reply = DRFAClient(here, DRFA(batch_size=2), {}).train_loss(Received(1, {SNAPSHOT: model}))
    expected = F.cross_entropy(NET.predict(model, here.data.train.x), here.data.train.y)
    torch.testing.assert_close(reply.arrays[LOSS][LOSS], expected)
    assert reply.arrays[LOSS][LOSS].dtype == torch.float32
    assert reply.metrics == {NUM_EXAMPLES: 20}


# ---------------------------------------------------------------------- the server


def numbered(client: str) -> int:
    return int(client.removeprefix("client-"))


def answer(client: str, message: Message) -> RecordDict:
    """Client u's model is full of u, its snapshot of 10 u, its loss is u."""
    u = float(numbered(client))
    if message.metadata.message_type == "train.loss":
        return content({LOSS: {LOSS: torch.tensor(u)}})
    return content({MODEL: {"w": torch.full((3,), u)}, SNAPSHOT: {"w": torch.full((3,), 10 * u)}}, risk=1.0)


def start() -> Any:
    return to_record({"w": torch.zeros(3)})


def test_a_round_by_hand() -> None:
    """Drawn by λ with replacement; both means count each draw; the losses are of the mean snapshot."""
    strategy = DRFAStrategy(toy_config("drfa", "mixture_rate=0.01", "local_steps=5"), "run")
    strategy.mixture = {"client-0": 0.0, "client-1": 0.5, "client-2": 0.0, "client-3": 0.5}
    grid = ScriptedGrid(strategy, answer)
    # A round in which one of the two is drawn three times.
    number = next(number for number in range(1, 99) if sorted(strategy.draw(number, 4).values()) == [1, 3])
    drawn = strategy.draw(number, 4)
    arrays = one_round(strategy, grid, start(), number)
    mean = (drawn["client-1"] + 3 * drawn["client-3"]) / 4
    assert arrays is not None
    assert from_record(arrays)["w"].tolist() == pytest.approx([mean] * 3)
    assert list(grid.of("train")) == ["client-1", "client-3"]
    assert list(grid.of("train.loss")) == list(strategy.mixture)
    for sent in grid.of("train.loss").values():
        assert sent[SNAPSHOT]["w"].tolist() == pytest.approx([10 * mean] * 3)
    # λ + 5 · 0.01 · (0, 1, 2, 3) = (0, 0.55, 0.1, 0.65): three shares stay, each 0.1 less.
    assert strategy.mixture == pytest.approx({"client-0": 0, "client-1": 0.45, "client-2": 0, "client-3": 0.55})
    (note,) = strategy.notes
    assert note.pop("entropy") == pytest.approx(-(0.45 * math.log(0.45) + 0.55 * math.log(0.55)))
    assert note.pop("largest") == pytest.approx(0.55)
    assert note == {"kind": "mixture", "round": number, "lambda": strategy.mixture, "least": 0}


def test_the_state_is_the_mixture() -> None:
    one, other = (DRFAStrategy(toy_config("drfa"), "run") for _ in range(2))
    assert set(one.mixture.values()) == {0.25}
    one_round(one, ScriptedGrid(one, answer), start())
    assert one.mixture != other.mixture
    other.load_state_dict(one.state_dict())
    assert one.mixture == other.mixture


def test_clients_are_drawn_by_their_share_from_seed_and_round() -> None:
    strategy = DRFAStrategy(toy_config("drfa"), "run")
    strategy.mixture = {"client-0": 0.1, "client-1": 0.0, "client-2": 0.6, "client-3": 0.3}
    draws = [strategy.draw(number, 2) for number in range(1, 1001)]
    assert draws == [strategy.draw(number, 2) for number in range(1, 1001)]
    frequency = {client: sum(draw[client] for draw in draws) / 2000 for client in strategy.mixture}
    assert frequency == pytest.approx(strategy.mixture, abs=0.04)  # 3.6 standard deviations
    assert any(draw.total() == 2 and len(draw) == 1 for draw in draws)


def test_sites_for_testing_alone_have_no_share() -> None:
    strategy = DRFAStrategy(toy_config("drfa", "test_sites=['client-1', 'client-3']"), "run")
    assert strategy.mixture == {"client-0": 0.5, "client-2": 0.5}
    assert strategy.draw(1, 50).keys() == {"client-0", "client-2"}


def test_the_snapshots_step_is_drawn_from_all_local_steps() -> None:
    strategy = DRFAStrategy(toy_config("drfa", "local_steps=3"), "run")
    steps = []

    def note(client: str, message: Message) -> RecordDict:
        if message.metadata.message_type == "train":
            steps.append(message.content.config_records["config"][SNAPSHOT_STEP])
        return answer(client, message)

    grid = ScriptedGrid(strategy, note)
    by_round = []
    for number in range(1, 30):
        steps.clear()
        one_round(strategy, grid, start(), number)
        assert len(set(steps)) == 1  # the same for all clients
        by_round.append(steps[0])
    assert set(by_round) == {1, 2, 3}


def test_when_nobody_answers_nothing_changes() -> None:
    def fail(client: str, message: Message) -> RecordDict:
        raise RuntimeError

    strategy = DRFAStrategy(toy_config("drfa", "quorum=0"), "run")
    assert one_round(strategy, ScriptedGrid(strategy, fail), start()) is None
    assert set(strategy.mixture.values()) == {0.25}


# ---------------------------------------------------------------------- whole runs


def test_a_client_whose_loss_is_not_finite_keeps_its_share(tmp_path: Path) -> None:
    config = toy_config("drfa", rounds=3)
    here = LocalRuntime(config)

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "train.loss":
            reply.content[LOSS] = to_record({LOSS: torch.tensor(float("nan"))})
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    folder = RunFolder.create(tmp_path / "run", config)
    here.run(folder)
    rows = [row["lambda"] for row in folder.rows() if row["kind"] == "mixture"]
    assert [row["client-1"] for row in rows] == [0.25] * 3
    assert len({row["client-0"] for row in rows}) == 3
    assert [sum(row.values()) for row in rows] == pytest.approx([1.0] * 3)


def test_with_one_client_it_is_fedavg(tmp_path: Path) -> None:
    found = []
    for method in ("drfa", "fedavg"):
        config = toy_config(method, rounds=3, scenario={"name": "toy", "clients": 1})
        LocalRuntime(config).run(RunFolder.create(tmp_path / method, config))
        found.append(load_file(tmp_path / method / "models" / "global.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


@pytest.mark.slow
def test_who_is_drawn_does_not_depend_on_who_has_enrolled(tmp_path: Path) -> None:
    """In a federation of which some evaluate, a resumed run knows only those that it has asked anew. A client that
    `left_out` leaves no data is drawn and then dropped, as from a cohort."""
    settings = ("scenario.clients=40", "participation=0.2", "quorum=0", "evaluate_clients=3", "left_out=p=0.8")
    config = toy_config("drfa", *settings, "mixture_rate=1e-5", "checkpoint_every=2", rounds=8)
    folder = taken_up(config, tmp_path, 4)
    assert [row["left_out"] for row in folder.rows() if row["kind"] == "round"] == [{}] * 8


def test_a_row_of_the_log_does_not_grow_with_the_federation(tmp_path: Path) -> None:
    """It has the shares of the clients of the draw and of V."""
    config = toy_config("drfa", "scenario.clients=100", "participation=0.05", "evaluate_clients=3", rounds=3)
    ids = config.scenario.client_ids
    asked: dict[int, set[str]] = {1: set(), 2: set(), 3: set()}

    def note(request: Message, reply: Message) -> Message:
        if request.metadata.message_type.startswith("train"):
            asked[int(request.metadata.group_id)].add(ids[request.metadata.dst_node_id - 1])
        return reply

    here = LocalRuntime(config)
    here.grid = SpoilingGrid(here.grid, note)  # type: ignore[assignment]
    here.run(folder := RunFolder.create(tmp_path / "run", config))
    rows = [row for row in folder.rows() if row["kind"] == "mixture"]
    assert {row["round"]: row["lambda"].keys() for row in rows} == asked
    assert all(len(row["lambda"]) <= 10 for row in rows)
    assert all(0 <= row["least"] <= min(row["lambda"].values()) for row in rows)
    assert all(max(row["lambda"].values()) <= row["largest"] <= 1 for row in rows)


def test_traffic(tmp_path: Path) -> None:
    """Down: the model to each client of the draw, and to all of V; up: two models, and a loss."""
    config = toy_config("drfa", rounds=3, participation=0.5)
    folder = RunFolder.create(tmp_path / "run", config)
    LocalRuntime(config).run(folder)
    size = 4 * sum(t.numel() for t in load_file(folder.path / "models" / "global.safetensors").values())
    rows = [row for row in folder.rows() if row["kind"] == "round"]
    assert [row["exchanges"] for row in rows] == [["train", "train.loss"]] * 3
    for row in rows:
        drawn = row["bytes_down"] // size - 2
        assert 1 <= drawn <= 2
        assert row["bytes_down"] == (drawn + 2) * size
        assert row["bytes_up"] == drawn * 2 * size + 2 * 4
