"""Client-level differential privacy: what the server makes of updates, against Flower's and by hand."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import exp, log, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.differential_privacy import compute_adaptive_clip_model_update, compute_stdv
from scripted_clients import ScriptedGrid, content, one_round, payload
from tiny_runs import broken_off, taken_up

from perennial.common.config import RunConfig
from perennial.common.methods import METHODS
from perennial.common.methods.base import ONE_MODEL, Sum
from perennial.common.methods.fediir import ANCHOR
from perennial.common.privacy.mechanisms import epsilon
from perennial.common.utils.errors import RunStopped
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import METRICS, MODEL, NUM_EXAMPLES, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.grid import LocalGrid
from perennial.server.run.loop import run_rounds, start
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.privacy.differential_privacy import clipped
from perennial.strategies.registry import strategy_for
from perennial.testing.tiny_federation import SpoilingGrid, Toy, WireGrid, toy_config

CLIENTS = Toy().client_ids
AVERAGING = sorted(name for name, method in METHODS.items() if method().sums == ONE_MODEL)


def config(*settings: str, method: str = "fedavg", mechanism: str = "fixed", **options: Any) -> RunConfig:
    return toy_config(method, f"privacy.mechanism={mechanism}", *settings, **options)


def norm(tensors: Tensors) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm())


def difference(one: Tensors, other: Tensors) -> Tensors:
    return {name: one[name].double() - other[name].double() for name in one}


def model(*values: float) -> ArrayRecord:
    return to_record({"w": torch.tensor(values, dtype=torch.float32)})


def after_a_round(strategy: MethodStrategy[Any], updates: dict[str, list[float]], **how: Any) -> list[float]:
    """The model after a round from the model (1, 1), where each client moves by its update or fails."""

    def answer(client: str, message: Message) -> RecordDict:
        before = payload(message)[MODEL]["w"]
        return content({MODEL: {"w": before + torch.tensor(updates[client])}}, **how)

    found = one_round(strategy, ScriptedGrid(strategy, answer), model(1, 1))
    assert found is not None
    return from_record(found)["w"].tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- which methods


def test_seventeen_methods_say_that_they_average() -> None:
    assert len(AVERAGING) == 17


@pytest.mark.parametrize("method", AVERAGING)
def test_all_that_a_client_sends_is_one_model_like_the_one_it_was_sent(method: str, tmp_path: Path) -> None:
    run = config("privacy.noise_multiplier=0.01", method=method, rounds=2, evaluate_every=2)
    here, seen = LocalRuntime(run), list[str]()

    def record(request: Message, reply: Message) -> Message:
        action = request.metadata.message_type
        seen.append(action)
        if action == "train":
            assert payload(request).keys() == payload(reply).keys() == {MODEL}
            assert payload(request)[MODEL].keys() == payload(reply)[MODEL].keys()
            assert all(tensor.is_floating_point() for tensor in payload(reply)[MODEL].values())
            assert set(reply.content) == {MODEL, METRICS}
        return reply

    here.grid = SpoilingGrid(here.grid, record)  # type: ignore[assignment]
    here.run(RunFolder.create(tmp_path / "run", run))
    assert set(seen) == {"query", "train", "evaluate"}
    assert seen.count("train") == 2 * len(CLIENTS)


def outcome(method: str, order: list[int]) -> dict[str, Tensors]:
    """All that a server is left with after two rounds with updates, which client has which being `order`."""
    run = toy_config(method)
    strategy = strategy_for(run, "run")
    generator = torch.Generator().manual_seed(5)
    arrays = to_record(start(run).arrays)
    for number in (1, 2):
        drawn: list[Tensors] = []

        def answer(client: str, message: Message, drawn: list[Tensors] = drawn) -> RecordDict:
            sent = payload(message)
            before = sent[MODEL] if MODEL in sent else next(iter(sent.values()))
            if not drawn:
                shapes = [(name, tensor.shape) for name, tensor in before.items()]
                drawn += [{n: torch.randn(s, generator=generator) for n, s in shapes} for _ in CLIENTS]
            update = drawn[order[CLIENTS.index(client)]]
            return content({MODEL: {name: tensor + update[name] for name, tensor in before.items()}})

        found = one_round(strategy, ScriptedGrid(strategy, answer), arrays, number)
        assert found is not None
        arrays = found
    return {**strategy.state_dict(), "arrays": from_record(arrays)}


@pytest.mark.parametrize("method", AVERAGING)
def test_the_server_uses_the_mean_alone(method: str) -> None:
    """It is left with the same when clients swap their updates."""
    assert same(outcome(method, [0, 1, 2, 3]), outcome(method, [2, 0, 3, 1]))


def test_a_server_that_uses_more_than_the_mean_would_be_noticed() -> None:
    assert not same(outcome("cgpfl", [0, 1, 2, 3]), outcome("cgpfl", [2, 0, 3, 1]))


def same(one: dict[str, Tensors], other: dict[str, Tensors]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(torch.allclose(one[name][key], other[name][key], atol=1e-5) for key in one[name])
        for name in one
    )


# ---------------------------------------------------------------------- clipping


@pytest.mark.parametrize("limit", [0.1, 2.0, 1e6])
def test_an_update_is_clipped_as_flower_does(limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4), "b": (5,), "c": (1, 1)}
    before, after = ({n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(2))
    arrays, received = ([tensor.double().numpy() for tensor in found.values()] for found in (after, before))
    clips = compute_adaptive_clip_model_update(arrays, received, limit)
    update, small = clipped(after, before, limit)
    assert small is not clips
    for array, (name, tensor) in zip(arrays, update.items(), strict=True):
        assert np.allclose(array, before[name].double().numpy() + tensor.numpy())
    assert norm(update) == pytest.approx(min(limit, norm(difference(after, before))))


def test_no_update_at_all_stays_none() -> None:
    update, small = clipped({"w": torch.ones(2)}, {"w": torch.ones(2)}, 0.1)
    assert (update["w"].tolist(), small) == ([0, 0], True)


def test_without_noise_a_round_is_flowers_with_server_side_clipping() -> None:
    updates = {c: [float(i), 0.5 * i] for i, c in enumerate(CLIENTS, start=1)}
    found = after_a_round(
        strategy_for(config("privacy.noise_multiplier=0", "privacy.clipping_norm=2"), ""), updates
    )
    flower = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 2.0, len(CLIENTS))
    flower.current_arrays = model(1, 1)
    replies = []
    for node, update in enumerate(updates.values(), start=1):
        record = ArrayRecord({"w": Array(np.array([1.0, 1.0], np.float32) + np.array(update, np.float32))})
        answer = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 10})})
        replies.append(Message(answer, reply_to=Message(RecordDict(), node, "train")))
    expected, _ = flower.aggregate_train(1, replies)
    assert expected is not None
    assert found == pytest.approx(expected["w"].numpy().tolist())


def test_every_client_counts_the_same_whatever_it_says_of_its_samples() -> None:
    strategy = strategy_for(config("privacy.noise_multiplier=0", "privacy.clipping_norm=100"), "")

    def answer(client: str, message: Message) -> RecordDict:
        number = CLIENTS.index(client)
        return content({MODEL: {"w": torch.full((2,), 1.0 + number)}}, count=10 ** (number + 1))

    found = one_round(strategy, ScriptedGrid(strategy, answer), model(1, 1))
    assert found is not None
    assert from_record(found)["w"].tolist() == [2.5, 2.5]


def test_a_client_that_sends_anything_moves_the_model_by_no_more_than_its_share() -> None:
    strategy = strategy_for(config("privacy.noise_multiplier=0", "privacy.clipping_norm=2"), "")
    updates = {client: [0.0, 0.0] for client in CLIENTS} | {CLIENTS[0]: [1e8, 0.0]}
    assert after_a_round(strategy, updates) == pytest.approx([1 + 2 / len(CLIENTS), 1])


def test_the_servers_step_comes_after_clipping_and_noise() -> None:
    """FTFA's server goes `mixing` of the way to the mean, and so does the noise."""
    settings = ("privacy.clipping_norm=1", "mixing=0.5")
    still = {client: [0.0, 0.0] for client in CLIENTS}
    found = []
    for mixing in ("mixing=0.5", "mixing=1"):
        strategy: Any = strategy_for(config(*settings[:1], mixing, method="ftfa"), "")
        strategy.entropy = np.random.default_rng(3)
        found.append(np.array(after_a_round(strategy, still)) - 1)
    assert found[0] == pytest.approx(0.5 * found[1])


