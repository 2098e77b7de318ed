"""Time rounds of equal cohorts in federations of very different sizes.

    uv run python benchmarks/federation.py [--clients N,N,...] [--method NAME] [--rounds N] [--repeats N]

Each federation is a run of the local runtime in a process of its own: cohorts of 20 clients with 20 samples each,
an MLP 64-32-10, five steps of batch 10, an evaluation of 100 clients and a checkpoint at every fifth round. With
Ditto (the default) each client keeps a model besides. The table has CPU seconds, which another process on the
machine disturbs less: until the run begins, of five rounds with their evaluation and checkpoint, and of the whole
process; and the seconds that the latter took, and its peak memory. Needs Linux.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from local_engine import SEED
from rich.console import Console
from rich.table import Table

SIZES = (100, 1_000, 10_000, 100_000)
COHORT, EVALUATED, EVERY = 20, 100, 5
COLUMNS = {
    "start": "start CPU s",
    "five": "five rounds CPU s",
    "cpu": "process CPU s",
    "wall": "process s",
    "peak_mib": "peak MiB",
}
"""Of a row: its fields and their titles."""


def run(clients: int, method: str, rounds: int) -> dict[str, float]:
    """One federation in this process; the row's figures."""
    begun = time.perf_counter()
    from perennial.common.config import load_config
    from perennial.server.local import LocalRuntime
    from perennial.server.run.folder import RunFolder
    from perennial.server.run.progress import Progress

    config = load_config(
        options={
            "method": {"name": method, "local_steps": 5, "batch_size": 10, "learning_rate": 0.05},
            "scenario": {"name": "benchmark", "clients": clients, "samples": 20, "shape": (64,)},
            "model": {"name": "mlp", "hidden": (32,)},
            "seed": SEED,
            "rounds": rounds,
            "participation": COHORT / clients,
            "evaluate_clients": EVALUATED,
            "evaluate_every": EVERY,
            "checkpoint_every": EVERY,
            "device": "cpu",
        }
    )
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create(Path(place) / "run", config)
        runtime = LocalRuntime(config)
        marks = [time.process_time()]

        def watch(progress: Progress) -> None:
            if progress.round % EVERY == 0:
                marks.append(time.process_time())

        runtime.run(folder, watch=watch)
    return {
        "start": marks[0],
        "five": statistics.median(after - before for before, after in pairwise(marks[1:])),
        "cpu": time.process_time(),
        "wall": time.perf_counter() - begun,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(clients: int, method: str, rounds: int) -> dict[str, float]:
    """`run` in a process of its own. Exits with its last words when it fails."""
    command = [sys.executable, __file__, "--one", str(clients), "--method", method, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"federation: {clients} clients: {(done.stderr or 'no word').strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", default=",".join(map(str, SIZES)), metavar="N,N,...", help="sizes")
    parser.add_argument("--method", default="ditto", help="which method's clients (default ditto)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="rounds of each run (default 20)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each size (default 3)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options.method, options.rounds)))
        return
    sizes = [int(size) for size in options.clients.split(",")]
    if min(sizes) < COHORT or options.repeats < 1 or options.rounds < 2 * EVERY:
        parser.error(f"--clients are at least {COHORT}, --rounds at least {2 * EVERY}, --repeats at least 1")
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(options.repeats):  # in turns, so that whatever else the machine does falls on all
        for size in sizes:
            found[size].append(measure(size, options.method, options.rounds))
    shown = Table(title=f"{options.method}, cohorts of {COHORT}, medians of {options.repeats}")
    for title in ("clients", *COLUMNS.values()):
        shown.add_column(title, justify="right")
    for size, measured in found.items():
        medians = {name: statistics.median(one[name] for one in measured) for name in COLUMNS}
        figures = (f"{medians[name]:.0f}" if name == "peak_mib" else f"{medians[name]:.2f}" for name in COLUMNS)
        shown.add_row(f"{size:,}", *figures)
    Console().print(shown)


if __name__ == "__main__":
    main()
