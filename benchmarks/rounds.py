"""Seconds per round on a real deployment, and memory of its processes: Flower's own SuperNodes and ours.

    uv run python benchmarks/rounds.py [--rounds N] [--clients N] [--scenarios NAME,NAME] [--steps NAME,NAME]
                                       [--model NAME] [--settings KEY=VALUE,…] [--repeats N]

A SuperLink and N SuperNodes on this machine, over gRPC. The steps:

- `stock`: Flower's own SuperNodes, as after `join --code shipped`: a ClientApp that imports PyTorch and loads data
  for each message;
- `executor`: SuperNodes with the resident executor, as after `join`.

A run is FedAvg. A round is timed from the log row of the one before it to its own; the first does not count,
nor does the last, whose row waits for the evaluation. Memory is each process's highest resident size, looked up
four times a second: the largest of all processes of its kind. A page that several processes share counts in each.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perennial.common.config import RunConfig, load_config
from perennial.common.flower.processes import program
from perennial.server.deployment.testbed import SUPERNODE, Deployment, deployment
from perennial.server.run.folder import RunFolder

STEPS = {"stock": [program("flower-supernode")], "executor": SUPERNODE}
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-serverapp", "flwr-clientapp")
MODULES = {
    "perennial.client.node.supernode": "flower-supernode",
    "perennial.client.node.executor": "executor",
    "perennial.client.node.join": "join",
}
PATIENCE = 1800.0


class Memory:
    """Highest resident size of a deployment's processes by kind, in MiB, from when the block begins."""

    def __init__(self, place: Deployment) -> None:
        self.place, self.peak = place, dict[str, float]()
        self._over = threading.Event()

    def __enter__(self) -> "Memory":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            for process in processes(self.place):
                self.peak[process.kind] = max(process.peak_mib, self.peak.get(process.kind, 0.0))


@dataclass(frozen=True)
class Process:
    """A process of a deployment, and its resident size in MiB."""

    pid: int
    kind: str
    mib: float
    peak_mib: float


def processes(place: Deployment) -> list[Process]:
    """All processes of a deployment."""
    words: dict[int, list[str]] = {}
    status: dict[int, dict[str, str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            line = (path / "cmdline").read_text()
            found = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
            if "VmHWM" in found:
                words[int(path.name)] = [Path(word).name for word in line.split("\0") if word]
                status[int(path.name)] = found
    ours, kinds = {process.pid for process in place.processes.values()}, dict[int, str]()
    while new := {pid for pid, own in status.items() if int(own["PPid"]) in kinds or pid in ours} - kinds.keys():
        for pid in new:
            known = (word if word in PROGRAMS else MODULES.get(word) for word in words[pid])
            kinds[pid] = next(filter(None, known), "")
    sizes = {pid: [int(status[pid][name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")] for pid in kinds}
    return [Process(pid, kind, *sizes[pid]) for pid, kind in kinds.items() if kind]


def timed(config: RunConfig, step: str, folder: Path) -> tuple[list[float], dict[str, float]]:
    """Seconds of each round that counts, and peak MiB by kind of process."""
    out, ends = folder / "run", list[float]()
    clients = len(config.scenario.client_ids)
    with deployment(folder / "deployment", clients, STEPS[step]) as place, Memory(place) as memory:
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
    wish = parser.parse_args()
    console = Console()
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
        name = f"{scenario}, {config.model.name}, {wish.clients} clients"
        table = Table("step", "median s", "lowest to highest", "ratio to the first", title=f"A round: {name}")
        medians = {step: statistics.median(values) for step, values in seconds.items()}
        for step, values in seconds.items():
            ratio = medians[step] / next(iter(medians.values()))
            table.add_row(step, f"{medians[step]:.2f}", f"{min(values):.2f} to {max(values):.2f}", f"{ratio:.2f}")
        console.print(table)
        table = Table("peak MiB", *peaks, title=f"Memory: {name}")
        for kind in dict.fromkeys(kind for peak in peaks.values() for kind in peak):
            table.add_row(kind, *(f"{peak[kind]:.0f}" if kind in peak else "" for peak in peaks.values()))
        console.print(table)


if __name__ == "__main__":
    main()
