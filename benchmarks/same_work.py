"""Time the same work done by several contenders: CPU seconds beside those of a bare PyTorch loop.

    uv run python benchmarks/same_work.py [--repeats N] [--workload NAME] [--contenders NAME,NAME] [--json]

All do the same rounds: the same clients, cohorts and mini-batches, plain SGD, the weighted mean. No figure is
printed unless their final parameters agree, what clients keep included. Every measurement is a fresh process, and
the contenders take turns. The timed rounds leave out the first one (data, warm-up) and the last (evaluation,
checkpoint). Efficiency is the bare loop's CPU seconds in them divided by those of the contender: the median over
the repeats, each beside the bare loop of its own repeat.

A contender is a function of a workload and an empty folder, listed in `CONTENDERS`. It runs in a process of its
own, and gives its figures and final tensors. `pfl` is pfl-research and `jax` a jitted function of a whole round,
which does FedAvg of equal clients alone. `uv` installs both beside this environment when they are first asked for;
where it cannot, the row is left out with the reason. Needs Linux (`/proc`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from local_engine import SEED, Case, Clock, Differs, Figures, Tree, _finished, difference, simulation
from rich.console import Console
from rich.table import Table

from perennial.common.models.architectures import build
from perennial.common.models.network import network
from perennial.common.utils.files import load_tensors, save_tensors
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors, flattened
from perennial.common.wire import PERSONAL

TOLERANCE = 1e-5
"""Between final parameters: a stack adds up in another order."""


@dataclass(frozen=True)
class Workload(Case):
    """One amount of work: one pass over each client's data in a round."""

    compared: int | None = None
    """After so many rounds parameters are compared, in shorter runs before the timed ones; None: at the end."""


SMALL = {"name": "mlp", "hidden": (32,)}
WORKLOADS = {
    "small": Workload(
        "MLP 64-32-10, 100 clients x 16 samples, batch 4",
        {"clients": 100, "samples": 16, "shape": (64,)}, SMALL, batch_size=4, timed_rounds=20,
    ),
    "mlp": Workload(
        "MLP 784-64-10, 20 clients x 64 samples, batch 16",
        {"clients": 20, "samples": 64, "shape": (784,)}, {"name": "mlp", "hidden": (64,)},
        batch_size=16, timed_rounds=20,
    ),
    "cnn": Workload(
        "cnn-small, 10 clients x 200 samples of 28x28, batch 20",
        {"clients": 10, "samples": 200, "shape": (1, 28, 28)}, {"name": "cnn-small"},
        # In float64 stack and loop agree to the end; in float32 rounding grows to 1e-3 in 80 steps.
        batch_size=20, timed_rounds=6, compared=3,
    ),
    "skewed": Workload(
        "MLP 64-32-10, 50 clients with 8 to 80 samples, batch 8",
        {"name": "benchmark-skewed", "clients": 50, "samples": 80, "shape": (64,)}, SMALL,
        batch_size=8, timed_rounds=20,
    ),
    "ditto": Workload(
        "Ditto, MLP 64-32-10, 200 clients x 16 samples that each keep a model, batch 8",
        {"clients": 200, "samples": 16, "shape": (64,)}, SMALL, batch_size=8, timed_rounds=8,
        method={"name": "ditto", "local_steps": 1, "personal_steps": 1, "proximity": 0.1},
    ),
    "many": Workload(
        "MLP 64-32-10, 1,000 clients x 64 samples, batch 16",
        {"clients": 1000, "samples": 64, "shape": (64,)}, SMALL, batch_size=16, timed_rounds=4,
    ),
}  # fmt: skip


EQUAL = ("small", "mlp", "many")
"""FedAvg of an MLP with as many samples at each client, which `jax` does."""


# ---------------------------------------------------------------------- the contenders


