"""Three sites join with tables of their own; one of them cannot take part, and the others go on without it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from perennial.client.state import FileStates
from perennial.common.config import RunConfig, load_config
from perennial.server.deployment.testbed import deployment
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

pytestmark = [pytest.mark.runtimes, pytest.mark.slow]

SITES = ("clinic", "hospital", "practice")
SECONDS = 480.0


def tables(folder: Path) -> None:
    """Who is older than 50 is ill; the practice has not noted the weight."""
    folder.mkdir()
    for place, site in enumerate(SITES):
        columns = ("age", "label") if site == "practice" else ("weight", "age", "label")
        rows = [
            {"age": n % 90, "weight": (13 * n + place) % 40 + 50, "label": int(n % 90 > 50)} for n in range(120)
        ]
        lines = [",".join(str(row[name]) for name in columns) for row in rows]
        (folder / f"{site}.csv").write_text("\n".join([",".join(columns), *lines]))


def config(runtime: str, root: Path) -> RunConfig:
    scenario = {
        "name": "own-data", "sites": SITES, "inputs": ("age", "weight"), "mean": (45, 70), "scale": (25, 12),
    }  # fmt: skip
    options = {
        "method": "ditto", "scenario": scenario, "rounds": 2, "runtime": runtime, "data_root": str(root),
        "device": "cpu",
    }  # fmt: skip
    return load_config(options=options, settings=["evaluate_every=2", "checkpoint_every=2"])


class Site:
    """A `perennial join` of a person at a terminal."""

    def __init__(self, name: str, folder: Path, port: int, *more: str) -> None:
        self.state, self.output = folder / f"state of {name}", folder / f"{name}.out"
        command = [
            str(Path(sys.executable).parent / "perennial"), "join", "--superlink", f"127.0.0.1:{port}",
            "--data", str(folder / "all data" / f"{name}.csv"), "--state", str(self.state), "--device", "cpu",
            *more,
        ]  # fmt: skip
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def says(self, text: str) -> None:
        """Wait until it has said this."""
        end = time.monotonic() + SECONDS
        while not any(text in line for line in self.output.read_text().splitlines()):
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.2)


def started_by(site: Site) -> set[int]:
    """The SuperNode of a site and all of its process group."""
    fields = {int(path.parent.name): path.read_text().rpartition(")")[2].split() for path in stats()}
    nodes = {pid for pid, (_, parent, *_) in fields.items() if int(parent) == site.process.pid}
    return {pid for pid, (_, _, group, *_) in fields.items() if int(group) in nodes}


def stats() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[dict[str, Site], Path]]:
    tables(tmp_path / "all data")
    with deployment(tmp_path / "server", clients=0) as server:
        joined = {name: Site(name, tmp_path, server.fleet_port) for name in SITES}
        try:
            for site in joined.values():
                site.says("waiting for a run")
            rows = list(server.connection.execute(config("deployment", tmp_path), tmp_path / "run"))
            assert [row["round"] for row in rows if row["kind"] == "round"] == [1, 2]
            yield joined, tmp_path
        finally:
            for site in joined.values():
                if site.process.poll() is None:
                    site.process.send_signal(signal.SIGTERM)
            for site in joined.values():
                site.process.wait(60)


def test_sites_with_their_own_tables(sites: tuple[dict[str, Site], Path]) -> None:
    joined, folder = sites
    sentence = "practice.csv lacks column 'weight', which the server announces"

    # The one that does not fit is told so, and the server names it with the same words.
    joined["practice"].says(f"this site takes no part in the run: {sentence}")
    rows = [row for row in RunFolder(folder / "run").rows() if row["kind"] == "round"]
    assert [row["left_out"] for row in rows] == [{"practice": sentence}] * 2
    assert RunFolder(folder / "run").summary()["left_out"]["practice"]["last"].endswith(sentence)

    # The others say what they do, and keep their models.
    for name in ("clinic", "hospital"):
        for text in ("ditto on own-data, with 84 training samples", "round 1: train", "round 2: evaluate"):
            joined[name].says(text)
        (place,) = FileStates(joined[name].state)
        assert place.endswith(f"/{name}")
        assert "personal" in FileStates(joined[name].state)[place][-1].kept
    assert not list(FileStates(joined["practice"].state))

    # The rehearsal on the same files, without the one that could not take part, gives the same.
    rehearsal = config("local", folder / "all data").model_copy(update={"wait": 0.01})
    here = LocalRuntime(rehearsal)
    del here.grid.contexts[SITES.index("practice") + 1]
    here.run(RunFolder.create(folder / "rehearsal", rehearsal))
    one, other = (load_file(folder / run / "models" / "global.safetensors") for run in ("run", "rehearsal"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-6)

    # A site is stopped with everything that it started.
    clinic = joined["clinic"]
    family = started_by(clinic)
    assert len(family) == 2  # SuperNode and executor
    clinic.process.send_signal(signal.SIGTERM)
    assert clinic.process.wait(60) == 0
    assert clinic.output.read_text().splitlines()[-1].endswith("stopped")
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in family) and time.monotonic() < end:
        time.sleep(0.2)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
