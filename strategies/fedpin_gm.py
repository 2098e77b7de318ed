"""FedPIN's global side, server half: the mean of the global models and of the auxiliary classifiers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.auxiliary import AUXILIARY, initial_auxiliary
from common.config import RunConfig
from common.methods.fedpin import AnchorTraining
from common.models import Tensors
from common.wire import MODEL, Scalar, from_record, to_record
from strategies.base import MethodStrategy
from strategies.exchange import MetricMeans
from strategies.fedrep import split_network
from strategies.mean import StreamingMean

A = TypeVar("A", bound=AnchorTraining)


class FedPINGMStrategy(MethodStrategy[A]):
    """`(Φ_g, ω_g, ω_a)^{t+1} = 1/|A_t| Σ_u (Φ_g, ω_g, ω_a)_u` over the clients A_t that answered.

    Thesis Algorithm 5. The global arrays are Φ_g and ω_g.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` for a model whose featurizer has nothing to be trained."""
        super().__init__(run, run_id)
        split = split_network(run)
        hidden = self.hparams.auxiliary == "hidden"
        self.auxiliary: Tensors = initial_auxiliary(split.width, run.scenario.classes, run.seed) if hidden else {}
        """ω_a but for the clients' own numbers, which stay with them; nothing where it has only these."""

    def state_dict(self) -> dict[str, Tensors]:
        return {AUXILIARY: self.auxiliary} if self.auxiliary else {}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.auxiliary = state[AUXILIARY] if self.auxiliary else {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        payload = {MODEL: from_record(arrays), **self.state_dict()}
        cohort, settings = self.sample(server_round, grid), self.settings(server_round)
        return self.messages(server_round, cohort, "train", payload, expect=payload, settings=settings)

    def settings(self, server_round: int) -> dict[str, Scalar]:
        """What a client is told of this round: α."""
        warming = server_round <= self.hparams.warm_up * self.run.rounds
        alpha = self.hparams.independence
        return {"independence": min(1.0, alpha) if warming else alpha}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        means, metrics = defaultdict[str, StreamingMean](StreamingMean), MetricMeans()
        for reply in self.accepted(replies):
            for name, tensors in reply.arrays.items():
                means[name].add(tensors)
            metrics.add(reply)
        if not means:
            return None, metrics.result()
        if self.auxiliary:
            self.auxiliary = means[AUXILIARY].result()
        return to_record(means[MODEL].result()), metrics.result()