def bare(workload: Workload, out: Path) -> Figures:
    """What a careful researcher writes for this one experiment, with nothing around it."""
    torch.set_num_threads(1)
    config = workload.config("bare")
    scenario, rate = config.scenario, config.method.learning_rate  # type: ignore[attr-defined]
    data = [scenario.client_data(number, SEED, None).train for number in range(scenario.clients)]
    samples, clock = sum(map(len, data)), Clock(config.rounds)
    weights = network(config.model, scenario.input_shape, scenario.classes).initial(SEED)
    model = build(config.model, scenario.input_shape, scenario.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    pull = workload.method.get("proximity", 0.0)
    personal = {client: weights for client in scenario.client_ids} if pull else {}
    for round_ in range(1, config.rounds + 1):
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()}
        anchors = [weights[name] for name, _ in model.named_parameters()]
        for client, train in zip(scenario.client_ids, data, strict=True):
            order = torch.randperm(len(train), generator=torch_generator(SEED, client, round_, "batches"))
            for own in (False, True) if pull else (False,):
                model.load_state_dict(personal[client] if own else weights)
                total = torch.zeros(())
                for index in torch.split(order, workload.batch_size):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(train.x[index]), train.y[index])
                    loss.backward()  # type: ignore[no-untyped-call]
                    if own:
                        for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                            parameter.grad.add_(parameter.detach() - anchor, alpha=pull)  # type: ignore[union-attr]
                    optimizer.step()
                    total += loss.detach()
                state = model.state_dict()
                if own:
                    personal[client] = {name: tensor.clone() for name, tensor in state.items()}
                else:
                    for name, tensor in state.items():
                        sums[name].add_(tensor, alpha=len(train))
        weights = {name: (tensor / samples).to(weights[name].dtype) for name, tensor in sums.items()}
        clock.after(round_)
    return _finished(out, flattened({"global": weights, **personal}) if personal else weights, clock)


def local(workload: Workload, out: Path, engine: str) -> Figures:
    """A run of the local runtime."""
    from perennial.client.state import FileStates
    from perennial.server.local import LocalRuntime
    from perennial.server.run.folder import RunFolder

    config = workload.config("local", engine)
    clock = Clock(config.rounds)
    runtime, folder = LocalRuntime(config), RunFolder.create(out / "run", config)
    runtime.run(folder, watch=lambda progress: clock.after(progress.round))
    states = FileStates(folder.clients)
    personal = {place.rpartition("/")[2]: versions[-1].kept[PERSONAL] for place, versions in states.items()}
    weights = load_tensors(folder.path / "models" / "global.safetensors")
    return _finished(out, flattened({"global": weights, **personal}) if personal else weights, clock)


def plain_flower(workload: Workload, out: Path) -> Figures:
    """A simulation app as Flower's users write it."""
    import plain_flower as app  # its functions are found by this name in Ray's processes

    tree = Tree()
    config = workload.config("bare")
    clock = Clock(config.rounds, tree.cpu)
    weights, personal = app.run(config, clock.after)
    save_tensors(out / "model.safetensors", flattened({"global": weights, **personal}) if personal else weights)
    cpu, wall = clock.seconds()
    return Figures(cpu, wall, tree.end(), 0.0, tree.peak / 2**20)


def beside(package: str) -> list[str]:
    """Python with a package in an environment of its own on top of this one, so that PyTorch is the same."""
    return ["uv", "run", "--no-sync", "--quiet", "--with", package, "python"]


ELSEWHERE = {"pfl": beside("pfl==0.6.0"), "jax": beside("jax==0.10.0")}


def pfl(workload: Workload, out: Path) -> Figures:
    """A simulation in pfl-research."""
    import pfl_app

    return _run(pfl_app.run, workload, out)


