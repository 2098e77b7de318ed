"""FedSGD, server half: a step along the mean of the clients' gradients."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.adam import Adam
from common.config import RunConfig
from common.methods.fedsgd import ServerTraining
from common.models import Tensors, network
from common.wire import GRADIENT, MODEL, from_record, to_record
from strategies.base import MethodStrategy
from strategies.exchange import AcceptedReply, MetricMeans
from strategies.mean import StreamingMean

S = TypeVar("S", bound=ServerTraining)


class FedSGDStrategy(MethodStrategy[S]):
    """`w ← w − η Σ_u (n_u / Σn) ∇R_u(w)` over the clients that answered, or Adam's step for that gradient.

    A subclass says with `combined` what it makes of the gradients (McMahan et al. 2017, Algorithm 1 with E = 1 and
    B = ∞).
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        self.network = network(run.model, run.scenario.input_shape, run.scenario.classes)
        self.adam = Adam()

    def state_dict(self) -> dict[str, Tensors]:
        return {"adam": self.adam.state()}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.adam = Adam(state.get("adam"))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model down, a gradient of the same shapes up."""
        cohort, self.sent = self.sample(server_round, grid), from_record(arrays)
        return self.messages(server_round, cohort, "train", {MODEL: self.sent}, expect={GRADIENT: self.sent})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        metrics = MetricMeans()

        def counted() -> Iterator[AcceptedReply]:
            for reply in self.accepted(replies, check=self.check):
                metrics.add(reply)
                yield reply

        gradient = self.combined(server_round, counted())
        return to_record(self.stepped(gradient)) if gradient else None, metrics.result()

    def check(self, reply: AcceptedReply) -> None:
        """Raises `Rejected` for a reply that cannot be used, though it is well-formed."""

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> Tensors:
        """`Σ_u (n_u / Σn) ∇R_u`, buffers too; empty if nobody answered."""
        mean = StreamingMean()
        for reply in replies:
            mean.add(reply[GRADIENT], self.weight(reply))
        return mean.result() if mean.weight else {}

    def stepped(self, gradient: Tensors) -> Tensors:
        """The model one step on; buffers as they come."""
        names = self.network.parameter_names
        params = [self.sent[name] for name in names]
        direction = [gradient[name].to(self.sent[name].device) for name in names]
        if self.hparams.weight_decay:
            torch._foreach_add_(direction, params, alpha=self.hparams.weight_decay)
        if self.hparams.optimizer == "adam":
            direction = self.adam.direction(direction)
        moved = torch._foreach_add(params, direction, alpha=-self.hparams.learning_rate)
        return {**gradient, **dict(zip(names, moved, strict=True))}
