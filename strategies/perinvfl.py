"""PerInvFL, server half: federated IRM's or GroupDRO's; the personal models stay with the clients."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.methods.perinvfl import PerInvFL
from strategies.exchange import AcceptedReply
from strategies.groupdro import GroupDROStrategy
from strategies.uniform import UniformStrategy


class PerInvFLStrategy(GroupDROStrategy[PerInvFL]):
    """`ν^{t+1} = ν^t − α (ν^t − mean of the ν_i)` (Algorithm 1, line 10), and the weights q with GroupDRO."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._half.configure_train(self, server_round, arrays, config, grid)

    def weight(self, reply: AcceptedReply) -> float:
        return self._half.weight(self, reply)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self._half.aggregate_train(self, server_round, replies)

    @property
    def _half(self) -> type[UniformStrategy[PerInvFL]]:
        """Whose server it is."""
        return GroupDROStrategy if self.hparams.invariance == "groupdro" else UniformStrategy
