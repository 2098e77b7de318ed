"""Connections that break what passes, a site that hangs and one whose clock jumps: nothing is left out or lost."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bad_luck import Proxies, wrong_clock
from faulty_deployment import (
    assert_same_model,
    config_for,
    federation,
    perennial,
    plan,
    rounds_of,
    signal_group,
    start_run,
    without,
)

from perennial.server.deployment.testbed import Deployment

pytestmark = [pytest.mark.runtimes, pytest.mark.faults]

ROUNDS, DAY = 6, 86_400
CONFIG = config_for(2, "deadline=120", "quorum=1", rounds=ROUNDS)


@dataclass
class Unlucky:
    """Two sites, each behind a proxy, and a clock of the second."""

    site: Deployment
    proxies: Proxies
    clock: Path
    unbroken: Path


@pytest.fixture(scope="module")
def unlucky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unlucky]:
    folder = tmp_path_factory.mktemp("federation")
    if not (library := wrong_clock(folder)):
        pytest.skip("no C compiler is here, which a wrong clock needs")
    everybody = {number: dict[str, str]() for number in range(1, ROUNDS + 1)}
    with federation(folder, 2) as site:
        proxies, clock = Proxies(2, site.fleet_port), folder / "clock"
        proxies.start()
        clock.write_text("0\n")
        for number, port in enumerate(proxies.ports):
            words = site.commands[f"supernode-{number}"]
            words[words.index("--superlink") + 1] = f"127.0.0.1:{port}"
        site.commands["supernode-1"][1:1] = [f"LD_PRELOAD={library}", f"WRONG_CLOCK={clock}"]
        site.start_all()
        yield Unlucky(site, proxies, clock, without(CONFIG, everybody, tmp_path_factory.mktemp("local") / "run"))


def goes_on(unlucky: Unlucky, out: Path) -> None:
    """The run ends with everybody's answers and the model of an unbroken one."""
    assert rounds_of(out) == {number: {} for number in range(1, ROUNDS + 1)}
    assert_same_model(out, unlucky.unbroken)


@pytest.mark.parametrize("mood", ["reorders", "doubles"])
def test_bytes_that_come_in_another_order_or_twice(unlucky: Unlucky, mood: str, tmp_path: Path) -> None:
    command = start_run(unlucky.site, CONFIG, out := tmp_path / "run")
    command.until(lambda: 2 in rounds_of(out))
    unlucky.proxies.mood = {1: mood}
    time.sleep(3)
    unlucky.proxies.mood = {}
    print(command.ends(0))
    goes_on(unlucky, out)


def test_replies_that_are_sent_twice(unlucky: Unlucky, tmp_path: Path) -> None:
    file = plan(unlucky.site, 1, train_2="twice", train_3="twice")
    print(start_run(unlucky.site, CONFIG, out := tmp_path / "run").ends(0))
    file.unlink()
    assert file.with_suffix(".sent").exists()
    goes_on(unlucky, out)


def test_a_site_that_hangs_for_less_than_the_deadline(unlucky: Unlucky, tmp_path: Path) -> None:
    command = start_run(unlucky.site, CONFIG, out := tmp_path / "run")
    command.until(lambda: 2 in rounds_of(out))
    signal_group(unlucky.site, "supernode-1", signal.SIGSTOP)
    time.sleep(10)
    done = rounds_of(out)
    signal_group(unlucky.site, "supernode-1", signal.SIGCONT)
    print(command.ends(0))
    assert len(done) < ROUNDS  # they waited for it
    goes_on(unlucky, out)


@pytest.mark.parametrize("by", [DAY, -DAY])
def test_a_site_whose_clock_jumps_a_day_and_back(unlucky: Unlucky, by: int, tmp_path: Path) -> None:
    """Its SuperNode may end, and is started again, as `join` does. If a request was lost, the run is resumed."""
    site = unlucky.site
    command = start_run(site, CONFIG, out := tmp_path / "run")
    command.until(lambda: 2 in rounds_of(out))
    unlucky.clock.write_text(f"{by}\n")
    time.sleep(5)
    unlucky.clock.write_text("0\n")
    while command.process.poll() is None:
        if site.processes["supernode-1"].poll() is not None:
            site.start("supernode-1")
        time.sleep(0.5)
    if command.process.returncode:
        assert "client-1: is gone" in command.ends(3)
        command = perennial(site, "resume", str(out))
    print(command.ends(0))
    goes_on(unlucky, out)
