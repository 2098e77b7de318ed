"""FedBN, server half: FedAvg's on all but the BatchNorm layers, which never come here."""

from flwr.app import ArrayRecord

from common.config import RunConfig
from common.methods.fedbn import FedBN
from common.models import network
from common.wire import MODEL, from_record
from strategies.base import MethodStrategy
from strategies.exchange import Payload


class FedBNStrategy(MethodStrategy[FedBN]):
    """`w^{t+1} = Σ_u (n_u / Σn) w_u` without BatchNorm, which the global arrays lose (Li et al. 2021, Alg 1)."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        self.norms = frozenset(network(run.model, run.scenario.input_shape, run.scenario.classes).batch_norm_names)

    def payload(self, arrays: ArrayRecord) -> Payload:
        return {MODEL: {name: tensor for name, tensor in from_record(arrays).items() if name not in self.norms}}
