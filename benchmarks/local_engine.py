"""Time the local runtime against a bare PyTorch loop and, with --simulation, against Flower's simulation.

    uv run python benchmarks/local_engine.py [--repeats N] [--simulation] [--json]

All contenders do the same FedAvg: the same clients, the same mini-batches, plain SGD, the weighted mean, each
round's mean risk. Their final models are compared before any figure is printed.

Every measurement is a fresh process, and the contenders take turns. The timed rounds are all but the first and
the last: round 1 loads the data and warms up, and the last round is the only one with an evaluation and a
checkpoint, which the bare loop has not. The local runtime is otherwise complete (messages, screening, log, the
watcher that reads the clock). What Flower's simulation spends is spread over many processes and start-up is much
of it, so for it there are figures of the whole process with all its descendants, and the same for the others.

Needs Linux (`/proc`).
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from flwr.app import Context, Message
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perennial.client.state import FileStates
from perennial.common.config import RunConfig, load_config
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenario import Scenario
from perennial.common.methods.fedavg import FedAvg
from perennial.common.models.architectures import build
from perennial.common.models.network import network
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.files import load_tensors, save_tensors
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors, flattened
from perennial.common.wire import PERSONAL

TOLERANCE = 1e-6
CONTENDERS = ("bare", "local", "simulation")
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


CASES = {
    "mlp": Case(
        "overhead-bound: MLP 64-32-10, 100 clients x 16 samples, batch 4, 20 rounds",
        {"clients": 100, "samples": 16, "shape": (64,)},
        {"name": "mlp", "hidden": (32,)},
        batch_size=4,
        timed_rounds=20,
    ),
    "cnn": Case(
        "compute-bound: cnn-small, 10 clients x 200 samples of 28x28, batch 20, 8 rounds",
        {"clients": 10, "samples": 200, "shape": (1, 28, 28)},
        {"name": "cnn-small"},
        batch_size=20,
        timed_rounds=8,
    ),
}


# ---------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Figures:
    """What one process used: in the timed rounds (None where they cannot be told apart), and altogether."""

    rounds_cpu: float | None
    """Seconds of all threads."""
    rounds_wall: float | None
    process_cpu: float
    process_wall: float
    peak_mib: float
    """Peak resident memory; of several processes, of their sum (pages that they share count in each)."""


class Clock:
    """CPU and wall seconds from the end of the first round to the end of the last but one.

    `cpu` says how many CPU seconds there have been so far, by default this process's.
    """

    def __init__(self, rounds: int, cpu: Callable[[], float] = time.process_time) -> None:
        self.rounds, self.cpu = rounds, cpu
        self._marks: list[tuple[float, float]] = []

    def after(self, round_: int) -> None:
        """To be called after every round."""
        if round_ in (1, self.rounds - 1):
            self._marks.append((self.cpu(), time.perf_counter()))

    def seconds(self) -> tuple[float, float]:
        """CPU, wall."""
        begin, end = self._marks
        return end[0] - begin[0], end[1] - begin[1]


class Tree:
    """CPU seconds and memory of this process and its descendants, the ended ones included."""

    def __init__(self) -> None:
        self.peak = 0
        self._ticks: dict[tuple[int, str], int] = {}
        self._stop = threading.Event()
        # Whoever loses its parent becomes our child, so that nothing leaves the tree.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """Stop watching; the CPU seconds of all."""
        self._stop.set()
        self._thread.join()
        return self.cpu()

    def cpu(self) -> float:
        """The CPU seconds of all until now."""
        self._look()
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self._look()

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


# ---------------------------------------------------------------------- the contenders


def bare(case: Case, out: Path) -> Figures:
    """What a careful researcher writes for this one experiment, with nothing around it."""
    torch.set_num_threads(1)
    config = case.config("bare")
    scenario = config.scenario
    assert isinstance(config.method, FedAvg)
    batch_size, clock = config.method.batch_size, Clock(config.rounds)
    data = [scenario.client_data(number, SEED, None).train for number in range(scenario.clients)]
    samples = sum(len(train) for train in data)
    weights = network(config.model, scenario.input_shape, scenario.classes).initial(SEED)
    model = build(config.model, scenario.input_shape, scenario.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.method.learning_rate)
    for round_ in range(1, config.rounds + 1):
        # In float64, as the local runtime has it: the order of float32 sums shows after some rounds.
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()}
        risk = 0.0
        for client, train in zip(scenario.client_ids, data, strict=True):
            model.load_state_dict(weights)
            order = torch.randperm(len(train), generator=torch_generator(SEED, client, round_, "batches"))
            batches = torch.split(order, batch_size)
            total = torch.zeros(())
            for index in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(train.x[index]), train.y[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.detach()
            for name, tensor in model.state_dict().items():
                sums[name].add_(tensor, alpha=len(train))
            risk += len(train) / samples * float(total) / len(batches)
        weights = {name: (tensor / samples).to(weights[name].dtype) for name, tensor in sums.items()}
        clock.after(round_)
    return _finished(out, weights, clock)


def local(case: Case, out: Path) -> Figures:
    """A run of the local runtime."""
    # Imported here, so that the bare loop's memory is its own.
    from perennial.server.local import LocalRuntime
    from perennial.server.run.folder import RunFolder

    config = case.config("local")
    clock = Clock(config.rounds)
    runtime, folder = LocalRuntime(config), RunFolder.create(out / "run", config)
    runtime.run(folder, watch=lambda progress: clock.after(progress.round))
    return _finished(out, load_tensors(folder.path / "models" / "global.safetensors"), clock)


def simulation(case: Case, out: Path) -> Figures:
    """The same run on Flower's simulation. The clock is read as the rows of its log come, which is 0.1 s late."""
    from perennial.server.run.folder import RunFolder

    tree = Tree()
    config = case.config("simulation")
    clock = Clock(config.rounds, tree.cpu)
    for row in in_simulation(config, out):
        if row["kind"] == "round":
            clock.after(row["round"])
    weights = load_tensors(out / "run" / "models" / "global.safetensors")
    kept = {
        place.rpartition("/")[2]: versions[-1].kept[PERSONAL]
        for place, versions in FileStates(RunFolder(out / "run").path / "clients").items()
    }
    save_tensors(out / "model.safetensors", flattened({"global": weights, **kept}) if kept else weights)
    cpu, wall = clock.seconds()
    return Figures(cpu, wall, tree.end(), _process_wall(), tree.peak / 2**20)


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


