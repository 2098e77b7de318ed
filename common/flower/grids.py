"""What is known of Flower's own Grids beyond their public methods."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from flwr.serverapp import Grid

from perennial.common.flower.names import RetryInvoker, RetryState
from perennial.common.flower.processes import has
from perennial.common.flower.retries import persist


def in_simulation(grid: Grid) -> bool:
    """Whether Flower's simulation runs the clients. Its class, a second's import, is there where it does."""
    module = sys.modules.get("flwr.superlink.grid.inmemory_grid")
    return module is not None and isinstance(grid, module.InMemoryGrid)


def be_the_server() -> None:
    """Let this process make requests though it is no task of Flower's, which releases from 1.38 on ask for."""
    if has("supercore.task_identity"):
        task = import_module("flwr.supercore.task_identity").TaskIdentity
        if task._run_id is None:  # else a ServerApp of somebody's runs here
            task.task_id = task.run_id = task.node_id = 0


def on_break(grid: Grid, tell: Callable[[], object]) -> None:
    """Have a Grid repeat what the SuperLink fails to do, and tell whenever its connection has broken."""
    invoker = getattr(grid, "_retry_invoker", None)  # a simulation's grid has none
    if isinstance(invoker, RetryInvoker):
        on_backoff = persist(invoker).on_backoff

        def noted(state: RetryState) -> None:
            tell()
            if on_backoff:
                on_backoff(state)

        invoker.on_backoff = noted


def runtime_stub(grid: Grid) -> Any:
    """The Runtime API's stub of a ServerApp's Grid, with the app's own token."""
    return grid._stub  # type: ignore[attr-defined]
