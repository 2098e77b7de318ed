"""FedILC, client half: a gradient and its variances at the received model, then a part of the penalty's slope."""

import torch
from torch import Tensor

from perennial.client.methods.fedsgd import FedSGDClient
from perennial.client.trainer import PIECE, Means, Metrics, Received, Reply
from perennial.client.working import Working
from perennial.common.data.examples import Examples
from perennial.common.fishr import head_sums, variance
from perennial.common.methods.fedilc import CLIENTS, PULL, VARIANCE, FederatedFishr, FedILC, Fishr, MiniBatches
from perennial.common.models import Tensors
from perennial.common.seeding import torch_generator
from perennial.common.wire import GRADIENT, MODEL, NUM_EXAMPLES

SENT = "fishr-model"
STATISTICS = "fishr-statistics"
RUNNING = "fishr-running"
"""What is kept: w, c_e and the mean gradient from a round's first exchange to its second; Fishr's running mean of
c_e from round to round."""


class FedILCClient(FedSGDClient[FedILC]):
    """Sends a gradient g_e and with Fishr's penalty c_e, and `q_e = J_eᵀ (c_e − c̄)` once it knows c̄.

    `J_e = ∂c_e/∂w`; c_e are the variances of the classifier's per-sample gradients over all training samples
    (Zhu et al. 2022, §3, §5; the second exchange is ours, docs/methods/fedilc.md).
    """

    def train(self, received: Received) -> Reply:
        reply, hparams = super().train(received), self.hparams
        if not isinstance(hparams, Fishr) or not hparams.penalty or hparams.fishr_mode == "central":
            return reply
        mean, own = self.moments(received[MODEL])
        if isinstance(hparams, FederatedFishr) and hparams.smoothing:
            own = self.running(own, hparams.smoothing)
        arrays = {**reply.arrays, VARIANCE: {VARIANCE: own}}
        if hparams.fishr_mode == "exact":
            self.kept |= {SENT: received[MODEL], STATISTICS: {"mean": mean, VARIANCE: own}}
        elif VARIANCE in received.arrays:
            pull = self.pull(received[MODEL], mean, own - received[VARIANCE][VARIANCE], received)
            if hparams.geometric_mean("clients"):
                arrays[PULL] = pull
            else:  # the server's mean of the gradients is the sum's, too
                slope = hparams.slope(int(received.settings[CLIENTS]))  # type: ignore[arg-type]
                added = {name: reply.arrays[GRADIENT][name] + slope * part for name, part in pull.items()}
                arrays[GRADIENT] = {**reply.arrays[GRADIENT], **added}
        return Reply(arrays, reply.metrics)

    def train_fishr(self, received: Received) -> Reply:
        """`q_e` at the model of this round's first exchange."""
        model, statistics = self.kept.pop(SENT), self.kept.pop(STATISTICS)
        away = statistics[VARIANCE] - received[VARIANCE][VARIANCE]
        pull = self.pull(model, statistics["mean"], away, received)
        return Reply({PULL: pull}, {NUM_EXAMPLES: len(self.data.train)})

    def own_gradient(self, model: Working, received: Received) -> tuple[list[Tensor], dict[str, float]]:
        """g_e: on all data, or the plain or geometric mean over mini-batches, all at the same w."""
        if not isinstance(self.hparams, MiniBatches):
            return super().own_gradient(model, received)
        train, means = self.data.train, Means()
        order = torch.randperm(
            len(train), generator=torch_generator(self.seed, self.client, received.round, "batches")
        )
        batches = torch.split(order.to(train.y.device), self.hparams.batch_size)
        mean, total = self.hparams.geometric_mean("batches"), [torch.zeros_like(value) for value in model.values]
        for index in batches:
            value, metrics = self.loss(model.tensors, train[index], received)
            means.add(metrics, len(index))
            gradient = model.gradient(value)
            if mean:
                mean.add(dict(zip(self.network.parameter_names, gradient, strict=True)))
            else:
                torch._foreach_add_(total, gradient, alpha=1 / len(batches))
        return list(mean.result().values()) if mean else total, means.result()

    @torch.no_grad()
    def moments(self, model: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and variance c_e of the classifier's per-sample gradients (FedILC §3.2, §5)."""
        train = self.data.train
        pieces = torch.split(torch.arange(len(train), device=train.y.device), PIECE)
        sums = [head_sums(self.network, model, train[index], self.class_weights) for index in pieces]
        first, second = (torch.stack(parts).sum(dim=0) for parts in zip(*sums, strict=True))
        return first / len(train), variance(first, second, len(train))

    def running(self, own: Tensor, smoothing: float) -> Tensor:
        """`r_e / (1 − γ)` of the running mean `r_e ← γ r_e + (1 − γ) c_e`, from 0 on (Ramé et al. 2022)."""
        before = self.kept[RUNNING][VARIANCE] if RUNNING in self.kept else torch.zeros_like(own)
        mean = torch.lerp(own, before, smoothing)
        self.kept[RUNNING] = {VARIANCE: mean}
        return mean / (1 - smoothing)

    def pull(self, model: Tensors, mean: Tensor, away: Tensor, received: Received) -> Tensors:
        """`J_eᵀ v` of v = `away`, in pieces: ∇ of `(1/n) Σ_i ⟨v, g_i² − 2 ḡ g_i⟩` with the ḡ = `mean` fixed."""

        def slope(params: Tensors, part: Examples, _: Received) -> tuple[Tensor, Metrics]:
            first, second = head_sums(self.network, params, part, self.class_weights)
            return (away * (second - 2 * mean * first)).sum() / len(part), {}

        names = self.network.parameter_names
        gradient, _ = self.full_gradient(Working(model, names), slope, received, size=PIECE)
        return dict(zip(names, gradient, strict=True))
