"""The local runtime: server and all clients in this process."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flwr.app import Context

from perennial.client.app import OneHandlerApp
from perennial.client.host import Host, pick_device
from perennial.client.state import RESIDENT, FileStates, SavedStates
from perennial.common import plugins
from perennial.common.config import RunConfig, parse_task
from perennial.common.data.examples import ClientData
from perennial.common.models.memory import COPIES, activation_bytes, keep_freed, must_fit, set_aside
from perennial.common.models.torch_state import plain_torch
from perennial.common.stacks import Requests, StackReply
from perennial.common.utils.errors import UserError
from perennial.common.utils.tracebacks import NAME, Tracebacks
from perennial.server.run.folder import Checkpoint, RunFolder
from perennial.server.run.grid import LocalGrid
from perennial.server.run.loop import run_rounds, start
from perennial.server.run.progress import Watcher
from perennial.server.run.references import load_references
from perennial.strategies.registry import strategy_class


def number(context: Context) -> int:
    """The number of the client that a node is."""
    return int(context.node_config["partition-id"])


class LocalRuntime:
    """One run's clients in this process, data loaded and networks resident."""

    @plain_torch(threads=1)
    @plugins.blaming()
    def __init__(self, config: RunConfig) -> None:
        """Raises `UserError` when the device, data set, references or a plug-in's half are not there.

        Nothing has been written then.
        """
        stacks = config.cohort_engine != "loop"
        if stacks:
            keep_freed()
        self.config = config
        self.states = SavedStates()
        device = pick_device(config.device)
        self.host = host = Host(self.states, config.data_folder, device, engine=config.cohort_engine)
        if config.evaluates_some:
            # Else an evaluation, which goes through them in order, would find that each has just been let go.
            evaluated = set(config.evaluated)
            host.stay = {number for number, client in enumerate(config.scenario.client_ids) if client in evaluated}
        self.references = load_references(config)
        strategy_class(config.method)
        text, scenario = config.task(), config.scenario
        # Each client keeps a model, and those that have been saved need not be in memory.
        kept = min(scenario.clients, max(RESIDENT, config.cohort * config.checkpoint_every))
        personal = kept if "personal" in config.method.evaluates else 0
        must_fit(config.model, scenario.input_shape, config.predicts.outputs, COPIES + personal)
        host.site(text, parse_task(text), 0)
        if stacks and config.model.stacks:  # which imports a lot: before `run` sets aside what is there
            activation_bytes(config.model, scenario.input_shape, config.predicts.outputs)
        app = OneHandlerApp(lambda message, context: host.handle(message, number(context)))

        def ahead(requests: Requests, contexts: Sequence[Context]) -> Iterable[StackReply | int]:
            return host.ahead(requests, list(map(number, contexts)))

        self.grid = LocalGrid(app, len(config.scenario.client_ids), ahead if stacks else None)

    @plain_torch(threads=1)
    def run(
        self,
        folder: RunFolder,
        origin: Checkpoint | None = None,
        watch: Watcher = lambda _: None,
        until: int | None = None,
    ) -> dict[str, Any]:
        """Run all rounds, or those after a checkpoint, into the folder; returns the summary.

        `until` as in `run_rounds`.
        """
        self.grid.tracebacks = Tracebacks(folder.path / NAME)
        if origin is None:
            origin = start(self.config)
        self.states.read(folder.clients)
        # Where a run that was begun earlier put them.
        if (before := folder.checkpoint_path(origin.round) / "clients").exists():
            self.states.update(FileStates(before))
        with set_aside():
            return run_rounds(
                self.config, folder, self.grid, origin, watch, self.states.save, until, self.references
            )

    def data(self) -> Iterator[tuple[str, ClientData]]:
        """The clients that are evaluated and their data; who has none that can be read is left out."""
        text, evaluated = self.config.task(), set(self.config.evaluated)
        for number, client in enumerate(self.config.scenario.client_ids):
            try:
                if client in evaluated:
                    yield client, self.host.site(text, parse_task(text), number).data
            except UserError:
                continue
