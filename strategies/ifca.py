"""IFCA, server half: K models, each the mean of what the clients made of it that chose it."""

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.config import RunConfig
from common.methods.ifca import IFCA
from common.models import Tensors, network
from common.wire import MODEL, from_record, to_record
from strategies.base import MethodStrategy
from strategies.exchange import AcceptedReply, MetricMeans, Payload
from strategies.mean import StreamingMean
from strategies.screening import Rejected


class IFCAStrategy(MethodStrategy[IFCA]):
    """`w_k ← Σ_{i: k_i = k} (n_i / Σn) w_i`; a model that nobody chose stays (Ghosh et al. 2020, Algorithm 1)."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        net = network(run.model, run.scenario.input_shape, run.scenario.classes, torch.device("cpu"))
        draw = self.hparams.start
        self.models: dict[str, Tensors] = {
            # The first model of the first draw is every other method's initial one.
            name: net.initial(run.seed, *(("ifca", draw, k) if draw or k else ()))
            for k, name in enumerate(self.hparams.model_names)
        }
        """The models by record name, in the order of the clusters' numbers."""

    def state_dict(self) -> dict[str, Tensors]:
        return self.models

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.models = {name: state[name] for name in self.models}

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        return {**super().results(arrays), **self.models}

    def payload(self, arrays: ArrayRecord) -> Payload:
        """All models; the client chooses."""
        return self.models

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        cohort, expect = self.sample(server_round, grid), {MODEL: from_record(arrays)}
        return self.messages(server_round, cohort, "train", self.models, expect=expect)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new models; the global arrays, which no client is sent, are the mean of all replies."""
        means = [StreamingMean() for _ in self.models]
        everyone, metrics = StreamingMean(), MetricMeans()
        labels: dict[str, int] = {}
        for reply in self.accepted(replies, check=self.cluster):
            labels[reply.client] = self.cluster(reply)
            for mean in (means[labels[reply.client]], everyone):
                mean.add(reply[MODEL], self.weight(reply))
            metrics.add(reply)
        chosen = zip(self.models, means, strict=True)
        self.models = self.models | {name: mean.result() for name, mean in chosen if mean.weight}
        self.notes.append({"kind": "clusters", "round": server_round, "labels": labels})
        return to_record(everyone.result()) if labels else None, metrics.result()

    def cluster(self, reply: AcceptedReply) -> int:
        """The number of the model that a client chose. Raises `Rejected` where there is none such."""
        number = reply.settings.get("cluster")
        if type(number) is not int or not 0 <= number < self.hparams.clusters:
            raise Rejected(f"its cluster is {number!r}, not one of 0 to {self.hparams.clusters - 1}")
        return number