# ---------------------------------------------------------------------- noise


@pytest.mark.parametrize("failing", [0, 2])
def test_the_noise_is_of_those_who_answered(failing: int) -> None:
    """`N(0, (z C / m)²)` on each number, with m the replies that were averaged, not those that were asked for."""
    size, z, limit = 40_000, 1.5, 0.8
    strategy: Any = strategy_for(config(f"privacy.noise_multiplier={z}", f"privacy.clipping_norm={limit}"), "")

    def answer(client: str, message: Message) -> RecordDict:
        if CLIENTS.index(client) < failing:
            raise RuntimeError("no")
        return content({MODEL: payload(message)[MODEL]})

    found = one_round(strategy, ScriptedGrid(strategy, answer), to_record({"w": torch.zeros(size)}))
    assert found is not None
    noise = from_record(found)["w"]
    deviation = compute_stdv(z, limit, len(CLIENTS) - failing)
    assert float(noise.std()) == pytest.approx(deviation, rel=0.03)
    assert abs(float(noise.mean())) < 5 * deviation / size**0.5
    assert strategy.notes == [
        {"kind": "privacy", "round": 1, "clients": len(CLIENTS) - failing, "clipping_norm": limit}
    ]


def test_no_two_runs_have_the_same_noise() -> None:
    """The seed is known to every client, which could otherwise subtract the noise."""
    still = {client: [0.0, 0.0] for client in CLIENTS}
    one, other = (after_a_round(strategy_for(config(), "run"), still) for _ in range(2))
    assert one != other


