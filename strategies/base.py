"""Base of every method's server half: what a method overrides, and what it calls.

As it stands it is FedAvg's. A method overrides the hooks of the first part, and says with `state_dict` what a
checkpoint must hold of it. A round with several exchanges overrides `prepare` or `ask`, and runs the first
ones there with `exchange` or `averaged`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Generic, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.measures.ranking import BATCH
from perennial.common.measures.scores import BINS, SCORES
from perennial.common.methods.base import Method
from perennial.common.models.network import Network, network
from perennial.common.selection import References
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.seeding import numpy_generator, torch_generator
from perennial.common.utils.tensors import Tensors, must_be_tensors
from perennial.common.wire import (
    KEPT,
    MODEL,
    NUM_EXAMPLES,
    RESUMED,
    ROUND,
    RUN,
    TASK,
    Scalar,
    from_record,
    to_record,
)
from perennial.strategies.evaluation import Evaluation
from perennial.strategies.exchange import AcceptedReply, AcceptedStack, Exchange, MetricMeans, Payload, PerClient
from perennial.strategies.mean import StreamingMean
from perennial.strategies.robust import RobustMean
from perennial.strategies.roster import Claim, Roster, Seated, claims
from perennial.strategies.screening import Limits, NotFinite, Rejected, Template, accept

H = TypeVar("H", bound=Method)
R = TypeVar("R", bound=AcceptedReply | AcceptedStack)
SECONDS_TO_ANSWER_AGAIN = 10.0
"""For a node that has been asked before which client it is, and had the run's `wait` for it."""


