"""A strategy in anybody's ServerApp: Flower's own `start`, a grid that answers in any order."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from safetensors.torch import load_file

from perennial.common.wire import from_record, to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import start
from perennial.strategies.base import MethodStrategy
from perennial.testing.tiny_federation import SpoilingGrid, toy_config


class Unordered(SpoilingGrid):
    """All replies at once, the last client's first, as a list: what a stock Grid may do."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:  # type: ignore[override]
        return list(self.inner.send_and_receive(messages, timeout=timeout))[::-1]


def test_flowers_own_loop_gives_the_same_arrays(tmp_path: Path) -> None:
    config = toy_config("fedavg")
    LocalRuntime(config).run(RunFolder.create(tmp_path, config))
    ours = load_file(tmp_path / "models" / "global.safetensors")

    grid = Unordered(LocalRuntime(config).grid, lambda _, reply: reply)
    strategy: MethodStrategy[Any] = MethodStrategy(config, "stock")
    result = strategy.start(grid, to_record(start(config).arrays), num_rounds=config.rounds)
    theirs = from_record(result.arrays)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert result.evaluate_metrics_clientapp[config.rounds]["global/accuracy"] > 0.5
    # Nobody else clears them: the last round's training and evaluation are left.
    assert [exchange.action for exchange in strategy.exchanges] == ["train", "evaluate"]
    assert strategy.notes == []
