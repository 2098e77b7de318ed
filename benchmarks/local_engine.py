"""What the benchmarks of the local runtime share: generated data, an amount of work, and how it is measured.

Needs Linux (`/proc`).
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from flwr.app import Context, Message

from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Scenario
from perennial.common.utils.seeding import torch_generator

SEED = 0


class Generated(Scenario):
    """Gaussian clouds, one around each class's own mean; every client draws from the same ones."""

    title = "generated tensors"
    source = "benchmarks"
    dataset = "generated"

    name: Literal["benchmark"] = "benchmark"
    clients: int
    samples: int
    shape: tuple[int, ...]

    model: ClassVar[dict[str, Any]] = {"name": "logistic"}
    classes: ClassVar[int] = 10
    train_environments: ClassVar[tuple[str, ...]] = ("training",)
    test_environments: ClassVar[tuple[str, ...]] = ("test",)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        means = torch.randn(self.classes, *self.shape, generator=torch_generator(seed, "benchmark", "means"))

        def draw(part: str, samples: int, environment: int) -> Examples:
            generator = torch_generator(seed, client, "benchmark", part)
            y = torch.randint(0, self.classes, (samples,), generator=generator)
            x = means[y] + torch.randn(samples, *self.shape, generator=generator)
            return Examples(x, y, torch.full_like(y, environment))

        return ClientData(draw("train", self.samples, 0), draw("validation", 8, 0), {"test": draw("test", 8, -1)})


class Skewed(Generated):
    """Clients with other numbers of samples: client i has `samples / (1 + i mod 10)` of them."""

    name: Literal["benchmark-skewed"] = "benchmark-skewed"  # type: ignore[assignment]

    def client_data(self, client: int, seed: int, data_root: Path | None) -> ClientData:
        data = super().client_data(client, seed, data_root)
        count = max(1, self.samples // (1 + client % 10))
        train = Examples(data.train.x[:count], data.train.y[:count], data.train.environment[:count])
        return ClientData(train, data.validation, data.test)


@dataclass(frozen=True)
class Case:
    """One amount of work."""

    title: str
    scenario: dict[str, Any]
    model: dict[str, Any]
    batch_size: int
    timed_rounds: int
    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedavg"})

    def config(self, runtime: str, engine: str = "loop") -> RunConfig:
        """The run: one pass over each client's data a round, evaluated and saved only at the very end."""
        rounds = self.timed_rounds + 2
        work = {"local_unit": "epoch", "local_steps": 1, "batch_size": self.batch_size, "learning_rate": 0.05}
        return load_config(
            options={
                "method": {**work, **self.method},
                "scenario": {"name": "benchmark", **self.scenario},
                "model": self.model,
                "seed": SEED,
                "rounds": rounds,
                "evaluate_every": rounds,
                "checkpoint_every": rounds,
                "runtime": "local" if runtime == "bare" else runtime,
                "device": "cpu",
                "cohort_engine": engine,
            }
        )


# ---------------------------------------------------------------------- measuring


class Clock:
    """CPU seconds from the end of the first round to the end of the last but one.

    Round 1 loads the data and warms up, and the last round is the only one with an evaluation and a checkpoint.
    `cpu` says how many CPU seconds there have been so far, by default this process's.
    """

    def __init__(self, rounds: int, cpu: Callable[[], float] = time.process_time) -> None:
        self.rounds, self.cpu = rounds, cpu
        self._marks: list[float] = []

    def after(self, round_: int) -> None:
        """To be called after every round."""
        if round_ in (1, self.rounds - 1):
            self._marks.append(self.cpu())

    def seconds(self) -> float:
        """Of the rounds that count."""
        begin, end = self._marks
        return end - begin


class Tree:
    """CPU seconds and memory of this process and its descendants, the ended ones included."""

    def __init__(self) -> None:
        self.peak = 0
        """Bytes, of all of them together; pages that they share count in each."""
        self._ticks: dict[tuple[int, str], int] = {}
        # Whoever loses its parent becomes our child, so that nothing leaves the tree.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        threading.Thread(target=self._watch, daemon=True).start()

    def cpu(self) -> float:
        """The CPU seconds of all until now."""
        self._look()
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def _watch(self) -> None:
        while True:
            self._look()
            time.sleep(0.1)

    def _look(self) -> None:
        found: dict[int, tuple[int, str, int, int]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    # After the name in brackets: state, parent, ..., utime, stime (11, 12), start (19), rss (21).
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue  # it has just ended
                ticks = int(fields[11]) + int(fields[12])
                found[int(folder.name)] = int(fields[1]), fields[19], ticks, int(fields[21])
        ours = {os.getpid()}
        while more := {pid for pid, (parent, *_) in found.items() if parent in ours} - ours:
            ours |= more
        for pid in ours:
            _, start, ticks, _ = found[pid]
            self._ticks[pid, start] = ticks
        self.peak = max(self.peak, sum(found[pid][3] for pid in ours) * os.sysconf("SC_PAGE_SIZE"))


# ---------------------------------------------------------------------- in Flower's simulation


def in_simulation(config: RunConfig, out: Path) -> Iterator[dict[str, Any]]:
    """A run whose scenario is of this file, which Ray's processes find by their PYTHONPATH."""
    from perennial.server.simulation import Simulation

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-P", "-c", "import local_engine; local_engine.simulate()"]
    return Simulation(out / "flower", command).execute(config, out / "run")


def simulate() -> None:
    """The process of the simulation."""
    from perennial.server.simulation import main

    main(answers)


def answers(settings: dict[str, str], message: Message, context: Context) -> Message:
    """What a simulated client answers; a process that finds this function knows the scenarios of this file."""
    from perennial.client.node.answer import simulated

    return simulated(settings, message, context)
