"""Federated learning for clients whose data differ from each other and from what they will meet after training.

`run`, `resume` and `load` give a `Result`; `sweep`, `tune`, `compare` and `leave_one_site_out` run many;
`from_arrays` and `from_partitions` make a scenario of data in memory; `plugin` takes up a method of your own.
docs/python.md shows each. `client_app` is a ClientApp for a Flower app of your own (docs/plugins.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perennial.client.plain import client_app
    from perennial.common.errors import RunStopped, UserError
    from perennial.data import InMemory, from_arrays, from_partitions
    from perennial.results import Result
    from perennial.runs import load, plugin, resume, run
    from perennial.server.progress import Progress
    from perennial.server.rows import Table
    from perennial.studies import Comparison, Search, compare, leave_one_site_out, sweep, tune

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "InMemory",
    "Progress",
    "Result",
    "RunStopped",
    "Search",
    "Table",
    "UserError",
    "client_app",
    "compare",
    "from_arrays",
    "from_partitions",
    "leave_one_site_out",
    "load",
    "plugin",
    "resume",
    "run",
    "sweep",
    "tune",
]

ROOMS = {
    "client.plain": ("client_app",),
    "common.errors": ("RunStopped", "UserError"),
    "data": ("InMemory", "from_arrays", "from_partitions"),
    "results": ("Result",),
    "runs": ("load", "plugin", "resume", "run"),
    "server.progress": ("Progress",),
    "server.rows": ("Table",),
    "studies": ("Comparison", "Search", "compare", "leave_one_site_out", "sweep", "tune"),
}
"""Where each name is; imported when it is first asked for, so that the package itself costs nothing."""


def __getattr__(name: str) -> Any:
    for room, names in ROOMS.items():
        if name in names:
            return getattr(import_module(f"perennial.{room}"), name)
    raise AttributeError(f"module 'perennial' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