def test_too_few_replies_stop_the_run_before_anything_is_sent_out() -> None:
    strategy = strategy_for(config("quorum=1"), "")

    def answer(client: str, message: Message) -> RecordDict:
        if client == CLIENTS[0]:
            raise RuntimeError("no")
        return content({MODEL: payload(message)[MODEL]})

    with pytest.raises(RunStopped, match="only 3 of 4 clients"):
        one_round(strategy, ScriptedGrid(strategy, answer), model(1, 1))
    assert strategy.notes == []


def test_with_no_reply_and_no_quorum_the_model_stays() -> None:
    strategy = strategy_for(config("quorum=0"), "")

    def answer(client: str, message: Message) -> RecordDict:
        raise RuntimeError("no")

    assert one_round(strategy, ScriptedGrid(strategy, answer), model(1, 1)) is None


# ---------------------------------------------------------------------- adaptive clipping


def test_the_clipping_norm_goes_to_the_quantile_of_the_updates_norms() -> None:
    """Of updates of norms 1, 2, 3 and 4, a half is at most 2 … 3; clipped and noised with this round's norm."""
    updates = {client: [number + 1.0, 0.0] for number, client in enumerate(CLIENTS)}
    strategy: Any = strategy_for(
        config("privacy.noise_multiplier=0", "privacy.clipping_norm=0.1", mechanism="adaptive"), ""
    )
    assert after_a_round(strategy, updates) == pytest.approx([1.1, 1])
    assert strategy.clipping_norm == pytest.approx(0.1 * exp(0.2 * 0.5))
    for _ in range(60):
        after_a_round(strategy, updates)
    assert 2 <= strategy.clipping_norm < 3


