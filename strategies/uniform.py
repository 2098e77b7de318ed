"""A server that moves towards the uniform mean of the clients' models."""

from collections.abc import Iterable
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.methods.pfedme import PFedMe
from common.methods.stateful import StatefulTraining
from common.models import Tensors
from common.wire import from_record, to_record
from strategies.base import MethodStrategy
from strategies.exchange import AcceptedReply
from strategies.mean import mix

S = TypeVar("S", bound=StatefulTraining | PFedMe)


class UniformStrategy(MethodStrategy[S]):
    """`ν^{t+1} = ν^t − α (ν^t − mean of the ν_i)` over the clients that answered, all with the same weight
    (PerInvFL Algorithm 1, line 10)."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.sent: Tensors = from_record(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        mean, metrics = super().aggregate_train(server_round, replies)
        return to_record(mix(self.sent, from_record(mean), self.hparams.mixing)) if mean else None, metrics
