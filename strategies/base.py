"""Base of every method's server half: cohorts, exchanges, screening, federated evaluation.

A method overrides `configure_train` and `aggregate_train`, like any Flower strategy, and says with `state_dict`
what a checkpoint must hold of it. A round with several exchanges runs the first ones inside `configure_train`
with `exchange`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from common import wire
from common.config import RunConfig
from common.errors import RunStopped
from common.methods.base import Method
from common.models import Tensors
from common.ranking import BATCH, COLUMNS, Ranking, from_columns
from common.seeding import numpy_generator
from common.wire import (
    CLIENT,
    CONFIG,
    KEPT,
    METRICS,
    MODEL,
    NUM_EXAMPLES,
    REFUSED,
    RESUMED,
    ROUND,
    RUN,
    TASK,
    Scalar,
    from_record,
    payload_bytes,
    records,
    to_record,
)
from strategies.mean import StreamingMean
from strategies.screening import Rejected, Template, accept, check_metrics

H = TypeVar("H", bound=Method)

Payload = Mapping[str, Tensors]
"""Named records of one request."""
PerClient = Callable[[str], Payload]
"""A payload of its own for each client id."""


@dataclass(frozen=True)
class Reply:
    """One client's accepted reply."""

    client: str
    arrays: Mapping[str, Tensors]
    metrics: MetricRecord
    settings: ConfigRecord

    def __getitem__(self, record: str) -> Tensors:
        return self.arrays[record]

    @property
    def num_examples(self) -> int:
        """The client's training samples."""
        count = self.metrics[NUM_EXAMPLES]
        assert isinstance(count, int)  # screened
        return count


@dataclass(frozen=True)
class Claim:
    """What a node says of itself: which client it is, why it cannot take part, its training samples."""

    client: str
    refusal: str = ""
    examples: int = 0
    silent: bool = False
    """It has not said anything yet."""


@dataclass
class Traffic:
    """Bytes of tensor values that went to and came from clients."""

    down: int = 0
    up: int = 0


@dataclass
class Exchange:
    """What is known of a send-and-receive while its replies come in."""

    action: str
    round: int
    clients: dict[int, str]
    """Client id by node id of those asked."""
    expect: Callable[[str], Mapping[str, Template]]
    optional: Mapping[str, Template] = field(default_factory=dict)
    """Records that a reply may bring beyond those expected."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why a client's reply was not used, by client id."""
    silent: set[str] = field(default_factory=set)
    """Those of them that did not answer at all."""
    traffic: Traffic = field(default_factory=Traffic)