def _finished(out: Path, weights: Tensors, clock: Clock) -> Figures:
    save_tensors(out / "model.safetensors", weights)
    cpu, wall = clock.seconds()
    return Figures(cpu, wall, time.process_time(), _process_wall(), _peak_mib())


def _peak_mib() -> float:
    # Not ru_maxrss: a process that is started by `vfork` begins with its parent's.
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def _process_wall() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------- the comparison


class Differs(Exception):  # noqa: N818 - a finding about the contenders, not a fault of this script
    """Two contenders did not reach the same model, or one of them failed."""


def measure(contender: str, case: str, folder: Path) -> tuple[Figures, Tensors]:
    """One contender in a process of its own. Raises `Differs` with its last words when it fails."""
    folder.mkdir(parents=True)
    command = [sys.executable, __file__, "--contender", contender, "--case", case, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise Differs(f"{contender} failed on {case}: {words[-1] if words else f'exit code {done.returncode}'}")
    return Figures(**json.loads((folder / "figures.json").read_text())), load_tensors(folder / "model.safetensors")


def compare(case: str, repeats: int, contenders: tuple[str, ...], folder: Path) -> dict[str, list[Figures]]:
    """Interleaved measurements of one case. Raises `Differs` unless all of them end at the same model."""
    found: dict[str, list[Figures]] = {contender: [] for contender in contenders}
    reference: Tensors | None = None
    for repeat in range(repeats):
        for contender in contenders:
            figures, model = measure(contender, case, folder / f"{case}-{repeat}-{contender}")
            reference = model if reference is None else reference
            distance = difference(reference, model)
            if not distance <= TOLERANCE:
                raise Differs(
                    f"{contender} and {contenders[0]} differ on {case}: their final parameters are {distance:.1e} "
                    f"apart, and at most {TOLERANCE:.0e} is allowed"
                )
            found[contender].append(figures)
    return found


def difference(one: Tensors, other: Tensors) -> float:
    """The largest absolute difference of two models; infinite when they are not of the same form."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return float("inf")
    gaps: list[Tensor] = [(one[name].double() - other[name].double()).abs().max() for name in one]
    return float(torch.stack(gaps).max())


def medians(measured: list[Figures]) -> dict[str, float | None]:
    """The median of every figure."""
    rows = [asdict(figures) for figures in measured]
    return {
        name: None if rows[0][name] is None else statistics.median(row[name] for row in rows) for name in rows[0]
    }


def report(found: dict[str, list[Figures]]) -> dict[str, dict[str, float | None]]:
    """Medians of each contender, and its efficiency, bare CPU / its CPU: median, lowest and highest repeat."""
    answer = {}
    for contender, measured in found.items():
        ratios = [
            base.rounds_cpu / figures.rounds_cpu
            for base, figures in zip(found["bare"], measured, strict=False)
            if base.rounds_cpu and figures.rounds_cpu
        ]
        answer[contender] = medians(measured)
        if ratios:
            spread = {"efficiency_low": min(ratios), "efficiency_high": max(ratios)}
            answer[contender] |= {"efficiency": statistics.median(ratios), **spread}
    return answer


def table(case: Case, answer: dict[str, dict[str, float | None]]) -> Table:
    """The report of one case."""
    shown = Table(title=case.title, title_justify="left")
    shown.add_column("")
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "rounds\nCPU s": ("rounds_cpu", "{:.2f}".format),
        "rounds\nwall s": ("rounds_wall", "{:.2f}".format),
        "effi-\nciency": ("efficiency", "{:.2f}".format),
        "\nlowest": ("efficiency_low", "{:.2f}".format),
        "\nhighest": ("efficiency_high", "{:.2f}".format),
        "process\nCPU s": ("process_cpu", "{:.1f}".format),
        "process\nwall s": ("process_wall", "{:.1f}".format),
        "peak\nMiB": ("peak_mib", "{:.0f}".format),
    }
    for title in columns:
        shown.add_column(title, justify="right")
    for contender, figures in answer.items():
        cells = [(figures.get(key), form) for key, form in columns.values()]
        shown.add_row(contender, *("" if value is None else form(value) for value, form in cells))
    return shown


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each (default 5)")
    parser.add_argument("--simulation", action="store_true", help="measure Flower's simulation too, once")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--case", choices=CASES, help="only this case")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.contender:
        contend = {"bare": bare, "local": local, "simulation": simulation}[options.contender]
        with _sentence():
            figures = contend(CASES[options.case], options.out)
        (options.out / "figures.json").write_text(json.dumps(asdict(figures)))
        return
    answers = {}
    with tempfile.TemporaryDirectory(prefix="perennial-benchmark-") as folder, _sentence():
        for name in [options.case] if options.case else CASES:
            found = compare(name, options.repeats, ("bare", "local"), Path(folder))
            if options.simulation:
                apart = compare(name, 1, ("bare", "simulation"), Path(folder) / "simulation")
                found["simulation"] = apart["simulation"]
            answers[name] = report(found)
    if options.json:
        print(json.dumps({"repeats": options.repeats, "cases": answers}, indent=2))
    else:
        for name, answer in answers.items():
            Console().print(table(CASES[name], answer))


@contextmanager
def _sentence() -> Iterator[None]:
    """Ends the program with one sentence."""
    try:
        yield
    except (Differs, RunStopped, UserError) as error:
        sys.exit(f"local_engine: {error}")


if __name__ == "__main__":
    main()
