"""Robust rules: equal to ByzFL's, in every mean of every method, in bounded memory, checked before use."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byzantine_clients import ATTACKS, attack, wrong
from flwr.app import Message
from tiny_runs import taken_up
from torch import Tensor

from perennial.common.aggregation import Aggregation
from perennial.common.config import load_config
from perennial.common.methods import METHODS
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies import registry, robust
from perennial.strategies.base import MethodStrategy
from perennial.strategies.mean import StreamingMean
from perennial.strategies.registry import strategy_for
from perennial.strategies.robust import RobustMean
from perennial.testing.tiny_federation import SpoilingGrid, toy_config

RULES = ("median", "trimmed-mean", "multi-krum", "geometric-median", "centred-clipping")
UNFIT = {"f-fl-games", "v-fl-games", "fedpac", "local", "geometric", "fishr-inter-geo"}
"""Methods whose server takes no means, or more than means."""


def drawn(clients: int, seed: int = 0, size: int = 40) -> Tensor:
    """Vectors around a common place; the first ones further away."""
    generator = torch.Generator().manual_seed(seed)
    found = 3 + torch.randn(clients, size, generator=generator, dtype=torch.float64)
    found[:2] += torch.tensor([[8.0], [-5.0]], dtype=torch.float64)
    return found


def ruled(vectors: Tensor, start: Tensor | None = None, order: Any = torch.arange, **settings: Any) -> Tensor:
    """What a rule makes of vectors that come as two records' worth of tensors."""
    rule = Aggregation(**{"hostile": 2, **settings})

    def cut(vector: Tensor) -> Tensors:
        return {"a": vector[:24].reshape(4, 6), "b": vector[24:]}

    mean = RobustMean(rule, None if start is None else cut(start), order)
    for vector in vectors:
        mean.add(cut(vector))
    found = mean.result()
    return torch.cat([found["a"].flatten(), found["b"]])


# ---------------------------------------------------------------------- the rules


def of_byzfl(rule: str, vectors: np.ndarray, start: np.ndarray, hostile: int) -> np.ndarray:
    import byzfl

    made: dict[str, Any] = {
        "median": byzfl.Median(),
        "trimmed-mean": byzfl.TrMean(hostile),
        "multi-krum": byzfl.MultiKrum(hostile),
        "geometric-median": byzfl.GeometricMedian(nu=0.5, T=7),
        "centred-clipping": byzfl.CenteredClipping(L=7, tau=4.0),
    }
    # The last two start from 0: there, all is seen from the start.
    return made[rule](vectors - start) + start  # type: ignore[no-any-return]


