"""pFedMe, server half: the global model moves towards the mean of the clients' copies."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.methods.pfedme import PFedMe
from common.wire import from_record, to_record
from strategies.base import MethodStrategy, Reply
from strategies.mean import mix


class PFedMeStrategy(MethodStrategy[PFedMe]):
    """`w^{t+1} = (1 − β) w^t + β · mean of w_i` over the clients that answered (Dinh et al. 2020, Algorithm 1)."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.sent = from_record(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def weight(self, reply: Reply) -> float:
        """All clients count the same."""
        return 1.0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is not None:
            mean = to_record(mix(self.sent, from_record(mean), self.hparams.mixing))
        return mean, metrics
