"""The server's side dies or its disk is full; the run goes on, or is resumed, to the arrays of an unbroken run."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_deployment import (
    assert_same_model,
    children,
    config_for,
    federation,
    perennial,
    rounds_of,
    start_run,
    until,
    without,
)

from perennial.server.deployment.testbed import Deployment
from perennial.server.run.folder import RunFolder

pytestmark = [pytest.mark.runtimes, pytest.mark.faults]

ROUNDS = 6
CONFIG = config_for(2, "checkpoint_every=2", "deadline=120", rounds=ROUNDS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with federation(tmp_path_factory.mktemp("federation"), 2) as site:
        site.start_all()
        yield site


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "run"
    return without(CONFIG, {number: {} for number in range(1, ROUNDS + 1)}, folder)


def test_a_superlink_that_is_killed_and_started_again_interrupts_nothing(
    site: Deployment, unbroken: Path, tmp_path: Path
) -> None:
    """With a database and process isolation: the nodes, the ServerApp and whoever follows the run come back."""
    out = tmp_path / "run"
    command = start_run(site, CONFIG, out)
    command.until(lambda: 2 in rounds_of(out))
    site.kill("superlink")
    time.sleep(3)
    site.start("superlink")
    print(command.ends(0))
    assert rounds_of(out) == {number: {} for number in range(1, ROUNDS + 1)}
    assert_same_model(out, unbroken)


def test_a_serverapp_that_is_killed_is_resumed_even_from_the_older_checkpoint(
    site: Deployment, unbroken: Path, tmp_path: Path
) -> None:
    """Killed after round 4; then the checkpoint of round 4 is cut short, and that of round 2 taken."""
    out = tmp_path / "run"
    command = start_run(site, CONFIG, out)
    command.until(lambda: 4 in RunFolder(out).checkpoints())
    (server,) = children(site.processes["superexec"].pid, "flwr-serverapp")
    os.kill(server, signal.SIGKILL)
    begun = time.monotonic()
    said = command.ends(3)
    print(said, time.monotonic() - begun)
    assert "perennial: the run stopped: Flower says of run" in said
    assert "finished:failed" in said

    newest = RunFolder(out).checkpoint_path(4)
    with (newest / "arrays.safetensors").open("r+b") as file:
        file.truncate(100)
    said = perennial(site, "resume", str(out)).ends(2)
    print(said)
    assert f"checkpoint {newest} is damaged (the checksum of arrays.safetensors does not match)" in said
    assert "; move it away to resume from round 2" in said
    newest.rename(newest.with_name("round-4.damaged"))
    print(perennial(site, "resume", str(out)).ends(0))
    assert_same_model(out, unbroken)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_server_whose_disk_is_full_is_resumed_once_there_is_room(
    site: Deployment, unbroken: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        out = disk / "run"
        command = start_run(site, CONFIG, out)
        command.until(lambda: RunFolder(out).checkpoints())
        filler = disk / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True, check=False)
        said = command.process.wait(timeout=300), command.said.read_text()
        print(said)
        assert "No space left on device" in said[1]
        assert "Traceback" not in said[1]
        filler.unlink()
        perennial(site, "resume", str(out)).ends(0)
        assert_same_model(out, unbroken)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_superlink_without_its_database_has_forgotten_the_run_and_the_nodes(
    site: Deployment, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = start_run(site, CONFIG, out)
    command.until(lambda: RunFolder(out).checkpoints())
    site.kill("superlink")
    for path in site.folder.glob("state.db*"):
        path.unlink()
    site.start("superlink")
    said = command.ends(3)
    print(said)
    assert "the SuperLink was started again without its database and does not know run" in said
    for name in ("supernode-0", "supernode-1"):  # ends, for nobody knows its node; `join` would start it again
        until(lambda name=name: site.processes[name].poll() is not None)
        site.start(name)
    until(lambda: not RunFolder(out).owner())  # the ServerApp of the old SuperLink may outlive it
    print(perennial(site, "resume", str(out)).ends(0))
    assert_same_model(out, unbroken)
