"""The server's optimizers against Flower's own, against the paper's formula, and through a whole run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flowers
from safetensors.torch import load_file

from perennial.common.config import load_config
from perennial.common.training import ServerOptimizer
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.server.run.folder import RunFolder
from perennial.strategies.registry import strategy_for
from perennial.strategies.server_optimizer import FIRST, SECOND, ServerSteps
from perennial.testing.methods import run
from perennial.testing.tiny_federation import toy_config
from tests.helpers.tiny_runs import taken_up

FLOWERS: dict[str, Any] = {
    "fedavgm": lambda: flowers.FedAvgM(server_learning_rate=0.7, server_momentum=0.8),
    "fedadagrad": lambda: flowers.FedAdagrad(eta=0.3, tau=0.02),
    "fedyogi": lambda: flowers.FedYogi(eta=0.3, beta_1=0.8, beta_2=0.95, tau=0.02),
}
OURS = {
    "fedavgm": ServerOptimizer(name="fedavgm", learning_rate=0.7, momentum=0.8),
    "fedadagrad": ServerOptimizer(name="fedadagrad", learning_rate=0.3, adaptivity=0.02),
    "fedyogi": ServerOptimizer(name="fedyogi", learning_rate=0.3, betas=(0.8, 0.95), adaptivity=0.02),
    "fedadam": ServerOptimizer(name="fedadam", learning_rate=0.3, betas=(0.8, 0.95), adaptivity=0.02),
}


def means(rounds: int) -> list[Tensors]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "w": torch.randn(3, 2, generator=generator, dtype=torch.float64),
            "b": torch.randn(2, generator=generator),
        }
        for _ in range(rounds)
    ]


@pytest.mark.parametrize("name", FLOWERS)
def test_it_is_flowers_but_for_where_the_squares_begin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's v begins as 0 and the paper's as τ², so both are let begin there."""
    theirs = FLOWERS[name]()
    start, now = means(1)[0], [None]
    monkeypatch.setattr(flowers.FedAvg, "aggregate_train", lambda *_: (now[0], None))
    theirs.current_arrays = ArrayRecord({k: v for k, v in start.items()})  # type: ignore[arg-type]
    if name != "fedavgm":
        theirs.current_arrays = {k: v.numpy() for k, v in start.items()}
        theirs.v_t = {k: np.full(v.shape, 0.02**2) for k, v in start.items()}
    ours, here = ServerSteps(OURS[name], {}, {}), start
    for mean in means(6)[1:]:
        now[0] = ArrayRecord({k: v for k, v in mean.items()})  # type: ignore[assignment,arg-type]
        found, _ = theirs.aggregate_train(1, [])
        expected = {k: v.numpy() for k, v in found.items()}
        if name != "fedavgm":
            theirs.current_arrays = expected
        here = {k: ours.step(k, here[k], mean[k], OURS[name].learning_rate) for k in here}
        for k in here:
            np.testing.assert_allclose(here[k].numpy(), expected[k], rtol=1e-5, atol=1e-6)


def test_fedadam_is_algorithm_2() -> None:
    """Flower's has a bias correction that the paper's has not, so this is against the formula."""
    settings = OURS["fedadam"]
    ours, x, m, v = ServerSteps(settings, {}, {}), 2.0, 0.0, 0.02**2
    here = torch.tensor([x], dtype=torch.float64)
    for mean in (3.0, 2.5, -1.0, 0.25):
        delta = mean - x
        m, v = 0.8 * m + 0.2 * delta, 0.95 * v + 0.05 * delta * delta
        x += 0.3 * m / (v**0.5 + 0.02)
        here = ours.step("x", here, torch.tensor([mean], dtype=torch.float64), settings.learning_rate)
        assert float(here) == pytest.approx(x, rel=1e-12)


def test_momentum_0_and_rate_1_is_the_mean(tmp_path: Path) -> None:
    plain = ("server_optimizer=fedavgm", "server_optimizer.momentum=0")
    for name, settings in {"mean": (), "step": plain}.items():
        run(toy_config("fedavg", "model.norm=batch", *settings, rounds=3), tmp_path / name)
    one, other = (load_file(tmp_path / name / "models" / "global.safetensors") for name in ("mean", "step"))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedsr", marks=pytest.mark.slow)])