@pytest.mark.parametrize("before", ["nothing", "nearest-neighbours", "bucketing"])
@pytest.mark.parametrize("clients", [11, 14])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_byzfls(rule: str, clients: int, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import byzfl

    hostile = 1 if before == "bucketing" else 2
    vectors, start = drawn(clients), torch.full((40,), 2.5, dtype=torch.float64)
    permutation = torch.randperm(clients, generator=torch.Generator().manual_seed(4))
    settings = {"rule": rule, "before": before, "hostile": hostile, "bucket": 2}
    steps = {"iterations": 7, "smoothing": 0.5, "radius": 4.0}
    found = ruled(vectors, start, lambda _: permutation, **settings, **steps)
    seen = vectors.numpy()
    if before == "nearest-neighbours":
        seen = byzfl.NNM(hostile)(seen)
    if before == "bucketing":
        monkeypatch.setattr(np.random, "permutation", lambda rows: rows[permutation.numpy()])
        seen = byzfl.Bucketing(2)(seen)
    np.testing.assert_allclose(found.numpy(), of_byzfl(rule, seen, start.numpy(), hostile), atol=1e-6)


def test_multi_krum_sums_over_as_many_neighbours_as_there_are_honest_others() -> None:
    """By hand: of seven numbers, two hostile, the sums over four neighbours are 105, 76, 57, 70, 65, 116, 153.

    Over three, 6 would be left out and 11 kept; over five, 0 would be left out and 11 kept.
    """
    mean = RobustMean(Aggregation(rule="multi-krum", hostile=2))
    for number in (0.0, 1.0, 2.0, 6.0, 8.0, 11.0, 12.0):
        mean.add({"w": torch.tensor([number])})
    assert mean.result()["w"].item() == pytest.approx((0 + 1 + 2 + 6 + 8) / 5)


@pytest.mark.parametrize("rule", RULES)
def test_chunks_on_a_disk_change_nothing(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = drawn(9)
    whole = ruled(vectors, rule=rule, before="nearest-neighbours")
    monkeypatch.setattr(robust, "CHUNK", 30)  # three coordinates of ten vectors
    monkeypatch.setattr(robust, "SPILL", 100)
    widths, chunks = [], RobustMean._chunks

    def watched(self: RobustMean, size: int) -> Any:
        for chunk in chunks(self, size):
            widths.append(chunk.numel())
            yield chunk

    monkeypatch.setattr(RobustMean, "_chunks", watched)
    assert torch.allclose(ruled(vectors, rule=rule, before="nearest-neighbours"), whole, atol=1e-12)
    assert max(widths) <= 30


def test_vectors_beyond_the_limit_lie_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "SPILL", 100)
    mean = RobustMean(Aggregation(rule="median"))
    mean.add({"w": torch.zeros(10)})
    assert not mean._file._rolled  # type: ignore[attr-defined]
    for _ in range(3):
        mean.add({"w": torch.zeros(10)})
    assert mean._file._rolled  # type: ignore[attr-defined]
    assert mean.result()["w"].tolist() == [0] * 10


@pytest.mark.parametrize("rule", RULES)
def test_types_come_out_as_they_went_in_and_integers_rounded(rule: str) -> None:
    mean = RobustMean(Aggregation(rule=rule, hostile=1))
    for number in range(5):
        mean.add({"n": torch.tensor([2**40, 7 + number % 2]), "h": torch.tensor(1.5).half(), "w": torch.ones(2)})
    found = mean.result()
    assert list(found) == ["n", "h", "w"]
    assert found["n"].dtype == torch.int64
    assert found["n"][0].item() == 2**40 or rule == "centred-clipping"  # which goes there from 0
    assert (found["h"].dtype, found["w"].dtype) == (torch.float16, torch.float32)


def test_integers_are_no_part_of_a_distance() -> None:
    """Clients with more batches in an epoch count more of them, which is no attack."""
    mean = RobustMean(Aggregation(rule="multi-krum", hostile=1))
    for number, value in enumerate([0.0, 0.1, 0.2, 0.1, 50.0]):
        mean.add({"counter": torch.tensor(10**6 * (number == 1)), "w": torch.tensor([value])})
    assert mean.result()["w"].item() == pytest.approx(0.1)


def test_without_a_radius_clipping_takes_the_median_distance() -> None:
    vectors = torch.zeros(5, 40, dtype=torch.float64)
    vectors[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 1e6])
    found = ruled(vectors, rule="centred-clipping", iterations=1)
    assert found[0].item() == pytest.approx((1 + 2 + 3 + 3 + 3) / 5)


def test_a_client_counts_once_whatever_it_says_of_its_samples() -> None:
    mean = RobustMean(Aggregation(rule="trimmed-mean", hostile=0))
    for value, weight in ((1.0, 1.0), (2.0, 1e6)):
        mean.add({"w": torch.tensor([value])}, weight)
    assert mean.result()["w"].item() == 1.5


def test_a_full_temporary_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(robust, "SpooledTemporaryFile", lambda **_: full)
        mean = RobustMean(Aggregation(rule="median"))
        with pytest.raises(OSError, match=f"No space left on device: '{tempfile.gettempdir()}'"):
            mean.add({"w": torch.ones(3)})


def test_the_mean_of_nothing_is_none() -> None:
    with pytest.raises(ValueError, match="the mean of nothing"):
        RobustMean(Aggregation(rule="median")).result()


# ---------------------------------------------------------------------- before anything is sent


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        ("fedavg", ["aggregation=avg"], "aggregation.rule: 'avg' is not possible"),
        ("fedavg", ["aggregation.radiu=1"], "aggregation.radiu: there is no such setting; did you mean 'radius'"),
        (
            "fedavg",
            ["aggregation=median", "aggregation.hostile=2"],
            "hostile: 2 is not possible with rule 'median' and 4 clients a round, of whom it withstands 1; take",
        ),
        ("fedavg", ["aggregation=multi-krum"], "of whom it withstands none; take hostile=0 or more clients"),
        (
            "fedavg",
            ["aggregation=median", "aggregation.before=bucketing"],
            "rule 'median' after bucketing by 2 and 4 clients a round, of whom it withstands none",
        ),
        ("fedavg", ["aggregation.before=bucketing"], "'bucketing' is not possible with rule 'mean'"),
        (
            "local",
            ["aggregation=median"],
            "'median' is not possible with method 'local', whose server takes no mean",
        ),
        (
            "fedavg",
            ["aggregation=median", "privacy.mechanism=secagg"],
            "rule: 'median' is not possible with privacy.mechanism='secagg', under which the server sees",
        ),
        (
            "fedavg",
            ["aggregation=median", "privacy.mechanism=fixed"],
            "rule: 'median' is not possible with privacy.mechanism='fixed', whose noise is for a mean",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(method: str, settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        toy_config(method, *settings)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "before", "clients", "borne"),
    [
        ("mean", "nothing", 9, 0),
        ("median", "nothing", 8, 3),
        ("median", "nothing", 9, 4),
        ("trimmed-mean", "nearest-neighbours", 9, 4),
        ("multi-krum", "nothing", 8, 2),
        ("multi-krum", "nothing", 9, 3),
        ("geometric-median", "bucketing", 9, 2),
        ("centred-clipping", "bucketing", 2, 0),
    ],
)
def test_how_many_a_rule_bears(rule: Any, before: Any, clients: int, borne: int) -> None:
    assert Aggregation(rule=rule, before=before).borne(clients) == borne


