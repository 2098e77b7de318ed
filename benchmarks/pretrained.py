"""A frozen ResNet-50 on PACS: one round of Perennial's FedAvg, and the same in plain PyTorch.

Both start from one file of weights, which this program makes: no network is needed, and the numbers are no
statement on ImageNet. Both train the classifier on the same mini-batches, average the clients' classifiers by
their numbers of pictures, and are tested on the domain left out. Ends with exit code 1 where the accuracies differ
by more than half a point, or a number of the classifiers by more than 1e-3.

    PERENNIAL_DATA=/path/to/data python benchmarks/pretrained.py
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

from perennial.common.config import RunConfig, load_config
from perennial.common.models.network import network
from perennial.common.utils.seeding import torch_generator
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder

POINTS, CLOSE = 0.5, 1e-3
BATCH, RATE = 64, 0.05


def made(file: Path, pictures: Tensor) -> None:
    """Drawn weights, with BatchNorm statistics of some pictures."""
    torch.manual_seed(0)
    model = resnet50()
    with torch.no_grad():
        for _ in range(10):  # of momentum 0.1 each
            model(pictures)
    torch.save(model.state_dict(), file)


def plain(config: RunConfig, runtime: LocalRuntime, file: Path, steps: int) -> tuple[nn.Linear, float]:
    """The same round as one writes it in PyTorch: the averaged classifier, and its accuracy."""
    weights = torch.load(file, weights_only=True)
    begun = network(config.model, config.scenario.input_shape, config.scenario.classes).initial(config.seed)
    sums, pictures, held_out = [torch.zeros(7, 2048), torch.zeros(7)], 0, []
    for client, data in runtime.data():
        model = resnet50()
        model.load_state_dict(weights)
        model.requires_grad_(False)
        model.fc = nn.Linear(2048, 7)
        model.fc.load_state_dict({name: begun[f"classifier.{name}"] for name in ("weight", "bias")})
        model.eval()  # frozen, with its BatchNorm statistics
        optimizer = torch.optim.SGD(model.fc.parameters(), lr=RATE)
        order = torch.randperm(len(data.train), generator=torch_generator(config.seed, client, 1, "batches"))
        for index in order.split(BATCH)[:steps]:
            optimizer.zero_grad()
            cross_entropy(model(data.train.x[index]), data.train.y[index]).backward()
            optimizer.step()
        for total, tensor in zip(sums, (model.fc.weight, model.fc.bias), strict=True):
            total += tensor.detach() * len(data.train)
        pictures += len(data.train)
        held_out += list(data.test.values())
    with torch.no_grad():
        for tensor, total in zip((model.fc.weight, model.fc.bias), sums, strict=True):
            tensor.copy_(total / pictures)
        shares = [
            torch.cat([model(piece).argmax(dim=1) for piece in part.x.split(256)]).eq(part.y).double().mean()
            for part in held_out
        ]
    return model.fc, 100 * float(torch.stack(shares).mean())


def main() -> int:
    """Compare, and say by how much they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="mini-batches of each client")
    parser.add_argument("--side", type=int, default=64, help="pixels")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    base = [
        f"scenario.side={asked.side}",
        f"local_steps={asked.steps}",
        f"batch_size={BATCH}",
        f"learning_rate={RATE}",
    ]
    options = {"method": "fedavg", "scenario": "pacs-domains", "rounds": 1}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "resnet50.pt"
        probe = LocalRuntime(load_config(options=options, settings=base))
        made(file, next(probe.data())[1].train.x[:BATCH])
        settings = ["model.name=torchvision:resnet50", f"model.weights={file}", "model.freeze=featurizer"]
        config = load_config(options=options, settings=[*base, *settings])
        begun = time.perf_counter()
        runtime, run = LocalRuntime(config), RunFolder.create(Path(folder) / "run", config)
        found = runtime.run(run)["models"]["global"]["final"]["average"]
        done = time.perf_counter()
        ours = 100 * found
        theirs_layer, theirs = plain(config, runtime, file, asked.steps)
        arrays = run.load_checkpoint().arrays
    apart = max(
        float((arrays[f"classifier.{name}"] - tensor.detach()).abs().max())
        for name, tensor in theirs_layer.named_parameters()
    )
    print(f"Perennial {ours:.2f} %, {done - begun:.0f} s")
    print(f"plain PyTorch {theirs:.2f} %, {time.perf_counter() - done:.0f} s")
    print(f"largest difference of the classifiers {apart:.1e}")
    return 0 if abs(ours - theirs) <= POINTS and apart <= CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