def test_a_run_is_taken_up_to_the_bit_and_is_another_than_with_the_mean(
    method: str, name: str, tmp_path: Path
) -> None:
    config = toy_config(method, f"server_optimizer={name}", "model.norm=batch", rounds=5, participation=0.5)
    folder = taken_up(config, tmp_path, after=3)
    state = folder.load_checkpoint()
    assert state.strategy[FIRST].keys() <= state.arrays.keys()
    assert not any("running" in key for key in state.strategy[FIRST])
    assert bool(state.strategy.get(SECOND)) == (name != "fedavgm")
    run(toy_config(method, "model.norm=batch", rounds=5, participation=0.5), tmp_path / "mean")
    rows = [[row.get("metrics") for row in each.rows()] for each in (folder, type(folder)(tmp_path / "mean"))]
    assert rows[0][0] == rows[1][0]
    assert rows[0] != rows[1]


def test_it_stands_before_a_privacy_mechanism_and_a_robust_rule(tmp_path: Path) -> None:
    for settings in ("privacy.mechanism=fixed", "aggregation=median"):
        for name in ("none", "fedadam"):
            config = toy_config("fedavg", f"server_optimizer={name}", settings, rounds=2)
            run(config, tmp_path / settings / name)
        folders = [RunFolder(tmp_path / settings / name) for name in ("none", "fedadam")]
        plain, stepped = (folder.load_checkpoint() for folder in folders)
        assert stepped.strategy[SECOND].keys() == stepped.arrays.keys()
        assert stepped.strategy.keys() - {FIRST, SECOND} == plain.strategy.keys()


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("local", "whose server takes no mean"),
        ("l2sgd", "whose clients step towards the mean itself"),
        ("perinvfl", "whose server half has its own update and so takes more than a mean; leave it out"),
        ("fedsgd", "whose server half has its own update and so takes more than a mean; leave it out"),
        ("ifca", "whose server half has its own combined, update and so takes more than a mean; leave it out"),
    ],
)
def test_a_server_that_does_more_refuses_it(method: str, why: str) -> None:
    said = f"server_optimizer.name: 'fedadam' is not possible with method '{method}', {why}"
    with pytest.raises(UserError) as error:
        strategy_for(toy_config(method, "server_optimizer=fedadam"), "run")
    assert str(error.value) == said


def test_defaults_go_with_the_name() -> None:
    def of(*settings: str) -> ServerOptimizer:
        return load_config(options={"method": "fedavg"}, settings=settings).server_optimizer

    assert of("server_optimizer=fedavgm").learning_rate == 1.0
    assert of("server_optimizer.name=fedavgm", "server_optimizer.learning_rate=0.5").learning_rate == 0.5
    assert of("server_optimizer=fedadagrad").betas == (0.0, 0.99)
    assert of("server_optimizer=fedyogi").betas == (0.9, 0.99)
    with pytest.raises(UserError, match=r"server_optimizer.betas: \[1, 0.9\] is not possible; both must be"):
        of("server_optimizer=fedadam", "server_optimizer.betas=[1, 0.9]")
    with pytest.raises(UserError, match=r"server_optimizer.learning_rate: it needs a server_optimizer.name, such"):
        of("server_optimizer.learning_rate=0.5")


def test_a_schedule_makes_the_steps_shorter(tmp_path: Path) -> None:
    """Of two rounds with FedAvgM at momentum 0 the second goes half the way to the mean."""
    settings = ("server_optimizer=fedavgm", "server_optimizer.momentum=0", "checkpoint_every=1")
    half = ("server_schedule=exponential", "server_schedule.decay=0.5")
    ends = {}
    for name, more in {"mean": (), "half": half}.items():
        run(toy_config("fedavg", *settings, *more, rounds=2), tmp_path / name)
        ends[name] = load_file(tmp_path / name / "models" / "global.safetensors")
    run(toy_config("fedavg", *settings, rounds=1), tmp_path / "first")
    first = load_file(tmp_path / "first" / "models" / "global.safetensors")
    for key, start in first.items():
        torch.testing.assert_close(ends["half"][key], (start + ends["mean"][key]) / 2, rtol=1e-5, atol=1e-6)