class MethodStrategy(Strategy, Generic[H]):
    """Base of all server halves; as it stands, one global model and the sample-weighted mean of the replies."""

    robust: ClassVar[bool] = False
    """Whether hooks of its own that see replies take all their means with `mean`, so that a run's `aggregation`
    holds there, too."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        self.run, self.run_id = run, run_id
        self.hparams: H = run.method  # type: ignore[assignment]
        # Elsewhere the nodes are this machine's, and have other numbers.
        self.roster = Roster(run.scenario.client_ids, run.nodes if run.runtime == "deployment" else {})
        self.sent: Tensors = {}
        """The global model of the round."""
        self.kept_checkpoints: list[int] = []
        self.resumed: list[int] = []
        self.exchanges: list[Exchange] = []
        """The exchanges since the round began, for the log."""
        self.notes: list[dict[str, Any]] = []
        """The method's own rows of this round for the log, each with a `kind` and a `round`."""
        self.evaluation: list[dict[str, Any]] = []
        """Rows of the latest evaluation, one per client, model and split."""
        self.references: References | None = None
        """With which clients tell held-out samples apart when they evaluate."""
        self._own = plugins.half(type(run.method), "server", MethodStrategy) is not None
        """Whether this half is a plug-in's: what that makes is looked at once a round."""
        self._task = run.task()
        self._limits = Limits(run, self.roster.examples)

    @cached_property
    def network(self) -> Network:
        """The run's network."""
        return network(self.run.model, self.run.scenario.input_shape, self.run.predicts.outputs)

    # ------------------------------------------------------------------ what a method says about itself

    def state_dict(self) -> dict[str, Tensors]:
        """Everything beyond the global arrays that the next round depends on, as named tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        """Take up the state of a checkpoint."""

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        """The server's models after the last round, by the names of their files."""
        return {"global": from_record(arrays)}

    def payload(self, model: Tensors) -> Payload | PerClient:
        """What a client needs to evaluate, from the global arrays: the same for all, or by client id."""
        return {MODEL: model}

    def training_payload(self, model: Tensors) -> Payload | PerClient:
        """What a client needs to train: as to evaluate."""
        return self.payload(model)

    def expect(self, model: Tensors) -> Payload | PerClient:
        """What a client sends back, as tensors of the right shapes and types: as it was sent."""
        return self.training_payload(model)

    def optional(self) -> Payload:
        """Records that only some clients send, and the server need not know beforehand which."""
        return {}

    def settings(self, server_round: int) -> dict[str, Scalar]:
        """Scalars of a request to train."""
        return {}

    def check(self, reply: AcceptedReply) -> None:
        """Raises `Rejected` for a reply that cannot be used, though it is well-formed."""

    def weight(self, reply: AcceptedReply) -> float:
        """What a client counts for in the means: its training samples."""
        return reply.num_examples

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        """The mean of each record over the clients that sent it, weighted by `weight` (McMahan et al. 2017).

        Empty if nobody answered.
        """
        sent = self.training_payload(self.sent)
        return self._means(replies, {MODEL: self.sent} if callable(sent) else sent, self.weight)

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """The next global model, from the one before and what `combined` has found; what else the server has to
        change, it changes here. Empty: the model stays."""
        return means.get(MODEL, {})

    # ------------------------------------------------------------------ Flower's strategy, one exchange a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's cohort to `train` from the global model."""
        self.exchanges.clear()
        self.notes.clear()
        if rates := self.run.rates(server_round):
            self.notes.append({"kind": "rate", "round": server_round, **rates})
        self.sent = from_record(arrays)
        self.roster.round = server_round
        cohort = self.sample(server_round, grid)
        self.prepare(server_round, cohort, grid)
        return self.ask(server_round, cohort, grid)

    def prepare(self, server_round: int, cohort: list[str], grid: Grid) -> None:
        """Exchanges of a round before the one that trains, with `exchange` or `averaged`."""

    def ask(self, server_round: int, cohort: list[str], grid: Grid) -> Sequence[Message]:
        """The requests to train, whose replies go through `collected`."""
        return self.messages(
            server_round,
            cohort,
            "train",
            self.training_payload(self.sent),
            expect=self.expect(self.sent),
            optional=self.optional(),
            settings=self.settings(server_round),
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model after `update`, and the clients' mean metrics."""
        means, metrics = self.collected(server_round, replies)
        model = self.update(self.sent, means) if means else {}
        if model and self._own:
            self._must_fit(model)
        return to_record(model) if model else None, metrics

    def _must_fit(self, model: Tensors) -> None:
        """Whether a model can be sent in place of the one before."""
        half = f"round {self.exchanges[-1].round}: {self._half}"
        must_be_tensors(model, f"{half}: its model")
        try:
            accept(MODEL, to_record(model), self.sent, sys.float_info.max)
        except NotFinite as error:
            raise RunStopped(f"{half} gave a model that no client can use: {error}") from None
        except Rejected as error:
            raise UserError(f"{half} gave a model that is not like the one before: {error}") from None

    def collected(self, server_round: int, replies: Iterable[Message]) -> tuple[dict[str, Tensors], MetricRecord]:
        """What `combined` makes of the replies, and the means of their metrics."""
        metrics = MetricMeans()

        def counted(found: Iterable[R]) -> Iterator[R]:
            for reply in found:
                metrics.add(reply)
                yield reply

        own, base = type(self), MethodStrategy
        looks = own.check is not base.check or own.combined is not base.combined  # at each reply
        if looks or self._own or self.run.aggregation.rule != "mean":
            one_by_one = counted(self.accepted(replies, check=self.check))
            return self.combined(server_round, one_by_one), metrics.result()
        return self._means(counted(self.accepted_together(replies)), {}, self.weight), metrics.result()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client to evaluate its models, or those that are drawn for it (`RunConfig.evaluated`)."""
        clients, payload, settings = self.evaluation_request(arrays, grid)
        return self.messages(server_round, clients, "evaluate", payload, settings=settings)

    def evaluation_request(
        self, arrays: ArrayRecord, grid: Grid
    ) -> tuple[list[str], PerClient, Mapping[str, Scalar]]:
        """The clients that evaluate and are there, what they need, and what they are to count."""
        evaluated = self.run.evaluated
        self.enrol(grid, evaluated)
        batch = self.run.ranking_batch
        settings = {**({BATCH: batch} if batch else {}), **({SCORES: BINS} if self.run.scored else {})}
        payload, references = self.payload(from_record(arrays)), self.references.records if self.references else {}

        def both(client: str) -> Payload:
            return {**(payload(client) if callable(payload) else payload), **references}

        nodes = self.roster.nodes
        return [client for client in evaluated if client in nodes], both, settings

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Rows of counts and sums into `evaluation`; returns `evaluated`.

        Rankings are summed over clients, and only their areas become rows.
        """
        found = Evaluation(self.run, server_round, self.references)
        for _ in self.accepted(replies, check=found.add):
            pass  # taken in as it was checked
        return self.evaluated(found)

    def evaluated(self, found: Evaluation) -> MetricRecord:
        """The task's headline measure of each model, once the rows are in `evaluation`: its mean over clients."""
        measure = self.run.predicts.headline.name
        self.evaluation = found.rows()
        return MetricRecord({f"{name}/{measure}": value for name, value in found.test_means().items()})

    def summary(self) -> None:
        """Nothing to log: the run folder holds the complete configuration."""

    # ------------------------------------------------------------------ the toolbox

    def enrol(self, grid: Grid, clients: Iterable[str] = ()) -> None:
        """Find out which node is which client (`Roster.enrol`).

        Only of these `clients`, where the grid knows their nodes and nobody needs all: so what a round costs does
        not depend on how many clients there are. A node that hangs is not waited for as long as for a training.
        """

        def ask(nodes: list[int], again: bool) -> Mapping[int, Claim]:
            wait = min(self.run.wait, SECONDS_TO_ANSWER_AGAIN) if again else self.run.wait
            # Flower's simulation has its nodes answer one after the other.
            seconds = min(self.run.deadline, max(wait, len(nodes)))
            query = Exchange("query", 0, {node: f"node {node}" for node in nodes}, lambda _: {})
            messages = self._requests(query, lambda _: {})
            found = claims(query, self.accepted(self.send(grid, messages, seconds), quorum=0.0))
            frozen = self.network.frozen_digest
            found = {node: claim.fits(frozen) for node, claim in found.items()}
            if isinstance(grid, Seated) and (nameless := [node for node in nodes if not found[node].client]):
                names = {grid.node_of(number): client for client, number in self.roster.numbers.items()}
                found |= {node: replace(found[node], client=names[node]) for node in nameless}
            return found

        if isinstance(grid, Seated) and self.run.evaluates_some:
            self.roster.admit([grid.node_of(self.roster.numbers[client]) for client in clients], ask)
        else:
            self.roster.enrol(grid.get_node_ids(), ask)

    def mean(self, start: Tensors | None = None) -> StreamingMean | RobustMean:
        """A mean over clients of this round, which the run's `aggregation` may have another rule stand for.

        `start` are the tensors of which the clients have made theirs; none for gradients.
        """
        rule = self.run.aggregation
        if rule.rule == "mean":
            return StreamingMean()

        def order(clients: int) -> Tensor:
            key = ("server", self.exchanges[-1].round, "buckets")
            return torch.randperm(clients, generator=torch_generator(self.run.seed, *key))

        def lowered(clients: int, hostile: int) -> None:
            number = self.exchanges[-1].round
            row = {"kind": "aggregation", "round": number, "clients": clients, "hostile": hostile}
            if row not in self.notes:
                self.notes.append(row)

        return RobustMean(rule, start, order, lowered)

    def sample(self, server_round: int, grid: Grid) -> list[str]:
        """The round's cohort: `participation` of the scenario's clients, drawn from (seed, round).

        The draw is over all client ids of the scenario, whoever is connected, so it is the same on every
        runtime; clients that are not connected are left out and named. Those that `left_out` or
        `test_sites` leave nothing to train on are not among it.
        """
        ids = self.run.scenario.client_ids
        generator = numpy_generator(self.run.seed, "server", server_round, "cohort")
        drawn = [ids[number] for number in sorted(generator.choice(len(ids), self.run.cohort, replace=False))]
        self.enrol(grid, drawn)
        return [client for client in drawn if self.trains(client)]

    def trains(self, client: str) -> bool:
        """Whether a client has training samples, as all have unless the run says otherwise."""
        if client in self.run.test_sites:
            return False
        nodes = self.roster.nodes
        return not self.run.left_out or client not in nodes or bool(self.roster.examples(nodes[client]))

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
    ) -> Sequence[Message]:
        """One request per client of the cohort, in client-id order.

        `payload` and `expect` (the records that a reply must bring, as tensors of the right shapes and types) may
        be functions of the client id; `optional` are records that it may bring. The replies go through `accepted`.
        """
        nodes = self.roster.nodes
        connected = {nodes[client]: client for client in sorted(cohort) if client in nodes}
        absent = [client for client in cohort if client not in nodes]
        exchange = Exchange(
            action,
            server_round,
            connected,
            expect if callable(expect) else lambda _: expect or {},
            optional or {},
            left_out={client: self.roster.refused.get(client, "is not connected") for client in absent},
        )
        return self._requests(exchange, payload if callable(payload) else lambda _: payload, settings or {})

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
    ) -> Iterator[AcceptedReply]:
        """Send and receive within a round: `messages`, the grid, `accepted`."""
        messages = self.messages(server_round, cohort, action, payload, expect=expect, settings=settings)
        return self.accepted(self.send(grid, messages))

    def averaged(
        self,
        grid: Grid,
        server_round: int,
        cohort: Sequence[str],
        action: str,
        payload: Payload,
        expect: Payload,
        weight: Callable[[AcceptedReply], float],
    ) -> dict[str, Tensors]:
        """The weighted mean of each record that an exchange within a round brings, and nothing else of it."""
        replies = self.exchange(grid, server_round, cohort, action, payload, expect=expect)
        return self._means(replies, payload, weight)

    def accepted(
        self,
        replies: Iterable[Message],
        *,
        quorum: float | None = None,
        check: Callable[[AcceptedReply], object] = lambda _: None,
    ) -> Iterator[AcceptedReply]:
        """The replies of the latest exchange that may be used, in client-id order, one at a time.

        `check` raises `Rejected` for others that may not. Raises `RunStopped` after the last reply when fewer than
        the quorum could be used (`Exchange.accepted`).
        """
        quorum = self.run.quorum if quorum is None else quorum
        return self.exchanges[-1].accepted(replies, self._limits, quorum, check)

    def accepted_together(self, replies: Iterable[Message]) -> Iterator[AcceptedReply | AcceptedStack]:
        """As `accepted`, for plain means: in the local runtime, stacks of clients come as one where they can."""
        if self.run.aggregation.rule != "mean":
            return self.accepted(replies)
        return self.exchanges[-1].accepted_together(replies, self._limits, self.run.quorum)

    def send(self, grid: Grid, messages: Sequence[Message], seconds: float | None = None) -> Iterable[Message]:
        """The replies to `messages` that come before the run's deadline, or within so many seconds."""
        return grid.send_and_receive(messages, timeout=self.run.deadline if seconds is None else seconds)

    @property
    def _half(self) -> str:
        return f"the server half of {self.run.method.name!r}"

    def _means(
        self,
        replies: Iterable[AcceptedReply | AcceptedStack],
        sent: Payload,
        weight: Callable[[AcceptedReply], float],
    ) -> dict[str, Tensors]:
        means: dict[str, Any] = {}
        for reply in replies:
            if isinstance(reply, AcceptedStack):
                weights = reply.metrics[NUM_EXAMPLES]
                if type(self).weight is not MethodStrategy.weight:
                    weights = [weight(reply.reply(place)) for place in range(len(reply))]
                for name, tensors in reply.arrays.items():
                    means.setdefault(name, self.mean()).add_stack(tensors, weights)
                continue
            count = weight(reply)
            if self._own and not 0 <= count < inf:
                raise UserError(
                    f"{self._half}: weight: {count!r} is not possible for {reply.client}; it must be 0 or more"
                )
            for name, tensors in reply.arrays.items():
                if name not in means:
                    means[name] = self.mean(sent.get(name))
                means[name].add(tensors, count)
        if self._own and (nothing := [name for name, mean in means.items() if not mean.weight]):
            raise UserError(
                f"{self._half}: weight: 0 is not possible for all who sent {nothing[0]!r}; somebody must have more"
            )
        return {name: mean.result() for name, mean in means.items()}

    def _requests(
        self, exchange: Exchange, payload: PerClient, settings: Mapping[str, Scalar] | None = None
    ) -> Sequence[Message]:
        self.exchanges.append(exchange)
        protocol: dict[str, Scalar] = {
            TASK: self._task,
            RUN: self.run_id,
            ROUND: exchange.round,
            KEPT: self.kept_checkpoints,
            RESUMED: self.resumed,
        }
        settings = settings or {}
        if taken := protocol.keys() & settings:
            raise UserError(
                f"{self._half} has a setting {min(taken)!r}, which is one of the protocol; give it another name"
            )
        try:
            config = ConfigRecord({**protocol, **settings})
        except TypeError:
            name = next(name for name, value in settings.items() if not isinstance(value, (int, float, str)))
            raise UserError(f"{self._half}: setting {name!r} must be a number, a text or a list of them") from None
        return exchange.requests(payload, config)