def test_the_noise_belongs_to_the_norm_that_clipped() -> None:
    """Not to the next one, which may be smaller."""
    strategy: Any = strategy_for(config("privacy.clipping_norm=0.5", mechanism="adaptive"), "")
    strategy.entropy = np.random.default_rng(8)
    found = after_a_round(strategy, {client: [0.0, 0.0] for client in CLIENTS})
    generator = np.random.default_rng(8)
    multiplier, deviation = strategy.privacy.noise(len(CLIENTS))
    assert found == pytest.approx(1 + generator.normal(0, multiplier * 0.5 / len(CLIENTS), 2))
    share = (len(CLIENTS) + generator.normal(0, deviation)) / len(CLIENTS)
    assert strategy.clipping_norm == pytest.approx(strategy.privacy.followed(0.5, share))


@pytest.mark.parametrize("absent", [CLIENTS[0], CLIENTS[3]])
def test_an_absent_client_counts_as_half_an_unclipped_one(absent: str) -> None:
    """Less a half for each that answered, the released count changes by ½ when a client leaves, clipped or not."""

    def count(clients: list[str]) -> float:
        settings = ("privacy.clipping_norm=1.5", "privacy.noise_multiplier=1e-9", "quorum=0.1")
        strategy: Any = strategy_for(config(*settings, mechanism="adaptive"), "")
        strategy.entropy = SimpleNamespace(normal=lambda mean, deviation, size=(): np.full(size, mean, float))

        def answer(client: str, message: Message) -> RecordDict:
            if client not in clients:
                raise RuntimeError("absent")
            moved = payload(message)[MODEL]["w"] + torch.tensor([CLIENTS.index(client) + 1.0, 0.0])
            return content({MODEL: {"w": moved}})

        one_round(strategy, ScriptedGrid(strategy, answer), model(1, 1))
        unclipped = 0.5 - log(strategy.clipping_norm / 1.5) / 0.2  # C' = C exp(-η_C (b - γ))
        return len(clients) * float(unclipped) - len(clients) / 2

    everybody = list(CLIENTS)
    others = [client for client in everybody if client != absent]
    change = 0.5 if absent == CLIENTS[0] else -0.5
    assert count(everybody) - count(others) == pytest.approx(change)


# ---------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedsr", "groupdro"])
def test_the_wire_changes_nothing(method: str, tmp_path: Path) -> None:
    run = config(
        "privacy.noise_multiplier=0", "privacy.clipping_norm=0.1", method=method, mechanism="adaptive", rounds=4
    )
    LocalRuntime(run).run(RunFolder.create(tmp_path / "local", run))
    folder = RunFolder.create(tmp_path / "wire", run)
    run_rounds(run, folder, WireGrid(run, tmp_path / "sites"), start(run))
    assert RunFolder(tmp_path / "local").rows() == folder.rows()
    assert len({row["clipping_norm"] for row in folder.rows() if row["kind"] == "privacy"}) == 4


@pytest.mark.slow
def test_a_resumed_run_knows_its_clipping_norm_and_counts_what_it_sends_out_again(tmp_path: Path) -> None:
    run = config("privacy.noise_multiplier=0", "privacy.clipping_norm=0.01", mechanism="adaptive", rounds=6)
    unbroken = LocalRuntime(run).run(RunFolder.create(tmp_path / "unbroken", run))
    folder, origin = broken_off(run, tmp_path / "broken", 3)
    summary = LocalRuntime(run).run(folder, origin)
    assert RunFolder(tmp_path / "unbroken").rows() == folder.rows()
    assert unbroken["privacy"]["releases"] == 6
    assert summary["privacy"]["releases"] == 6 + (3 - origin.round)


