"""The round loop: train, log, evaluate, checkpoint. The same on every runtime."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.models.memory import must_fit
from perennial.common.models.network import network
from perennial.common.selection import References
from perennial.common.tasks import PredictionTask
from perennial.common.utils.errors import RunStopped, Stop, UserError
from perennial.common.utils.events import tell
from perennial.common.utils.tensors import must_be_records
from perennial.common.utils.tracebacks import NAME
from perennial.common.wire import from_record, numbers, to_record
from perennial.server.run.folder import Checkpoint, RunFolder
from perennial.server.run.progress import Progress, Watcher
from perennial.server.run.references import load_references
from perennial.server.selection.summary import Evaluation, Patience, majority, summarise, versions
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import Exchange
from perennial.strategies.privacy.differential_privacy import PrivateStrategy
from perennial.strategies.registry import strategy_for
from perennial.strategies.roster import Seated


def start(config: RunConfig) -> Checkpoint:
    """The state before the first round. Raises `UserError` where two environments have one name."""
    scenario = config.scenario
    for kind in ("train_environments", "test_environments"):
        name, times = Counter(getattr(scenario, kind)).most_common(1)[0]
        if times > 1:
            why = f"{name!r} is there {times} times; give each a name of its own"
            raise UserError(f"scenario {scenario.name!r}: {kind}: {why}")
    must_fit(config.model, scenario.input_shape, config.predicts.outputs)
    net = network(config.model, scenario.input_shape, config.predicts.outputs, torch.device("cpu"))
    return Checkpoint(round=0, run_id=uuid4().hex[:12], arrays=net.initial(config.seed), strategy={})


def run_rounds(
    config: RunConfig,
    folder: RunFolder,
    grid: Grid,
    origin: Checkpoint,
    watch: Watcher = lambda _: None,
    save_clients: Callable[[Path], None] | None = None,
    until: int | None = None,
    references: References | None = None,
) -> dict[str, Any]:
    """All rounds after `origin`, into the run folder; returns the summary.

    With `until` it stops after that round with a checkpoint, and returns nothing if more are to come.
    `save_clients` writes what clients keep into a checkpoint, where they cannot do so themselves. `references` are
    the run's, where they have been read before. It ends before the last round, with a checkpoint and a summary,
    where `patience` is over, or `watch` or whoever follows it from elsewhere asks it to. Raises `RunStopped` when
    an exchange misses its quorum; the last checkpoint then stands.
    """
    with folder.logging(), _run_events(config, origin), plugins.blaming(folder.path / NAME):
        strategy = _ready_strategy(config, folder, grid, origin, references or load_references(config))
        arrays, nothing = to_record(origin.arrays), ConfigRecord()
        begun = time.monotonic() - origin.seconds
        clock = RoundEvents(origin.run_id, config.predicts)
        end = min(until or config.rounds, config.rounds)
        waiting, why = Patience(config, folder.rows() if config.patience else []), ""

        def evaluate(number: int, rows: list[dict[str, Any]]) -> dict[str, float]:
            evaluated, exchanges = _evaluate(strategy, number, arrays, grid, config)
            rows += [*strategy.evaluation, _exchange_row("evaluation-traffic", number, exchanges)]
            clock.done("evaluate", exchanges)
            clock.evaluated(strategy.evaluation)
            return evaluated

        def save(number: int) -> None:
            state, half = strategy.state_dict(), f"the server half of {config.method.name!r}"
            must_be_records(state, f"{half}: state_dict")
            seconds, length = time.monotonic() - begun, folder.log.stat().st_size
            here = Checkpoint(number, origin.run_id, from_record(arrays), state, seconds, length, config)
            folder.save_checkpoint(here, save_clients, hold=waiting.best)
            strategy.kept_checkpoints = folder.checkpoints()
            clock.done("checkpoint", [])

        for number in range(origin.round + 1, end + 1):
            clock.begin(number)
            requests = strategy.configure_train(number, arrays, nothing, grid)
            replies = grid.send_and_receive(requests, timeout=config.deadline)
            new_arrays, metrics = strategy.aggregate_train(number, replies)
            if isinstance(strategy, PrivateStrategy):
                strategy.count_release(number)  # of a round in which nobody answered, too
            arrays = arrays if new_arrays is None else new_arrays
            trained = numbers(metrics or {})
            rows = [_round_row(number, strategy, trained), *strategy.notes]
            clock.done("train", strategy.exchanges)
            evaluated = number == config.rounds or number % config.evaluate_every == 0
            if evaluated:
                trained |= evaluate(number, rows)
            folder.append(rows)
            why = waiting.over(number, strategy.evaluation) if evaluated else ""
            best = waiting.best == number
            saved = bool(why) or best or number == end or number % config.checkpoint_every == 0
            if saved:
                save(number)
            clock.round_done(len(strategy.roster.nodes), len(rows[0]["left_out"]))
            models = partial(strategy.results, arrays)
            try:
                watch(Progress(number, config.rounds, trained, rows[0]["left_out"], rows, models))
                if asked := folder.asked_to_stop():
                    raise Stop(asked)
            except Stop as stop:
                why = why or str(stop) or "by the one who watched it"
                if not evaluated:
                    rows = []
                    evaluate(number, rows)
                    folder.append(rows)
                if not (saved and evaluated):
                    save(number)
            if why:
                break
        if end < config.rounds and not why:
            return {}

        for name, tensors in strategy.results(arrays).items():
            folder.save_model(name, tensors)
        summary = summarise(config, folder.rows(), seconds=time.monotonic() - begun) | {"versions": versions()}
        if why and summary["rounds"] < config.rounds:
            summary["stopped"] = {"round": summary["rounds"], "reason": why}
        if waiting.best:
            summary["best"] = {"round": waiting.best, "selection": waiting.selection}
        if privacy := config.privacy.report(folder.releases()):
            summary["privacy"] = privacy
        folder.write_summary(summary)
        return summary


def _ready_strategy(
    config: RunConfig, folder: RunFolder, grid: Grid, origin: Checkpoint, references: References | None
) -> MethodStrategy[Any]:
    """The server half as it was at `origin`, once enough clients are there."""
    strategy = strategy_for(config, origin.run_id)
    strategy.references = references
    if isinstance(strategy, PrivateStrategy):
        strategy.count = folder.add_release
    if origin.round:
        strategy.load_state_dict(defaultdict(dict, origin.strategy))  # no file has the records that were empty
        strategy.resumed = folder.add_resume(origin.round)
        strategy.kept_checkpoints = folder.checkpoints()
    if origin.round < config.rounds:
        await_clients(strategy, grid, config)
        if changed := folder.changes(origin, config):
            folder.append([{"kind": "changed", "round": origin.round + 1, "settings": changed}])
            folder.note_inputs(config)
    return strategy


@contextmanager
def _run_events(config: RunConfig, origin: Checkpoint) -> Iterator[None]:
    """Events of a run's beginning and its end."""
    begun, run = time.monotonic(), origin.run_id
    about: dict[str, Any] = {"method": config.method.name, "scenario": config.scenario.name, "seed": config.seed}
    tell("run", run=run, action="resume" if origin.round else "start", rounds=config.rounds, **about)
    try:
        yield
    except BaseException as error:
        why = " ".join(str(error).split())[:1000] or type(error).__name__
        tell("stopped", level=logging.ERROR, run=run, seconds=round(time.monotonic() - begun, 3), reason=why)
        raise
    tell("ended", run=run, seconds=round(time.monotonic() - begun, 3))


