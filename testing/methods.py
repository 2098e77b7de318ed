"""What every method must keep, whoever wrote it: trains, repeats, resumes, survives bad and missing clients.

Each test takes the name of a method as `method`; METHOD/TASK, such as fedavg/numbers, is the method with another
task than classes.
"""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from perennial.client import cohort
from perennial.client.cohort import Work
from perennial.client.host import Host, client_class
from perennial.client.state import FileStates, valid
from perennial.client.trainer import Client, Site
from perennial.common.config import RunConfig, Task
from perennial.common.models.network import network
from perennial.common.models.torch_state import plain_torch
from perennial.common.stacks import StackReply
from perennial.common.utils import seeding
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors, flattened
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing import kept_and_sent
from perennial.testing.bad_replies import BAD_TENSORS, OTHERWISE_BAD, with_fault
from perennial.testing.kept_and_sent import OPTIMIZERS
from perennial.testing.tiny_federation import LEARNT, SpoilingGrid, WireGrid, toy_config

STEPS = ("local_steps", "personal_steps", "head_steps", "environment_steps", "fine_tuning_steps")


def brief(method: str, *settings: str, **options: Any) -> RunConfig:
    """A run in which clients take three steps at most, for what does not depend on how many."""
    taken = toy_config(method).method
    few = [f"{name}=3" for name in STEPS if getattr(taken, name, 0) > 3]
    return toy_config(method, *few, *settings, **options)


def run(config: RunConfig, path: Path, **how: Any) -> dict[str, Any]:
    return LocalRuntime(config).run(RunFolder.create(path, config), **how)


def files(folder: Path) -> dict[str, Tensors]:
    """Every tensor file of a run: final model, last checkpoint, what clients keep after it."""
    last = RunFolder(folder).checkpoints()[-1]
    places = [folder / "models", folder / "checkpoint" / f"round-{last}"]
    paths = [path for place in places for path in sorted(place.rglob("*.safetensors"))]
    found = {f"{path.parent.name}/{path.stem}": load_file(path) for path in paths}
    for place, versions in FileStates(RunFolder(folder).clients).items():
        newest = valid(versions, RunFolder(folder).resumes())[-1]
        found[f"{place.rpartition('/')[2]}/round-{newest.round}"] = flattened(newest.kept)
    return found


def assert_same(one: Path, other: Path) -> None:
    assert_equal(files(one), files(other))
    assert RunFolder(one).rows() == RunFolder(other).rows()


