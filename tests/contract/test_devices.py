"""Every method, its stacks and a resume on another device than the CPU: a GPU, or the one of `fake_device.py`.

The suite takes a few methods; `pytest -m devices` takes all, and `pytest -m gpu` all on CUDA.
"""

from pathlib import Path
from typing import Any

import fake_device
import pytest
import torch
from fake_device import ElsewhereTensor
from tiny_runs import broken_off
from torch.utils._pytree import tree_leaves

from perennial.client import captured, cohort
from perennial.client.host import Host, client_class
from perennial.client.serving.models import load, newest
from perennial.client.snapshot import Snapshot
from perennial.client.trainer import Received, Reply
from perennial.common.config import RunConfig, load_config
from perennial.common.methods import METHODS
from perennial.common.models.network import network
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.methods import close, files
from perennial.testing.tiny_federation import toy_config

FEW = ("ditto", "fedavg", "fedsdr")
TOLERANCE = {fake_device.NAME: 1e-5, "cuda": 1e-3}
"""A GPU adds up in another order; a few steps later that shows."""
NOT_ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
NOT_BESIDE_CUDA = pytest.mark.skipif(
    torch.cuda.is_available(), reason="PyTorch has one kind of accelerator in a process, which is the GPU here"
)


def often(method: str) -> list[Any]:
    """How often a method is tested, as marks."""
    return [] if method == FEW[0] else [pytest.mark.slow if method in FEW else pytest.mark.devices]


def cases(methods: Any) -> list[Any]:
    """Methods with each device, marked."""
    found = []
    for method in methods:
        marks = [NOT_BESIDE_CUDA, *often(method)]
        found.append(pytest.param(fake_device.NAME, method, marks=marks, id=f"{fake_device.NAME}-{method}"))
        found.append(pytest.param("cuda", method, marks=(pytest.mark.gpu, NOT_ON_CUDA), id=f"cuda-{method}"))
    return found


each_device = pytest.mark.parametrize(("device", "method"), cases(sorted(METHODS)))
one_method = pytest.mark.parametrize(
    "device",
    [
        pytest.param(fake_device.NAME, marks=NOT_BESIDE_CUDA),
        pytest.param("cuda", marks=(pytest.mark.gpu, NOT_ON_CUDA)),
    ],
)
STACKING = [
    method for method in sorted(METHODS)
    if "train" in vars(client_class(type(toy_config(method).method))).get("stacks", ())
]  # fmt: skip


def small(method: str, device: str, *settings: str, **options: Any) -> RunConfig:
    own = METHODS[method].model_fields
    few = [f"{name}=2" for name in ("local_steps",) if name in own]
    # The gradient of a bias before BatchNorm is rounding alone, and Adam makes whole steps of it.
    adam = "optimizer" in own and own["optimizer"].default == "adam"
    alone = method in ("irm-l2", "perinvfl")  # with BatchNorm no stacks
    norm = f"model.norm={'none' if adam or alone else 'batch'}"
    return toy_config(method, norm, *few, *settings, device=device, **{"rounds": 2, **options})


def run(config: RunConfig, path: Path) -> RunFolder:
    folder = RunFolder.create(path, config)
    LocalRuntime(config).run(folder)
    return folder


def assert_alike(one: RunFolder, other: RunFolder, device: str) -> None:
    left, right = files(one.path), files(other.path)
    assert left.keys() == right.keys()
    for name in left:
        for key, tensor in left[name].items():
            torch.testing.assert_close(right[name][key], tensor, rtol=TOLERANCE[device], atol=TOLERANCE[device])
    assert close(one.rows(), other.rows())


@each_device
def test_a_method_does_there_what_it_does_on_the_cpu(device: str, method: str, tmp_path: Path) -> None:
    assert_alike(
        run(small(method, "cpu"), tmp_path / "cpu"), run(small(method, device), tmp_path / "there"), device
    )


@pytest.mark.parametrize(("device", "method"), cases(STACKING))
def test_a_stack_does_there_what_it_does_on_the_cpu(device: str, method: str, tmp_path: Path) -> None:
    one, other = (run(small(method, own, "cohort_engine=stack"), tmp_path / own) for own in ("cpu", device))
    assert_alike(one, other, device)


CAPTURED = [
    method for method in STACKING
    if "train" in vars(client_class(type(toy_config(method).method))).get("captures", ())
]  # fmt: skip


class AgainInPython:
    """What stands for a CUDA graph where there is none: does the work again, and has its results in fixed memory.

    As a graph cannot, neither may the work wait for the device.
    """

    def __init__(self, work: Any) -> None:
        before = ElsewhereTensor.waits.copy()
        self._work, self._found = work, work()
        assert not (waited := ElsewhereTensor.waits - before), waited

    def replay(self) -> Any:
        for old, new in zip(self._tensors(self._found), self._tensors(self._work()), strict=True):
            old.copy_(new)
        return self._found

    def _tensors(self, found: tuple[Reply, Any]) -> list[Any]:
        reply, kept = found
        values = [dict(reply.arrays), list(reply.metrics.values()), kept]
        return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.dim()]


