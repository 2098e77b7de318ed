"""Local training, server half: says when to train, and sends and receives no model."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, Message, MetricRecord

from common.methods.local import Local
from strategies.base import MethodStrategy
from strategies.exchange import MetricMeans, Payload


class LocalStrategy(MethodStrategy[Local]):
    """Nothing is aggregated; the global arrays stay as they were."""

    def payload(self, arrays: ArrayRecord) -> Payload:
        return {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        metrics = MetricMeans()
        for reply in self.accepted(replies):
            metrics.add(reply)
        return None, metrics.result()
