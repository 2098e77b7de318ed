"""CGPFL: invariants, a golden trace, and closed forms on quadratic risks."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from quadratic_clients import QuadraticRisk, Trace, run_quadratics, stacked
from tiny_runs import broken_off
from torch import Tensor

from perennial.client.methods.cgpfl import CGPFLClient
from perennial.client.methods.pfedme import PFedMeClient
from perennial.common.config import RunConfig
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import SpoilingGrid, toy_config


class Quadratic(QuadraticRisk, CGPFLClient):
    pass


class QuadraticPFedMe(QuadraticRisk, PFedMeClient):
    pass


def exact(proximity: float, gamma: float, iterations: int) -> tuple[str, ...]:
    """Settings with which one step of size 1/(1 + λ) solves the inner problem, and ω̃ moves by γ."""
    return (
        f"proximity={proximity}",
        f"personal_learning_rate={1 / (1 + proximity)!r}",
        "personal_steps=1",
        f"learning_rate={gamma / proximity!r}",
        f"local_steps={iterations}",
    )


def planted(groups: int, each: int, within: float = 0.5, d: int = 3, seed: int = 0) -> Tensor:
    """Centres in groups that lie s.d. 5 apart."""
    generator = torch.Generator().manual_seed(seed)
    middles = 5 * torch.randn(groups, d, generator=generator, dtype=torch.float64)
    return middles.repeat_interleave(each, dim=0) + within * torch.randn(
        groups * each, d, generator=generator, dtype=torch.float64
    )


def run(path: Path, centres: Any, *settings: str, rounds: int, **how: Any) -> Trace:
    return run_quadratics(Quadratic, path, "cgpfl", centres, *settings, rounds=rounds, **how)


def run_toy(config: RunConfig, path: Path) -> tuple[LocalRuntime, Tensors]:
    """The runtime with what its clients keep, and the final global arrays."""
    here = LocalRuntime(config)
    here.run(RunFolder.create(path, config))
    return here, RunFolder(path).load_checkpoint().arrays


def personal(here: LocalRuntime) -> dict[str, Tensors]:
    return {place.split("/")[1]: versions[-1].kept[PERSONAL] for place, versions in here.states.items()}


def groups_of(labels: dict[str, int]) -> set[frozenset[str]]:
    return {frozenset(c for c in labels if labels[c] == k) for k in labels.values()}


# ---------------------------------------------------------------------- golden trace

CORNERS = [[0, 0], [0, 2], [10, 0], [10, 2]]
UPLOADS = [
    [(0, 0), (0, 0.5), (2.5, 0), (2.5, 0.5)],
    [(0, 0.1875), (0, 0.6875), (4.375, 0.1875), (4.375, 0.6875)],
    [(0, 0.328125), (0, 0.828125), (5.78125, 0.328125), (5.78125, 0.828125)],
]
CONTEXTS = [[(0, 0.25), (2.5, 0.25)], [(0, 0.4375), (4.375, 0.4375)], [(0, 0.578125), (5.78125, 0.578125)]]
PERSONAL_MODELS = [
    [(0, 0), (0, 1), (5, 0), (5, 1)],
    [(0, 0.125), (0, 1.125), (6.25, 0.125), (6.25, 1.125)],
    [(0, 0.21875), (0, 1.21875), (7.1875, 0.21875), (7.1875, 1.21875)],
]


def test_the_golden_trace(tmp_path: Path) -> None:
    trace = run(tmp_path / "run", CORNERS, *exact(1, 0.5, 1), "contexts=2", rounds=4)
    for t in range(3):
        assert [tuple(row) for row in stacked(trace.uploaded[t]).tolist()] == UPLOADS[t]
        assert [tuple(row) for row in stacked(trace.personal[t]).tolist()] == PERSONAL_MODELS[t]
        low, high = CONTEXTS[t]
        assert [tuple(row) for row in stacked(trace.sent[t + 1]).tolist()] == [low, low, high, high]
        assert groups_of(trace.labels[t]) == {
            frozenset({"client-0", "client-1"}),
            frozenset({"client-2", "client-3"}),
        }
    assert len({tuple(labels.items()) for labels in trace.labels}) == 1  # the clusters keep their numbers


@pytest.mark.slow
def test_the_golden_trace_settles_at_the_groups_means(tmp_path: Path) -> None:
    trace = run(tmp_path / "run", CORNERS, *exact(1, 0.5, 1), "contexts=2", rounds=50)
    expected = torch.tensor([[0, 1], [0, 1], [10, 1], [10, 1]], dtype=torch.float64)
    torch.testing.assert_close(stacked(trace.sent[-1]), expected, rtol=0, atol=2e-5)
    expected = torch.tensor([[0, 0.5], [0, 1.5], [10, 0.5], [10, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(stacked(trace.personal[-1]), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", ["cgpfl", "pfedme"])
def test_the_golden_trace_of_one_context(method: str, tmp_path: Path) -> None:
    half, settings = (Quadratic, ("contexts=1",)) if method == "cgpfl" else (QuadraticPFedMe, ())
    trace = run_quadratics(half, tmp_path / "run", method, CORNERS, *exact(1, 0.5, 1), *settings, rounds=4)
    for t, omega in enumerate([(1.25, 0.25), (2.1875, 0.4375), (2.890625, 0.578125)]):
        assert {tuple(row) for row in stacked(trace.sent[t + 1]).tolist()} == {omega}


# ---------------------------------------------------------------------- one context is pFedMe


@pytest.mark.slow
def test_one_context_is_pfedme_in_float64(tmp_path: Path) -> None:
    settings = ("proximity=3", "mixing=0.7", "participation=0.6", "weight_decay=0.01")
    centres = planted(2, 3)
    one = run(tmp_path / "one", centres, *settings, "contexts=1", rounds=8)
    other = run_quadratics(QuadraticPFedMe, tmp_path / "other", "pfedme", centres, *settings, rounds=8)
    for found, expected in zip(
        one.sent + one.uploaded + one.personal, other.sent + other.uploaded + other.personal, strict=True
    ):
        assert found.keys() == expected.keys()
        assert all((found[client] - expected[client]).abs().max() <= 1e-12 for client in found)
    assert all(set(labels.values()) == {0} for labels in one.labels)


@pytest.mark.slow
def test_one_context_is_pfedme_on_a_network(tmp_path: Path) -> None:
    settings = ("mixing=0.5", "participation=0.5", "rounds=6")
    here, arrays = run_toy(toy_config("cgpfl", "contexts=1", *settings), tmp_path / "one")
    there, expected = run_toy(toy_config("pfedme", *settings), tmp_path / "other")
    for client, tensors in {"": arrays, **personal(here)}.items():
        like = expected if not client else personal(there)[client]
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, like[name], rtol=1e-5, atol=1e-5)
    losses = [
        [row["metrics"]["risk"] for row in RunFolder(tmp_path / place).rows() if row["kind"] == "round"]
        for place in ("one", "other")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---------------------------------------------------------------------- the server's part, computed again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        (("contexts=3", "mixing=0.6"), 5),
        (("contexts=3", "mixing=0.6", "participation=0.5"), 12),
        (("contexts=4", "participation=0.3"), 12),  # at first fewer uploads than contexts
        (("contexts=6", "participation=0.7"), 4),
    ],
)
def test_every_client_receives_its_contexts_model(settings: tuple[str, ...], rounds: int, tmp_path: Path) -> None:
    """From uploads and logged labels alone: the mean of fresh members, mixed; the mean of Ω for new clients."""
    start = [1.0, 2.0, 3.0]
    trace = run(tmp_path / "run", planted(3, 2), *settings, rounds=rounds, start=start)
    alpha = next((float(s.partition("=")[2]) for s in settings if s.startswith("mixing")), 1.0)
    contexts: dict[int, Tensor] = {}
    known: dict[str, int] = {}
    seen: set[str] = set()
    shared = torch.tensor(start, dtype=torch.float64)
    first = shared
    for t in range(rounds):
        for client, omega in trace.sent[t].items():
            expected = contexts.get(known[client], first) if client in known else shared
            torch.testing.assert_close(omega, expected)
        seen |= trace.uploaded[t].keys()
        known = trace.labels[t]
        assert known.keys() == seen
        assert len(set(known.values())) == min(trace.config.method.contexts, len(seen))  # type: ignore[attr-defined]
        for k in set(known.values()):
            fresh = [upload for client, upload in trace.uploaded[t].items() if known[client] == k]
            if fresh:
                contexts[k] = (1 - alpha) * contexts.get(k, first) + alpha * sum(fresh) / len(fresh)
        shared = sum(contexts.get(k, first) for k in known.values()) / len(known)


def test_two_clients_by_hand(tmp_path: Path) -> None:
    """c = 0, 8; K = 2, λ = 1, γ = ½, α = ½, from ω = 2: θ = 1, 5; ω̃ = 1.5, 3.5; ω = 1.75, 2.75.

    Then θ = 0.875, 5.375; ω̃ = 1.3125, 4.0625; ω = 1.53125, 3.40625.
    """
    trace = run(tmp_path / "run", [[0], [8]], *exact(1, 0.5, 1), "contexts=2", "mixing=0.5", rounds=3, start=[2.0])
    assert [stacked(part).flatten().tolist() for part in trace.personal[:2]] == [[1, 5], [0.875, 5.375]]
    assert [stacked(part).flatten().tolist() for part in trace.uploaded[:2]] == [[1.5, 3.5], [1.3125, 4.0625]]
    sent = [stacked(part).flatten().tolist() for part in trace.sent]
    assert sent == [[2, 2], [1.75, 2.75], [1.53125, 3.40625]]


def test_without_mixing_no_model_at_the_server_changes(tmp_path: Path) -> None:
    trace = run(tmp_path / "run", planted(2, 2), "contexts=2", "mixing=0", rounds=4, start=[1.0, 2.0, 3.0])
    assert all(omega.tolist() == [1, 2, 3] for part in trace.sent for omega in part.values())


def test_a_bad_client_keeps_its_place_and_its_upload_is_not_averaged(tmp_path: Path) -> None:
    def spoil(number: int, request: Message, reply: Message) -> Message:
        if number == 1 or request.metadata.dst_node_id != 4:
            return reply
        content = RecordDict(dict(reply.content))
        bad = {name: Array(torch.full(array.shape, float("nan"), dtype=torch.float64))
               for name, array in reply.content.array_records[MODEL].items()}  # fmt: skip
        content[MODEL] = ArrayRecord(bad)
        return Message(content, reply_to=request)

    settings = (*exact(1, 0.5, 1), "contexts=2")
    trace = run(tmp_path / "run", CORNERS, *settings, rounds=4, start=[5.0, 1.0], spoil=spoil)
    assert all(labels == trace.labels[0] for labels in trace.labels)
    left_out = [row["left_out"].keys() for row in trace.rows("round")]
    assert left_out == [set(), {"client-3"}, {"client-3"}, {"client-3"}]
    for t in (1, 2):
        assert torch.equal(trace.sent[t + 1]["client-2"], trace.uploaded[t]["client-2"])  # alone in the mean
        assert torch.equal(trace.sent[t + 1]["client-3"], trace.sent[t + 1]["client-2"])


# ---------------------------------------------------------------------- decoupling


def test_without_proximity_a_personal_model_is_local_training(tmp_path: Path) -> None:
    """Bit for bit, with one step per mini-batch; nothing is uploaded but what came."""
    here, arrays = run_toy(toy_config("cgpfl", "proximity=0", "personal_steps=1"), tmp_path / "one")
    there, untouched = run_toy(toy_config("local", "learning_rate=0.02", "batch_size=20"), tmp_path / "other")
    assert personal(here).keys() == personal(there).keys()
    for client, tensors in personal(here).items():
        assert all(torch.equal(tensor, personal(there)[client][name]) for name, tensor in tensors.items())
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in arrays.items())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("proximity=0", "contexts=2"), ("contexts=3",)])
def test_clients_that_do_not_meet_do_not_matter(settings: tuple[str, ...], tmp_path: Path) -> None:
    """λ = 0, and as many contexts as clients: the first client's models are the same beside other clients."""
    one = run(tmp_path / "one", [[1, 2], [4, 0], [-3, 7]], *settings, rounds=6)
    other = run(tmp_path / "other", [[1, 2], [9, 9], [0, -5]], *settings, rounds=6)
    for mine, theirs in zip(one.personal + one.sent, other.personal + other.sent, strict=True):
        assert torch.equal(mine["client-0"], theirs["client-0"])


