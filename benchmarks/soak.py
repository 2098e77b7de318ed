"""A deployment over many rounds: memory of its processes over time, and random kills.

    uv run python benchmarks/soak.py FOLDER [--sites N] [--rounds N] [--kill SECONDS] [--minutes M] [--seed N]

A SuperLink with a database, its SuperExec and N SuperNodes with their executors on this machine, over gRPC.

Without `--kill`, the run is left alone. Every second the resident size of each kind of process (the largest of its
kind) goes to FOLDER/memory.csv, and at the end to FOLDER/memory.svg.

With `--kill`, every so many seconds a random one of all processes gets `kill -9`, for so many minutes. A
SuperLink, SuperExec or SuperNode is started again, as its service would do it, and an executor by its SuperNode. A
site that misses a round changes the model, so all must answer (`quorum=1`), and a run that stops is resumed.

At the end the final arrays are compared with those of a quiet local run.
"""

import argparse
import csv
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread

import torch
from rounds import processes
from safetensors.torch import load_file

from perennial.common.config import RunConfig, load_config
from perennial.common.utils.errors import RunStopped, UserError
from perennial.server.deployment.testbed import Deployment, arrange
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

SECONDS_TO_START, SECONDS_TO_RESUME = 8.0, 5.0


def resident(place: Deployment) -> dict[str, float]:
    """The largest resident size of each kind of process, now, in MiB."""
    found: dict[str, float] = {}
    for process in processes(place):
        found[process.kind] = max(process.mib, found.get(process.kind, 0.0))
    return found


class Watch(Thread):
    """Writes memory down until told to end; kills, if it is to."""

    def __init__(self, place: Deployment, wish: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self.place, self.wish, self.over, self.killed = place, wish, Event(), Counter[str]()
        self.draw = random.Random(wish.seed)

    def run(self) -> None:
        begun = last = time.monotonic()
        with (self.wish.folder / "memory.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["seconds", "kind", "mib"])
            while not self.over.wait(1.0):
                now = time.monotonic()
                table.writerows([f"{now - begun:.0f}", *row] for row in resident(self.place).items())
                file.flush()
                self._start_again()
                if self.wish.kill and now - last > self.wish.kill and now - begun < 60 * self.wish.minutes:
                    last = now
                    self._kill()

    def _kill(self) -> None:
        chosen = self.draw.choice(sorted(processes(self.place), key=lambda process: process.pid))
        pid, kind = chosen.pid, chosen.kind
        print(f"{time.strftime('%H:%M:%S')} kill -9 {kind} {pid}", flush=True)
        self.killed[kind] += 1
        name = next((name for name, process in self.place.processes.items() if process.pid == pid), None)
        if name:
            self.place.kill(name)
        else:
            os.kill(pid, 9)

    def _start_again(self) -> None:
        for name in self.place.commands:
            process = self.place.processes.get(name)
            if process is None or process.poll() is not None:
                self.place.start(name)


def follow(place: Deployment, config: RunConfig, out: Path) -> int:
    """The whole run, resumed as often as it stops; how often that was."""
    resumed = 0
    while True:
        try:
            begun = bool(RunFolder(out).checkpoints())
            for row in place.connection.execute(config, out, resume=begun):
                if row["kind"] == "round" and row["round"] % 25 == 0:
                    print(f"{time.strftime('%H:%M:%S')} round {row['round']}", flush=True)
            return resumed
        except (RunStopped, UserError) as error:
            print(f"{time.strftime('%H:%M:%S')} {error}", flush=True)
            resumed += 1
            for word in ("error.txt", "summary.json"):
                (out / word).unlink(missing_ok=True)
            time.sleep(SECONDS_TO_RESUME)


def plot(folder: Path) -> None:
    """The figure of memory over time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perennial"
    from matplotlib import pyplot

    lines: dict[str, list[tuple[float, float]]] = {}
    with (folder / "memory.csv").open() as file:
        for row in csv.DictReader(file):
            lines.setdefault(row["kind"], []).append((float(row["seconds"]) / 60, float(row["mib"])))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for kind, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=kind)
    axes.set(xlabel="minutes", ylabel="resident MiB, largest of the kind", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "memory.svg", metadata={"Date": None})


def main() -> None:
    """Run, and say how it went; exit code 1 where the arrays differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--kill", type=float, default=0.0, help="seconds between two kills; 0: none")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long processes are killed")
    parser.add_argument("--seed", type=int, default=0)
    wish = parser.parse_args()
    wish.folder = wish.folder.resolve()
    settings = [f"scenario.clients={wish.sites}", "scenario.train_per_class=20", "evaluate_every=1000000"]
    settings += ["checkpoint_every=1" if wish.kill else "checkpoint_every=50", "wait=600"]
    settings += ["quorum=1", "deadline=150"] if wish.kill else []
    options = {"method": "ditto", "scenario": "colored-digits", "rounds": wish.rounds, "runtime": "deployment"}
    config = load_config(options=options, settings=settings)
    with arrange(wish.folder / "deployment", wish.sites, database=True) as place:
        watch = Watch(place, wish)
        place.start_all()
        watch.start()
        time.sleep(SECONDS_TO_START)
        try:
            resumed = follow(place, config, wish.folder / "run")
        finally:
            watch.over.set()
            watch.join()
    plot(wish.folder)
    here = config.model_copy(update={"runtime": "local"})
    LocalRuntime(here).run(RunFolder.create(wish.folder / "quiet", here))
    one, other = (load_file(wish.folder / name / "models" / "global.safetensors") for name in ("run", "quiet"))
    same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    summary = RunFolder(wish.folder / "run").summary()
    print(f"{wish.rounds} rounds, {wish.sites} sites, killed {dict(watch.killed)}, resumed {resumed} times")
    print(f"left out: {summary['left_out']}; final arrays {'are' if same else 'are NOT'} those of the quiet run")
    sys.exit(not same)


if __name__ == "__main__":
    main()