def jitted(workload: Workload, out: Path) -> Figures:
    """A round as one function of jax; on one core, as all others are."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax_app

    return _run(jax_app.run, workload, out)


def _run(run: Callable[..., tuple[Tensors, dict[str, Tensors]]], workload: Workload, out: Path) -> Figures:
    config = workload.config("bare")
    clock = Clock(config.rounds)
    weights, personal = run(config, clock.after)
    return _finished(out, flattened({"global": weights, **personal}) if personal else weights, clock)


def absent(contender: str) -> str:
    """Why a contender from elsewhere cannot take part here; empty where it can."""
    try:
        command = [*ELSEWHERE[contender], "-c", f"import {contender}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no uv on the PATH"
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


CONTENDERS: dict[str, Callable[[Workload, Path], Figures]] = {
    "bare": bare,
    "loop": lambda workload, out: local(workload, out, "loop"),
    "stack": lambda workload, out: local(workload, out, "stack"),
    "auto": lambda workload, out: local(workload, out, "auto"),
    "simulation": simulation,
    "flower": plain_flower,
    "pfl": pfl,
    "jax": jitted,
}
"""The first is what the others are measured by. Other systems are added here."""


# ---------------------------------------------------------------------- the comparison


def measure(contender: str, workload: str, folder: Path, rounds: int = 0) -> tuple[Figures, Tensors]:
    """One contender in a process of its own. Raises `Differs` with its last words when it fails."""
    folder.mkdir(parents=True)
    python = ELSEWHERE.get(contender, [sys.executable])
    command = [*python, __file__, "--contender", contender, "--workload", workload, "--out", str(folder)]
    done = subprocess.run([*command, "--rounds", str(rounds)], capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise Differs(f"{contender} failed on {workload}: {words[-1] if words else done.returncode}")
    return Figures(**json.loads((folder / "figures.json").read_text())), load_tensors(folder / "model.safetensors")


def compare(workload: str, contenders: list[str], repeats: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each contender. Raises `Differs` unless all of them come to the same parameters."""
    found: dict[str, list[Figures]] = {contender: [] for contender in contenders}
    reference: Tensors = {}
    early = WORKLOADS[workload].compared

    def same(contender: str, model: Tensors) -> None:
        nonlocal reference
        reference = reference or model
        if not (distance := difference(reference, model)) <= TOLERANCE:
            raise Differs(f"{contender} ends {distance:.1e} away from {contenders[0]} on {workload}")

    for contender in contenders if early else []:
        same(contender, measure(contender, workload, folder / f"{workload}-early-{contender}", early)[1])
    for repeat in range(repeats):
        for contender in contenders:
            figures, model = measure(contender, workload, folder / f"{workload}-{repeat}-{contender}")
            if not early:
                same(contender, model)
            found[contender].append(figures)
    base, *_ = found.values()
    return [
        {
            "workload": workload,
            "contender": contender,
            "efficiency": statistics.median(
                one.rounds_cpu / own.rounds_cpu  # type: ignore[operator]
                for one, own in zip(base, measured, strict=True)
            ),
            "cpu_seconds": statistics.median(own.rounds_cpu for own in measured),  # type: ignore[type-var]
            "peak_mib": statistics.median(own.peak_mib for own in measured),
        }
        for contender, measured in found.items()
    ]


def table(workload: str, rows: list[dict[str, Any]]) -> Table:
    """The rows of one workload."""
    shown = Table(title=WORKLOADS[workload].title, title_justify="left")
    for title in ("", "efficiency", "CPU s", "peak MiB"):
        shown.add_column(title, justify="right" if title else "left")
    for row in rows:
        shown.add_row(
            row["contender"], f"{row['efficiency']:.2f}", f"{row['cpu_seconds']:.2f}", f"{row['peak_mib']:.0f}"
        )
    return shown


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each (default 5)")
    parser.add_argument("--workload", choices=WORKLOADS, help="only this one")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="which, beside bare (default all)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = options.contenders.split(",")
    if options.repeats < 1 or not set(asked) <= CONTENDERS.keys():
        parser.error(f"--repeats must be at least 1, and --contenders some of {', '.join(CONTENDERS)}")
    if options.contender:
        workload = WORKLOADS[options.workload]
        if options.rounds:
            workload = replace(workload, timed_rounds=options.rounds - 2)
        figures = CONTENDERS[options.contender](workload, options.out)
        (options.out / "figures.json").write_text(json.dumps(asdict(figures)))
        return
    contenders = [name for name in CONTENDERS if name == "bare" or name in asked]
    for contender in [name for name in contenders if name in ELSEWHERE]:
        if why := absent(contender):
            contenders.remove(contender)
            print(f"same_work: no row for {contender}: {why}", file=sys.stderr)
    rows = []
    with tempfile.TemporaryDirectory(prefix="perennial-benchmark-") as folder:
        for name in [options.workload] if options.workload else WORKLOADS:
            able = [one for one in contenders if one != "jax" or name in EQUAL]
            try:
                found = compare(name, able, options.repeats, Path(folder))
            except Differs as error:
                sys.exit(f"same_work: {error}")
            rows += found
            if not options.json:
                Console().print(table(name, found))
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
