"""Memory of a real deployment's processes, beside the size of the model and of its trained part.

    uv run python benchmarks/memory.py [--numbers N,N,...] [--all] [--layers N] [--method NAME] [--sites N]
        [--rounds N]

A SuperLink and SuperNodes on this machine, over gRPC, as `perennial run` and `perennial join` start them. The
network has N parameters in 100 layers, of which the last one, a hundredth, is trained, or with `--all` every one;
`--layers 1` makes it one tensor. Each row is a run: `--rounds` rounds, of which the last evaluates and saves, on
a few samples. A process' figure is the highest resident size that the kernel has noted of it, in MiB, and behind
it what it is more than in the first row, in multiples of the trained part. Needs Linux.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from rounds import Memory
from sized_net import Net

from perennial.common.config import RunConfig, load_config
from perennial.common.plugins import VARIABLE
from perennial.server.deployment.testbed import deployment

NET = Path(__file__).with_name("sized_net.py")
KINDS = {
    "flower-superlink": "SuperLink",
    "flwr-serverapp": "ServerApp",
    "flower-supernode": "SuperNode",
    "executor": "executor",
}


def size(config: RunConfig) -> tuple[int, int]:
    """Bytes of the network's parameters, and of those that are trained."""
    with torch.device("meta"):
        net = Net(config.predicts.outputs, config.scenario.input_shape, **config.model.options)
    return tuple(sum(own.nbytes for own in net.parameters() if own.requires_grad >= least) for least in (0, 1))


def measured(config: RunConfig, sites: int) -> tuple[float, float, dict[str, float]]:
    """Seconds of a run, bytes of tensors to a site in its last round, and peak MiB by kind of process."""
    with tempfile.TemporaryDirectory() as folder:
        out, begun = Path(folder) / "run", time.monotonic()
        with (
            deployment(Path(folder) / "deployment", sites, PERENNIAL_PLUGINS=str(NET)) as place,
            Memory(place) as memory,
        ):
            rows = list(place.connection.execute(config, out))
        if lost := next((row["left_out"] for row in rows if row.get("left_out")), None):
            sys.exit(f"a client was left out, so this is no measurement: {lost}")
        sent = [row["bytes_down"] for row in rows if row["kind"] == "round"][-1] / sites
        return time.monotonic() - begun, sent, memory.peak


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--numbers", default="10_000,1_000_000,50_000_000,100_000_000", help="parameters of each row"
    )
    parser.add_argument("--all", action="store_true", help="train all of them")
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    wish = parser.parse_args()
    os.environ[VARIABLE] = str(NET)
    print(markdown(("parameters", "MB", "trained MB", "message MB", "s", *KINDS.values())))
    print("|---" + "|--:" * (4 + len(KINDS)) + "|")
    first: dict[str, float] = {}
    for numbers in map(int, wish.numbers.split(",")):
        settings = [f"scenario.clients={wish.sites}", "scenario.train_per_class=20", "scenario.test_per_class=5"]
        settings += ["model.name=sized_net:Net", f"model.numbers={numbers}", f"model.layers={wish.layers}"]
        settings += [f"model.all_of_it={str(wish.all).lower()}", "local_steps=2", "batch_size=8"]
        options = {
            "method": wish.method,
            "scenario": "colored-digits",
            "rounds": wish.rounds,
            "runtime": "deployment",
        }
        config = load_config(options=options, settings=settings)
        whole, trained = size(config)
        seconds, sent, peak = measured(config, wish.sites)
        first = first or peak
        cells = [f"{peak[kind]:.0f} ({(peak[kind] - first[kind]) * 2**20 / trained:.1f})" for kind in KINDS]
        row = (f"{numbers:,}", *(f"{own / 1e6:.3g}" for own in (whole, trained, sent)), f"{seconds:.0f}", *cells)
        print(markdown(row), flush=True)


def markdown(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