class Counting(LocalGrid):
    """Counts the different models that clients were ever sent; dies when told to."""

    def __init__(self, here: LocalRuntime, record: str = MODEL) -> None:
        super().__init__(here.grid.app, len(here.grid.contexts))
        self.record, self.models = record, set[bytes]()
        self.left = 10**9
        """Exchanges until it dies."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        messages = list(messages)
        if messages[0].metadata.message_type != "query":
            sent = [message.content.array_records.get(self.record) for message in messages]
            self.models |= {record.to_numpy_ndarrays()[0].tobytes() for record in sent if record}
            self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        yield from super().send_and_receive(messages, timeout=timeout)


@pytest.mark.slow
@pytest.mark.parametrize("left", [9, 10, 11, 12])
def test_every_model_that_was_sent_is_counted_also_after_falling_back_two_checkpoints(
    left: int, tmp_path: Path
) -> None:
    """Dead in a round or an evaluation, the newest checkpoint put aside: it counts what clients really got."""
    run = config("privacy.noise_multiplier=1", "checkpoint_every=2", "evaluate_every=3", rounds=9)
    here, folder = LocalRuntime(run), RunFolder.create(tmp_path / "run", run)
    grid, origin = Counting(here), start(run)
    for dies_after in (left, left - 3, 10**9):
        grid.left = dies_after
        with suppress(KeyboardInterrupt):
            summary = run_rounds(run, folder, grid, origin, save_clients=here.states.save)
        newest = folder.checkpoint_path(folder.checkpoints()[-1])
        if dies_after < 10**9:
            newest.rename(newest.with_name(f"damaged-{dies_after}"))
            origin = folder.load_checkpoint()
            folder.cut_log(origin.log_bytes)
    first_one = 1  # the model before the first round is nobody's
    assert summary["privacy"]["releases"] == len(grid.models) - first_one > 9


def test_an_anchor_with_noise_that_was_sent_is_counted_if_the_server_dies_in_the_same_round(
    tmp_path: Path,
) -> None:
    """FedIIR's clients get the anchor before there is a new model."""
    run = config("privacy.noise_multiplier=1", "checkpoint_every=1", method="fediir", rounds=3)
    here, folder = LocalRuntime(run), RunFolder.create(tmp_path / "run", run)
    grid = Counting(here, ANCHOR)
    grid.left = 3  # a round has two exchanges, and it dies in the second of round 2
    with suppress(KeyboardInterrupt):
        run_rounds(run, folder, grid, start(run), save_clients=here.states.save)
    assert folder.releases() == 2
    grid.left = 10**9
    origin = folder.load_checkpoint()
    folder.cut_log(origin.log_bytes)
    summary = run_rounds(run, folder, grid, origin, save_clients=here.states.save)
    assert summary["privacy"]["releases"] == len(grid.models) == 4


def test_a_run_learns_under_little_noise_and_says_what_it_promises(tmp_path: Path) -> None:
    run = config("privacy.noise_multiplier=0.02", "privacy.clipping_norm=0.5", rounds=8)
    summary = LocalRuntime(run).run(RunFolder.create(tmp_path / "run", run))
    assert summary["models"]["global"]["final"]["validation"] > 0.75
    assert summary["privacy"] == {
        "mechanism": "fixed",
        "noise_multiplier": 0.02,
        "releases": 8,
        "delta": 1e-5,
        "epsilon": epsilon(0.02, 8, 1e-5),
    }
    assert RunFolder(tmp_path / "run").summary()["privacy"] == summary["privacy"]


# ---------------------------------------------------------------------- several records and exchanges

WEIGHTS = {"q", "first-risks", "level"}
"""GroupDRO's, which the server has in another form behind a mechanism (`tests/methods/test_groupdro.py`)."""
SUMMING = sorted(name for name, method in METHODS.items() if method().sums not in ((), ONE_MODEL))


