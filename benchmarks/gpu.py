"""Time a round of many small clients on a GPU, by every engine there is, and run the suite's tests there.

    uv run --group dev python benchmarks/gpu.py [--clients N,N,...] [--methods NAME,...] [--convolutions]
        [--contenders NAME,...] [--repeats N] [--seconds N] [--no-tests] [--json]

A round is four steps of batch 16 of an MLP 64-32-10 at each of 8 to 1,000 clients. Contenders: a bare PyTorch
loop; the local runtime one client after the other (`loop`) and with stacks (`stack`), whose work is a CUDA graph;
the same without graphs (`ungraphed`); and one step of all clients as a bare stack, replayed as a CUDA graph
(`graph`) and compiled (`compiled`), which have no messages, screening or mean. `--methods` has rows of other
methods' `loop` and `stack`, and `--convolutions` of cnn-small. `profile` tells where a round of `stack` goes.

Each measurement is a process of its own; what fails in one is said in its row. The table has the median time of a
round and the peak memory on the device. After `--seconds` nothing more is begun.

Where there is no GPU this is a rehearsal: it runs on the CPU, with few clients, and says what it has left out.
"""

import argparse
import cProfile
import json
import pstats
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
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
STEPS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "ditto": {"name": "ditto", "personal_steps": 1},
    "fediir": {"name": "fediir"},
    "fedsdr": {"name": "fedsdr", "personal_steps": 1},
    "perinvfl": {"name": "perinvfl"},
}
"""Methods, of which each takes its steps in one pass over the data."""
MOST = 128
"""Clients for contenders that do one after the other; of more they would take minutes."""


class Left(Exception):  # noqa: N818
    """Why a contender is left out."""


def case(clients: int, method: str = "fedavg", convolutions: bool = False) -> Case:
    """The work of so many clients."""
    scenario = {"clients": clients, "samples": SAMPLES, "shape": (1, 28, 28) if convolutions else (64,)}
    model = {"name": "cnn-small"} if convolutions else {"name": "mlp", "hidden": (32,)}
    return Case("", scenario, model, batch_size=BATCH, timed_rounds=5, method=STEPS[method])


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


def runtime(work: Case, engine: str, watch_also: Callable[[int], None] = lambda _: None) -> float:
    """A run of the local runtime; rounds are told apart by its watcher."""
    from perennial.server.local import LocalRuntime
    from perennial.server.run.folder import RunFolder

    config = work.config("local", engine).model_copy(update={"device": str(DEVICE)})
    marks: list[float] = []

    def watch(progress: Any) -> None:
        wait()
        marks.append(time.perf_counter())
        watch_also(progress.round)

    with tempfile.TemporaryDirectory() as place:
        LocalRuntime(config).run(RunFolder.create(Path(place) / "run", config), watch=watch)
    # The first one loads the data, the last one evaluates and saves.
    return statistics.median(after - before for before, after in pairwise(marks[:-1]))


def profiled(clients: int) -> float:
    """A round of `stack`; where its time goes is printed to standard error."""
    profile, work = cProfile.Profile(), case(clients)

    def watch(number: int) -> None:
        if number == 3:  # by now all is captured
            profile.enable()
        elif number == work.timed_rounds + 1:
            profile.disable()

    seconds = runtime(work, "stack", watch)
    found = pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime")
    found.print_stats(25)
    found.sort_stats("cumulative").print_stats(25)
    return seconds


def ungraphed(clients: int) -> float:
    """A round of `stack` whose work is done step by step."""
    from perennial.client import cohort

    cohort.possible = lambda _: False
    return runtime(case(clients), "stack")


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


def _method(method: str, engine: str, convolutions: bool, clients: int) -> float:
    return runtime(case(clients, method, convolutions), engine)


CONTENDERS: dict[str, Callable[[int], float]] = {
    "bare": bare,
    "loop": lambda clients: runtime(case(clients), "loop"),
    "stack": lambda clients: runtime(case(clients), "stack"),
    "ungraphed": ungraphed,
    "graph": graph,
    "compiled": compiled,
    "profile": profiled,
    **{
        f"{name} {engine}": partial(_method, name, engine, False)
        for name in STEPS if name != "fedavg" for engine in ("loop", "stack")
    },
    **{f"cnn-small {engine}": partial(_method, "fedavg", engine, True) for engine in ("loop", "stack")},
}  # fmt: skip
USUAL = ("bare", "loop", "stack", "graph", "compiled")


