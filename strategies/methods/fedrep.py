"""FedRep, server half: the mean of the clients' featurizers; classifiers never come here."""

import torch

from perennial.common.config import RunConfig
from perennial.common.methods.fedrep import FedRep, own_part
from perennial.common.models.network import Network, network
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import Payload


class FedRepStrategy(MethodStrategy[FedRep]):
    """`φ^{t+1} = Σ_u (n_u / Σn) φ_u` (Collins et al. 2021, Algorithm 1). The global arrays become φ alone."""

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` for a model whose featurizer has nothing to be shared."""
        super().__init__(run, run_id)
        net = split_network(run)
        if self.hparams.keeps_adapters and not net.adapter_names:
            raise UserError(
                "method.personal: 'adapters' is for a model with LoRA; set model.lora, or leave it out"
            )

    def payload(self, model: Tensors) -> Payload:
        own = own_part(model, self.hparams)
        return {MODEL: {name: tensor for name, tensor in model.items() if name not in own}}


def split_network(run: RunConfig) -> Network:
    """The run's network, of which a method trains both parts. Raises `UserError` if its featurizer has none."""
    found = network(run.model, run.scenario.input_shape, run.predicts.outputs, torch.device("cpu"))
    if not found.featurizer_names:
        raise UserError(
            f"model {run.model.name!r} has no featurizer to be trained, and method {run.method.name!r} shares "
            "one; give another, e.g. --set model.name=mlp"
        )
    return found