@pytest.mark.parametrize(("device", "method"), cases(CAPTURED))
def test_what_is_captured_is_what_is_done_step_by_step(
    device: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if device != "cuda":
        monkeypatch.setattr(captured, "Graph", AgainInPython)
    made, folders = [], []
    init = captured._Captured.__init__

    def counted(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(captured._Captured, "__init__", counted)
    habit = "schedule" not in METHODS[method].refuses
    changes = ("schedule.name=step", "schedule.every=3") if habit else ("anneal_rounds=3",)
    settings = ("cohort_engine=stack", *changes)
    for possible in (False, True):
        monkeypatch.setattr(cohort, "possible", lambda _, possible=possible: possible)
        folders.append(run(small(method, device, *settings, rounds=6), tmp_path / str(possible)))
    assert_alike(*folders, device)
    half = client_class(type(toy_config(method).method))
    # Steps of rounds 1 to 3 are of one kind, those of 4 to 6 of another. There are one or two stacks.
    assert len(made) in (2 * len(vars(half)["captures"]), 4)
    assert "one by one" not in caplog.text
    assert "other numbers" not in caplog.text


@NOT_BESIDE_CUDA
def test_what_is_captured_wrongly_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(AgainInPython):
        def replay(self) -> Any:
            found = super().replay()
            for tensor in self._tensors(found):
                tensor += 1
            return found

    monkeypatch.setattr(captured, "Graph", Wrong)
    folders = []
    for possible in (False, True):
        monkeypatch.setattr(cohort, "possible", lambda _, possible=possible: possible)
        config = small("fedavg", "elsewhere", "cohort_engine=stack", rounds=5)
        folders.append(run(config, tmp_path / str(possible)))
    assert_alike(*folders, "elsewhere")
    assert "other numbers" in caplog.text


@one_method
@pytest.mark.parametrize("engine", ["loop", "stack"])
@pytest.mark.parametrize("scenario", ["diabetes-sites", "labels-and-shortcut", "event-and-shortcut"])
def test_a_task_is_trained_and_evaluated_there_as_on_the_cpu(
    device: str, engine: str, scenario: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"method": "fedavg", "scenario": {"name": scenario, "clients": 2}, "rounds": 2}
    settings = ["local_steps=2", "evaluate_every=2", f"cohort_engine={engine}"]
    one, other = (
        run(load_config(options={**options, "device": own}, settings=settings), tmp_path / own)
        for own in ("cpu", device)
    )
    assert_alike(one, other, device)
    assert "one by one" not in caplog.text  # as after an exception in a stack


def stepping() -> list[Any]:
    """Methods that take steps, marked."""
    found = []
    for method in sorted(METHODS):
        if "local_steps" in METHODS[method].model_fields:
            found.append(pytest.param(method, marks=often(method)))
    return found


@NOT_BESIDE_CUDA
@pytest.mark.parametrize("method", stepping())
def test_no_step_waits_for_the_device(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits as often for a few steps as for many."""
    answer = Host._act

    def counted(self: Host, work: Any) -> Reply:
        before = ElsewhereTensor.waits.total()
        reply = answer(self, work)
        if work.action.startswith("train"):
            waits[-1] += ElsewhereTensor.waits.total() - before
        return reply

    monkeypatch.setattr(Host, "_act", counted)
    waits: list[int] = []
    for steps in (2, 6):
        waits.append(0)
        run(small(method, fake_device.NAME, f"local_steps={steps}", rounds=1), tmp_path / str(steps))
    assert waits[0] == waits[1], ElsewhereTensor.waits


@pytest.mark.slow
@one_method
def test_a_run_goes_on_there(device: str, tmp_path: Path) -> None:
    config = small("ditto", device, rounds=4)
    whole = run(config, tmp_path / "whole")
    folder, origin = broken_off(config, tmp_path / "broken", 3)
    LocalRuntime(config).run(folder, origin)
    assert_alike(whole, folder, device)


@one_method
def test_what_is_served_there_is_what_is_served_on_the_cpu(device: str, tmp_path: Path) -> None:
    """Both models of a snapshot, one of which the site keeps; samples come from the CPU and answers go there."""
    config = small("ditto", "cpu")
    net = network(config.model, config.scenario.input_shape, config.scenario.classes)
    received, kept = Received(3, {MODEL: net.initial(1)}), {PERSONAL: net.initial(1, "own")}
    Snapshot(config.task(), "client-0", None, received, kept, run="run").save(tmp_path / "run" / "client-0")
    path = newest(tmp_path, None, None)
    assert path
    x = torch.randn(5, *config.scenario.input_shape, generator=torch.Generator().manual_seed(0))
    here, there = (load(path, None, torch.device(name)) for name in ("cpu", device))
    assert there.models.keys() == set(config.method.evaluates)
    for name in there.models:
        found = there.outputs(name, x)
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, here.outputs(name, x), rtol=TOLERANCE[device], atol=TOLERANCE[device])


@one_method
def test_the_server_clips_there_as_on_the_cpu(device: str, tmp_path: Path) -> None:
    settings = ("privacy.mechanism=fixed", "privacy.noise_multiplier=0", "privacy.clipping_norm=0.1")
    one, other = (
        run(toy_config("fedavg", *settings, device=own, rounds=2), tmp_path / own) for own in ("cpu", device)
    )
    assert_alike(one, other, device)


@NOT_BESIDE_CUDA
def test_two_places_that_meet_are_noticed_and_waits_are_counted() -> None:
    there, here = torch.ones(3, device=fake_device.NAME), torch.ones(3)
    assert there.device.type == fake_device.NAME
    with pytest.raises(RuntimeError, match="meets tensors of elsewhere and of cpu"):
        there + here
    assert (there + 1).device.type == fake_device.NAME
    before = ElsewhereTensor.waits.total()
    assert float(there.sum()) == 3
    assert torch.equal(there.cpu(), here)
    assert bool((there > 0).all())
    assert ElsewhereTensor.waits.total() == before + 3
    there += there
    assert there.tolist() == [2, 2, 2]
