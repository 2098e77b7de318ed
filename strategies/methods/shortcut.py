"""FedSDR's server: a shortcut extractor from all clients, a classifier for each training environment."""

from collections.abc import Mapping
from typing import TypeVar

from flwr.app import ArrayRecord

from perennial.common.config import RunConfig
from perennial.common.methods.shortcut import SHORTCUT, ShortcutTraining, environment_head
from perennial.common.utils.tensors import Tensors, part
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Payload
from perennial.strategies.methods.fedrep import split_network
from perennial.strategies.screening import Rejected

S = TypeVar("S", bound=ShortcutTraining)


class ShortcutStrategy(MethodStrategy[S]):
    """`Ψ^{t+1} = 1/|S| Σ_u Ψ_u`, `ω_i^{t+1} = Σ_u ρ_u^i ω_{i,u} / Σ_u ρ_u^i`, and where there is a global model
    `f^{t+1} = 1/|S| Σ_u f_u`, over the clients S that answered (thesis Algorithms 2 to 4).

    ρ_u^i = 1 if client u sent ω_i, which it does for its own environments. A classifier that nobody sent stays.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` for a model whose featurizer has nothing to be trained."""
        super().__init__(run, run_id)
        net, environments = split_network(run), run.scenario.train_environments
        heads = [environment_head(place) for place, name in enumerate(environments) if name != run.left_out]
        self.heads = {name: part(net.initial(run.seed, name), "classifier") for name in heads}
        """ω_i by record name, of the environments that are trained on."""
        self.shortcut: Tensors = net.initial(run.seed, SHORTCUT)
        """Ψ with the label classifier ω."""

    def state_dict(self) -> dict[str, Tensors]:
        return {SHORTCUT: self.shortcut, **self.heads}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.shortcut = state[SHORTCUT]
        self.heads = {name: state[name] for name in self.heads}

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        return {**super().results(arrays), SHORTCUT: self.shortcut, **self.heads}

    def payload(self, model: Tensors) -> Payload:
        return {MODEL: model}

    def training_payload(self, model: Tensors) -> Payload:
        return {**self.expect(model), **self.heads}

    def expect(self, model: Tensors) -> Payload:
        """Ψ, and the model where one travels; classifiers only of the environments that a client has."""
        return {**self.payload(model), SHORTCUT: self.shortcut}

    def optional(self) -> Payload:
        return self.heads

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        self.shortcut = means[SHORTCUT]
        self.heads |= {name: means[name] for name in self.heads if name in means}
        return means.get(MODEL, {})

    def check(self, reply: AcceptedReply) -> None:
        """Raises `Rejected` for a reply without the classifier of any environment."""
        if not reply.arrays.keys() & self.heads.keys():
            raise Rejected("it has no environment's classifier")
