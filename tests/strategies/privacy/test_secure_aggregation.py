"""Secure aggregation in whole rounds: the plain mean within a step, whoever drops out, and nothing else seen."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from safetensors.torch import load_file
from scripted_clients import one_round, payload
from tiny_runs import taken_up
from torch import Tensor

from perennial.client.secure_aggregation import Participant, Vault
from perennial.client.trainer import Received
from perennial.common.config import RunConfig, load_config
from perennial.common.methods import METHODS
from perennial.common.methods.base import ONE_MODEL, Sum
from perennial.common.methods.references import FILE
from perennial.common.privacy.secure_aggregation import (
    ACTIONS,
    ADVERTISE,
    KEY_BYTES,
    KEYS,
    MASKED,
    SHARE,
    SHARES,
    STEPS,
    UNMASK,
    Words,
    as_bytes,
    dequantised,
    mask,
    means_of_sum,
    pair_mask,
    summands,
    vector,
)
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import CLIENT, CONFIG, METRICS, MODEL, NUM_EXAMPLES, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.grid import LocalGrid
from perennial.server.run.loop import run_rounds, start
from perennial.strategies.base import MethodStrategy
from perennial.strategies.registry import strategy_for
from perennial.testing.tiny_federation import SpoilingGrid, Toy, WireGrid, toy_config

CLIENTS = Toy().client_ids
AVERAGING = sorted(name for name, method in METHODS.items() if method().sums == ONE_MODEL)
COUNTS = dict(zip(CLIENTS, (10, 20, 30, 40), strict=True))
UPDATES = {c: torch.tensor([0.1 * i, -1.0 / 3]) for i, c in enumerate(CLIENTS)}
BEFORE: Tensors = {"w": torch.tensor([1.0, 2.0])}

Spoil = Callable[[str, str, dict[str, Tensors]], dict[str, Tensors]]
"""Client, action and the records of its answer to those that it sends; it may raise."""


def config(*settings: str, method: str = "fedavg", **options: Any) -> RunConfig:
    return toy_config(method, "privacy.mechanism=secagg", *settings, **options)


class Federation(LocalGrid):
    """Clients that move the model by their updates, in the true protocol, and as a test spoils them."""

    def __init__(self, spoil: Spoil = lambda client, action, arrays: arrays) -> None:
        self.vault, self.seen = Vault(), list[tuple[str, str, dict[str, Tensors]]]()

        def app(message: Message, context: Context) -> Message:
            client, action = CLIENTS[int(context.node_config["partition-id"])], message.metadata.message_type
            metrics = MetricRecord({NUM_EXAMPLES: COUNTS[client]})
            if action == "query":
                return Message(
                    RecordDict({CONFIG: ConfigRecord({CLIENT: client}), METRICS: metrics}), reply_to=message
                )
            given = message.content.config_records[CONFIG]
            received = Received(int(given["round"]), payload(message), dict(given))  # type: ignore[arg-type]
            participant = Participant(f"run/{client}", self.vault)
            if action in ACTIONS:
                arrays = participant.answer(action, received)
            else:
                model = {"w": received[MODEL]["w"] + UPDATES[client]}
                arrays = participant.masked(received, {MODEL: model})
            arrays = spoil(client, action, arrays)
            self.seen.append((client, action, arrays))
            records = {name: to_record(tensors) for name, tensors in arrays.items()}
            return Message(RecordDict({**records, METRICS: metrics}), reply_to=message)

        super().__init__(app, len(CLIENTS))  # type: ignore[arg-type]


def failing(failures: dict[str, str]) -> Spoil:
    """Some clients fail at an action, and at those after it."""
    order = [ADVERTISE, SHARE, "train", UNMASK]

    def spoil(client: str, action: str, arrays: dict[str, Tensors]) -> dict[str, Tensors]:
        if client in failures and order.index(action) >= order.index(failures[client]):
            raise RuntimeError("gone")
        return arrays

    return spoil


def after_a_round(strategy: MethodStrategy[Any], grid: LocalGrid) -> list[float]:
    found = one_round(strategy, grid_asked(grid), to_record(BEFORE))
    assert found is not None
    return from_record(found)["w"].tolist()  # type: ignore[no-any-return]


def grid_asked(grid: Any) -> Any:
    grid.asked = []  # `one_round` clears it
    return grid


def mean(clients: list[str], weights: dict[str, int]) -> list[float]:
    total = sum((weights[c] * UPDATES[c].double() for c in clients), start=torch.zeros(2, dtype=torch.float64))
    found: list[float] = (BEFORE["w"] + total / sum(weights[c] for c in clients)).tolist()
    return found


# ---------------------------------------------------------------------- the mean


@pytest.mark.parametrize(("method", "weights"), [("fedavg", COUNTS), ("l2sgd", dict.fromkeys(CLIENTS, 1))])
def test_the_model_is_the_mean_within_half_a_step(method: str, weights: dict[str, int]) -> None:
    strategy = strategy_for(config(method=method), "run")
    assert after_a_round(strategy, Federation()) == pytest.approx(mean(CLIENTS, weights), abs=8 / STEPS / 2 + 2e-7)
    assert [exchange.action for exchange in strategy.exchanges] == ["query", ADVERTISE, SHARE, "train", UNMASK]


@pytest.mark.parametrize("method", AVERAGING)
def test_a_run_comes_to_where_it_comes_without_it(method: str, tmp_path: Path) -> None:
    for name, run in (("plain", toy_config(method, rounds=2)), ("secure", config(method=method, rounds=2))):
        LocalRuntime(run).run(RunFolder.create(tmp_path / name, run))
    plain, secure = (load_file(tmp_path / name / "models" / "global.safetensors") for name in ("plain", "secure"))
    assert plain.keys() == secure.keys()
    for name, tensor in plain.items():
        assert torch.allclose(tensor, secure[name], atol=1e-4), name


WEIGHTS = {"q", "first-risks", "level"}
"""GroupDRO's, which the server has in another form behind a mechanism (`tests/methods/test_groupdro.py`)."""
SUMMING = sorted(name for name, method in METHODS.items() if method().sums not in ((), ONE_MODEL))


