"""Every method, serving and resume on another device than the CPU: a GPU, or the one of `elsewhere.py`.

The suite takes a few methods; `pytest -m devices` takes all, and `pytest -m gpu` all on CUDA.
"""

from pathlib import Path
from typing import Any

import elsewhere
import pytest
import torch
from elsewhere import ElsewhereTensor
from test_contract import close, files
from toys import broken_off, toy_config

from perennial.client.host import Host, client_class
from perennial.client.trainer import Reply
from perennial.common.config import RunConfig
from perennial.common.methods import METHODS
from perennial.server.folder import RunFolder
from perennial.server.local import LocalRuntime

FEW = ("cgpfl", "ditto", "fedavg", "fedilc", "fedpin", "fedsdr", "perinvfl")
TOLERANCE = {elsewhere.NAME: 1e-5, "cuda": 1e-3}
"""A GPU adds up in another order; a few steps later that shows."""
NOT_ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def cases(methods: Any) -> list[Any]:
    """Methods with each device, marked."""
    found = []
    for method in methods:
        marks = () if method in FEW else (pytest.mark.devices,)
        found.append(pytest.param(elsewhere.NAME, method, marks=marks, id=f"{elsewhere.NAME}-{method}"))
        found.append(pytest.param("cuda", method, marks=(pytest.mark.gpu, NOT_ON_CUDA), id=f"cuda-{method}"))
    return found


each_device = pytest.mark.parametrize(("device", "method"), cases(sorted(METHODS)))
one_of_each_device = pytest.mark.parametrize(("device", "method"), cases(["ditto"]))
STACKING = [
    method for method in sorted(METHODS)
    if "train" in vars(client_class(type(toy_config(method).method))).get("stacks", ())
]  # fmt: skip


def small(method: str, device: str, *settings: str, **options: Any) -> RunConfig:
    own = METHODS[method].model_fields
    few = [f"{name}=2" for name in ("local_steps",) if name in own]
    return toy_config(method, "model.norm=batch", *few, *settings, device=device, **{"rounds": 2, **options})


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


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=() if method in FEW else (pytest.mark.devices,))
        for method in sorted(METHODS)
        if "local_steps" in METHODS[method].model_fields
    ],
)
def test_no_step_waits_for_the_device(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits as often for a few steps as for many."""
    answer, found = Host._act, []

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
        found.append(run(small(method, elsewhere.NAME, f"local_steps={steps}", rounds=1), tmp_path / str(steps)))
    assert waits[0] == waits[1], ElsewhereTensor.waits


@one_of_each_device
def test_a_run_goes_on_there(device: str, method: str, tmp_path: Path) -> None:
    config = small(method, device, rounds=4)
    whole = run(config, tmp_path / "whole")
    folder, origin = broken_off(config, tmp_path / "broken", 3)
    LocalRuntime(config).run(folder, origin)
    assert_alike(whole, folder, device)


@one_of_each_device
def test_an_environment_s_areas_and_clipping_are_the_same_there(device: str, method: str, tmp_path: Path) -> None:
    """Beside a method's own work: clipping and noise, which are the server's."""
    settings = ("privacy.mechanism=fixed", "privacy.noise_multiplier=0", "privacy.clipping_norm=0.1")
    one, other = (
        run(toy_config("fedavg", *settings, device=own, rounds=2), tmp_path / own) for own in ("cpu", device)
    )
    assert_alike(one, other, device)


def test_two_places_that_meet_are_noticed_and_waits_are_counted() -> None:
    there, here = torch.ones(3, device=elsewhere.NAME), torch.ones(3)
    assert there.device.type == elsewhere.NAME
    with pytest.raises(RuntimeError, match="meets tensors of elsewhere and of cpu"):
        there + here
    assert (there + 1).device.type == elsewhere.NAME
    before = ElsewhereTensor.waits.total()
    assert float(there.sum()) == 3
    assert torch.equal(there.cpu(), here)
    assert bool((there > 0).all())
    assert ElsewhereTensor.waits.total() == before + 3
    there += there
    assert there.tolist() == [2, 2, 2]
