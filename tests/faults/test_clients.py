"""Clients that die, hang, are late or lie: the run ends as if they had not been there."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
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
from perennial.server.run.folder import RunFolder
from perennial.testing.bad_replies import BAD_TENSORS, OTHERWISE_BAD

pytestmark = [pytest.mark.runtimes, pytest.mark.faults]

CLIENTS = 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Four sites; a fifth SuperNode can be started, which is nobody's."""
    with federation(tmp_path_factory.mktemp("federation"), CLIENTS + 1) as site:
        stranger = site.commands.pop(f"supernode-{CLIENTS}")
        site.start_all()
        site.commands["stranger"] = [*stranger[:-1], stranger[-1].replace("partition-id=4", "partition-id=1")]
        yield site


@pytest.fixture(autouse=True)
def nothing_wrong(site: Deployment) -> None:
    """Every test begins with sites that do as they should."""
    for path in site.folder.glob("mischief-*"):
        path.unlink()


def test_a_hostile_client_does_no_harm_whatever_it_sends(site: Deployment, tmp_path: Path) -> None:
    """NaN, 1e30, wrong shapes, pickle bytes, … in turn; and a node that says that it is another one's site."""
    faults = {**BAD_TENSORS, **OTHERWISE_BAD}
    config, out = config_for(CLIENTS, rounds=len(faults)), tmp_path / "run"
    file = plan(site, 3, **{f"train_{number}": fault for number, fault in enumerate(faults, 1)})
    plan(site, CLIENTS, query_0="claim client-1")
    command = start_run(site, config, out)
    command.until(lambda: rounds_of(out))
    site.start("stranger")
    said = command.ends(0)
    print(said)
    site.kill("stranger")
    left_out = rounds_of(out)
    for number, word in enumerate(faults.values(), 1):
        assert word in left_out[number]["client-3"]
        assert f"left out client-3: {left_out[number]['client-3']}" in said
    assert all(who == "client-3" or who.startswith("node ") for names in left_out.values() for who in names)
    refusals = {why for names in left_out.values() for who, why in names.items() if who.startswith("node ")}
    assert len(refusals) == 1
    assert "says that it is client-1, which node " in refusals.pop()
    assert not file.with_name(f"{file.stem}.hatched").exists()
    assert_same_model(out, without(config, left_out, tmp_path / "absent"))


def test_clients_that_die_hang_or_are_late_are_missed_for_some_rounds_and_come_back(
    site: Deployment, tmp_path: Path
) -> None:
    """Round 2: client-1 dies in its upload, client-2 in training, client-3 is late; round 6: client-3 hangs."""
    deadline = 30
    config, out = config_for(CLIENTS, f"deadline={deadline}", "quorum=0", rounds=9), tmp_path / "run"
    plan(site, 1, train_2="cut")
    working = plan(site, 2, train_2="wait").with_name("mischief-2.waiting")
    plan(site, 3, train_2=f"late {deadline + 15}", train_6="wait")
    hanging = working.with_name("mischief-3.waiting")
    command = start_run(site, config, out)
    command.until(working.exists)
    site.kill("supernode-2")
    working.unlink()
    site.start("supernode-2")
    command.until(lambda: site.processes["supernode-1"].poll() is not None)
    site.kill("supernode-1")
    site.start("supernode-1")
    command.until(hanging.exists)
    signal_group(site, "supernode-3", signal.SIGSTOP)
    command.until(lambda: 6 in rounds_of(out))
    hanging.unlink()
    signal_group(site, "supernode-3", signal.SIGCONT)
    said = command.ends(0)
    print(said)
    left_out = rounds_of(out)
    late, gone = "did not answer in time", "is gone: it has left, or has sent no heartbeat for a minute"
    assert not [who for who in left_out[1] if who.startswith("client-")]  # the stranger may still be missed
    assert left_out[2]["client-1"] == left_out[2]["client-3"] == late
    assert left_out[2]["client-2"] in (late, gone)
    assert f"left out client-2: {left_out[2]['client-2']}" in said
    assert left_out[6]["client-3"] == late
    assert left_out[9] == {}
    assert_same_model(out, without(config, left_out, tmp_path / "absent"))


def test_a_quorum_that_is_never_met_ends_the_run_and_a_resume_goes_on(site: Deployment, tmp_path: Path) -> None:
    """Two of four are gone in round 2, one of them by `kill -9`; and a new run does not even begin."""
    config = config_for(CLIENTS, "deadline=30", "quorum=0.75", "wait=5", rounds=3)
    out, other = tmp_path / "run", tmp_path / "other"
    waiting = plan(site, 3, train_2="wait").with_name("mischief-3.waiting")
    plan(site, 2, train_2="die")
    command = start_run(site, config, out)
    command.until(waiting.exists)
    site.kill("supernode-3")
    waiting.unlink()
    said = command.ends(3)
    print(said)
    assert "perennial: the run stopped: round 2: only 2 of 4 clients gave a usable answer to 'train'" in said
    assert RunFolder(out).checkpoints() == [1]
    site.kill("supernode-2")
    said = start_run(site, config, other).ends(3)
    assert "only 2 of 4 clients were there after wait=5 seconds, and quorum=0.75 of them is needed" in said
    assert not RunFolder(other).checkpoints()
    for number in (2, 3):
        plan(site, number)
        site.start(f"supernode-{number}")
    perennial(site, "resume", str(out)).ends(0)
    assert_same_model(out, without(config, {number: {} for number in (1, 2, 3)}, tmp_path / "unbroken"))
