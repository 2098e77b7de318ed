"""IRM-L2, client half: federated IRM's steps, and a personal model held near the local copy of the shared one."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from perennial.client.methods.irm import IrmClient
from perennial.client.objectives import squared_distance, squared_norm
from perennial.client.stateful import OWN, Chosen
from perennial.client.trainer import Means, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.methods.personal_invariant import PersonalInvariantTraining
from perennial.common.models.network import Network
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL

P = TypeVar("P", bound=PersonalInvariantTraining)

PROX_DECAY = 0.001
"""Weight decay of the personal steps in the authors' code."""


class IrmL2Client(IrmClient[P]):
    """PerInvFL's Algorithm 1 with a personal loss without penalty (§5.2)."""

    stacks = ("train", "evaluate")
    captures = ("train",)
    by_environment = True

    @classmethod
    def can_stack(cls, network: Network) -> bool:
        """Not with BatchNorm, for which all samples of a mini-batch count."""
        return not network.batch_norm_names

    def train(self, received: Received) -> Reply:
        return self.algorithm_1(received) if self.hparams.preset == "paper" else self.public_code(received)

    def algorithm_1(self, received: Received) -> Reply:
        """PerInvFL's Algorithm 1, lines 5 to 9.

        Order matters: θ goes on from where it was, within the round and from round to round; it takes its steps
        before v does, towards v as it is then.
        """
        hparams, means = self.hparams, Means()
        v, theta = self.working(received[MODEL]), self.working(self.personal(received))
        for batch, contexts in self.contexts(received.round):
            for _ in range(hparams.personal_steps):
                value = self.each(self.personal_loss)(theta.tensors, v.tensors, contexts, received)
                theta.descend(value, self.optimizer(OWN), hparams.personal_learning_rate)
            means.add(self.shared_step(v, batch, received))
        self.kept[PERSONAL] = theta.result()
        return self.finish(v, means)

    def personal_loss(
        self, params: Tensors, anchor: Tensors, contexts: Sequence[Examples], received: Received
    ) -> Tensor:
        """`Σ_j R(θ; e_j) + β ‖θ − v‖²` over the client's environments e_j."""
        risks = [self.risk(params, part) for part in contexts]
        return self.held(self.over_contexts(risks, contexts), params, anchor)

    def over_contexts(self, values: Sequence[Tensor], contexts: Sequence[Examples]) -> Tensor:
        """The sum or the mean over the client's environments; one without samples has the value 0."""
        stacked = torch.stack(list(values))
        if self.hparams.context_reduction == "sum":
            return stacked.sum()
        there = present(contexts)
        return stacked.mean() if there is None else stacked.sum() / there.sum()

    def held(self, value: Tensor, params: Tensors, anchor: Tensors) -> Tensor:
        """`value + β ‖θ − v‖²`, and weight decay."""
        distance = squared_distance(params, anchor, self.network.parameter_names)
        return self.decayed(value + self.hparams.proximity * distance, params)

    def public_code(self, received: Received) -> Reply:
        """The authors' code: `θ ← θ − η (∇R(θ; B) + 2β (θ − v) + 0.001 θ)`, anew from v before every step of v."""
        hparams, names = self.hparams, self.network.parameter_names
        v, means = self.working(received[MODEL]), Means()

        def loss(params: Tensors, anchor: Tensors, batch: Examples) -> Tensor:
            value = self.risk(params, batch)
            value = value + hparams.proximity * squared_distance(params, anchor, names)
            return value + PROX_DECAY / 2 * squared_norm(params, names)

        for batch in self.batches(hparams.local_steps, received.round):
            theta = self.working(v.tensors)
            for _ in range(hparams.personal_steps):
                value = self.each(loss)(theta.tensors, v.tensors, batch)
                theta.step(theta.gradient(value), hparams.personal_learning_rate)
            means.add(self.shared_step(v, batch, received))
        self.kept[PERSONAL] = theta.result()
        return self.finish(v, means)


def present(contexts: Sequence[Examples]) -> Tensor | None:
    """Which environments have samples (environments,), where some may have none: of a stack."""
    counts = [part.counts for part in contexts if isinstance(part, Chosen)]
    return torch.stack([own.amax() for own in counts]) if counts else None