@pytest.mark.slow
def test_with_a_context_for_each_client_all_end_at_their_own_minimum(tmp_path: Path) -> None:
    centres = planted(3, 1)
    trace = run(tmp_path / "run", centres, *exact(1, 0.5, 10), "contexts=3", rounds=30)
    torch.testing.assert_close(stacked(trace.personal[-1]), centres, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- clients in another order


@pytest.mark.slow
def test_permuted_clients_permute_personal_models_and_labels(tmp_path: Path) -> None:
    centres, order = planted(3, 2), [4, 2, 0, 5, 1, 3]
    one = run(tmp_path / "one", centres, "contexts=3", rounds=4)
    other = run(tmp_path / "other", centres[order], "contexts=3", rounds=4)
    for t in range(4):
        torch.testing.assert_close(stacked(one.personal[t])[order], stacked(other.personal[t]))
        torch.testing.assert_close(stacked(one.sent[t])[order], stacked(other.sent[t]))
        renamed = {f"client-{place}": one.labels[t][f"client-{client}"] for place, client in enumerate(order)}
        assert groups_of(renamed) == groups_of(other.labels[t])


@pytest.mark.slow
def test_planted_contexts_are_found_and_their_number_stays(tmp_path: Path) -> None:
    trace = run(tmp_path / "run", planted(4, 3), "contexts=4", "mixing=0.5", rounds=6)
    expected = {frozenset(f"client-{3 * k + i:02d}" for i in range(3)) for k in range(4)}
    assert all(groups_of(labels) == expected for labels in trace.labels)
    assert all(labels == trace.labels[0] for labels in trace.labels)


@pytest.mark.slow
def test_personal_models_come_near_their_contexts_up_to_the_true_number_of_contexts(tmp_path: Path) -> None:
    """What more contexts are good for: a sharp fall of ‖θ − ω‖² up to 4, then little."""
    centres, distance = planted(4, 2, d=10), {}
    for contexts in (1, 2, 4, 8):
        settings = (*exact(2, 0.5, 1), f"contexts={contexts}")
        trace = run(tmp_path / str(contexts), centres, *settings, rounds=30)
        away = stacked(trace.personal[-1]) - stacked(trace.sent[-1])
        distance[contexts] = float(away.square().sum(dim=1).mean())
    assert distance[1] > distance[2] > 20 * distance[4]
    assert distance[4] < 0.3


# ---------------------------------------------------------------------- a client's round


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0])
def test_the_copy_moves_along_the_segment_to_the_personal_model(gamma: float, tmp_path: Path) -> None:
    trace = run(tmp_path / "run", planted(2, 2), *exact(2, gamma, 1), "contexts=2", rounds=3)
    for sent, uploaded, theta in zip(trace.sent, trace.uploaded, trace.personal, strict=True):
        expected = (1 - gamma) * stacked(sent) + gamma * stacked(theta)
        torch.testing.assert_close(stacked(uploaded), expected, rtol=0, atol=1e-14)