class RoundEvents:
    """Logs what each part of a round took, and what came of it."""

    def __init__(self, run: str, task: PredictionTask) -> None:
        self._run, self._task = run, task

    def begin(self, number: int) -> None:
        """A round begins."""
        self._round, self._begun = number, time.monotonic()
        self._part, self._exchanges = self._begun, list[Exchange]()

    def done(self, action: str, exchanges: Sequence[Exchange]) -> None:
        """A part of it is done: training, evaluation, checkpoint."""
        now = time.monotonic()
        self._tell(action, action=action, seconds=round(now - self._part, 3))
        self._part = now
        for exchange in _work(exchanges):
            self._exchanges.append(exchange)
            for client, reason in sorted(exchange.left_out.items()):
                known = {"client": client, "action": exchange.action, "reason": reason}
                self._tell("left out", level=logging.WARNING, **known)

    def evaluated(self, rows: Iterable[dict[str, Any]]) -> None:
        """Accuracies by model and test environment, means over clients."""
        models: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            models.setdefault(row["model"], []).append(row)
        found = {model: Evaluation(own, self._task).client_mean("test") for model, own in models.items()}
        known: dict[str, Any] = {"action": "evaluate", self._task.headline.name: found}
        self._tell("evaluated", **known)

    def round_done(self, connected: int, left_out: int) -> None:
        """The round is done."""
        silent = sum(len(exchange.silent) for exchange in self._exchanges)
        lost = sum(len(exchange.left_out) for exchange in self._exchanges)
        clients = sum(len({*exchange.clients.values(), *exchange.left_out}) for exchange in self._exchanges)
        self._tell(
            "round",
            seconds=round(time.monotonic() - self._begun, 3),
            connected=connected,
            left_out=left_out,
            used=clients - lost,
            refused=lost - silent,
            silent=silent,
            **_traffic(self._exchanges),
        )

    def _tell(self, event: str, *, level: int = logging.INFO, **known: Any) -> None:
        tell(event, level=level, run=self._run, round=self._round, **known)


