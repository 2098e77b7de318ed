"""CGPFL, server half: a model for each context, contexts being clusters of the clients' uploads."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor

from perennial.common.config import RunConfig
from perennial.common.methods.cgpfl import ContextTraining
from perennial.common.utils.seeding import derive
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, to_record
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import MetricMeans, PerClient
from perennial.strategies.mean import StreamingMean, mix
from perennial.strategies.methods.clustering import align, averaging, coordinates, flat, k_means, pulled_in

C = TypeVar("C", bound=ContextTraining)


class CGPFLStrategy(MethodStrategy[C]):
    """Each round: every client is sent its context's model ω_k; the uploads ω̃_i are clustered anew;
    `ω_k ← (1 − α) ω_k + α · mean of its members' uploads` (thesis Algorithm 1, lines 4, 13 and 14).

    The uploads of clients that did not answer are clustered as they last were, but not averaged. The global arrays
    are the mean over clients of their context's model; it is what a client gets that has no context yet.
    """

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        self.contexts: list[Tensors] = []
        """Ω: the models ω_1 … ω_K."""
        self.membership: dict[str, int] = {}
        """k(i), the context of every client that has ever answered."""
        self.uploads: dict[str, Tensors] = {}
        """The latest ω̃_i of each of them."""
        self.seed = derive(run.seed, "server", "k-means")  # the same draws in every round

    def payload(self, model: Tensors) -> PerClient:
        return lambda client: {
            MODEL: self.contexts[self.membership[client]] if client in self.membership else model
        }

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        fresh: dict[str, Tensors] = {}
        metrics = MetricMeans()
        for reply in self.accepted(replies):
            fresh[reply.client] = {name: tensor.cpu() for name, tensor in reply[MODEL].items()}
            metrics.add(reply)
        if not fresh:
            return None, metrics.result()
        self.uploads |= fresh
        self.cluster(server_round, metrics.result())
        self.mix(fresh)
        shared = StreamingMean()
        for context in self.membership.values():
            shared.add(self.contexts[context])
        return to_record(shared.result()), metrics.result()

    def cluster(self, server_round: int, metrics: MetricRecord) -> None:
        """k-means on all uploads; a cluster keeps the number of the context that it continues."""
        clients = sorted(self.uploads)
        rows = pulled_in(flat((self.uploads[client] for client in clients), self.network.parameter_names))
        points = coordinates(rows)
        number = self.number(server_round, points, metrics)
        if len(self.contexts) != number:
            self.contexts = [self.sent] * number
        labels = k_means(points, number, self.seed)
        slots = align(averaging(labels).T @ rows, flat(self.contexts, self.network.parameter_names))
        self.membership = {client: slots[label] for client, label in zip(clients, labels.tolist(), strict=True)}
        self.notes.append({"kind": "clusters", "round": server_round, "labels": self.membership})

    def number(self, server_round: int, points: Tensor, metrics: MetricRecord) -> int:
        """K, the number of contexts, from the uploads as points and the round's mean metrics: here a given one."""
        return self.hparams.contexts

    def mix(self, fresh: Mapping[str, Tensors]) -> None:
        """Move each context's model to the mean of its members' fresh uploads; one without any stays."""
        means = {context: self.mean(self.contexts[context]) for context in sorted(set(self.membership.values()))}
        for client, upload in fresh.items():
            means[self.membership[client]].add(upload)
        for context, mean in means.items():
            if mean.weight:
                self.contexts[context] = mix(self.contexts[context], mean.result(), self.hparams.mixing)

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        return {**super().results(arrays), **self._named()}

    def _named(self) -> dict[str, Tensors]:
        return {f"context-{number}": model for number, model in enumerate(self.contexts)}

    def state_dict(self) -> dict[str, Tensors]:
        return {
            "membership": {client: torch.tensor(context) for client, context in self.membership.items()},
            **self._named(),
            **{f"upload-{client}": model for client, model in self.uploads.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.membership = {client: int(context) for client, context in state.get("membership", {}).items()}
        self.uploads = {client: state[f"upload-{client}"] for client in self.membership}
        self.contexts = [state[name] for number in range(len(state)) if (name := f"context-{number}") in state]