def test_a_word_a_table_and_a_setting_mean_the_same(tmp_path: Path) -> None:
    word, table = tmp_path / "word.toml", tmp_path / "table.toml"
    word.write_text('aggregation = "median"\n')
    table.write_text('[aggregation]\nrule = "median"\nhostile = 1\n')
    given = {"method": "fedavg", "scenario": {"name": "toy"}}
    assert (
        load_config(word, given) == load_config(table, given) == load_config(None, given, ["aggregation=median"])
    )
    path = tmp_path / "whole.toml"
    path.write_text(load_config(word, given).toml())
    assert load_config(path) == load_config(word, given)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_goes_with_a_rule_or_says_why_not(method: str) -> None:
    if method in UNFIT:
        with pytest.raises(UserError, match=f"with method '{method}', whose (server|ensemble)"):
            toy_config(method, "aggregation=median")
    else:
        assert isinstance(strategy_for(toy_config(method, "aggregation=median"), "run").mean(), RobustMean)


def test_with_the_mean_a_method_takes_the_mean() -> None:
    assert type(strategy_for(toy_config("fedavg"), "run").mean()) is StreamingMean


class Own(MethodStrategy[Any]):
    """A server half with means of its own."""

    def combined(self, server_round: int, replies: Any) -> Any:
        return {}


class Told(Own):
    robust = True

    def combined(self, server_round: int, replies: Any) -> Any:
        return {}


def test_a_server_half_that_does_not_say_how_it_takes_means_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = toy_config("fedavg", "aggregation=median")
    monkeypatch.setattr(registry, "strategy_class", lambda *_: Own)
    with pytest.raises(UserError, match="whose server half has its own combined and does not say `robust`"):
        strategy_for(run, "run")
    monkeypatch.setattr(registry, "strategy_class", lambda *_: Told)
    assert isinstance(strategy_for(run, "run"), Told)
    monkeypatch.setattr(registry, "strategy_class", lambda *_: type("Heir", (Told,), {"combined": Own.combined}))
    with pytest.raises(UserError, match="does not say `robust`"):
        strategy_for(run, "run")


# ---------------------------------------------------------------------- whole runs


def largest(tmp_path: Path, method: str, *settings: str, value: float = 0.0) -> float:
    """The largest number that the server has after a round of eight clients, the first of whom goes a million
    times as far as it has come, or sends nothing but `value`."""
    run = toy_config(method, *settings, "seed=1", scenario={"name": "toy", "clients": 8}, rounds=1)
    here = LocalRuntime(run)

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 1 and request.metadata.message_type.startswith("train"):
            start = {name: from_record(record) for name, record in request.content.array_records.items()}
            for name, record in reply.content.array_records.items():
                if name != "group":  # a risk, of which no mean is taken
                    own, sent = from_record(record), start.get(name, start.get(MODEL, {}))
                    far = {n: 1e6 * (t - sent.get(n, torch.zeros(()))) for n, t in own.items()}
                    if value:
                        far = {n: torch.full_like(t, value) for n, t in own.items()}
                    reply.content[name] = to_record(far)
        return reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    folder = RunFolder.create(tmp_path / "-".join((method, *settings)).replace("=", "-"), run)
    here.run(folder)
    checkpoint = folder.load_checkpoint()
    records = {"arrays": checkpoint.arrays, **checkpoint.strategy}
    return max(
        float(t.double().abs().max())
        for name, tensors in records.items()
        for t in tensors.values()
        if t.numel() and not name.startswith("upload-")  # what CGPFL's clients sent, as it came
    )


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "ditto",
        "fedsdr",
        "fedsdr-fedavg",
        "fediir",
        "fedpin",
        "perinvfl",
        "fedsgd",
        "and-mask",
        "vrex",
        "drfa",
        "groupdro",
        "fishr",
        "ftfa",
    ],
)
def test_no_record_of_one_hostile_client_of_eight_gets_through(method: str, tmp_path: Path) -> None:
    assert largest(tmp_path, method) > 1e3, "the attack does nothing"
    assert largest(tmp_path, method, "aggregation=median") < 50


