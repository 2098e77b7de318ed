"""Client-level differential privacy in place of a method's own mean: clip each update, add noise to their mean."""

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

import numpy as np
import torch

from perennial.common.config import RunConfig
from perennial.common.models import Tensors
from perennial.common.privacy import Clipping
from perennial.common.wire import MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.mean import StreamingMean

STATE = "privacy"


class PrivateStrategy(MethodStrategy[Any]):
    """`w ← w + 1/m (Σ_u clip(w_u − w, C) + N(0, z² C² I))` over the m clients that answered, all of one weight.

    What the model has frozen gets no noise. The class stands before a method's own class, which sees no other mean
    (`strategies.registry`). McMahan et al. 2018, Algorithm 1; with `adaptive` Andrew et al. 2021, Algorithm 1.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        assert isinstance(run.privacy, Clipping)
        self.privacy = run.privacy
        self.clipping_norm = run.privacy.clipping_norm
        """C of the next round."""
        self.entropy = np.random.default_rng()
        """From the operating system's entropy: whoever knew the run's seed, as its clients do, could subtract the
        noise."""

    def state_dict(self) -> dict[str, Tensors]:
        norm = torch.tensor(self.clipping_norm, dtype=torch.float64)
        return {**super().state_dict(), STATE: {"clipping-norm": norm}}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.clipping_norm = float(state[STATE]["clipping-norm"])
        super().load_state_dict({name: tensors for name, tensors in state.items() if name != STATE})

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        payload = self.training_payload(self.sent)
        assert isinstance(payload, Mapping)  # of every method that `averages`
        fixed = set(self.network.frozen_names)
        reference = {name: tensor for name, tensor in payload[MODEL].items() if name not in fixed}
        updates, unclipped = StreamingMean(), 0
        for reply in replies:
            trained = {name: reply[MODEL][name] for name in reference}
            update, small = clipped(trained, reference, self.clipping_norm)
            updates.add(update)
            unclipped += small
        clients = int(updates.weight)
        if not clients:
            return {}
        multiplier, deviation = self.privacy.noise(clients)
        model: Tensors = {}
        for name, mean in updates.result().items():
            before, shape = reference[name], tuple(mean.shape)
            noise = self.entropy.normal(0, multiplier * self.clipping_norm / clients, shape)
            model[name] = (before + mean.cpu() + torch.as_tensor(noise)).to(before.dtype)
        norm = {"kind": "privacy", "round": server_round, "clients": clients, "clipping_norm": self.clipping_norm}
        self.notes.append(norm)
        share = (unclipped + self.entropy.normal(0, deviation)) / clients
        self.clipping_norm = self.privacy.followed(self.clipping_norm, share)
        return {MODEL: {name: model.get(name, tensor) for name, tensor in payload[MODEL].items()}}


def clipped(model: Tensors, start: Tensors, norm: float) -> tuple[Tensors, bool]:
    """`Δ · min(1, C / ‖Δ‖)` of the update `Δ = model − start`, all tensors as one vector, in float64; and whether
    ‖Δ‖ ≤ C (McMahan et al. 2018, FlatClip)."""
    update = {name: tensor.double() - start[name].to(tensor.device) for name, tensor in model.items()}
    length = sqrt(sum(float(tensor.square().sum()) for tensor in update.values()))
    if length <= norm:
        return update, True
    return {name: tensor * (norm / length) for name, tensor in update.items()}, False
