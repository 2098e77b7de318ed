"""SCAFFOLD, server half: beside the model, the mean of all clients' control variates."""

from collections.abc import Mapping

import torch

from perennial.common.methods.scaffold import Scaffold
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.exchange import Payload
from perennial.strategies.mean import mix
from perennial.strategies.methods.uniform import UniformStrategy

CONTROL = "control"


class ScaffoldStrategy(UniformStrategy[Scaffold]):
    """`w ← w + η_g mean(w_u − w)` and `c ← c + (|S| / N) mean(Δc_u)` over those |S| of N clients that answered,
    all with the same weight (Karimireddy et al. 2020, Algorithm 1, lines 16 and 17)."""

    control: Tensors
    """c; as long as there is none, it is 0."""

    def state_dict(self) -> dict[str, Tensors]:
        return {CONTROL: self.control} if hasattr(self, "control") else {}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        if CONTROL in state:
            self.control = state[CONTROL]

    def training_payload(self, model: Tensors) -> Payload:
        if not hasattr(self, "control"):
            self.control = {name: torch.zeros_like(model[name]) for name in self.network.parameter_names}
        return {MODEL: model, CONTROL: self.control}

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        share = len(self.exchanges[-1].samples) / len(self.run.scenario.client_ids)
        self.control = mix(self.control, means[CONTROL], share)
        return super().update(model, means)
