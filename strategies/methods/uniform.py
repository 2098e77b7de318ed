"""A server that moves towards the uniform mean of the clients' models."""

from collections.abc import Mapping
from typing import TypeVar

from perennial.common.methods.pfedme import PFedMe
from perennial.common.methods.scaffold import Scaffold
from perennial.common.methods.stateful import StatefulTraining
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.mean import mix

S = TypeVar("S", bound=StatefulTraining | PFedMe | Scaffold)


class UniformStrategy(MethodStrategy[S]):
    """`ν^{t+1} = ν^t − α (ν^t − mean of the ν_i)` over the clients that answered, all with the same weight
    (PerInvFL Algorithm 1, line 10)."""

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        mixed = mix(model, means[MODEL], self.hparams.mixing)
        if self.hparams.mixing <= 1:
            return mixed
        # Beyond the mean, a buffer such as BatchNorm's variance may be negative.
        return mixed | {name: means[MODEL][name] for name in self.network.buffer_names}
