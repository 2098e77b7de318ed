"""Time a round of many small clients on a GPU, by every engine there is, and run the suite's tests there.

    uv run --group dev python benchmarks/gpu.py [--clients N,N,...] [--repeats N] [--no-tests] [--json]

A round is four steps of batch 16 of an MLP 64-32-10 at each of 8 to 1,000 clients. Contenders: a bare PyTorch
loop; the local runtime one client after the other (`loop`) and with stacks (`stack`); and one step of all clients
as a bare stack, replayed as a CUDA graph (`graph`) and compiled (`compiled`), which have no messages, screening or
mean. Each measurement is a process of its own. The table has the median time of a round and the peak memory on the
device.

Where there is no GPU this is a rehearsal: it runs on the CPU, with few clients, and says what it has left out.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from local_engine import SEED, Case
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from perennial.common.models.architectures import build

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SIZES = (8, 32, 128, 512, 1000)
REHEARSAL = (8,)
SAMPLES, BATCH, RATE = 64, 16, 0.05
MOST = 128
"""Clients for contenders that do one after the other; of more they would take minutes."""


class Left(Exception):  # noqa: N818
    """Why a contender is left out."""


def case(clients: int) -> Case:
    """The work of so many clients."""
    scenario = {"clients": clients, "samples": SAMPLES, "shape": (64,)}
    return Case("", scenario, {"name": "mlp", "hidden": (32,)}, batch_size=BATCH, timed_rounds=5)


def wait() -> None:
    """Until the device has done everything."""
    if GPU:
        torch.cuda.synchronize()


def timed(one: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds of a round, after one that warms up."""
    found = []
    for _ in range(rounds + 1):
        wait()
        begun = time.perf_counter()
        one()
        wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


def bare(clients: int) -> float:
    """A loop over clients, as one writes it by hand."""
    work = case(clients).config("bare")
    scenario = work.scenario
    data = [scenario.client_data(number, SEED, None).train.to(DEVICE) for number in range(clients)]
    model = build(work.model, scenario.input_shape, scenario.classes).to(DEVICE)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def one() -> None:
        sums = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for own in data:
            model.load_state_dict(start)
            for index in torch.split(torch.randperm(SAMPLES).to(DEVICE), BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(own.x[index]), own.y[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, tensor in model.state_dict().items():
                sums[name] += tensor / clients
        start.update(sums)

    return timed(one)


def runtime(clients: int, engine: str) -> float:
    """A run of the local runtime; rounds are told apart by its watcher."""
    from perennial.server.local import LocalRuntime
    from perennial.server.run.folder import RunFolder

    config = case(clients).config("local", engine).model_copy(update={"device": str(DEVICE)})
    marks: list[float] = []

    def watch(_: Any) -> None:
        wait()
        marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as place:
        LocalRuntime(config).run(RunFolder.create(Path(place) / "run", config), watch=watch)
    # The first one loads the data, the last one evaluates and saves.
    return statistics.median(after - before for before, after in pairwise(marks[:-1]))


def stacked(clients: int) -> tuple[Callable[[], object], Callable[[Callable[[], object]], Callable[[], object]]]:
    """One step of a stack of all clients in fixed memory; and what makes a round of a step."""
    work = case(clients).config("bare")
    shape, classes = work.scenario.input_shape, work.scenario.classes
    model: nn.Module = build(work.model, shape, classes).to(DEVICE)
    values, _ = stack_module_state([model] * clients)  # type: ignore[list-item]
    values = {name: tensor.detach().clone().requires_grad_() for name, tensor in values.items()}
    data = [work.scenario.client_data(number, SEED, None).train.to(DEVICE) for number in range(clients)]
    x, y = torch.stack([own.x for own in data]), torch.stack([own.y for own in data])
    batch, labels = x[:, :BATCH].clone(), y[:, :BATCH].clone()

    def loss(own: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, own, (inputs,)), targets)

    def step() -> None:
        total = vmap(loss)(values, batch, labels).sum()
        gradients = torch.autograd.grad(total, list(values.values()))
        with torch.no_grad():
            for value, gradient in zip(values.values(), gradients, strict=True):
                value.sub_(gradient, alpha=RATE)

    def rounds(one_step: Callable[[], object]) -> Callable[[], object]:
        def one() -> None:
            order = torch.rand(clients, SAMPLES, device=DEVICE).argsort(dim=1)
            for index in torch.split(order, BATCH, dim=1):
                batch.copy_(x.gather(1, index[..., None].expand(-1, -1, *x.shape[2:])))
                labels.copy_(y.gather(1, index))
                one_step()

        return one

    return step, rounds


def graph(clients: int) -> float:
    """A step captured once and replayed."""
    if not GPU:
        raise Left("a CUDA graph needs a GPU")
    step, rounds = stacked(clients)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return timed(rounds(captured.replay))


def compiled(clients: int) -> float:
    """A step that `torch.compile` has made kernels of."""
    step, rounds = stacked(clients)
    try:
        return timed(rounds(torch.compile(step)))
    except Exception as error:  # whatever the compiler or its tools lack
        raise Left(f"torch.compile failed: {' '.join(str(error).split())[:120]}") from None


CONTENDERS: dict[str, Callable[[int], float]] = {
    "bare": bare,
    "loop": lambda clients: runtime(clients, "loop"),
    "stack": lambda clients: runtime(clients, "stack"),
    "graph": graph,
    "compiled": compiled,
}


def one(contender: str, clients: int) -> dict[str, Any]:
    """A row, measured in this process."""
    torch.set_num_threads(1)
    row: dict[str, Any] = {"contender": contender, "clients": clients, "device": str(DEVICE)}
    try:
        if contender in ("bare", "loop") and clients > MOST:
            raise Left(f"one after the other is measured for at most {MOST} clients")
        row["seconds"] = CONTENDERS[contender](clients)
    except Left as reason:
        return {**row, "left_out": str(reason)}
    peak = torch.cuda.max_memory_allocated() if GPU else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**row, "peak_mib": peak / 2**20}


