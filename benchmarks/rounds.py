"""Seconds per round on a real deployment, and memory of its processes: Flower as it is, then step by step.

    uv run python benchmarks/rounds.py [--rounds N] [--clients N] [--scenarios NAME,NAME] [--steps NAME,NAME]
                                       [--model NAME] [--settings KEY=VALUE,…] [--repeats N] [--json]

A SuperLink and N SuperNodes on this machine, over gRPC. The steps, each with what is before it:

- `stock`: Flower's own Grid in the ServerApp; a ClientApp that imports PyTorch and loads data for each message;
- `poll`: the ServerApp looks for replies every 0.25 s instead of every 3 s;
- `worker`: the client worker;
- `launcher`: the warm launcher.

A run is FedAvg. A round is timed from the log row of the one before it to its own; the first does not count,
nor does the last, whose row waits for the evaluation. Memory is each process's highest resident size, looked up
four times a second: the largest of all processes of its kind. A page that several processes share counts in each.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perennial.client.node import launcher
from perennial.common.config import RunConfig, load_config
from perennial.server.deployment import remote
from perennial.server.deployment.testbed import Deployment, deployment
from perennial.server.folder import RunFolder

PROJECT = Path(__file__).parents[1]
STEPS = ("stock", "poll", "worker", "launcher")
GRID = "folder, ordered, origin"
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-serverapp", "flwr-clientapp")
PATIENCE = 1800.0


def app(folder: Path, own_poll: bool) -> Path:
    """A copy of the Flower app, which nobody edits while it is timed; with Flower's own Grid unless `own_poll`."""
    for name in ("client", "common", "server", "strategies"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(PROJECT / name, folder / name)
    main = folder / "server" / "app.py"
    if GRID not in main.read_text():
        sys.exit(f"{main} has no {GRID} any more; nothing to time")
    if not own_poll:
        main.write_text(main.read_text().replace(GRID, "folder, grid, origin"))
    return folder


@dataclass
class Memory:
    """Highest resident size of a deployment's processes by kind, in MiB, from when the block begins."""

    place: Deployment
    peak: dict[str, float] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Memory":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            for kind, size in self._look():
                self.peak[kind] = max(size, self.peak.get(kind, 0.0))

    def _look(self) -> Iterator[tuple[str, float]]:
        words, parents, sizes = {}, {}, {}
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            try:
                words[pid] = [Path(word).name for word in (path / "cmdline").read_text().split("\0") if word]
                status = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
            except OSError:
                continue  # it has ended
            if "VmHWM" in status:
                parents[pid], sizes[pid] = int(status["PPid"]), int(status["VmHWM"].split()[0]) / 1024
        for pid, kind in kinds({p.pid for p in self.place.processes.values()}, words, parents).items():
            yield kind, sizes[pid]


def kinds(roots: set[int], words: dict[int, list[str]], parents: dict[int, int]) -> dict[int, str]:
    """What each process below `roots` is."""
    found: dict[int, str] = {}
    for pid in sorted(parents, key=lambda pid: depth(pid, parents)):
        above = found.get(parents[pid], "")
        kind = next((word for word in words[pid] if word in PROGRAMS), "") if above or pid in roots else ""
        if kind and kind == above and "launcher.py" in words[pid]:
            kind = "warm process"
        elif above == "warm process":
            kind = "flwr-clientapp"
        if kind:
            found[pid] = kind
    # A worker is nobody's child once its first ClientApp has ended; it says whose it is.
    workers = [pid for pid in parents if words[pid][-2:-1] == ["perennial.client.node.worker"]]
    return found | {pid: "client worker" for pid in workers if int(words[pid][-1].partition("-")[0]) in found}


def depth(pid: int, parents: dict[int, int]) -> int:
    """How many processes are above this one."""
    above = 0
    while (pid := parents.get(pid, 0)) > 1:
        above += 1
    return above


def timed(config: RunConfig, step: str, folder: Path) -> tuple[list[float], dict[str, float]]:
    """Seconds of each round that counts, and peak MiB by kind of process."""
    index = STEPS.index(step)
    remote.APP = app(folder / "app", own_poll=index >= 1)
    prefix = [sys.executable, "-P", launcher.__file__] if index >= 3 else []
    switch = {"PERENNIAL_WORKER": "on" if index >= 2 else "off", "PERENNIAL_LAUNCHER": "on" if prefix else "off"}
    out, ends = folder / "run", list[float]()
    clients = len(config.scenario.client_ids)
    with deployment(folder / "deployment", clients, prefix, **switch) as place, Memory(place) as memory:
        run, seen, limit = place.connection.submit(config, out), 0, time.monotonic() + PATIENCE
        # Nothing else is asked of the SuperLink meanwhile: each question would cost seconds of a core.
        while (
            not (out / "summary.json").exists() and not (out / "error.txt").exists() and time.monotonic() < limit
        ):
            if (out / "metrics.jsonl").exists():
                rows, seen = RunFolder(out).rows_after(seen)
                ends += [time.monotonic() for row in rows if row["kind"] == "round"]
            time.sleep(0.01)
        list(place.connection.follow(run, out))  # raises if it did not end well
    if row := next((row for row in RunFolder(out).rows() if row.get("left_out")), None):
        sys.exit(f"{step}: a client was left out, so nothing was timed: {row['left_out']}")
    return [end - begin for begin, end in pairwise(ends[:-1])], memory.peak


def main() -> None:
    """Print seconds per round, ratios and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds that count")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--scenarios", default="colored-digits,cmnist-games")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--model", help="instead of the scenario's own")
    parser.add_argument("--settings", default="", help="of the run, as for `perennial run --set`")
    parser.add_argument("--repeats", type=int, default=1, help="all steps take turns so often")
    parser.add_argument("--json", action="store_true")
    wish = parser.parse_args()
    results, console = [], Console()
    for scenario in wish.scenarios.split(","):
        settings = [f"scenario.clients={wish.clients}", "evaluate_every=1000000", "checkpoint_every=1000000"]
        settings += [f"model.name={wish.model}"] if wish.model else []
        options = {"method": "fedavg", "scenario": scenario, "rounds": wish.rounds + 2, "runtime": "deployment"}
        config = load_config(options=options, settings=[*settings, *filter(None, wish.settings.split(","))])
        seconds: dict[str, list[float]] = {step: [] for step in wish.steps.split(",")}
        peaks: dict[str, dict[str, float]] = {step: {} for step in seconds}
        for _ in range(wish.repeats):
            for step in seconds:
                with tempfile.TemporaryDirectory() as folder:
                    rounds, peak = timed(config, step, Path(folder))
                seconds[step] += rounds
                peaks[step] = {kind: max(size, peaks[step].get(kind, 0.0)) for kind, size in peak.items()}
                print(scenario, step, *(f"{value:.2f}" for value in rounds), file=sys.stderr, flush=True)
        results.append({"scenario": scenario, "model": config.model.name, "seconds": seconds, "peak_mib": peaks})
    if wish.json:
        print(json.dumps({"clients": wish.clients, "results": results}))
        return
    for result in results:
        name = f"{result['scenario']}, {result['model']}, {wish.clients} clients"
        table = Table("step", "median s", "lowest to highest", "ratio to the first", title=f"A round: {name}")
        medians = {step: statistics.median(values) for step, values in result["seconds"].items()}
        for step, values in result["seconds"].items():
            ratio = medians[step] / next(iter(medians.values()))
            table.add_row(step, f"{medians[step]:.2f}", f"{min(values):.2f} to {max(values):.2f}", f"{ratio:.2f}")
        console.print(table)
        table = Table("peak MiB", *result["peak_mib"], title=f"Memory: {name}")
        for kind in dict.fromkeys(kind for peak in result["peak_mib"].values() for kind in peak):
            cells = (peak.get(kind) for peak in result["peak_mib"].values())
            table.add_row(kind, *("" if size is None else f"{size:.0f}" for size in cells))
        console.print(table)


if __name__ == "__main__":
    main()
