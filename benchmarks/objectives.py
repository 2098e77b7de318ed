"""Time a client's work in a round of every method, relative to FedAvg, and Fishr's closed form against autograd.

    uv run python benchmarks/objectives.py [--repeats N] [--methods NAME,NAME]

A round is one pass over a client's 640 samples: ten mini-batches of 64 for methods with local steps, personal ones
too where there are any. FedAvg's ten are plain cross-entropy steps, so its time is the unit. Methods take turns in
every repeat, and each is divided by the FedAvg beside it; only client work counts, in CPU seconds.

The second table has the variance of the gradients of a linear head, and its pull back to head and features: from
the closed form, and from every sample's own gradient by `torch.func`, all at once. Both are compared before any
figure is printed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import Message
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import functional_call, grad, vmap

from perennial.common.config import RunConfig, load_config
from perennial.common.mathematics.gradient_variance import gradient_sums, variance
from perennial.common.methods import METHODS
from perennial.common.tasks import Classes
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.tensors import Tensors
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

UNIT = "fedavg"
CLIENTS, SAMPLES, BATCH, STEPS, ROUNDS = 4, 640, 64, 10, 4
WORK = {"local_steps": STEPS, "personal_steps": STEPS, "head_steps": STEPS, "batch_size": BATCH}


# ---------------------------------------------------------------------- methods


def config(method: str) -> RunConfig:
    """A few rounds of the linear model with known causes, on 640 samples a client. Raises `UserError`."""
    fields = METHODS[method].model_fields
    return load_config(
        options={
            "method": {"name": method, **{key: value for key, value in WORK.items() if key in fields}},
            "scenario": {
                "name": "synthetic-scm",
                "clients": CLIENTS,
                "seen": 2,
                "unseen": 1,
                "train_samples": 711,
            },
            "model": {"name": "mlp", "hidden": [390, 390]},
            "rounds": ROUNDS,
            "participation": 1.0,
            "evaluate_every": ROUNDS,
            "checkpoint_every": ROUNDS,
            "device": "cpu",
        }
    )


def work(method: str) -> float:
    """CPU seconds of one client in a round: all of its training exchanges, the first round left out."""
    run = LocalRuntime(config(method))
    spent = [0.0] * ROUNDS
    handle = run.host.handle

    def timed(message: Message, number: int) -> Message:
        begun = time.process_time()
        reply = handle(message, number)
        if message.metadata.message_type.startswith("train"):
            spent[int(message.metadata.group_id) - 1] += time.process_time() - begun
        return reply

    run.host.handle = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as out:
        run.run(RunFolder.create(Path(out) / "run", run.config))
    return statistics.median(spent[1:]) / CLIENTS


def costs(methods: Sequence[str], repeats: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Of each method the milliseconds and FedAvg's rounds that one takes, medians; and why one cannot be timed."""
    found: dict[str, list[tuple[float, float]]] = {}
    refused: dict[str, str] = {}
    for _ in range(repeats):
        for method in methods:
            if method in refused:
                continue
            try:
                unit, own = work(UNIT), work(method)
            except (UserError, RunStopped) as error:
                refused[method] = str(error)
                continue
            found.setdefault(method, []).append((1000 * own, own / unit))
    medians = {
        method: [statistics.median(column) for column in zip(*rows, strict=True)] for method, rows in found.items()
    }
    return dict(sorted(medians.items(), key=lambda item: item[1][1])), refused


# ---------------------------------------------------------------------- Fishr


CASES = {
    "Color-MNIST: 8,000 samples, 390 features, 1 output": (8000, 390, 1),
    "Rotated-CIFAR10: 10,002 samples, 128 features, 10 outputs": (10_002, 128, 10),
    "eICU: 1,000 samples, 512 features, 1 output": (1000, 512, 1),
}


def variances(case: str, repeats: int) -> tuple[float, ...]:
    """CPU milliseconds of c and of its pull, both ways on the same samples. Ends the script where they differ."""
    count, width, outputs = CASES[case]
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(count, width, generator=generator).requires_grad_()
    y = torch.randint(max(2, outputs), (count,), generator=generator)
    layer = torch.nn.Linear(width, outputs)
    head: Tensors = {name: tensor for name, tensor in layer.named_parameters()}

    def logits(own: Tensors, features: Tensor) -> Tensor:
        found: Tensor = functional_call(layer, own, (features,))
        return torch.cat([torch.zeros_like(found), found], dim=1) if outputs == 1 else found

    task = Classes(max(2, outputs))

    def closed() -> Tensor:
        return variance(*gradient_sums(z, task.residuals(logits(head, z), y)[:, -outputs:]), count)

    def loss(own: Tensors, h: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(logits(own, h[None]), label[None])

    def per_sample() -> Tensor:
        found = vmap(grad(loss), in_dims=(None, 0, 0))(head, z, y)
        return torch.cat([found["weight"].flatten(1), found["bias"]], dim=1).var(dim=0, correction=0)

    def pulled(way: Callable[[], Tensor]) -> tuple[Tensor, float]:
        begun = time.process_time()
        own = way()
        gradient = torch.autograd.grad(own.square().sum(), [z, *head.values()])
        spent = time.process_time() - begun
        return torch.cat([own.detach(), *(g.flatten() for g in gradient)]), 1000 * spent

    ours, theirs = pulled(closed)[0], pulled(per_sample)[0]
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6):
        sys.exit(f"{case}: the closed form and autograd differ; nothing to time")
    times = [(pulled(closed)[1], pulled(per_sample)[1]) for _ in range(repeats)]
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


# ---------------------------------------------------------------------- what people see


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS), help="those to be timed, with commas between them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    methods = arguments.methods.split(",")
    if unknown := set(methods) - METHODS.keys():
        sys.exit(f"--methods: there is no {', '.join(sorted(unknown))}")
    timed, refused = costs(methods, arguments.repeats)
    table = Table(title=f"a client's round: {SAMPLES} samples, MLP 12-390-390-2, CPU time")
    for heading in ("method", "ms", "relative to FedAvg"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method, (milliseconds, relative) in timed.items():
        table.add_row(method, f"{milliseconds:.1f}", f"{relative:.2f}")
    for method, reason in refused.items():
        table.add_row(method, "–", reason)
    console = Console()
    console.print(table)
    table = Table(
        "head", "closed form, ms", "per sample, ms", "ratio", title="variance of gradients, and its pull"
    )
    for case in CASES:
        closed, per_sample = variances(case, arguments.repeats)
        table.add_row(case, f"{closed:.1f}", f"{per_sample:.1f}", f"{per_sample / closed:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