class MethodStrategy(Strategy, Generic[H]):
    """Base of all server halves; as it stands, one global model and the sample-weighted mean of the replies."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        self.run, self.run_id = run, run_id
        self.hparams: H = run.method  # type: ignore[assignment]
        self.roster: dict[str, int] = {}
        """Node id by client id, in the order of client ids."""
        self.refused: dict[str, str] = {}
        """Why nodes that are there take no part, by client id or as `node 123`."""
        self.kept_checkpoints: list[int] = []
        self.resumed: list[int] = []
        self.exchanges: list[Exchange] = []
        """The exchanges of the round so far, for the log; whoever reads them clears them."""
        self.notes: list[dict[str, Any]] = []
        """The method's own rows of this round for the log, each with a `kind` and a `round`."""
        self.evaluation: list[dict[str, Any]] = []
        """Rows of the latest evaluation, one per client, model and split."""
        self._task = run.task()
        self._claims: dict[int, Claim] = {}
        """What the nodes that are there say of themselves, by node id; nothing, if they did not answer."""
        self._holders: dict[str, list[int]] = {}
        """Nodes that have been a client in this run, the first one first, by client id."""

    # ------------------------------------------------------------------ what a method says about itself

    def state_dict(self) -> dict[str, Tensors]:
        """Everything beyond the global arrays that the next round depends on, as named tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        """Take up the state of a checkpoint."""

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        """The server's models after the last round, by the names of their files."""
        return {"global": from_record(arrays)}

    def payload(self, arrays: ArrayRecord) -> Payload | PerClient:
        """What a client needs to train or to evaluate: the same for all, or by client id."""
        return {MODEL: from_record(arrays)}

    def weight(self, reply: Reply) -> float:
        """What a client counts for in the mean of the models: its training samples."""
        return reply.num_examples

    # ------------------------------------------------------------------ Flower's strategy, one exchange a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's cohort to `train` from the global model."""
        return self.ask(server_round, self.sample(server_round, grid), self.payload(arrays))

    def ask(self, server_round: int, cohort: list[str], payload: Payload | PerClient) -> list[Message]:
        """The requests to train, whose replies go through `mean`."""
        return self.messages(server_round, cohort, "train", payload, expect=payload)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of the clients' models."""
        mean, metrics = self.mean(server_round, replies)
        return to_record(mean) if mean else None, metrics

    def mean(self, server_round: int, replies: Iterable[Message]) -> tuple[Tensors, MetricRecord]:
        """The mean of the clients' models, weighted by `weight` (McMahan et al. 2017), and of their metrics.

        No tensors if nobody answered.
        """
        mean, metrics = StreamingMean(), MetricMeans()
        for reply in self.accepted(replies):
            mean.add(reply[MODEL], self.weight(reply))
            metrics.add(reply)
        return mean.result() if mean.weight else {}, metrics.result()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client to evaluate its models."""
        self.enrol(grid)
        batch = self.run.scenario.ranking_batch
        settings = {BATCH: batch} if batch else {}
        return self.messages(server_round, list(self.roster), "evaluate", self.payload(arrays), settings=settings)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Rows of counts and sums into `evaluation`; returns each model's client-mean test accuracy.

        Rankings are summed over clients, and only their areas become rows.
        """
        exchange = self.exchanges[-1]
        self.evaluation = []
        rankings: dict[tuple[str, str, str], Ranking] = {}
        for reply in self.accepted(replies):
            try:
                rows = self._rows(server_round, reply)
            except Rejected as reason:
                exchange.left_out[reply.client] = str(reason)
                continue
            for row in rows:
                for name, found in zip(row["environment"], row.pop("rankings"), strict=False):
                    key = row["model"], row["split"], name
                    rankings[key] = rankings[key] + found if key in rankings else found
            self.evaluation += rows
        accuracy: dict[str, list[float]] = {}
        for row in self.evaluation:
            if row["split"] == "test":
                values = [
                    right / count for right, count in zip(row["correct"], row["count"], strict=True) if count
                ]
                if values:
                    accuracy.setdefault(row["model"], []).append(sum(values) / len(values))
        for (model, split, name), found in rankings.items():
            where = {"model": model, "split": split, "environment": name}
            self.evaluation.append({"kind": "ranking", "round": server_round, **where, **found.measures()})
        return MetricRecord({f"{name}/accuracy": sum(v) / len(v) for name, v in accuracy.items()})

    def summary(self) -> None:
        """Nothing to log: the run folder holds the complete configuration."""

    # ------------------------------------------------------------------ the toolbox

    def enrol(self, grid: Grid) -> None:
        """Ask every node that has not said yet which client it is; forget nodes that are gone.

        Of several nodes that say they are the same client, the one that was it first in this run is. When none
        was, none is until only one is left. Where the setting `nodes` names a client's node, no other can be it.
        """
        present = set(grid.get_node_ids())
        self._claims = {n: claim for n, claim in self._claims.items() if n in present and not claim.silent}
        if strangers := sorted(present - self._claims.keys()):
            names = {f"node {node}": node for node in strangers}
            clients = {node: name for name, node in names.items()}
            messages = self._requests(0, clients, "query", lambda _: {}, lambda _: {}, {})
            for reply in self.accepted(self._send(grid, messages), quorum=0.0):
                client, refusal = (str(reply.settings.get(key, "")) for key in (CLIENT, REFUSED))
                count = reply.num_examples if NUM_EXAMPLES in reply.metrics else 0
                self._claims[names[reply.client]] = Claim(client, refusal, count)
            exchange = self.exchanges[-1]
            for name, reason in exchange.left_out.items():
                self._claims[names[name]] = Claim("", reason, silent=name in exchange.silent)
        self._seat()

    def _seat(self) -> None:
        """Who is which client, into `roster` and `refused`."""
        claimants: dict[str, list[int]] = {}
        self.roster, self.refused = {}, {}
        for node, claim in sorted(self._claims.items()):
            owner = self.run.nodes.get(claim.client, node)
            if claim.client not in self.run.scenario.client_ids:
                reason = claim.refusal or f"says that it is {claim.client!r}, which is none of this run's clients"
                self.refused[f"node {node}"] = str(Rejected(reason))
            elif node != owner:
                self.refused[f"node {node}"] = f"says that it is {claim.client}, which only node {owner} may be"
            else:
                claimants.setdefault(claim.client, []).append(node)
        for client, nodes in sorted(claimants.items()):
            able = [node for node in nodes if not self._claims[node].refusal]
            holders = self._holders.setdefault(client, [])
            if len(able) == 1 and able[0] not in holders:
                holders += able
            holder = next((node for node in holders if node in able), None)
            if holder is not None:
                self.roster[client] = holder
                others = [f"node {node}" for node in able if node != holder]
                self.refused |= dict.fromkeys(others, f"says that it is {client}, which node {holder} is")
            elif able:
                who = " and ".join(f"node {node}" for node in able)
                self.refused[client] = f"{who} say that they are {client}; the setting nodes can tell which one is"
            else:
                self.refused[client] = str(Rejected(self._claims[nodes[0]].refusal))

    def sample(self, server_round: int, grid: Grid) -> list[str]:
        """The round's cohort: `participation` of the scenario's clients, drawn from (seed, round).

        The draw is over all client ids of the scenario, whoever is connected, so it is the same on every
        runtime; clients that are not connected are left out and named.
        """
        self.enrol(grid)
        ids = self.run.scenario.client_ids
        generator = numpy_generator(self.run.seed, "server", server_round, "cohort")
        return [ids[number] for number in sorted(generator.choice(len(ids), self.run.cohort, replace=False))]

    def messages(
        self,
        server_round: int,
        cohort: Sequence[str],
        action: str,
        payload: Payload | PerClient,
        *,
        expect: Mapping[str, Template] | Callable[[str], Mapping[str, Template]] | None = None,
        optional: Mapping[str, Template] | None = None,
        settings: Mapping[str, Scalar] | None = None,
    ) -> list[Message]:
        """One request per client of the cohort, in client-id order.

        `payload` and `expect` (the records that a reply must bring, as tensors of the right shapes and types) may
        be functions of the client id; `optional` are records that it may bring. The replies go through `accepted`.
        """
        connected = {self.roster[client]: client for client in sorted(cohort) if client in self.roster}
        per_client = payload if callable(payload) else lambda _: payload
        expected = expect if callable(expect) else lambda _: expect or {}
        messages = self._requests(server_round, connected, action, per_client, expected, settings or {})
        exchange = self.exchanges[-1]
        exchange.optional = optional or {}
        absent = [client for client in cohort if client not in self.roster]
        exchange.left_out |= {client: self.refused.get(client, "is not connected") for client in absent}
        return messages

    def exchange(
        self,
        grid: Grid,
        server_round: int,
        cohort: Sequence[str],
        action: str,
        payload: Payload | PerClient,
        *,
        expect: Mapping[str, Template] | Callable[[str], Mapping[str, Template]] | None = None,
        settings: Mapping[str, Scalar] | None = None,
    ) -> Iterator[Reply]:
        """Send and receive within a round: `messages`, the grid, `accepted`."""
        messages = self.messages(server_round, cohort, action, payload, expect=expect, settings=settings)
        return self.accepted(self._send(grid, messages))

    def accepted(
        self,
        replies: Iterable[Message],
        *,
        quorum: float | None = None,
        check: Callable[[Reply], object] = lambda _: None,
    ) -> Iterator[Reply]:
        """The replies of the latest exchange that may be used, in client-id order, one at a time.

        A reply that is an error, lacks a record, has another shape or type or a number that is not finite is left
        out and named in the exchange's `left_out`; so is one for which `check` raises `Rejected`. Raises
        `RunStopped` after the last reply when fewer than the quorum could be used.
        """
        return self._accepted(self.exchanges[-1], replies, self.run.quorum if quorum is None else quorum, check)

    # ------------------------------------------------------------------ inside

    def _accepted(
        self, exchange: Exchange, replies: Iterable[Message], quorum: float, check: Callable[[Reply], object]
    ) -> Iterator[Reply]:
        if isinstance(replies, Sequence):  # a stock Grid's: in order of arrival
            replies = sorted(replies, key=lambda reply: exchange.clients.get(reply.metadata.src_node_id, ""))
        asked = len(exchange.clients) + len(exchange.left_out)
        waiting = dict(exchange.clients)
        used = 0
        for message in replies:
            client = waiting.pop(message.metadata.src_node_id, None)
            if client is None:
                continue  # the SuperLink's word on a lost node: that client is named below
            try:
                reply = self._screened(client, message, exchange)
                check(reply)
            except Rejected as reason:
                exchange.left_out[client] = str(reason)
                if message.has_error() and message.error.code in (wire.NO_REPLY, wire.NODE_UNAVAILABLE):
                    exchange.silent.add(client)
                continue
            exchange.traffic.up += sum(payload_bytes(tensors) for tensors in reply.arrays.values())
            used += 1
            yield reply
        exchange.left_out |= {client: "did not answer in time" for client in waiting.values()}
        exchange.silent |= set(waiting.values())
        need = math.ceil(round(quorum * asked, 9))  # 0.55 * 20 is a little more than 11
        if used < need:
            reasons = "; ".join(f"{client}: {reason}" for client, reason in sorted(exchange.left_out.items())[:3])
            raise RunStopped(
                f"round {exchange.round}: only {used} of {asked} clients gave a usable answer to "
                f"{exchange.action!r}, and quorum={quorum} asks for {need} ({reasons})"
            )

    def _screened(self, client: str, message: Message, exchange: Exchange) -> Reply:
        if message.has_error():
            raise Rejected(_error_text(message))
        given = records(message.content, ArrayRecord)
        optional = {name: like for name, like in exchange.optional.items() if name in given}
        expect = {**exchange.expect(client), **optional}
        if extra := message.content.keys() - {*expect, METRICS, CONFIG}:
            raise Rejected(f"unexpected record {sorted(extra)[0]!r}")
        arrays = {name: accept(name, given.get(name), like, self.run.largest) for name, like in expect.items()}
        counted = exchange.action.startswith("train")
        metrics = records(message.content, MetricRecord).get(METRICS)
        metrics = check_metrics(metrics, counted=counted, most_examples=self.run.most_examples)
        claim = self._claims.get(message.metadata.src_node_id)
        if claim and NUM_EXAMPLES in metrics and metrics[NUM_EXAMPLES] > claim.examples:  # type: ignore[operator]
            count = metrics[NUM_EXAMPLES]
            raise Rejected(f"metric {NUM_EXAMPLES!r} is {count}, and {claim.examples} when the client enrolled")
        settings = records(message.content, ConfigRecord).get(CONFIG) or ConfigRecord()
        return Reply(client, arrays, metrics, settings)

    def _send(self, grid: Grid, messages: list[Message]) -> Iterable[Message]:
        return grid.send_and_receive(messages, timeout=self.run.deadline)

    def _requests(
        self,
        server_round: int,
        clients: dict[int, str],
        action: str,
        payload: PerClient,
        expect: Callable[[str], Mapping[str, Template]],
        settings: Mapping[str, Scalar],
    ) -> list[Message]:
        exchange = Exchange(action, server_round, clients, expect)
        config = ConfigRecord(
            {
                TASK: self._task,
                RUN: self.run_id,
                ROUND: server_round,
                KEPT: self.kept_checkpoints,
                RESUMED: self.resumed,
                **settings,
            }
        )
        messages = []
        encoded: dict[int, tuple[Tensors, ArrayRecord]] = {}
        for node, client in clients.items():
            content = RecordDict({CONFIG: config})
            for name, tensors in payload(client).items():
                # The same tensors for several clients become one record.
                if id(tensors) not in encoded:
                    encoded[id(tensors)] = tensors, to_record(tensors)
                content[name] = encoded[id(tensors)][1]
                exchange.traffic.down += payload_bytes(tensors)
            messages.append(Message(content, node, action, group_id=str(server_round)))
        self.exchanges.append(exchange)
        return messages

    def _rows(self, server_round: int, reply: Reply) -> list[dict[str, Any]]:
        """An evaluation reply as one row per model and split, with `rankings` by environment if asked for.

        Raises `Rejected` where the columns do not fit.
        """
        ranked = COLUMNS if self.run.scenario.ranking_batch else ()
        environments = {"validation": {"validation"}, "test": set(self.run.scenario.test_environments)}
        columns: dict[tuple[str, str], dict[str, Any]] = {}
        rows = []
        try:
            for key, values in reply.metrics.items():
                model, split, column = key.split("/")
                columns.setdefault((model, split), {})[column] = values
            for (model, split), row in columns.items():
                if model not in self.hparams.evaluates or row.keys() != {"count", "correct", "loss", *ranked}:
                    raise ValueError(f"{model}/{split} was not asked for")
                names = list(reply.settings[split])  # type: ignore[arg-type]
                if not environments[split].issuperset(names) or len(set(names)) < len(names):
                    raise ValueError(f"{split} has other environments than the scenario")
                counts = zip(names, row["count"], row["correct"], row["loss"], strict=True)
                if not all(0 <= correct <= count for _, count, correct, _ in counts):
                    raise ValueError("more correct answers than samples")
                if (most := max(row["count"], default=0)) > self.run.most_examples:
                    raise ValueError(f"{most} samples; most_examples={self.run.most_examples} is the limit")
                given = {column: row.pop(column) for column in ranked}
                rankings = from_columns(given, row["count"]) if given else []
                named = {"kind": "evaluation", "round": server_round, "client": reply.client}
                where = {"model": model, "split": split, "environment": names}
                rows.append({**named, **where, **row, "rankings": rankings})
        except (KeyError, TypeError, ValueError) as error:
            raise Rejected(f"its evaluation cannot be read ({error})") from None
        return rows


