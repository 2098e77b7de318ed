"""FedIIR, server half: the anchor, asked for anew in every round, and the uniform mean of the models."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

import torch
from flwr.serverapp import Grid

from perennial.common.config import RunConfig
from perennial.common.methods.fediir import ANCHOR, FedIIR
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, AcceptedStack, Payload
from perennial.strategies.mean import StreamingMean, mix


class FedIIRStrategy(MethodStrategy[FedIIR]):
    """`ḡ = 1/C Σ_c ∇_ω R_c(θ^{t−1})`, `g̃ ← v g̃ + (1 − v) ḡ`, `θ^t = 1/C Σ_c θ_c` over the C that answered.

    Two exchanges with the same clients: gradients up, then the anchor g̃ down and models up (Guo et al. 2023,
    Algorithm 1 and appendix C). A client may fail in the one and not in the other.
    """

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        self.names = self.hparams.aligned(self.network)
        self.anchor: Tensors = {}
        """g̃; before the first round 0, and no tensors."""
        self.updates = 0
        """How many rounds are in it."""

    def state_dict(self) -> dict[str, Tensors]:
        return {"anchor": self.anchor, "updates": {"count": torch.tensor(self.updates)}}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.anchor, self.updates = state.get("anchor", {}), int(state["updates"]["count"])

    def prepare(self, server_round: int, cohort: list[str], grid: Grid) -> None:
        """The gradients first, which make the anchor."""
        aligned, sent = {name: self.sent[name] for name in self.names}, {MODEL: self.sent}
        expect, action = {GRADIENT: aligned}, "train.gradient"
        if self.run.privacy.mechanism == "none":
            messages = self.messages(server_round, cohort, action, sent, expect=expect)
            self.follow(server_round, self.accepted_together(self.send(grid, messages)), like=aligned)
            return
        means = self.averaged(grid, server_round, cohort, action, sent, expect, self.share)
        self.take(server_round, means.get(GRADIENT, {}), like=aligned)

    def share(self, reply: AcceptedReply) -> float:
        """What a client's gradient counts for in the mean."""
        batched = self.hparams.anchor_average == "batches"
        return ceil(reply.num_examples / self.hparams.batch_size) if batched else 1.0

    def training_payload(self, model: Tensors) -> Payload:
        return {MODEL: model, ANCHOR: self.corrected()}

    def expect(self, model: Tensors) -> Payload:
        return {MODEL: model}

    def follow(self, server_round: int, replies: Iterable[AcceptedReply | AcceptedStack], like: Tensors) -> None:
        """Takes the round's mean gradient into the anchor; with no reply at all the anchor stays as it was."""
        mean: Any = self.mean()
        squares = StreamingMean()
        for reply in replies:
            gradient = reply.arrays[GRADIENT]
            if isinstance(reply, AcceptedStack):
                weights = [self.share(reply.reply(place)) for place in range(len(reply))]
                mean.add_stack(gradient, weights)
                squares.add_stack({"norm": _squared_norms(gradient)}, weights)
            else:
                mean.add(gradient, weight := self.share(reply))
                squares.add({"norm": _squared_norm(gradient)}, weight)
        gradient = mean.result() if mean.weight else {}
        self.take(server_round, gradient, like, squares.result()["norm"].item() if gradient else 0.0)

    def take(self, server_round: int, gradient: Tensors, like: Tensors, norm: float | None = None) -> None:
        """`g̃ ← v g̃ + (1 − v) ḡ`; `norm` is the mean of the ‖g_c‖², where it is known."""
        self.anchor = self.anchor or {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        if not gradient:
            return
        self.anchor = mix(self.anchor, gradient, 1 - self.hparams.anchor_ema)
        self.updates += 1
        row = {"kind": "anchor", "round": server_round, "norm": _squared_norm(self.anchor).sqrt().item()}
        if norm is not None:
            row["gradient"] = norm**0.5
            # Mean ‖g_c − ḡ‖², which the penalty is to lower, as a share of mean ‖g_c‖².
            row["dispersion"] = 1 - _squared_norm(gradient).item() / norm if norm else 0.0
        self.notes.append(row)

    def corrected(self) -> Tensors:
        """What is sent as the anchor: g̃, or `g̃ / (1 − v^t)` after t rounds."""
        if not (self.hparams.bias_correction and self.updates):
            return self.anchor
        weight = 1 - self.hparams.anchor_ema**self.updates
        return {name: tensor / weight for name, tensor in self.anchor.items()}

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0


def _squared_norm(tensors: Tensors) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum()


def _squared_norms(stack: Tensors) -> torch.Tensor:
    """Each client's (clients,)."""
    return torch.stack([tensor.double().square().flatten(1).sum(1) for tensor in stack.values()]).sum(0)
