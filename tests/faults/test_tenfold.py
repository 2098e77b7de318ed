"""A finite, well-formed model ten times too large: screening lets it through, and clipping bounds what it does."""

from pathlib import Path

import torch
from flwr.app import Message
from safetensors.torch import load_file

from perennial.common.utils.tensors import Tensors
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import start
from perennial.testing.bad_replies import with_fault
from perennial.testing.tiny_federation import SpoilingGrid, toy_config


def trained(path: Path, *settings: str, attacked: bool) -> Tensors:
    """The global model after a round of four clients with as many samples each; client-1 may lie."""
    config = toy_config("fedavg", *settings, rounds=1)
    here = LocalRuntime(config)

    def spoil(request: Message, reply: Message) -> Message:
        lies = attacked and request.metadata.dst_node_id == 2 and request.metadata.message_type == "train"
        return with_fault("tenfold", request, reply) if lies else reply

    here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
    summary = here.run(RunFolder.create(path, config))
    assert summary["left_out"] == {}
    return load_file(path / "models" / "global.safetensors")


def moved(one: Tensors, other: Tensors) -> float:
    """Euclidean distance of two models."""
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


def test_it_is_averaged_in(tmp_path: Path) -> None:
    """The first tensor of client-1's model counts ten times: 9/4 of it more in the mean of four."""
    honest, attacked = (trained(tmp_path / str(lie), attacked=lie) for lie in (False, True))
    start_model = start(toy_config("fedavg")).arrays
    first = next(iter(start_model))
    assert moved({first: attacked[first]}, {first: honest[first]}) > 0.5 * float(honest[first].norm())
    rest = [name for name in honest if name != first]
    assert all(torch.equal(honest[name], attacked[name]) for name in rest)


def test_clipping_bounds_it(tmp_path: Path) -> None:
    """No client moves the mean of four updates further than C/4, so a lie changes it by C/2 at most."""
    norm = 0.1
    settings = ("privacy.mechanism=fixed", f"privacy.clipping_norm={norm}", "privacy.noise_multiplier=0")
    honest, attacked = (trained(tmp_path / str(lie), *settings, attacked=lie) for lie in (False, True))
    assert 0 < moved(honest, attacked) <= 2 * norm / 4 + 1e-6
    assert moved(attacked, start(toy_config("fedavg")).arrays) <= norm + 1e-6