def measured(contender: str, clients: int) -> dict[str, Any]:
    """A row, measured in a process of its own. Exits with its last words when it fails."""
    command = [sys.executable, __file__, "--one", contender, "--clients", str(clients)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"gpu: {contender} with {clients} clients: {(done.stderr or 'no word').strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def tests() -> str:
    """What `pytest -m gpu` says in its last line."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "--no-header", "-q", "--tb=short"]
    done = subprocess.run(
        [*command, "-o", "addopts=", "tests/contract/test_devices.py"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return said[-1].strip("= ") if said else f"pytest ended with {done.returncode}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = ",".join(map(str, SIZES if GPU else REHEARSAL))
    parser.add_argument("--clients", default=default, metavar="N,N,...", help=f"sizes (default {default})")
    parser.add_argument("--repeats", type=int, default=3 if GPU else 1, metavar="N", help="processes of each")
    parser.add_argument("--no-tests", action="store_true", help="do not run `pytest -m gpu`")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.clients.split(",")]
    if min(sizes) < 2 or options.repeats < 1:
        parser.error("--clients are at least 2, --repeats at least 1")
    if options.one:
        print(json.dumps(one(options.one, sizes[0])))
        return
    rows = []
    for size in sizes:
        for contender in CONTENDERS:
            found = [measured(contender, size) for _ in range(options.repeats)]
            figures = {
                name: statistics.median(row[name] for row in found)
                for name in ("seconds", "peak_mib")
                if name in found[0]
            }
            rows.append({**found[0], **figures})
    suite = "" if options.no_tests else tests()
    if options.json:
        print(json.dumps({"rows": rows, "tests": suite}, indent=2))
        return
    title = torch.cuda.get_device_name() if GPU else "a rehearsal on the CPU: there is no GPU here"
    shown = Table(title=title)
    for name in ("clients", "contender", "round ms", "peak MiB", ""):
        shown.add_column(name, justify="right" if name else "left")
    for row in rows:
        figures = (f"{1000 * row['seconds']:.1f}", f"{row['peak_mib']:.0f}") if "seconds" in row else ("", "")
        shown.add_row(str(row["clients"]), row["contender"], *figures, row.get("left_out", ""))
    Console().print(shown)
    if suite:
        print(f"pytest -m gpu: {suite}")


if __name__ == "__main__":
    main()
