"""FedBN, server half: FedAvg's on all but the BatchNorm layers, which never come here."""

from perennial.common.methods.fedbn import FedBN
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import Payload


class FedBNStrategy(MethodStrategy[FedBN]):
    """`w^{t+1} = Σ_u (n_u / Σn) w_u` without BatchNorm, which the global arrays lose (Li et al. 2021, Alg 1)."""

    def payload(self, model: Tensors) -> Payload:
        norms = self.network.batch_norm_names
        return {MODEL: {name: tensor for name, tensor in model.items() if name not in norms}}