@pytest.mark.parametrize(
    ("method", "settings"), [*((name, ()) for name in SUMMING), ("perinvfl", ("invariance=groupdro",))]
)
def test_of_several_records_and_exchanges_each_mean_is_within_half_a_step(
    method: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Of one round, so that all that clients start from is the same; the step of a server is of its own size."""
    found = []
    runs = toy_config(method, *settings, rounds=1), config(*settings, method=method, rounds=1)
    for name, run in zip(("plain", "secure"), runs, strict=True):
        LocalRuntime(run).run(folder := RunFolder.create(tmp_path / name, run))
        checkpoint = folder.load_checkpoint()
        found.append({"arrays": checkpoint.arrays, **checkpoint.strategy})
    plain, secure = ({k: v for k, v in each.items() if k not in WEIGHTS} for each in found)
    assert plain.keys() == secure.keys()
    half = 8.0 / STEPS / 2 + 3e-7
    for record, tensors in plain.items():
        assert tensors.keys() == secure[record].keys()
        for name, tensor in tensors.items():
            slack = half * (
                20 if method in ("vrex", "fediir") else 1
            )  # the penalty's weight, and training at the anchor
            assert torch.allclose(tensor.double(), secure[record][name].double(), rtol=0, atol=slack), (
                record,
                name,
            )


def test_a_record_of_which_nobody_has_a_part_stays() -> None:
    parts = summands(
        (Sum("train", "head-*", "owner"),), "train", {"head-0": BEFORE, "head-1": BEFORE}, {"head-1": BEFORE}
    )
    own = [{"head-1": {"w": BEFORE["w"] + 1}}, {"head-1": {"w": BEFORE["w"] + 2}}, {}]
    total = sum((vector(parts, each, 1, 8.0) for each in own), start=np.zeros(6, dtype=np.uint64))
    assert means_of_sum(total, parts, 3, 8.0).keys() == {"head-1"}
    assert means_of_sum(total, parts, 3, 8.0)["head-1"]["w"].tolist() == pytest.approx([2.5, 3.5], abs=1e-6)
    total[-1] = 4
    with pytest.raises(ValueError, match="more clients have a record than there are"):
        means_of_sum(total, parts, 3, 8.0)


def test_a_record_that_all_have_must_be_there() -> None:
    parts = summands((Sum("train", "shortcut"),), "train", {"shortcut": BEFORE}, {})
    with pytest.raises(ValueError, match="record 'shortcut' is missing"):
        vector(parts, {}, 1, 8.0)


@pytest.mark.parametrize("limit", [0.3, 8.0, 70.0, 1e6])
def test_signs_are_exact_whatever_the_range_of_updates(limit: float) -> None:
    parts = summands((Sum("train", "signs", bounded=True),), "train", {"signs": BEFORE}, {})
    signs = torch.tensor([1.0, -1.0])
    total = sum((vector(parts, {"signs": {"w": signs}}, 1, limit) for _ in range(3)), start=np.zeros(2, np.uint64))
    assert means_of_sum(total, parts, 3, limit)["signs"]["w"].tolist() == [1, -1]


RESULTS = {"risk", "dependence", "shortcut-risk", "disagreement", "capped"}
"""FedSDR's losses and their like; with accuracies they travel in the clear (docs/privacy.md)."""


def said(message: Message, client: str, hidden: set[str]) -> list[Any]:
    """All that is in a message, names, types and numbers, but for losses, accuracies and the numbers of records
    that are `hidden`; of those the sizes."""
    found: list[Any] = [message.metadata.message_type, sorted(message.content)]
    for name, arrays in sorted(message.content.array_records.items()):
        tensors = from_record(arrays)
        for key, tensor in sorted(tensors.items()):
            numbers = b"" if name in hidden else as_bytes(tensor)
            # Shares have the names of all others, and a client's key has its own.
            own = len(tensors) if name in hidden else key
            found.append((name, own, tensor.dtype, tuple(tensor.shape), numbers))
    for kind in (message.content.metric_records, message.content.config_records):
        for name, record in sorted(kind.items()):
            for key, value in sorted(record.items()):
                result = key in RESULTS or key.endswith(("/correct", "/loss"))
                size = len(value) if isinstance(value, list) else 1
                found.append((name, key, size if result else "itself" if value == client else value))
    return found


def messages_of(method: str, *settings: str, tmp_path: Path) -> dict[str, list[Any]]:
    """Of each client: all that a reader of all messages of a run sees of it, but for losses and accuracies."""
    run = toy_config(method, *settings, rounds=2)
    here, seen = LocalRuntime(run), dict[str, list[Any]]()

    def read(request: Message, reply: Message) -> Message:
        client = CLIENTS[request.metadata.dst_node_id - 1]
        secret = {KEYS, SHARES, MASKED}  # what a client draws or has masked
        assert run.privacy.mechanism == "none" or reply.content.array_records.keys() <= secret
        seen.setdefault(client, []).extend([said(request, client, {SHARES}), said(reply, client, secret)])
        if MASKED in reply.content.array_records:
            words = np.frombuffer(as_bytes(payload(reply)[MASKED][MASKED]), dtype=np.uint64)
            assert words.min() > 2**32, "a count, or a small update, in the clear"
        return reply

    here.grid = SpoilingGrid(here.grid, read)  # type: ignore[assignment]
    here.run(RunFolder.create(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", run))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsdr", "fedsdr-fedavg", "fedsdr-pfedme"])
def test_no_message_says_which_environment_a_site_has(method: str, tmp_path: Path) -> None:
    """Of a whole run, evaluations and counts for `split` included: all that goes to and comes from a site, losses
    and accuracies apart, is what goes to and comes from every other one, or has a number of its own that is drawn
    at random."""
    made = toy_config("references", rounds=1)
    LocalRuntime(made).run(RunFolder.create(tmp_path / "made", made))
    references = f"references='{tmp_path / 'made' / FILE}'"
    plain = messages_of(method, references, tmp_path=tmp_path)
    names = [[content[:2] for content in plain[client]] for client in CLIENTS]
    assert names[0] == names[2] != names[1] == names[3], "without masks it is told by the classifiers sent"
    masked = messages_of(method, references, "privacy.mechanism=secagg", tmp_path=tmp_path)
    assert {content[0] for content in masked[CLIENTS[0]]} == {"query", *ACTIONS, "train", "evaluate"}
    for client in CLIENTS:
        for one, other in zip(masked[client], masked[CLIENTS[0]], strict=True):
            assert one == other, client


def test_the_server_is_sent_masked_vectors_and_shares_alone() -> None:
    """No vector, and no sum of some of them, says anything: it is not even a possible update."""
    grid = Federation()
    after_a_round(strategy_for(config(), "run"), grid)
    vectors = {}
    for client, action, arrays in grid.seen:
        assert arrays.keys() == {{ADVERTISE: "keys", SHARE: SHARES, "train": MASKED, UNMASK: SHARES}[action]}
        if action == "train":
            vectors[client] = np.frombuffer(arrays[MASKED][MASKED].numpy().tobytes(), dtype=np.uint64)
    for some in (CLIENTS[:1], CLIENTS[:2], CLIENTS[1:]):
        total = sum((vectors[client] for client in some), start=np.zeros(2, dtype=np.uint64))
        with pytest.raises(ValueError, match="larger than"):
            dequantised(total, 100, BEFORE, 8.0)


def test_no_two_rounds_have_the_same_masks() -> None:
    strategy, grid = strategy_for(config(), "run"), Federation()
    for _ in range(2):
        after_a_round(strategy, grid)
    vectors = [bytes(arrays[MASKED][MASKED].tolist()) for _, action, arrays in grid.seen if action == "train"]
    assert len(set(vectors)) == 2 * len(CLIENTS)


# ---------------------------------------------------------------------- who drops out


@pytest.mark.parametrize("action", [ADVERTISE, SHARE, "train", UNMASK])
@pytest.mark.parametrize("who", CLIENTS)
def test_a_client_that_drops_out_does_no_harm(action: str, who: str) -> None:
    """Before its vector has arrived, the mean is of the others; after it, of all."""
    strategy = strategy_for(config(), "run")
    found = after_a_round(strategy, Federation(failing({who: action})))
    others = [client for client in CLIENTS if client != who]
    expected = mean(CLIENTS if action == UNMASK else others, COUNTS)
    assert found == pytest.approx(expected, abs=8 / STEPS / 2 + 2e-7)
    left_out = {name: why for exchange in strategy.exchanges for name, why in exchange.left_out.items()}
    assert left_out == {who: "failed: gone (RuntimeError)"}


def test_clients_may_drop_out_one_after_the_other_down_to_the_threshold() -> None:
    strategy = strategy_for(config("privacy.threshold=0.51", scenario={"name": "toy", "clients": 4}), "run")
    assert strategy.run.cohort == 4
    found = after_a_round(strategy, Federation(failing({CLIENTS[1]: UNMASK})))
    assert found == pytest.approx(mean(CLIENTS, COUNTS), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [(ADVERTISE, ADVERTISE), (ADVERTISE, SHARE), (SHARE, "train"), ("train", UNMASK), (UNMASK, UNMASK)],
)
def test_below_the_threshold_the_run_stops_with_a_sentence(first: str, second: str) -> None:
    """0.6 of 4 clients are 2.4, so 3."""
    strategy = strategy_for(config("privacy.colluders=0"), "run")
    grid = Federation(failing({CLIENTS[0]: first, CLIENTS[2]: second}))
    sentence = (
        rf"round 1: secure aggregation needs 3 clients to the end, and 2 gave a usable answer to '{second}' "
    )
    with pytest.raises(RunStopped, match=sentence + r"\(.*client-2: failed: gone \(RuntimeError\)"):
        after_a_round(strategy, grid)


def test_the_quorum_counts_where_it_is_more() -> None:
    strategy = strategy_for(config("quorum=1"), "run")
    with pytest.raises(RunStopped, match="needs 4 clients to the end"):
        after_a_round(strategy, Federation(failing({CLIENTS[0]: UNMASK})))


# ---------------------------------------------------------------------- who works together with the server


class Listening(Vault):
    """All that a client ever remembers, also what it forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, dict[str, Any]] = {}

    def write(self, place: str, values: Any) -> None:
        self.heard[place] = {**self.heard.get(place, {}), **values}
        super().write(place, values)


def views(grid: Federation, colluder: str, dropped: list[str]) -> dict[str, Words]:
    """What the server and one client can make of each other client's vector: it, less all masks that they know.

    The server knows the seeds of the survivors, and the masking keys of those who dropped out; the client its own.
    """
    arrived = {(client, action): arrays for client, action, arrays in grid.seen}
    survivors = [client for client in CLIENTS if (client, "train") in arrived]
    shares = [arrived[client, UNMASK][SHARES] for client in survivors]
    secret = {
        client: combine_shares([as_bytes(share[client]) for share in shares]) for client in [*survivors, *dropped]
    }
    public = {client: as_bytes(arrived[client, ADVERTISE][KEYS][client])[KEY_BYTES:] for client in CLIENTS[:3]}
    known = {client: secret[client] for client in dropped}
    known[colluder] = bytes.fromhex(grid.vault.heard[f"run/{colluder}"]["masking"])  # type: ignore[attr-defined]
    found = {}
    for client in survivors:
        vector = np.frombuffer(as_bytes(arrived[client, "train"][MASKED][MASKED]), dtype=np.uint64)
        vector = vector - mask(secret[client], len(vector))
        for other, key in known.items():
            if other != client:
                vector = vector - pair_mask(key, public[client], client, other, len(vector))
        found[client] = vector
    return {client: vector for client, vector in found.items() if client != colluder}


def three(colluders: int, fails: str = "") -> tuple[MethodStrategy[Any], Federation]:
    scenario = {"name": "toy", "clients": 3}
    run = config("privacy.threshold=0.6", f"privacy.colluders={colluders}", scenario=scenario)
    strategy = strategy_for(run, "run")
    grid = Federation(failing({fails: "train"} if fails else {}))
    grid.vault = Listening()
    return strategy, grid


def test_of_two_survivors_one_and_the_server_know_the_other_s_update() -> None:
    """The attack: three clients, a threshold of two, one of whom drops out; and `colluders` is 0."""
    strategy, grid = three(0, CLIENTS[2])
    after_a_round(strategy, grid)
    [vector] = views(grid, CLIENTS[0], CLIENTS[2:3]).values()
    update = dequantised(vector, COUNTS[CLIENTS[1]], {"w": torch.zeros(2)}, 8.0)["w"]
    assert torch.allclose(update, UPDATES[CLIENTS[1]], atol=1e-6)


def test_a_round_that_would_leave_one_honest_client_alone_is_not_made() -> None:
    """The same three, with `colluders` as it is by default: no share that takes off a mask is asked for."""
    assert config().privacy.colluders == 1  # type: ignore[attr-defined]
    strategy, grid = three(1, CLIENTS[2])
    with pytest.raises(RunStopped, match="secure aggregation needs 3 clients to the end, and 2 gave"):
        after_a_round(strategy, grid)
    assert UNMASK not in {action for _, action, _ in grid.seen}


def test_two_honest_survivors_hide_in_each_other_s_masks() -> None:
    """A client and the server are left with the honest ones' sum, and with vectors that say nothing."""
    strategy, grid = three(1)
    after_a_round(strategy, grid)
    honest = list(CLIENTS[1:3])
    vectors = views(grid, CLIENTS[0], [])
    assert list(vectors) == honest
    for one in vectors.values():
        with pytest.raises(ValueError, match="larger than"):
            dequantised(one, 100, BEFORE, 8.0)
    total = sum(vectors.values(), start=np.zeros(2, dtype=np.uint64))
    found = dequantised(total, sum(COUNTS[c] for c in honest), BEFORE, 8.0)["w"].tolist()
    assert found == pytest.approx(mean(honest, COUNTS), abs=1e-6)


def test_as_many_must_stay_as_the_colluders_ask_for() -> None:
    assert config("privacy.colluders=2").privacy.colluders == 2  # type: ignore[attr-defined]
    sentence = (
        "privacy.colluders: 3 is not possible with 4 clients a round, two of whom must be honest; at most 2 is"
    )
    with pytest.raises(UserError, match=sentence):
        config("privacy.colluders=3")


# ---------------------------------------------------------------------- who does not keep to it


@pytest.mark.parametrize("part", [slice(0, 64), slice(0, 32), slice(32, 64)])
def test_two_who_show_one_key_are_left_out_and_the_others_go_on(
    part: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    six = Toy(clients=6).client_ids
    monkeypatch.setattr(sys.modules[__name__], "CLIENTS", six)
    monkeypatch.setitem(globals(), "COUNTS", dict.fromkeys(six, 10))
    monkeypatch.setitem(globals(), "UPDATES", {c: torch.tensor([0.1 * i, 0.0]) for i, c in enumerate(six)})
    shown: dict[str, Tensor] = {}

    def spoil(client: str, action: str, arrays: dict[str, Tensors]) -> dict[str, Tensors]:
        if action == ADVERTISE and client in six[1:3]:
            key = shown.setdefault("key", arrays[KEYS][client][part].clone())
            arrays[KEYS][client][part] = key
        return arrays

    strategy = strategy_for(config(scenario={"name": "toy", "clients": 6}), "run")
    found = after_a_round(strategy, Federation(spoil))
    assert found == pytest.approx(mean([six[0], *six[3:]], COUNTS), abs=1e-6)
    assert strategy.exchanges[1].left_out == {
        one: f"shows a public key that {other} shows, too" for one, other in (six[1:3], six[2:0:-1])
    }


def test_a_vector_that_is_none_spoils_the_sum_and_that_is_seen() -> None:
    def spoil(client: str, action: str, arrays: dict[str, Tensors]) -> dict[str, Tensors]:
        if (client, action) == (CLIENTS[1], "train"):
            return {MASKED: {MASKED: torch.full_like(arrays[MASKED][MASKED], 7)}}
        return arrays

    with pytest.raises(RunStopped, match=r"the sum under secure aggregation cannot be used .* did not keep to"):
        after_a_round(strategy_for(config(), "run"), Federation(spoil))


@pytest.mark.parametrize(
    ("whose", "why"),
    [(CLIENTS[0], "did not keep to"), (CLIENTS[3], f"the shares of the key of {CLIENTS[3]} are wrong")],
)
def test_a_wrong_share_spoils_the_sum_and_that_is_seen(whose: str, why: str) -> None:
    """client-3 has dropped out, so the share of its key, which can be checked, is asked for."""

    def spoil(client: str, action: str, arrays: dict[str, Tensors]) -> dict[str, Tensors]:
        arrays = failing({CLIENTS[3]: "train"})(client, action, arrays)
        if (client, action) == (CLIENTS[1], UNMASK):
            changed = arrays[SHARES][whose] ^ torch.tensor([0] * 20 + [1] + [0] * 31, dtype=torch.uint8)
            return {SHARES: {**arrays[SHARES], whose: changed}}
        return arrays

    with pytest.raises(RunStopped, match=f"the sum under secure aggregation cannot be used.*{why}"):
        after_a_round(strategy_for(config(), "run"), Federation(spoil))


def test_an_answer_of_another_shape_is_left_out() -> None:
    def spoil(client: str, action: str, arrays: dict[str, Tensors]) -> dict[str, Tensors]:
        if (client, action) == (CLIENTS[1], "train"):
            return {MASKED: {MASKED: arrays[MASKED][MASKED][:-1]}}
        return arrays

    strategy = strategy_for(config(), "run")
    found = after_a_round(strategy, Federation(spoil))
    assert found == pytest.approx(mean([CLIENTS[0], *CLIENTS[2:]], COUNTS), abs=1e-6)


@pytest.mark.parametrize("half", [slice(0, 32), slice(32, 64)])
def test_a_client_with_keys_that_are_none_is_left_out(half: slice) -> None:
    """Otherwise all others would fail on them."""

    def spoil(client: str, action: str, arrays: dict[str, Tensors]) -> dict[str, Tensors]:
        if (client, action) == (CLIENTS[1], ADVERTISE):
            arrays[KEYS][client][half] = 0
        return arrays

    strategy = strategy_for(config(), "run")
    found = after_a_round(strategy, Federation(spoil))
    assert found == pytest.approx(mean([CLIENTS[0], *CLIENTS[2:]], COUNTS), abs=1e-6)
    assert strategy.exchanges[1].left_out == {CLIENTS[1]: "its public keys are none"}


def test_shares_that_cannot_be_opened_stop_the_run_and_name_their_sender() -> None:
    def spoil(client: str, action: str, arrays: dict[str, Tensors]) -> dict[str, Tensors]:
        if (client, action) == (CLIENTS[1], SHARE):
            return {SHARES: {other: torch.zeros_like(sealed) for other, sealed in arrays[SHARES].items()}}
        return arrays

    with pytest.raises(RunStopped, match="failed: the shares of client-1 cannot be opened"):
        after_a_round(strategy_for(config(), "run"), Federation(spoil))


def test_clients_whose_update_is_out_of_range_say_so(tmp_path: Path) -> None:
    run = config("privacy.range=1e-6", rounds=1)
    with pytest.raises(RunStopped, match=r"a parameter changed by .*, and privacy.range=1e-06 is the limit"):
        LocalRuntime(run).run(RunFolder.create(tmp_path / "run", run))


# ---------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "fedsr", "groupdro", "references"])
def test_the_wire_changes_nothing(method: str, tmp_path: Path) -> None:
    """Every message meets a new process; what lasts between stages lies in a file, which is gone in the end."""
    run = config(method=method, rounds=3, participation=0.75)
    LocalRuntime(run).run(RunFolder.create(tmp_path / "local", run))
    folder = RunFolder.create(tmp_path / "wire", run)
    run_rounds(run, folder, WireGrid(run, tmp_path / "sites"), start(run))
    assert RunFolder(tmp_path / "local").rows() == folder.rows()
    for path in (tmp_path / "local" / "models").iterdir():
        here, there = load_file(path), load_file(folder.path / "models" / path.name)
        assert all(torch.equal(here[name], there[name]) for name in here)
    assert not list((tmp_path / "sites").rglob("secagg.*"))


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    run = config(method="ditto", rounds=4)
    taken_up(run, tmp_path, 3)


def test_what_a_dropped_client_remembers_is_gone_with_the_next_evaluation(tmp_path: Path) -> None:
    run = config(rounds=2, evaluate_every=2)
    grid = WireGrid(run, tmp_path / "sites")
    left = list[list[str]]()

    def lose(request: Message, reply: Message) -> Message | None:
        kind, node = request.metadata.message_type, request.metadata.dst_node_id
        if kind == "evaluate" and node == 1:
            left.append([path.parts[-4] for path in (tmp_path / "sites").rglob("secagg.json")])
        return None if (kind, node) == ("train", 2) else reply

    run_rounds(run, RunFolder.create(tmp_path / "run", run), SpoilingGrid(grid, lose), start(run))
    assert not list((tmp_path / "sites").rglob("secagg.*"))
    assert left[0] == ["site-2"]


def test_two_clients_have_nothing_to_hide_in() -> None:
    with pytest.raises(
        UserError, match=r"'secagg' is not possible with 2 clients in a round; it takes at least 3"
    ):
        config(participation=0.5)
    assert load_config(options={"method": "fedavg", "privacy": {"mechanism": "secagg"}}).cohort == 8
