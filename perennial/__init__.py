"""Federated learning for clients whose data differ from each other and from what they will meet after training.

`run`, `resume` and `load` give a `Result`; `sweep`, `tune`, `compare` and `leave_one_site_out` run many;
`from_arrays`, `from_frames`, `from_datasets` and `from_partitions` make a scenario of data in memory; `plugin`
takes up a method of your own.
docs/python.md shows each. `client_app` is a ClientApp for a Flower app of your own (docs/plugins.md).
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from perennial.common.utils.version import __version__ as __version__
from perennial.moved import Moved

if TYPE_CHECKING:
    from perennial.client.flower_app import client_app
    from perennial.common.tasks import Metric
    from perennial.common.utils.errors import RunStopped, Stop, UserError
    from perennial.server.frames import from_frames
    from perennial.server.in_memory import InMemory, from_arrays, from_datasets, from_partitions
    from perennial.server.results.result import Result, plot
    from perennial.server.results.table import Table
    from perennial.server.run.progress import Progress
    from perennial.server.runs import load, plugin, resume, run
    from perennial.server.studies import Comparison, Search, compare, leave_one_site_out, sweep, tune

__all__ = [
    "Comparison",
    "InMemory",
    "Metric",
    "Progress",
    "Result",
    "RunStopped",
    "Search",
    "Stop",
    "Table",
    "UserError",
    "client_app",
    "compare",
    "from_arrays",
    "from_datasets",
    "from_frames",
    "from_partitions",
    "leave_one_site_out",
    "load",
    "plot",
    "plugin",
    "resume",
    "run",
    "sweep",
    "tune",
]

ROOMS = {
    "client.flower_app": ("client_app",),
    "common.tasks": ("Metric",),
    "common.utils.errors": ("RunStopped", "Stop", "UserError"),
    "server.frames": ("from_frames",),
    "server.in_memory": ("InMemory", "from_arrays", "from_datasets", "from_partitions"),
    "server.results.result": ("Result", "plot"),
    "server.results.table": ("Table",),
    "server.run.progress": ("Progress",),
    "server.runs": ("load", "plugin", "resume", "run"),
    "server.studies": ("Comparison", "Search", "compare", "leave_one_site_out", "sweep", "tune"),
}
"""Where each name is; imported when it is first asked for, so that the package itself costs nothing."""


def __getattr__(name: str) -> Any:
    for room, names in ROOMS.items():
        if name in names:
            return getattr(import_module(f"perennial.{room}"), name)
    raise AttributeError(f"module 'perennial' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


sys.meta_path.append(Moved())
