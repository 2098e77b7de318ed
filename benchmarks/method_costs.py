"""What each method costs a client, as multiples of FedAvg: the columns of the tables of docs/methods/README.md.

    uv run python benchmarks/method_costs.py [METHOD ...]

Runs four rounds of `colored-digits` (8 clients, all asked) with the method's defaults. It counts bytes of tensors
down and up, floating-point operations of a client's training, and bytes that a client keeps after the last round.
The network is small (8,386 numbers, 64 features), so what a method adds to the model weighs more than with a large
one.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

from flwr.app import Message
from torch.utils.flop_counter import FlopCounterMode

from perennial.client.host import Host
from perennial.client.state import FileStates
from perennial.common.config import load_config
from perennial.common.methods import METHODS
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

ROUNDS = 4


class Cost(NamedTuple):
    """Of one client: bytes down and up and operations of its training in a round, bytes kept at the end."""

    down: float
    up: float
    work: float
    kept: float

    def of(self, fedavg: "Cost") -> list[str]:
        """The cells of a row; what is kept is a multiple of the model that FedAvg sends."""
        ratios = (self.down / fedavg.down, self.up / fedavg.up, self.work / fedavg.work, self.kept / fedavg.down)
        return ["–" if not ratio else f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios]


def measure(method: str) -> Cost:
    """What the method's clients cost in the mean."""
    operations, handle = 0, Host.handle

    def counted(host: Host, message: Message, number: int = 0) -> Message:
        nonlocal operations
        if not message.metadata.message_type.startswith("train"):
            return handle(host, message, number)
        with FlopCounterMode(display=False) as counter:
            reply = handle(host, message, number)
        operations += counter.get_total_flops()
        return reply

    options = {"method": method, "scenario": "colored-digits", "rounds": ROUNDS, "evaluate_every": ROUNDS}
    config = load_config(options=options)
    with TemporaryDirectory() as temporary, patch.object(Host, "handle", counted):
        folder = RunFolder.create(Path(temporary) / "run", config)
        LocalRuntime(config).run(folder)
        sent = folder.summary()["bytes_per_client_and_round"]
        kept = sum(
            tensor.nbytes
            for versions in FileStates(folder.clients).values()
            for version in versions
            if version.round == ROUNDS
            for record in version.kept.values()
            for tensor in record.values()
        )
    clients = config.scenario.clients
    return Cost(sent["down"], sent["up"], operations / ROUNDS / clients, kept / clients)


if __name__ == "__main__":
    reference = measure("fedavg")
    for name in sys.argv[1:] or sorted(METHODS):
        print(f"| `{name}` | {' | '.join(measure(name).of(reference))} |", flush=True)
