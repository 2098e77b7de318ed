"""Schedules against PyTorch's, and what cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.common.config import load_config, parse_task
from perennial.common.training import Schedule
from perennial.common.utils.errors import UserError
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.study.run_names import config_digest
from perennial.testing.tiny_federation import toy_config
from tests.helpers.tiny_runs import broken_off

SCHEDULES: dict[str, tuple[Schedule, Any]] = {
    "step": (Schedule(name="step", every=3, decay=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
    "exponential": (Schedule(name="exponential"), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95)),
    "cosine": (
        Schedule(name="cosine", least=0.1).over(12),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12, 0.1),
    ),
    "constant": (Schedule(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_pytorchs(name: str) -> None:
    ours, theirs = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = theirs(optimizer)
    for number in range(1, 13):
        assert ours.at(number) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_the_warm_up_rises_evenly_and_then_the_schedule_begins() -> None:
    warm = Schedule(name="cosine", warm_up=3).over(11)
    plain = Schedule(name="cosine").over(8)
    assert [warm.at(number) for number in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert [warm.at(number + 3) for number in range(1, 9)] == [plain.at(number) for number in range(1, 9)]
    assert warm.at(12) == warm.at(99) == 0.0
    assert [Schedule(warm_up=1).at(number) for number in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert Schedule(name="cosine", warm_up=20).over(10).at(10) == 10 / 21


def test_clients_are_told_when_cosine_ends() -> None:
    config = load_config(options={"method": "fedavg", "rounds": 7}, settings=["schedule=cosine"])
    assert config.schedule.rounds == 0
    assert parse_task(config.task()).schedule.rounds == 7


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["schedule=cosin"], "schedule.name: 'cosin' is not possible; input should be 'constant', 'step', "),
        (["schedule=cosine", "schedule.every=3"], "schedule.every: it is for step, and the schedule is 'cosine'"),
        (["schedule.decay=0.5"], "schedule.decay: it is for step and exponential, and the schedule is 'constant'"),
        (
            ["schedule=cosine", "schedule.rounds=5", "schedule.warm_up=5"],
            "schedule.rounds: 5 is not possible; it ",
        ),
        (["schedule=step", "schedule.decay=0"], "schedule.decay: 0 is not possible; input should be greater th"),
        (["server_schedule=cosine"], "server_schedule: it needs a server_optimizer, whose step size it changes"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(options={"method": "fedavg"}, settings=settings)
    assert str(error.value).startswith(sentence)


def test_a_method_with_steps_of_its_own_refuses_a_schedule() -> None:
    for method in ("perinvfl", "pfedme", "fedsgd", "f-fl-games"):
        with pytest.raises(
            UserError, match=f"schedule.name: 'cosine' is not possible with method '{method}', whose"
        ):
            load_config(options={"method": method}, settings=["schedule=cosine"])


def test_a_run_that_is_taken_up_cannot_have_other_rounds_than_its_cosine(tmp_path: Path) -> None:
    config = toy_config("fedavg", "schedule=cosine", rounds=4)
    folder, origin = broken_off(config, tmp_path / "run", after=2)
    longer = config.model_copy(update={"rounds": 8})
    with pytest.raises(
        UserError, match=r"rounds was 4, and is 8 now: schedule=cosine comes down by the last round"
    ):
        LocalRuntime(longer).run(folder, origin)
    fixed = toy_config("fedavg", "schedule=cosine", "schedule.rounds=4", rounds=4)
    folder, origin = broken_off(fixed, tmp_path / "fixed", after=2)
    LocalRuntime(fixed.model_copy(update={"rounds": 6})).run(folder, origin)
    rates = [row["client"] for row in folder.rows() if row["kind"] == "rate"]
    assert rates == pytest.approx([0.05 * fixed.schedule.at(number) for number in range(1, 7)])


def test_the_servers_rate_is_logged_and_in_the_name_of_a_run(tmp_path: Path) -> None:
    stepping = ("server_optimizer=fedavgm", "server_optimizer.momentum=0")
    plain, falling = (
        toy_config("fedavg", *stepping, *more, rounds=4) for more in ((), ("server_schedule=cosine",))
    )
    assert config_digest(plain) != config_digest(falling)
    folder = RunFolder.create(tmp_path / "run", falling)
    LocalRuntime(falling).run(folder)
    rates = [row["server"] for row in folder.rows() if row["kind"] == "rate"]
    assert rates == pytest.approx([Schedule(name="cosine", rounds=4).at(number) for number in (1, 2, 3, 4)])