def await_clients(strategy: MethodStrategy[Any], grid: Grid, config: RunConfig) -> None:
    """Wait until all of the scenario's clients are there or have declined, at most `wait` seconds.

    Raises `RunStopped` when then fewer than the quorum are there.
    """
    if isinstance(grid, Seated) and config.evaluates_some:
        return  # all are there, and each round asks whom it needs
    wanted, roster = len(config.scenario.client_ids), strategy.roster
    end = time.monotonic() + config.wait

    def pause() -> None:
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))

    while True:
        # One query for all who are there costs as much as one for the first.
        while len(list(grid.get_node_ids())) < wanted and time.monotonic() < end:
            pause()
        strategy.enrol(grid)
        decided = len(roster.nodes) + len(roster.declined) >= wanted
        if decided or time.monotonic() >= end:
            break
        pause()
    there = len(roster.nodes)
    if there < max(1, round(config.quorum * wanted, 9)):
        reasons = [f"{name}: {reason}" for name, reason in roster.refused.items()]
        when = "take part" if decided else f"were there after wait={config.wait:g} seconds"
        raise RunStopped(
            f"only {there} of {wanted} clients {when}, and quorum={config.quorum:g} of them is needed"
            + (f" ({reasons[-1]})" if reasons else "")
        )


def _evaluate(
    strategy: MethodStrategy[Any], number: int, arrays: ArrayRecord, grid: Grid, config: RunConfig
) -> tuple[dict[str, float], list[Exchange]]:
    before = len(strategy.exchanges)
    requests = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
    metrics = strategy.aggregate_evaluate(number, grid.send_and_receive(requests, timeout=config.deadline))
    return numbers(metrics or {}), _work(strategy.exchanges[before:])


def _work(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Without queries, which train and evaluate nothing."""
    return [exchange for exchange in exchanges if exchange.action != "query"]


def _round_row(number: int, strategy: MethodStrategy[Any], trained: dict[str, float]) -> dict[str, Any]:
    work = _work(strategy.exchanges)
    row = _exchange_row("round", number, work)
    if found := majority(next((exchange.samples for exchange in reversed(work) if exchange.samples), {})):
        row["majority"] = found
    if insists := strategy.roster.insists:
        row["insists"] = insists
    return {**row, "left_out": {**strategy.roster.refused, **row["left_out"]}, "metrics": trained}


def _traffic(exchanges: Iterable[Exchange]) -> dict[str, int]:
    return {name: sum(getattr(exchange, name) for exchange in exchanges) for name in ("bytes_down", "bytes_up")}


def _exchange_row(kind: str, number: int, exchanges: list[Exchange]) -> dict[str, Any]:
    return {
        "kind": kind,
        "round": number,
        "exchanges": [exchange.action for exchange in exchanges],
        "asked": len({client for exchange in exchanges for client in exchange.clients.values()}),
        **_traffic(exchanges),
        "left_out": {client: reason for exchange in exchanges for client, reason in exchange.left_out.items()},
    }
