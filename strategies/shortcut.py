"""FedSDR's server: a shortcut extractor from all clients, a classifier for each training environment."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.config import RunConfig
from common.methods.shortcut import SHORTCUT, ShortcutTraining, environment_head
from common.models import Tensors, part
from common.wire import MODEL, from_record, to_record
from strategies.base import MethodStrategy
from strategies.exchange import AcceptedReply, MetricMeans, Payload
from strategies.fedrep import split_network
from strategies.mean import StreamingMean
from strategies.screening import Rejected

S = TypeVar("S", bound=ShortcutTraining)


class ShortcutStrategy(MethodStrategy[S]):
    """`Ψ^{t+1} = 1/|S| Σ_u Ψ_u`, `ω_i^{t+1} = Σ_u ρ_u^i ω_{i,u} / Σ_u ρ_u^i`, and where there is a global model
    `f^{t+1} = 1/|S| Σ_u f_u`, over the clients S that answered (thesis Algorithms 2 to 4).

    ρ_u^i = 1 if client u sent ω_i, which it does for its own environments. A classifier that nobody sent stays.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` for a model whose featurizer has nothing to be trained."""
        super().__init__(run, run_id)
        net, heads = split_network(run), map(environment_head, range(len(run.scenario.train_environments)))
        self.heads = {name: part(net.initial(run.seed, name), "classifier") for name in heads}
        """ω_i by record name."""
        self.shortcut: Tensors = net.initial(run.seed, SHORTCUT)
        """Ψ with the label classifier ω."""

    def state_dict(self) -> dict[str, Tensors]:
        return {SHORTCUT: self.shortcut, **self.heads}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.shortcut = state[SHORTCUT]
        self.heads = {name: state[name] for name in self.heads}

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        return {**super().results(arrays), **self.state_dict()}

    def payload(self, arrays: ArrayRecord) -> Payload:
        return {MODEL: from_record(arrays)}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's cohort for Ψ and for the classifiers of the environments that each client has."""
        expect = {**self.payload(arrays), SHORTCUT: self.shortcut}
        cohort, payload = self.sample(server_round, grid), {**expect, **self.heads}
        return self.messages(server_round, cohort, "train", payload, expect=expect, optional=self.heads)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of each record over the clients that sent it, all with the same weight."""
        means, metrics = defaultdict[str, StreamingMean](StreamingMean), MetricMeans()
        for reply in self.accepted(replies, check=self.has_a_head):
            for name, tensors in reply.arrays.items():
                means[name].add(tensors)
            metrics.add(reply)
        trained = {name: mean.result() for name, mean in means.items()}
        self.load_state_dict({**self.state_dict(), **trained})
        return to_record(trained[MODEL]) if MODEL in trained else None, metrics.result()

    def has_a_head(self, reply: AcceptedReply) -> None:
        """Raises `Rejected` for a reply without the classifier of any environment."""
        if not reply.arrays.keys() & self.heads.keys():
            raise Rejected("it has no environment's classifier")