class MetricMeans:
    """Sample-weighted means of the plain numbers in replies."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, int] = {}
        self._examples = 0

    def add(self, reply: Reply) -> None:
        """Take in a reply that counts its samples."""
        for name, value in reply.metrics.items():
            if name != NUM_EXAMPLES and not isinstance(value, list):
                self._sums[name] = self._sums.get(name, 0.0) + value * reply.num_examples
                self._weights[name] = self._weights.get(name, 0) + reply.num_examples
        self._examples += reply.num_examples

    def result(self) -> MetricRecord:
        """The means, each over the clients that report it, and the number of samples of all."""
        means: dict[str, float | int] = {name: total / self._weights[name] for name, total in self._sums.items()}
        return MetricRecord({**means, NUM_EXAMPLES: self._examples})


def _error_text(message: Message) -> str:
    reason = " ".join((message.error.reason or "no reason given").split())
    match message.error.code:
        case wire.BROKEN_REPLY:
            return "its answer broke off, or cannot be read"
        case wire.NO_REPLY:
            return reason
        case wire.NODE_UNAVAILABLE:
            return "is gone: it has sent no heartbeat for a minute"
    raised = re.fullmatch(r"<class '(?:.*\.)?(\w+)'>:<['\"](.*)['\"]>", reason)  # Flower's form of an exception
    return f"failed: {raised[2]} ({raised[1]})" if raised else f"failed: {reason} (code {message.error.code})"