def test_a_copy_that_does_not_move_is_sent_back_as_it_came(tmp_path: Path) -> None:
    """γ = 0, on a network in float32: the upload is the download, bit for bit, while θ moves."""
    config = toy_config("cgpfl", "proximity=0", "rounds=2")
    here = LocalRuntime(config)
    pairs = []

    def watch(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            pairs.append(
                [from_record(content.array_records[MODEL]) for content in (request.content, reply.content)]
            )
        return reply

    here.grid = SpoilingGrid(here.grid, watch)  # type: ignore[assignment]
    here.run(RunFolder.create(tmp_path / "run", config))
    assert len(pairs) == 8
    assert all(torch.equal(sent[name], back[name]) for sent, back in pairs for name in sent)
    assert not any(torch.equal(t, pairs[0][0][n]) for p in personal(here).values() for n, t in p.items())


# ---------------------------------------------------------------------- closed forms

KAPPA = 1 / 13  # μ_c/(μ_c + λ) with μ_c = 1, λ = 12
GROUP = [[0.0, 0.0], [2.0, 0.0], [0.0, 3.0], [6.0, 5.0]]
MEAN = [2.0, 2.0]


def test_a_contexts_error_contracts_as_it_should(tmp_path: Path) -> None:
    """By ρ = 1 − α (1 − (1 − γκ)^R) in each round."""
    for alpha in (1.0, 0.5):
        trace = run(tmp_path / str(alpha), GROUP, *exact(12, 0.05, 10), "contexts=1", f"mixing={alpha}", rounds=8)
        errors = [float((part["client-0"] - torch.tensor(MEAN)).norm()) for part in trace.sent]
        rho = 1 - alpha * (1 - (1 - 0.05 * KAPPA) ** 10)
        for before, after in pairwise(errors):
            assert after / before == pytest.approx(rho, abs=1e-10)
    assert abs((1 - 0.05 * KAPPA) ** 10 - 0.96219736) < 1e-8


@pytest.mark.parametrize("iterations", [1, 10])
def test_at_the_fixed_point_a_personal_model_is_off_by_a_known_factor(iterations: int, tmp_path: Path) -> None:
    """ω = c̄ stays, and θ_i − ω = (κ + (1 − κ)(1 − (1 − γκ)^{R−1})) (c_i − c̄)."""
    settings = ("contexts=1", *exact(12, 0.05, iterations))
    trace = run(tmp_path / "run", GROUP, *settings, rounds=3, start=MEAN)
    torch.testing.assert_close(stacked(trace.sent[-1]), torch.tensor([MEAN] * 4).double(), rtol=0, atol=1e-10)
    factor = KAPPA + (1 - KAPPA) * (1 - (1 - 0.05 * KAPPA) ** (iterations - 1))
    away = torch.tensor(GROUP).double() - torch.tensor(MEAN)
    torch.testing.assert_close(stacked(trace.personal[-1]) - torch.tensor(MEAN), factor * away, rtol=0, atol=1e-10)
    if iterations == 10:
        assert (factor / KAPPA) ** 2 == pytest.approx(1.986, abs=1e-3)


def test_the_bound_on_the_risk_of_a_contexts_model_is_tight(tmp_path: Path) -> None:
    """Thesis (3.26): `R(ω) − R(θ) = (λ + L/2) ‖θ − ω‖²` for a quadratic with L = 1."""
    centres = planted(2, 2)
    trace = run(tmp_path / "run", centres, *exact(12, 0.05, 1), "contexts=2", rounds=3)
    for sent, theta in zip(trace.sent, trace.personal, strict=True):
        omega, own = stacked(sent), stacked(theta)
        gap = ((omega - centres).square() - (own - centres).square()).sum(dim=1) / 2
        torch.testing.assert_close(gap, 12.5 * (own - omega).square().sum(dim=1), rtol=1e-10, atol=0)


# ---------------------------------------------------------------------- wire and state


def test_each_client_is_sent_one_model_and_never_sends_its_personal_one(tmp_path: Path) -> None:
    config = toy_config("cgpfl", "contexts=2", "rounds=3")
    here = LocalRuntime(config)
    travelled: list[Tensor] = []
    kept: list[Tensor] = []

    def watch(request: Message, reply: Message) -> Message:
        for content in (request.content, reply.content):
            assert content.array_records.keys() <= {MODEL}
            travelled.extend(t for record in content.array_records.values() for t in from_record(record).values())
        kept.extend(tensor for tensors in personal(here).values() for tensor in tensors.values())
        return reply

    here.grid = SpoilingGrid(here.grid, watch)  # type: ignore[assignment]
    here.run(RunFolder.create(tmp_path / "run", config))
    assert kept
    assert not any(torch.equal(own, t) for own in kept for t in travelled if t.shape == own.shape)
    d = sum(tensor.numel() for tensor in RunFolder(tmp_path / "run").load_checkpoint().arrays.values())
    rows = [row for row in RunFolder(tmp_path / "run").rows() if row["kind"] == "round"]
    assert [row["bytes_down"] + row["bytes_up"] for row in rows] == [2 * 4 * d * 4] * 3


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("participation=0.5",)])
def test_a_resumed_run_has_contexts_membership_and_uploads(settings: tuple[str, ...], tmp_path: Path) -> None:
    """With mixing below 1, so that Ω matters, and stopped while some clients are known by an old upload."""
    config = toy_config("cgpfl", "contexts=2", "mixing=0.5", "rounds=7", *settings)
    run_toy(config, tmp_path / "unbroken")
    broken, origin = broken_off(config, tmp_path / "broken", 5)
    assert origin.round == 4
    contexts = [name for name in origin.strategy if name.startswith("context-")]
    uploads = {name.removeprefix("upload-") for name in origin.strategy if name.startswith("upload-")}
    assert len(contexts) == 2
    assert origin.strategy["membership"].keys() == uploads
    assert all(t.dtype == torch.float32 for name in contexts for t in origin.strategy[name].values())
    LocalRuntime(config).run(broken, origin)
    one, other = (RunFolder(tmp_path / place).load_checkpoint() for place in ("unbroken", "broken"))
    assert one.strategy.keys() == other.strategy.keys()
    for record, tensors in one.strategy.items():
        assert all(torch.equal(tensor, other.strategy[record][name]) for name, tensor in tensors.items())
    assert RunFolder(tmp_path / "unbroken").rows() == broken.rows()


