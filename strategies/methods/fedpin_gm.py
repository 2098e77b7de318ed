"""FedPIN's global side, server half: the mean of the global models and of the auxiliary classifiers."""

from collections.abc import Mapping
from typing import TypeVar

from perennial.common.config import RunConfig
from perennial.common.mathematics.auxiliary_classifier import AUXILIARY, initial_auxiliary
from perennial.common.methods.fedpin import AnchorTraining
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, Scalar
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Payload
from perennial.strategies.methods.fedrep import split_network

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
        self.auxiliary: Tensors = initial_auxiliary(split.width, split.outputs, run.seed) if hidden else {}
        """ω_a but for the clients' own numbers, which they do not send; nothing where it has only these."""

    def state_dict(self) -> dict[str, Tensors]:
        return {AUXILIARY: self.auxiliary} if self.auxiliary else {}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.auxiliary = state[AUXILIARY] if self.auxiliary else {}

    def training_payload(self, model: Tensors) -> Payload:
        return {MODEL: model, AUXILIARY: self.auxiliary} if self.auxiliary else {MODEL: model}

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0

    def settings(self, server_round: int) -> dict[str, Scalar]:
        """What a client is told of this round: α."""
        warming = server_round <= self.hparams.warm_up * self.run.rounds
        alpha = self.hparams.independence
        return {"independence": min(1.0, alpha) if warming else alpha}

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        self.auxiliary = means[AUXILIARY] if self.auxiliary else {}
        return means[MODEL]
