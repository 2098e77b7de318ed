"""Runs that count for the selection `split`: the references, and the way of the counts from client to log."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, MetricRecord, RecordDict
from split_counts import own_tables
from tiny_runs import toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.references import ReferencesClient
from perennial.client.trainer import Received, Site
from perennial.common.config import load_config
from perennial.common.data.examples import ClientData, join
from perennial.common.methods import METHODS
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.references import FILE, References, model_of, samples_of
from perennial.common.models.network import Network
from perennial.common.privacy.secure_aggregation import MASKED, as_bytes
from perennial.common.selection import record
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.files import load_records, load_tensors, save_records
from perennial.common.wire import MODEL, NUM_EXAMPLES, ROUND, from_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.server.selection.split_rule import score, unusable
from perennial.server.study.choose import with_references
from perennial.strategies.registry import strategy_for
from perennial.testing.tiny_federation import SpoilingGrid, Toy, WireGrid, toy_config

SIZE = ("scenario.clients=6", "scenario.samples=300")


def finish(path: Path, method: str, *settings: str, **options: Any) -> RunFolder:
    config = toy_config(method, *SIZE, *settings, **options)
    LocalRuntime(config).run(RunFolder.create(path, config))
    return RunFolder(path)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(tmp_path_factory.mktemp("references") / "run", "references", rounds=4).path / FILE


def split_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in folder.rows() if row["kind"] == "split"]


# ---------------------------------------------------------------------- the references


def test_a_reference_is_fedavg_on_the_clients_of_its_environment(tmp_path: Path) -> None:
    config = toy_config("references", rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    found = load_records(tmp_path / "run" / FILE)
    assert sorted(found) == [record(0), record(1)]
    sites = [toy_site(number) for number in range(4)]
    for environment in range(2):
        model = sites[0].network.initial(0)
        for round_ in (1, 2):
            replies = [
                FedAvgClient(sites[number], FedAvg(), {}).train(Received(round_, {MODEL: model})).arrays[MODEL]
                for number in (environment, environment + 2)
            ]
            model = {name: (replies[0][name] + replies[1][name]) / 2 for name in model}
        for name, tensor in model.items():
            assert torch.allclose(found[record(environment)][name], tensor, atol=1e-6)


def test_a_client_of_several_environments_trains_each_model_on_its_own_samples() -> None:
    own, other = toy_site(0), toy_site(1)
    train = join([own.data.train, other.data.train[torch.arange(10)]])
    both = Site(own.client, ClientData(train, own.data.validation, {}), own.network, 0)
    start = own.network.initial(0)
    received = Received(1, {model_of(0): start, model_of(1): start})
    reply = ReferencesClient(both, References(), {}).train(received)
    assert {name: reply.metrics[name] for name in (NUM_EXAMPLES, samples_of(0), samples_of(1))} == {
        NUM_EXAMPLES: 50, samples_of(0): 40, samples_of(1): 10,
    }  # fmt: skip
    alone = FedAvgClient(own, FedAvg(), {}).train(Received(1, {MODEL: start})).arrays[MODEL]
    assert all(torch.equal(reply.arrays[model_of(0)][name], alone[name]) for name in alone)


def test_a_client_that_lies_about_its_environments_is_left_out(tmp_path: Path) -> None:
    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "train":
            changed = {**reply.content.metric_records["metrics"], samples_of(1): 10**6}
            return changed_reply(request, reply, changed)
        return reply

    config = toy_config("references", rounds=1)
    here = LocalRuntime(config)
    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"]["client-1"]["last"].endswith("its environments have 1000000 samples, and it 40")


def changed_reply(request: Message, reply: Message, metrics: dict[str, Any]) -> Message:
    records = {name: value for name, value in reply.content.items() if name != "metrics"}
    return Message(RecordDict({**records, "metrics": MetricRecord(metrics)}), reply_to=request)


# ---------------------------------------------------------------------- the counts


def test_a_run_counts_what_its_models_and_references_say(references: Path, tmp_path: Path) -> None:
    """Against predictions made here, sample by sample."""
    folder = finish(tmp_path / "run", "fedavg", f"references='{references}'")
    row = split_rows(folder)[-1]
    net = toy_site().network
    model = load_tensors(folder.path / "models" / "global.safetensors")
    held_out = join([Toy(clients=6, samples=300).client_data(client, 0, None).validation for client in range(6)])
    correct = net.predict(model, held_out.x).argmax(dim=1) == held_out.y
    expected = []
    for tensors in load_records(references).values():
        known = net.predict(tensors, held_out.x).argmax(dim=1) == held_out.y
        where = [held_out.environment == environment for environment in range(2)]
        a, d = (sum(float(correct[kind & own].double().mean()) for own in where) / 2 for kind in (known, ~known))
        expected.append((min(a, d), a, d, int(known.sum()), int((~known).sum())))
    found = score(row)
    assert found is not None
    # Toy environments differ too little for followers, so it is the least over all references.
    told = (found.score, found.agreeing, found.misleading, found.right, found.wrong)
    assert told == pytest.approx(min(expected), abs=1e-12)
    assert row["clients"] == [3, 3]


@pytest.mark.slow
def test_nothing_else_of_a_run_changes(references: Path, tmp_path: Path) -> None:
    without = finish(tmp_path / "without", "ditto", rounds=4)
    with_them = finish(tmp_path / "with", "ditto", f"references='{references}'", rounds=4)
    kinds = ("round", "evaluation")
    assert [r for r in without.rows() if r["kind"] in kinds] == [r for r in with_them.rows() if r["kind"] in kinds]
    assert not split_rows(without)
    assert [(row["round"], row["model"]) for row in split_rows(with_them)] == [
        (number, model) for number in (2, 4) for model in ("global", "personal")
    ]


@pytest.mark.slow
def test_the_clients_of_another_process_count_the_same(references: Path, tmp_path: Path) -> None:
    config = toy_config("ditto", *SIZE, f"references='{references}'", rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    folder = RunFolder.create(tmp_path / "wire", config)
    run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), start(config))
    assert split_rows(folder) == split_rows(RunFolder(tmp_path / "local"))
    assert len(split_rows(folder)) == 2


@pytest.mark.slow
def test_sites_with_data_of_their_own_count_by_the_environments_that_they_announce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tables"
    options = {"method": "fedavg", "scenario": own_tables(root), "rounds": 1, "data_root": str(root)}
    (config,), why_not = with_references([load_config(options=options)], tmp_path / "pool", 1)
    assert why_not == ""
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    monkeypatch.setenv("PERENNIAL_DATA", str(root))
    folder = RunFolder.create(tmp_path / "wire", config)
    run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), start(config))
    (row,) = split_rows(folder)
    assert [row] == split_rows(RunFolder(tmp_path / "local"))
    assert (row["environments"], row["clients"]) == (["a", "b"], [2, 2])
    assert (
        sum(map(sum, row["samples"][0][0])) == 800
    )  # of both sites of environment a, as its own reference has them
    assert unusable(row) == ""


@pytest.mark.slow
def test_the_references_are_the_same_over_the_wire(tmp_path: Path) -> None:
    config = toy_config("references", *SIZE, rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    folder = RunFolder.create(tmp_path / "wire", config)
    run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), start(config))
    one, other = (load_records(tmp_path / runtime / FILE) for runtime in ("local", "wire"))
    assert all(torch.equal(one[name][key], other[name][key]) for name in one for key in one[name])


def test_what_a_site_serves_has_no_references(references: Path, tmp_path: Path) -> None:
    config = toy_config("fedavg", *SIZE, f"references='{references}'", rounds=1)
    run_rounds(
        config, RunFolder.create(tmp_path / "run", config), WireGrid(config, tmp_path / "sites"), start(config)
    )
    kept = list((tmp_path / "sites").rglob("serving.safetensors"))
    assert len(kept) == 6
    assert not any("reference" in key for path in kept for key in load_records(path))


@pytest.mark.parametrize("method", ["fedsdr", "f-fl-games", "cgpfl", "local"])
def test_methods_that_evaluate_in_their_own_way(method: str, references: Path, tmp_path: Path) -> None:
    folder = finish(tmp_path / "run", method, f"references='{references}'", rounds=2)
    assert {row["model"] for row in split_rows(folder)} == set(toy_config(method).method.evaluates)
    assert all(score(row) for row in split_rows(folder))


def test_a_client_without_held_out_data_has_no_say(
    references: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Toy.client_data

    def emptied(self: Toy, client: int, *where: Any) -> ClientData:
        data = whole(self, client, *where)
        return replace(data, validation=data.validation[torch.arange(0)]) if client == 2 else data

    monkeypatch.setattr(Toy, "client_data", emptied)
    config = toy_config("fedavg", *SIZE, f"references='{references}'", rounds=1)
    summary = LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"] == {}
    (row,) = split_rows(RunFolder(tmp_path / "run"))
    assert row["clients"] == [2, 3]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda found: {**found, "global/split/samples": found["global/split/samples"][1:]}, "another length"),
        (lambda found: {**found, "global/split/samples": [10**9] * 16}, "no whole number"),
        (lambda found: {**found, "global/split/correct": found["global/split/samples"]}, "no whole number|add up"),
        (lambda found: {**found, "global/split/samples": [0.5] * 16}, "no whole number"),
        (lambda found: {k: v for k, v in found.items() if k != "global/split/correct"}, "other columns"),
        (lambda found: {k: v for k, v in found.items() if "split" not in k}, "other columns"),
        (lambda found: {k: v for k, v in found.items() if "validation" not in k}, "validation"),
        (lambda found: {**found, "global/split/names": [1]}, "other columns"),
        (lambda found: {**found, "other/split/samples": [1]}, "not asked for"),
    ],
)
def test_counts_that_cannot_be_are_left_out(
    change: Callable[[dict[str, Any]], dict[str, Any]], word: str, references: Path, tmp_path: Path
) -> None:
    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "evaluate":
            return changed_reply(request, reply, change(dict(reply.content.metric_records["metrics"])))
        return reply

    config = toy_config("fedavg", *SIZE, f"references='{references}'", rounds=1)
    here = LocalRuntime(config)
    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"].keys() == {"client-1"}
    assert re.search(word, summary["left_out"]["client-1"]["last"])
    (row,) = split_rows(RunFolder(tmp_path / "run"))
    assert row["clients"] == [3, 2]


def test_counts_that_nobody_asked_for_are_left_out(tmp_path: Path) -> None:
    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "evaluate":
            metrics = {**reply.content.metric_records["metrics"], "global/split/samples": [1]}
            return changed_reply(request, reply, metrics)
        return reply

    config = toy_config("fedavg", rounds=1)
    here = LocalRuntime(config)
    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", config))
    assert "not asked for" in summary["left_out"]["client-1"]["last"]


@pytest.fixture(scope="module")
def of_labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return labels_run(tmp_path_factory.mktemp("of-labels") / "run", "references", rounds=4).path / FILE


def labels_run(path: Path, method: str, *settings: str, **options: Any) -> RunFolder:
    config = toy_config(f"{method}/labels", *settings, **options)
    LocalRuntime(config).run(RunFolder.create(path, config))
    return RunFolder(path)


def test_a_run_counts_each_label_that_is_known(of_labels: Path, tmp_path: Path) -> None:
    """Against predictions made here, label by label."""
    folder = labels_run(tmp_path / "run", "fedavg", f"references='{of_labels}'", rounds=2)
    (row,) = split_rows(folder)
    config = folder.config()
    scenario, task = config.scenario, config.predicts
    net = Network(config.model, scenario.input_shape, task.outputs, torch.device("cpu"))
    model = load_tensors(folder.path / "models" / "global.safetensors")
    clients = range(len(scenario.client_ids))
    held_out = join([scenario.client_data(client, 0, None).validation for client in clients])
    right = (net.predict(model, held_out.x).sigmoid() > 0.5).float() == held_out.y
    for reference, tensors in load_records(of_labels).items():
        known = (net.predict(tensors, held_out.x).sigmoid() > 0.5).float() == held_out.y
        for environment in range(2):
            there = held_out.environment == environment
            for label, value in product(range(3), (0, 1)):
                these = there & (held_out.y[:, label] == value)
                place = int(reference.rpartition("-")[2]), environment, 2 * label + value
                for kind, told in enumerate((known, ~known)):
                    own = these & told[:, label]
                    assert np.array(row["samples"])[place][kind] == int(own.sum())
                    assert np.array(row["correct"])[place][kind] == int((own & right[:, label]).sum())
    assert row["answers"] == [2, 2, 2]
    assert np.array(row["samples"])[0].sum() == int((~held_out.y.isnan()).sum()) < held_out.y.numel()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda found: found, ""),
        (lambda found: moved(found, "samples"), "samples does not add up"),
        (lambda found: moved(found, "correct"), "add up|more correct"),
        (lambda found: {**found, "global/split/samples": [1] * 16}, "another length"),
        (lambda found: {**found, "global/validation/negatives": [0] * 300}, "add up|no whole number"),
    ],
)
def test_counts_of_labels_that_cannot_be_are_left_out(
    change: Callable[[dict[str, Any]], dict[str, Any]], word: str, of_labels: Path, tmp_path: Path
) -> None:
    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 2 and request.metadata.message_type == "evaluate":
            return changed_reply(request, reply, change(dict(reply.content.metric_records["metrics"])))
        return reply

    config = toy_config("fedavg/labels", f"references='{of_labels}'", rounds=1)
    here = LocalRuntime(config)
    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(tmp_path / "run", config))
    (row,) = split_rows(RunFolder(tmp_path / "run"))
    if not word:
        assert summary["left_out"] == {}
        assert row["clients"] == [2, 2]
        return
    assert re.search(word, summary["left_out"]["client-1"]["last"])
    assert row["clients"] == [2, 1]


def moved(found: dict[str, Any], column: str) -> dict[str, Any]:
    """One count more, of the first kind that has any."""
    values = list(found[f"global/split/{column}"])
    values[next(place for place, value in enumerate(values) if value)] += 1
    return {**found, f"global/split/{column}": values}


@pytest.mark.slow
def test_labels_are_counted_the_same_in_another_process(of_labels: Path, tmp_path: Path) -> None:
    config = toy_config("ditto/labels", f"references='{of_labels}'", rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    folder = RunFolder.create(tmp_path / "wire", config)
    run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), start(config))
    assert split_rows(folder) == split_rows(RunFolder(tmp_path / "local"))
    assert [row["model"] for row in split_rows(folder)] == ["global", "personal"]


# ---------------------------------------------------------------------- what can be wrong


def test_the_local_runtime_reads_the_references_once(
    references: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    original = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        read.append(self)
        return original(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    finish(tmp_path / "run", "fedavg", f"references='{references}'", rounds=1)
    assert read.count(references) == 1


def test_references_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"references: .*nowhere cannot be read .No such file"):
        LocalRuntime(toy_config("fedavg", f"references='{tmp_path / 'nowhere'}'"))
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    with pytest.raises(UserError, match=r"references: .*noise cannot be read"):
        LocalRuntime(toy_config("fedavg", f"references='{tmp_path / 'noise'}'"))


def test_references_of_another_model(references: Path) -> None:
    with pytest.raises(
        UserError, match="other models than one of this run's for each of the 2 training environments"
    ):
        LocalRuntime(toy_config("fedavg", f"references='{references}'", "model.hidden=[4]"))


def test_references_that_are_not_finite(references: Path, tmp_path: Path) -> None:
    models = load_records(references)
    next(iter(models[record(1)].values())).fill_(float("nan"))
    save_records(tmp_path / "nan", models)
    with pytest.raises(UserError, match="not finite"):
        LocalRuntime(toy_config("fedavg", f"references='{tmp_path / 'nan'}'"))


def test_references_do_not_go_with_noise(references: Path) -> None:
    with pytest.raises(UserError, match=r"references: .* is not possible with privacy\.mechanism=fixed, since"):
        toy_config("fedavg", f"references='{references}'", "privacy.mechanism=fixed")


def test_two_clients_cannot_hide_in_a_sum(references: Path) -> None:
    with pytest.raises(UserError, match=r"references: .*evaluate_clients=2; at least 3 must count together"):
        toy_config("fedavg", *SIZE, f"references='{references}'", SECURE, "evaluate_clients=2")


# ---------------------------------------------------------------------- under secure aggregation

SECURE = "privacy.mechanism=secagg"


def spied(
    path: Path, method: str, *settings: str, spoil: Callable[..., Any] | None = None, rounds: int = 2
) -> tuple[RunFolder, list[tuple[Message, Message]]]:
    """A run, and all messages of it."""
    config = toy_config(method, *SIZE, *settings, rounds=rounds)
    here, seen = LocalRuntime(config), list[tuple[Message, Message]]()

    def read(request: Message, reply: Message) -> Message:
        reply = spoil(request, reply) if spoil else reply
        seen.append((request, reply))
        return reply

    here.grid = SpoilingGrid(here.grid, read)  # type: ignore[assignment]
    here.run(RunFolder.create(path, config))
    return RunFolder(path), seen


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedsdr", "ditto"])
def test_masked_counts_have_the_sums_of_plain_ones(method: str, references: Path, tmp_path: Path) -> None:
    """With steps so small that models stay what they are: masked training alone is good to half a step."""
    settings = (f"references='{references}'", "learning_rate=1e-12")
    plain, _ = spied(tmp_path / "plain", method, *settings)
    masked, seen = spied(tmp_path / "masked", method, *settings, SECURE)
    assert split_rows(plain) == split_rows(masked)
    assert split_rows(masked)[0]["clients"] == [3, 3]
    (row,) = [row for row in masked.rows() if row["kind"] == "evaluation-traffic"]
    assert row["exchanges"] == ["train.keys", "train.shares", "evaluate", "train.unmask"]
    answered = [reply for request, reply in seen if request.metadata.message_type == "evaluate"]
    assert len(answered) == 6
    for reply in answered:
        names = {name for record in reply.content.metric_records.values() for name in record}
        assert not any("split" in name for name in names), "counts in the clear"
        assert reply.content.array_records.keys() == {MASKED}
        words = np.frombuffer(as_bytes(from_record(reply.content.array_records[MASKED])[MASKED]), dtype=np.uint64)
        assert len(words) == 2 + 2 * 4 + 16 * (1 + len(METHODS[method].evaluates))
        assert words.min() > 2**32, "a count in the clear"


def test_references_can_be_made_under_masks(references: Path, tmp_path: Path) -> None:
    """Each model within half a step, over its environment's share, of the one made without; who has which
    environment is no part of any message."""
    folder, seen = spied(tmp_path / "plain", "references")
    masked, hidden = spied(tmp_path / "masked", "references", SECURE)
    one, other = (load_records(own.path / FILE) for own in (folder, masked))
    for name, tensors in one.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(other[name][key], tensor, rtol=0, atol=2 * 2 * (8 / 2**23 / 2 + 2e-7))

    def told(messages: list[tuple[Message, Message]]) -> set[tuple[str, ...]]:
        replies = [reply for request, reply in messages if request.metadata.message_type == "train"]
        return {
            (*sorted(reply.content.array_records), *sorted(reply.content.metric_records["metrics"]))
            for reply in replies
        }

    assert told(hidden) == {("masked", "num-examples", "risk")}
    assert len(told(seen)) == 2, "without masks, by environment"


def test_references_do_not_divide_noise_by_noise() -> None:
    config = toy_config("references", "privacy.mechanism=fixed")
    with pytest.raises(
        UserError, match="'fixed' is not possible with method 'references', whose models are quotients"
    ):
        strategy_for(config, "run")


@pytest.mark.slow
def test_a_search_under_secure_aggregation_makes_its_references_so(tmp_path: Path) -> None:
    (config,), why_not = with_references([toy_config("fedavg", *SIZE, SECURE, rounds=2)], tmp_path / "pool", 1)
    assert why_not == ""
    (made,) = (path for path in (tmp_path / "pool").iterdir() if path.is_dir())
    assert RunFolder(made).config().privacy == config.privacy
    LocalRuntime(config).run(folder := RunFolder.create(tmp_path / "run", config))
    assert split_rows(folder)


def test_a_client_that_drops_out_of_the_counting_is_not_in_the_sums(references: Path, tmp_path: Path) -> None:
    def spoil(request: Message, reply: Message) -> Message:
        if (request.metadata.dst_node_id, request.metadata.message_type) == (2, "evaluate"):
            return Message(Error(code=2, reason="gone"), reply_to=request)
        return reply

    folder, _ = spied(tmp_path / "run", "fedavg", f"references='{references}'", SECURE, spoil=spoil)
    (row,) = split_rows(folder)
    assert row["clients"] == [3, 2]
    assert sum(sum(map(sum, own)) for own in row["samples"][0]) == 5 * 300


@pytest.mark.slow
def test_two_sums_of_counts_do_not_differ_by_a_client(references: Path, tmp_path: Path) -> None:
    """The counts are the same in every evaluation, so the difference would be its own."""

    def spoil(request: Message, reply: Message) -> Message:
        late = request.content.config_records["config"][ROUND] in (2, 3)
        if late and (request.metadata.dst_node_id, request.metadata.message_type) == (2, "evaluate"):
            return Message(Error(code=2, reason="gone"), reply_to=request)
        return reply

    settings = (f"references='{references}'", SECURE, "evaluate_every=1", "checkpoint_every=2")
    folder, _ = spied(tmp_path / "run", "fedavg", *settings, spoil=spoil, rounds=4)
    assert [row["round"] for row in split_rows(folder)] == [1, 4]
    assert len({str(row["samples"]) for row in split_rows(folder)}) == 1
    evaluated = [row for row in folder.rows() if row["kind"] == "evaluation" and row["split"] == "test"]
    assert [sum(row["round"] == number for row in evaluated) for number in (1, 2, 3, 4)] == [6, 5, 5, 6]
    traffic = [row["exchanges"] for row in folder.rows() if row["kind"] == "evaluation-traffic"]
    assert ["train.unmask" in exchanges for exchanges in traffic] == [True, False, False, True]

    config = toy_config("fedavg", *SIZE, *settings, rounds=4)
    here = LocalRuntime(config)
    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    again = RunFolder.create(tmp_path / "again", config)
    here.run(again, until=2)
    another = LocalRuntime(config)
    another.grid = SpoilingGrid(another.grid, spoil)  # type: ignore[assignment]
    another.run(again, again.load_checkpoint())
    assert split_rows(again) == split_rows(folder)


@pytest.mark.parametrize(("column", "change"), [("validation/count", 1), ("validation/correct", -1)])
def test_sums_that_cannot_be_stop_the_run(column: str, change: int, references: Path, tmp_path: Path) -> None:
    def spoil(request: Message, reply: Message) -> Message:
        if (request.metadata.dst_node_id, request.metadata.message_type) == (2, "evaluate"):
            metrics = dict(reply.content.metric_records["metrics"])
            (value,) = metrics[f"global/{column}"]  # type: ignore[misc]
            return changed_reply(request, reply, {**metrics, f"global/{column}": [value + change]})  # type: ignore[operator]
        return reply

    cannot = r"round 2: the sum under secure aggregation cannot be used"
    sentence = cannot + r" \((samples|correct) does not add up to the \d+ held"
    with pytest.raises(RunStopped, match=sentence):
        spied(tmp_path / "run", "fedavg", f"references='{references}'", SECURE, spoil=spoil)


@pytest.mark.slow
def test_masked_counts_are_the_same_over_the_wire(references: Path, tmp_path: Path) -> None:
    config = toy_config("fedsdr", *SIZE, f"references='{references}'", SECURE, rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "local", config))
    folder = RunFolder.create(tmp_path / "wire", config)
    run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), start(config))
    assert split_rows(folder) == split_rows(RunFolder(tmp_path / "local"))
    assert not list((tmp_path / "sites").rglob("secagg.json")), "keys that nobody needs any more"