def test_membership_is_logged_in_every_round(tmp_path: Path) -> None:
    run_toy(toy_config("cgpfl", "contexts=2", "rounds=3"), tmp_path / "run")
    rows = [row for row in RunFolder(tmp_path / "run").rows() if row["kind"] == "clusters"]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(row["labels"].keys() == {f"client-{i}" for i in range(4)} for row in rows)
    assert all(Counter(row["labels"].values()).keys() == {0, 1} for row in rows)


# ---------------------------------------------------------------------- bad input


@pytest.mark.slow
@pytest.mark.parametrize("value", [1e4, 1e9])
def test_one_upload_far_away_leaves_the_others_their_contexts(value: float, tmp_path: Path) -> None:
    """A client that sends it once and is never heard of again has one of four contexts, and the others three."""
    config = toy_config("cgpfl", "contexts=4", rounds=3, scenario={"name": "toy", "clients": 8})
    here = LocalRuntime(config)

    def spoil(request: Message, reply: Message) -> Message | None:
        if request.metadata.dst_node_id != 1 or request.metadata.message_type != "train":
            return reply
        if request.metadata.group_id != "1":
            return None
        upload = from_record(reply.content.array_records[MODEL])
        reply.content[MODEL] = to_record({name: torch.full_like(t, value) for name, t in upload.items()})
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    here.run(folder := RunFolder.create(tmp_path / "run", config))
    for row in folder.rows():
        if row["kind"] == "clusters":
            far = row["labels"].pop("client-0")
            assert len(set(row["labels"].values())) == 3
            assert far not in row["labels"].values()
    models = [folder.load_checkpoint().strategy[f"context-{number}"] for number in range(4)]
    assert sum(max(float(t.abs().max()) for t in model.values()) < 10 for model in models) == 3


def test_more_contexts_than_clients_are_refused() -> None:
    with pytest.raises(UserError, match=r"method\.contexts: 5 is more than the scenario's 4 clients; take 1 to 4"):
        toy_config("cgpfl", "contexts=5")
    with pytest.raises(UserError, match=r"personal_learning_rate: 0\.02 is too large"):
        toy_config("cgpfl", "proximity=125")


@pytest.mark.parametrize("setting", ["contexts=0", "mixing=1.5", "personal_steps=0", "proximity=-1"])
def test_values_out_of_bounds_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"method.{setting.partition('=')[0]}"):
        toy_config("cgpfl", setting)
