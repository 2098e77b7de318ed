"""Whatever the caller has set in PyTorch, and in as many threads as it likes, a run has the same numbers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import perennial
from perennial import InMemory, Progress, Result, from_arrays
from perennial.common.models.torch_state import plain_torch
from perennial.common.utils.files import load_tensors

FEW: dict[str, Any] = {"checkpoint_every": 1, "model.hidden": [64]}
X = np.random.default_rng(9).normal(size=(7, 20))
KINDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class Stop(Exception):  # noqa: N818
    """What ends a run that is broken off."""


@pytest.fixture(scope="module")
def scenario() -> InMemory:
    rng = np.random.default_rng(0)

    def samples(n: int) -> tuple[Any, Any, Any]:
        y = np.arange(n) // 2 % 2
        return rng.normal(size=(n, 20)) + y[:, None], y, np.array(["hot", "cold"])[np.arange(n) % 2]

    return from_arrays({"north": samples(80), "east": samples(60), "west": samples(60)})


@pytest.fixture(scope="module")
def undisturbed(scenario: InMemory, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return perennial.run("ditto", scenario, rounds=4, settings=FEW, out=tmp_path_factory.mktemp("run") / "plain")


def arrays(result: Result) -> dict[str, Tensor]:
    return dict(load_tensors(result.folder / "models" / "global.safetensors"))


def same(one: Result, other: Result) -> bool:
    """Whether two runs have the same models to the bit, and the same log."""
    first, second = arrays(one), arrays(other)
    logs = [(result.folder / "metrics.jsonl").read_text() for result in (one, other)]
    return (
        first.keys() == second.keys()
        and all(torch.equal(first[k], second[k]) for k in first)
        and len({*logs}) == 1
    )


@contextmanager
def setting(name: str, value: Any, get: Callable[[], Any]) -> Iterator[None]:
    before = get()
    getattr(torch, name)(value)
    try:
        yield
    finally:
        getattr(torch, name)(before)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def new_way() -> Iterator[None]:
    """After which the old way cannot be asked."""
    before, KINDS[1].fp32_precision = KINDS[1].fp32_precision, "bf16"
    try:
        yield
    finally:
        KINDS[1].fp32_precision = before


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "medium": lambda: setting("set_float32_matmul_precision", "medium", torch.get_float32_matmul_precision),
    "bf16": new_way,
    "float64": lambda: setting("set_default_dtype", torch.float64, torch.get_default_dtype),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "meta": default_device,
    "within meta": lambda: torch.device("meta"),
}


def state() -> list[Any]:
    """What a run might change, and one thing that it must be able to."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = "told in the new way"
    return [
        precision,
        [kind.fp32_precision.replace("none", "ieee") for kind in KINDS],
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
    ]


@pytest.mark.parametrize("name", STATES)
def test_what_the_caller_has_set_changes_no_number_and_is_as_before_afterwards(
    name: str, scenario: InMemory, undisturbed: Result, tmp_path: Path
) -> None:
    wanted, plain = undisturbed.predict_proba(X, "personal", client="east"), state()
    seen = []

    def stop(progress: Progress) -> None:
        seen.append(state())
        if progress.round == 2:
            raise Stop

    with STATES[name]():
        before = state()
        with pytest.raises(Stop):
            perennial.run("ditto", scenario, rounds=4, settings=FEW, out=tmp_path / "run", watch=stop)
        assert state() == before
        result = perennial.resume(tmp_path / "run")  # also from what a checkpoint holds
        found = result.predict_proba(X, "personal", client="east")
        assert state() == before
    assert before != plain
    assert state() == plain
    assert [now[1:7] for now in seen] == [plain[1:7]] * 3
    assert same(result, undisturbed)
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autocast", "float64", "inference_mode", "meta"])
def test_a_study_in_this_process_changes_neither_its_numbers_nor_the_number_of_threads(
    name: str, scenario: InMemory, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with STATES[name]():
            before = state()
            found = perennial.compare(
                ["fedavg"], scenario, seeds=1, rounds=2, settings=FEW, jobs=1, out=tmp_path / "one"
            )
            assert state() == before
        assert torch.get_num_threads() == 2
        wanted = perennial.compare(
            ["fedavg"], scenario, seeds=1, rounds=2, settings=FEW, jobs=1, out=tmp_path / "two"
        )
    finally:
        torch.set_num_threads(threads)
    assert found.table == wanted.table


@pytest.mark.slow
def test_runs_in_threads_are_the_runs_one_after_the_other(undisturbed: Result, tmp_path: Path) -> None:
    turns = list[int]()

    def run(kind: str, seed: int) -> Result:
        def ask(_: Progress) -> None:
            turns.append(seed)
            undisturbed.predict(X, "personal", client="east")  # within its own turn

        out, settings = tmp_path / f"{kind}-{seed}", {"scenario.clients": 2}
        return perennial.run(
            "fedavg", "colored-digits", rounds=3, seed=seed, settings=settings, out=out, watch=ask
        )

    together: dict[int, Result] = {}
    threads = [Thread(target=lambda s=seed: together.update({s: run("together", s)})) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(together) == [0, 1, 2]
    assert [len(list(rounds)) for _, rounds in groupby(turns)] == [4, 4, 4]  # none within another's turn
    assert all(same(together[seed], run("alone", seed)) for seed in range(3))


def test_at_its_defaults_nothing_of_pytorch_is_touched() -> None:
    before = state()
    with plain_torch():
        assert state() == before
        assert not torch.overrides._get_current_function_mode_stack()  # each call would pass it