def one(contender: str, clients: int) -> dict[str, Any]:
    """A row, measured in this process."""
    torch.set_num_threads(1)
    row: dict[str, Any] = {"contender": contender, "clients": clients, "device": str(DEVICE)}
    try:
        row["seconds"] = CONTENDERS[contender](clients)
    except Left as reason:
        return {**row, "left_out": str(reason)}
    peak = torch.cuda.max_memory_allocated() if GPU else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**row, "peak_mib": peak / 2**20}


def measured(contender: str, clients: int, end: float) -> dict[str, Any]:
    """A row, measured in a process of its own; where that fails, or there is no time, with its last words."""
    left, row = end - time.monotonic(), {"contender": contender, "clients": clients}
    if contender.endswith(("bare", "loop")) and clients > MOST:
        return {**row, "left_out": f"one after the other is measured for at most {MOST} clients"}
    if left < 0:
        return {**row, "left_out": "the time was over"}
    command = [sys.executable, __file__, "--one", contender, "--clients", str(clients)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(20.0, left))
    except subprocess.TimeoutExpired:
        return {**row, "left_out": "it took too long"}
    if contender == "profile" or "WARNING" in done.stderr:
        print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode:
        return {**row, "left_out": " ".join((done.stderr or "no word").strip().splitlines()[-1].split())[:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def tests(only: str, seconds: float) -> str:
    """What `pytest -m gpu` says of those `only` in its last lines."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "--no-header", "-q", "--tb=short"]
    try:
        done = subprocess.run(
            [*command, "-oaddopts=", "-ofilterwarnings=ignore", "tests/contract/test_devices.py", "-k", only],
            cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False, timeout=max(20.0, seconds),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return f"took too long; so far: {str(error.stdout or '')[-300:]}"
    said = [line for line in done.stdout.splitlines() if re.match(r"E  |FAILED|.*\d+ (passed|failed|error)", line)]
    return "\n".join(said[-30:]).strip("= ") if said else f"pytest ended with {done.returncode}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = ",".join(map(str, SIZES if GPU else REHEARSAL))
    parser.add_argument("--clients", default=default, metavar="N,N,...", help=f"sizes (default {default})")
    parser.add_argument("--repeats", type=int, default=3 if GPU else 1, metavar="N", help="processes of each")
    parser.add_argument("--contenders", default=",".join(USUAL), metavar="NAME,...", help="which")
    parser.add_argument("--methods", default="", metavar="NAME,...", help="of other methods, too")
    parser.add_argument("--convolutions", action="store_true", help="cnn-small, with 32 clients")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which nothing more is begun")
    parser.add_argument("--tests", default="", metavar="EXPRESSION", help="only these, as pytest's -k has them")
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
    asked = options.contenders.split(",")
    if unknown := {*asked} - CONTENDERS.keys():
        parser.error(f"--contenders: {min(unknown)} is none of {', '.join(CONTENDERS)}")
    end, small = time.monotonic() + options.seconds, sizes[0]
    wanted = [(contender, size) for size in sizes for contender in asked]
    others = [*filter(None, options.methods.split(",")), *(["cnn-small"] if options.convolutions else [])]
    wanted += [
        (f"{name} {engine}", min(small, 32) if name == "cnn-small" else small)
        for engine in ("stack", "loop")
        for name in others
    ]
    rows, suite = [], ""
    for place, (contender, size) in enumerate(wanted):
        if place == len(asked) * len(sizes) and not options.no_tests:
            suite = tests(options.tests, end - time.monotonic())
            print(f"pytest -m gpu: {suite}", file=sys.stderr, flush=True)
        found = [measured(contender, size, end) for _ in range(options.repeats)]
        figures = {
            name: statistics.median(row[name] for row in found)
            for name in ("seconds", "peak_mib")
            if all(name in row for row in found)
        }
        rows.append({**found[0], **figures})
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