@pytest.mark.parametrize(
    ("method", "settings"), [*((name, ()) for name in SUMMING), ("perinvfl", ("invariance=groupdro",))]
)
def test_without_noise_and_clipping_a_method_of_several_sums_is_itself(
    method: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    found = []
    loose = ("privacy.noise_multiplier=0", "privacy.clipping_norm=1e6")
    runs = toy_config(method, *settings, rounds=1), config(*loose, *settings, method=method, rounds=1)
    for name, run in zip(("plain", "loose"), runs, strict=True):
        LocalRuntime(run).run(folder := RunFolder.create(tmp_path / name, run))
        checkpoint = folder.load_checkpoint()
        found.append({"arrays": checkpoint.arrays, **checkpoint.strategy})
    names = [sorted(path.name for path in (tmp_path / name / "models").iterdir()) for name in ("plain", "loose")]
    assert names[0] == names[1]
    plain, private = ({k: v for k, v in each.items() if k not in WEIGHTS} for each in found)
    assert private.keys() - plain.keys() == {"privacy"}
    for record, tensors in plain.items():
        for name, tensor in tensors.items():
            assert torch.allclose(tensor.double(), private[record][name].double(), atol=1e-5), (record, name)


def test_a_client_changes_the_counts_of_owners_by_a_vector_of_norm_one() -> None:
    """It has j classifiers and counts 1/√j in each; one update with all others' is cut to the norm."""
    strategy: Any = strategy_for(
        config("privacy.noise_multiplier=0", "privacy.clipping_norm=2", method="fedsdr"), ""
    )
    heads, shortcut = strategy.heads, strategy.shortcut
    name = min(heads["environment-head-0"])

    def reply(client: str, **moved: float) -> AcceptedReply:
        arrays = {"shortcut": shortcut}
        for head, by in moved.items():
            after = {key: tensor.clone() for key, tensor in heads[head.replace("_", "-")].items()}
            after[name] = after[name] + by / after[name].numel() ** 0.5
            arrays[head.replace("_", "-")] = after
        return AcceptedReply(client, arrays, MetricRecord({NUM_EXAMPLES: 10}), ConfigRecord())

    both = reply("client-0", environment_head_0=1.0, environment_head_1=1.0)
    one = reply("client-1", environment_head_0=4.0)
    found = strategy.noised(1, "train", [both, one], strategy.training()[1])
    moved = (found["environment-head-0"][name] - heads["environment-head-0"][name]).norm()
    share = 0.5**0.5
    assert float(moved) == pytest.approx((share * 1.0 + 1.0 * 2.0) / (share + 1.0), rel=1e-5)
    assert strategy.mechanisms == 2


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ((Sum("train", "head-*", "owner"),), 2),
        ((Sum("train", "head-*", "owner"), Sum("train", "model")), 2),
        ((Sum("train", "head-*", "owner"), Sum("train.gradient", "head-*", "owner")), 4),
        ((Sum("train", "signs", bounded=True),), 1),
    ],
)
def test_every_sum_that_gets_noise_is_counted(
    sums: tuple[Sum, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS["fedavg"], "summed", lambda self: sums)
    strategy: Any = strategy_for(config("privacy.noise_multiplier=1.5", method="fedavg"), "")
    assert strategy.mechanisms == expected


class Drawn:
    """In the place of what draws the noise: no noise, or what is said, and a list of what was asked for."""

    def __init__(self, *owners: float) -> None:
        self.deviations: Counter[tuple[float, tuple[int, ...]]] = Counter()
        self.owners = list(owners)

    def normal(self, mean: float, deviation: float, shape: tuple[int, ...] | None = None) -> Any:
        if shape is None:  # on the number of unclipped updates
            return 0.0
        self.deviations[round(deviation, 9), shape] += 1
        return np.full(shape, self.owners.pop(0)) if shape == () and self.owners else np.zeros(shape)


@pytest.mark.parametrize(
    ("method", "sums", "in_all", "of_owners", "of_votes"),
    [
        ("fedavg", 1, 1, 0, ()),
        ("perinvfl", 1, 1, 0, ()),
        ("fedpin", 1, 1, 0, ()),
        ("vrex", 1, 2, 0, ()),
        ("fedsdr", 2, 1, 2, ()),
        ("fediir", 2, 1, 0, ()),
        ("and-mask", 2, 1, 0, ((8, 2), (8,), (2, 8), (2,))),
        ("groupdro", 2, 1, 0, ((), ())),
    ],
)
def test_all_sums_of_a_round_have_noise_and_together_they_tell_as_much_as_one_of_z(
    method: str,
    sums: int,
    in_all: int,
    of_owners: int,
    of_votes: tuple[tuple[int, ...], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of m clients: z √s C / m on each number of an update with s sums, z √s / m on how many own a record, and
    z √s √d / m on each of d numbers within [−1, 1]."""
    z, norm, clients = 1.5, 0.8, len(CLIENTS)
    drawn, default_rng = Drawn(), np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda *seed: default_rng(*seed) if seed else drawn)
    run = config(f"privacy.noise_multiplier={z}", f"privacy.clipping_norm={norm}", method=method, rounds=1)
    LocalRuntime(run).run(RunFolder.create(tmp_path / "run", run))
    each = z * sums**0.5 / clients
    found = drawn.deviations
    assert found[round(each * norm, 9), (8, 2)] == in_all, "on the first layer of each model that all send"
    assert found[round(each, 9), ()] == of_owners
    votes = round(each * sum(prod(shape) for shape in of_votes) ** 0.5, 9)
    assert {shape for deviation, shape in found if of_votes and deviation == votes} == {*of_votes}
    assert {deviation for deviation, _ in found} == {
        round(each * norm, 9),
        *([round(each, 9)] if of_owners else []),
        *([votes] if of_votes else []),
    }


@pytest.mark.parametrize(("seen", "stays"), [(0.4, True), (0.6, False)])
def test_a_classifier_that_nobody_seems_to_have_stays(seen: float, stays: bool) -> None:
    """Whether one or none of four clients has it can be told by what the noise makes of 0 alone."""
    strategy: Any = strategy_for(config("privacy.noise_multiplier=1", method="fedsdr"), "")
    head, others = "environment-head-0", {"shortcut": strategy.shortcut}
    with_it = {**others, "environment-head-1": strategy.heads["environment-head-1"]}
    replies = [
        AcceptedReply(client, with_it, MetricRecord({NUM_EXAMPLES: 10}), ConfigRecord()) for client in CLIENTS
    ]
    names = [part.record for part in strategy.training()[1] if part.owners]
    strategy.entropy = Drawn(*(seen / len(CLIENTS) if name == head else 0.0 for name in names))
    assert (head not in strategy.noised(1, "train", replies, strategy.training()[1])) == stays


def test_a_round_in_which_nobody_answers_counts(tmp_path: Path) -> None:
    run = config("privacy.noise_multiplier=1", "quorum=0", rounds=2)
    here = LocalRuntime(run)
    here.grid = SpoilingGrid(here.grid, lambda request, reply: None if "train" in kind(request) else reply)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", run))
    assert summary["privacy"]["releases"] == 2


def kind(message: Message) -> str:
    return str(message.metadata.message_type)


@pytest.mark.slow
def test_a_resumed_run_of_two_exchanges_knows_both_clipping_norms(tmp_path: Path) -> None:
    settings = ("privacy.noise_multiplier=0", "privacy.clipping_norm=0.01")
    run = config(*settings, mechanism="adaptive", method="fediir", rounds=6)
    folder = taken_up(run, tmp_path, 3)
    norms = {
        row.get("exchange", "train"): row["clipping_norm"] for row in folder.rows() if row["kind"] == "privacy"
    }
    assert norms.keys() == {"train", "train.gradient"}
    assert norms["train"] > 0.01, "it has followed the updates"