def assert_equal(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """That mappings have the same keys, and tensors of the same types, shapes and, within a tolerance, values."""
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_trains_and_improves(method: str, tmp_path: Path) -> None:
    config = toy_config(method, rounds=8)
    summary = run(config, tmp_path / "run")
    model = config.method.evaluates[-1]
    assert summary["models"].keys() == set(config.method.evaluates)
    task = config.predicts
    reached, least = summary["models"][model]["final"]["validation"], LEARNT[task.name]
    assert task.headline.goodness(reached) > task.headline.goodness(least)
    assert summary["left_out"] == {}
    reported = [row["metrics"] for row in RunFolder(tmp_path / "run").rows() if row["kind"] == "round"]
    missing = "the loss reports no metric 'risk', by which this test tells whether the method trains"
    assert all("risk" in metrics for metrics in reported), missing
    losses = [metrics["risk"] for metrics in reported]
    assert losses[-1] < losses[0]


def test_same_seed_same_bits_other_seed_other_bits(method: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(brief(method, rounds=2), tmp_path / name)
    run(brief(method, seed=1, rounds=1), tmp_path / "c")
    assert_same(tmp_path / "a", tmp_path / "b")
    first, other = (RunFolder(tmp_path / name).rows()[0] for name in ("a", "c"))
    assert (first["kind"], first["round"]) == (other["kind"], other["round"])
    assert first != other


def test_the_wire_changes_nothing(method: str, tmp_path: Path) -> None:
    """Over bytes, in new processes, with replies in another order: the rows and models of the local runtime.

    And of what clients keep, they send what the method declares.
    """
    config = toy_config(method, "model.norm=batch", rounds=3, participation=0.75)
    run(config, tmp_path / "local")
    folder, grid = RunFolder.create(tmp_path / "wire", config), WireGrid(config, tmp_path / "sites")
    with plain_torch(threads=1):  # as in every process of the system
        run_rounds(config, folder, grid, start(config))
    scenario = config.scenario
    buffers = network(config.model, scenario.input_shape, config.predicts.outputs).buffer_names
    kept_and_sent.check(type(config.method), grid.sent, buffers)
    other = (
        "the run has other numbers where each client has a process: a half draws from a generator of its process, "
        "or changes tensors in place that it received, keeps or has sent"
    )
    assert RunFolder(tmp_path / "local").rows() == folder.rows(), other
    for path in (tmp_path / "local" / "models").iterdir():
        assert_equal(load_file(path), load_file(folder.path / "models" / path.name))


class Killed(Exception):  # noqa: N818
    """Ends a run in a test."""


def test_resumed_run_equals_unbroken_run(method: str, tmp_path: Path) -> None:
    """Stopped after a checkpoint and after the next round, that twice between the same two checkpoints.

    So it is the same again where nothing is different, too.
    """
    config = brief(method, participation=0.5, rounds=5)
    run(config, tmp_path / "unbroken")
    broken, origin = RunFolder.create(tmp_path / "broken", config), None
    for stop in (2, 3, 3):

        def kill(progress: Any, stop: int = stop) -> None:
            if progress.round == stop:
                raise Killed

        with pytest.raises(Killed):
            LocalRuntime(config).run(broken, origin, kill)
        origin = broken.load_checkpoint()
        broken.cut_log(origin.log_bytes)
    LocalRuntime(config).run(broken, origin)
    assert_same(tmp_path / "unbroken", broken.path)


def test_a_client_that_sends_bad_tensors_is_left_out_and_named(method: str, tmp_path: Path) -> None:
    """Another fault in every round."""
    if method.startswith("local"):
        pytest.skip("this method's clients send no arrays")
    assert_left_out(method, BAD_TENSORS, tmp_path / "run")


def test_a_client_that_fails_otherwise_is_left_out_and_named(method: str, tmp_path: Path) -> None:
    assert_left_out(method, {**OTHERWISE_BAD, "silent": "did not answer"}, tmp_path / "run")


def assert_left_out(method: str, faults: dict[str, str], path: Path) -> None:
    """A run with one of the faults in each round, all of the same client; nothing else happens to it."""
    config = brief(method, rounds=len(faults))
    here = LocalRuntime(config)
    bad_node = 2

    def spoil(request: Message, reply: Message) -> Message | None:
        kind = request.metadata.message_type
        if request.metadata.dst_node_id != bad_node or not kind.startswith("train"):
            return reply
        fault = list(faults)[int(request.metadata.group_id) - 1]
        return with_fault(fault, request, reply) if fault != "silent" else None

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(path, config))
    rows = [row for row in RunFolder(path).rows() if row["kind"] == "round"]
    for row, word in zip(rows, faults.values(), strict=True):
        assert row["left_out"].keys() == {"client-1"}
        assert word in row["left_out"]["client-1"]
    assert summary["left_out"].keys() == {"client-1"}
    assert summary["left_out"]["client-1"]["replies"] == summary["rounds"] == config.rounds
    assert all(torch.isfinite(t).all() for t in load_file(path / "models" / "global.safetensors").values())
    assert "NaN" not in (path / "summary.json").read_text()


def test_an_absent_client_does_no_harm(method: str, tmp_path: Path) -> None:
    config = brief(method, wait=0.01, rounds=3)
    here = LocalRuntime(config)
    del here.grid.contexts[3]
    summary = here.run(RunFolder.create(tmp_path / "run", config))
    assert summary["left_out"]["client-2"]["last"].endswith("is not connected")
    assert summary["models"][config.method.evaluates[-1]]["final"]["clients"].keys() == {
        "client-0", "client-1", "client-3",
    }  # fmt: skip


def test_a_round_without_any_client_does_no_harm(method: str, tmp_path: Path) -> None:
    """In the cohort is one client, which has nothing to train on if its environment is `left_out`."""
    usual, empty = toy_config(method), []
    if "ensemble" in usual.method.evaluates:
        pytest.skip("this method's ensemble needs every client")
    for name in usual.scenario.train_environments:
        config = toy_config(method, f"left_out={name}", "participation=0.25", rounds=3)
        assert run(config, tmp_path / name)["left_out"] == {}
        empty.append([not row["asked"] for row in RunFolder(tmp_path / name).rows() if row["kind"] == "round"])
        model = load_file(tmp_path / name / "models" / "global.safetensors")
        assert all(tensor.isfinite().all() for tensor in model.values())
    assert all(one != other for one, other in zip(*empty, strict=True))


def test_the_optimizer_of_the_run_is_taken_or_refused(method: str, tmp_path: Path) -> None:
    """One that is not the usual one has other numbers, the same ones over the wire, and keeps its state."""
    settings = ("optimizer.name=adam", "optimizer.keep=true", "learning_rate=0.01")
    taken = toy_config(method).method
    if "optimizer" in taken.refuses:
        said = f"optimizer.name: 'adam' is not possible with method '{taken.name}', wh"
        with pytest.raises(UserError, match=said):
            brief(method, *settings[:2])
        return
    config = brief(method, *settings, rounds=2)
    run(brief(method, settings[2], rounds=2), tmp_path / "usual")
    run(config, tmp_path / "local")
    folder, grid = RunFolder.create(tmp_path / "wire", config), WireGrid(config, tmp_path / "sites")
    with plain_torch(threads=1):
        run_rounds(config, folder, grid, start(config))
    rows = RunFolder(tmp_path / "local").rows()
    assert rows == folder.rows()
    ignored = (
        "a half with a loop of its own takes steps with self.step and self.optimizer(), or refuses `optimizer`"
    )
    assert rows != RunFolder(tmp_path / "usual").rows(), ignored
    assert any(fnmatch(record, OPTIMIZERS) for reply in grid.sent for record in reply.after), ignored
    assert not any(fnmatch(record, OPTIMIZERS) for reply in grid.sent for record in reply.arrays)


HABITS = {
    "schedule": ("schedule=exponential", "schedule.decay=0.5"),
    "clip_norm": ("clip_norm=0.01",),
    "clip_value": ("clip_value=0.01",),
    "label_smoothing": ("label_smoothing=0.2",),
    "accumulate": ("accumulate=2",),
    "augment": ("augment=Noise(0.5)",),
    "mix": ("mix=MixUp(1)",),
}
"""By setting of `common/training.py`, with what it changes numbers within two rounds."""


def test_each_habit_of_training_is_taken_or_refused(method: str, tmp_path: Path) -> None:
    """One that is taken changes the numbers; a method that would ignore it says that it does not take it."""
    config, usual = toy_config(method), tmp_path / "usual"
    taken, task = type(config.method), config.predicts.name
    run(brief(method, rounds=2), usual)
    for name, settings in HABITS.items():
        if name in taken.model_fields:
            continue  # a setting of its own, which `--set` means
        if name in taken.refuses:
            said = f"{name}.* is not possible with method '{config.method.name}', wh"
            with pytest.raises(UserError, match=said):
                brief(method, *settings)
        elif name == "label_smoothing" and task in ("numbers", "event"):
            with pytest.raises(UserError, match=f"{name}: 0.2 is for classes and labels, and the task is {task}"):
                brief(method, *settings)
        elif name == "mix" and task != "classes":
            with pytest.raises(UserError, match=f"{name}: 'MixUp\\(1\\)' is for classes, and the task is {task}"):
                brief(method, *settings)
        else:
            run(brief(method, *settings, rounds=2), tmp_path / name)
            one, other = files(usual), files(tmp_path / name)
            same = f"{name} changes nothing; the method must take it or have it in `refuses`"
            assert any(not torch.equal(one[at][key], other[at][key]) for at in one for key in one[at]), same


def stack_config(method: str, engine: str, *settings: str, **options: Any) -> RunConfig:
    config = brief(method, "model.norm=batch", f"cohort_engine={engine}", *settings, **options)
    net = network(config.model, config.scenario.input_shape, config.scenario.task.outputs)
    if client_class(type(config.method)).can_stack(net):
        return config
    return brief(method, f"cohort_engine={engine}", *settings, **options)


def stacking(method: str) -> type[Client[Any]]:
    """The method's client half; a test of stacks is skipped where it trains none."""
    half = client_class(type(toy_config(method).method))
    if "train" not in vars(half).get("stacks", ()):
        pytest.skip("this method's clients train one after the other")
    return half


def test_a_stack_does_what_its_clients_do(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw is the same, and every tensor and number but for rounding."""
    half, draws, done = stacking(method), Counter[tuple[str | int, ...]](), Counter[str]()
    derive, answers = seeding.derive, cohort.answers

    def counted(seed: int, *key: str | int) -> int:
        draws[key] += 1
        return derive(seed, *key)

    def seen(half: type[Client[Any]], works: Sequence[Work], *rest: Any) -> Any:
        found = answers(half, works, *rest)
        done[works[0].action] += len(works)
        return found

    monkeypatch.setattr(seeding, "derive", counted)
    monkeypatch.setattr("perennial.client.host.answers", seen)
    drawn = []
    for engine in ("loop", "stack"):
        draws.clear()
        run(stack_config(method, engine, rounds=2), tmp_path / engine)
        # What is the same for all clients, a stack draws once.
        drawn.append({key: count if str(key[0]).startswith("client-") else 1 for key, count in draws.items()})
    assert drawn[0] == drawn[1]
    assert done.keys() == set(half.stacks)
    assert done["evaluate"] == 4
    assert_equal(files(tmp_path / "stack"), files(tmp_path / "loop"), 1e-5)
    rows = [RunFolder(tmp_path / engine).rows() for engine in ("loop", "stack")]
    assert close(*rows)


def close(one: Any, other: Any) -> bool:
    """Whether rows of a log are the same but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == pytest.approx(other, rel=1e-4, abs=1e-4) if isinstance(one, float) else one == other)


def test_who_fails_in_a_stack_is_named_alone(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do what they do one by one, to the last bit; of the stack that failed nothing is kept."""
    stacking(method)
    if toy_config(method).predicts.target_shape:
        pytest.skip("no target of this task is one of which there is no loss")
    load, tried = Host._load, []

    def spoiled(self: Host, task: Task, number: int) -> Site:
        site = load(self, task, number)
        site.data.train.environment[:] = 0  # so that all make one stack, whatever the method
        site.data.train.y[:] = 7 if number == 1 else site.data.train.y  # of two classes
        return site

    together = Host._together

    def seen(self: Host, works: Any, nodes: Any) -> StackReply | None:
        reply = together(self, works, nodes)
        tried.append((works[0].action, len(reply or ())))
        return reply

    monkeypatch.setattr(Host, "_load", spoiled)
    monkeypatch.setattr(Host, "_together", seen)
    for engine in ("loop", "stack"):
        summary = run(stack_config(method, engine, "evaluate_every=9", rounds=1), tmp_path / engine)
        assert summary["left_out"].keys() == {"client-1"}
    assert tried[0][1] == 0
    assert_equal(files(tmp_path / "loop"), files(tmp_path / "stack"))