@pytest.mark.parametrize("before", ["nothing", "nearest-neighbours", "bucketing"])
@pytest.mark.parametrize("rule", RULES)
def test_no_rule_lets_it_through(rule: str, before: str, tmp_path: Path) -> None:
    settings = [f"aggregation={rule}", f"aggregation.before={before}"]
    if (rule, before) == ("multi-krum", "bucketing"):
        settings.append("aggregation.bucket=1")  # four buckets bear none
    assert largest(tmp_path / "far", "fedavg", *settings) < 50
    assert largest(tmp_path / "largest", "fedavg", *settings, "model.hidden=[200,200]", value=1e9) < 2


@pytest.mark.parametrize("before", ["nothing", "nearest-neighbours", "bucketing"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [1e7, 1e9, -1e9])
def test_how_far_the_hostile_one_is_rounds_no_honest_distance_away(rule: str, before: str, value: float) -> None:
    """Of honest vectors that have come a way of about 1 and lie as far apart, the result is one more."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4000, generator=generator)
    honest = start + (0.5 + torch.randn(8, 4000, generator=generator)) / 4000**0.5
    mean = RobustMean(Aggregation(rule=rule, before=before, hostile=1), {"w": start})
    for vector in [torch.full((4000,), value), *honest]:
        mean.add({"w": vector})
    moved, way = mean.result()["w"] - start, honest.mean(dim=0) - start
    assert float(moved @ way / way.square().sum()) == pytest.approx(1, abs=0.5)
    assert float(moved.norm()) < 1.5


@pytest.mark.parametrize("kind", ATTACKS)
def test_under_an_attack_a_rule_keeps_nearer_to_the_honest_than_the_mean_does(kind: str, tmp_path: Path) -> None:
    """Distance to the model of a calm run, after some rounds of which two of eight clients are hostile."""

    def after(name: str, *settings: str, hostile: tuple[int, ...] = ()) -> Tensor:
        run = toy_config(
            "fedavg", *settings, "learning_rate=0.5", scenario={"name": "toy", "clients": 8}, rounds=3
        )
        here = LocalRuntime(run)
        if hostile:
            attack(here, kind, hostile)
        here.run(folder := RunFolder.create(tmp_path / name, run))
        return torch.cat([tensor.flatten() for tensor in folder.load_checkpoint().arrays.values()])

    rule = ("aggregation=trimmed-mean", "aggregation.hostile=2", "aggregation.before=nearest-neighbours")
    calm = after("calm")
    plain, held = after("plain", hostile=(0, 1)), after("held", *rule, hostile=(0, 1))
    assert float((held - calm).norm()) < float((plain - calm).norm())


def test_attacks_are_what_their_papers_say() -> None:
    start = {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(3)}
    own = {"w": torch.tensor([2.0, 0.0]), "n": torch.tensor(4)}
    honest = [{"w": torch.tensor(w), "n": torch.tensor(4)} for w in ([2.0, 3.0], [4.0, 5.0])]
    found = {name: wrong(name, start, own, honest)["w"].tolist() for name in ATTACKS[:4]}
    assert found["sign-flip"] == [0, 2]
    assert found["tenfold"] == [-9, 11]
    assert found["alie"] == pytest.approx([3 - 1.5 * 2**0.5, 4 - 1.5 * 2**0.5])
    assert found["ipm"] == [1 - 2 * 2, 1 - 2 * 3]
    assert wrong("tenfold", start, own, honest)["n"].item() == 4


def test_fewer_senders_than_the_rule_needs_are_in_the_log(tmp_path: Path) -> None:
    """FedSDR's classifier of an environment comes from its owners alone: two of four clients, who bear nobody."""
    run = toy_config("fedsdr", "aggregation=median", rounds=2)
    LocalRuntime(run).run(folder := RunFolder.create(tmp_path / "run", run))
    found = [row for row in folder.rows() if row["kind"] == "aggregation"]
    assert found == [{"kind": "aggregation", "round": n, "clients": 2, "hostile": 0} for n in (1, 2)]


def test_a_run_with_buckets_is_the_same_again_and_after_a_resume(tmp_path: Path) -> None:
    settings = ("aggregation=trimmed-mean", "aggregation.before=bucketing")
    run = toy_config("fedavg", *settings, scenario={"name": "toy", "clients": 6}, rounds=4)
    taken_up(run, tmp_path, 3)
