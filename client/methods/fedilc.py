"""FedILC, client half: a gradient and its variances at the received model, then a part of the penalty's slope."""

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from perennial.client.methods.fedsgd import FedSGDClient
from perennial.client.steps import Working
from perennial.client.trainer import Means, Metrics, Received, Reply
from perennial.common.data.examples import Examples
from perennial.common.mathematics.geometric_mean import summed
from perennial.common.mathematics.gradient_variance import head_sums, variance
from perennial.common.methods.fedilc import CLIENTS, PULL, VARIANCE, FederatedFishr, FedILC, Fishr, MiniBatches
from perennial.common.models.memory import activation_bytes, model_bytes
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, MODEL, NUM_EXAMPLES

SENT = "fishr-model"
STATISTICS = "fishr-statistics"
RUNNING = "fishr-running"
"""What is kept: w, c_e and the mean gradient from a round's first exchange to its second; Fishr's running mean of
c_e from round to round."""
GROUP_BYTES = 2**28
"""What the gradients of all mini-batches that a GPU takes together may take."""


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
        generator = torch_generator(self.seed, self.client, received.round, "batches")
        order = torch.randperm(len(self.data.train), generator=generator).to(self.data.train.y.device)
        groups, means = self.groups(order, self.hparams.batch_size), Means()
        count = sum(map(len, groups))
        mean, total = self.hparams.geometric_mean("batches"), [torch.zeros_like(value) for value in model.values]
        for group in groups:
            gradients, metrics = self.gradients(model, group, received)
            means.add(metrics, group.numel())
            if mean:
                mean.add_all(dict(zip(self.network.parameter_names, gradients, strict=True)))
            else:
                torch._foreach_add_(total, list(map(summed, gradients)), alpha=1 / count)
        return list(mean.result().values()) if mean else total, means.result()

    def groups(self, order: Tensor, size: int) -> list[Tensor]:
        """Mini-batches that are taken together (batches, samples): one each, and on a GPU, for which one is too
        little work, as many as fit."""
        key = self.network.settings, self.network.input_shape, self.network.outputs
        together = 1
        if self.in_bulk and not activation_bytes(*key)[1]:  # many convolutions at once are slower than each
            together = max(1, GROUP_BYTES // model_bytes(*key))
        last = len(order) // size * size
        groups = *torch.split(order[:last].view(-1, size), together), order[None, last:]
        return [group for group in groups if group.numel()]

    def gradients(self, model: Working, group: Tensor, received: Received) -> tuple[list[Tensor], Metrics]:
        """The gradient of each mini-batch of a group (batches, *shape), and their mean metrics."""
        if len(group) == 1:
            value, metrics = self.loss(model.tensors, self.data.train[group[0]], received)
            return [part[None] for part in model.gradient(value)], metrics

        def loss(trained: Tensors, batch: Examples) -> tuple[Tensor, Metrics]:
            return self.loss(model.tensors | trained, batch, received)

        names = self.network.parameter_names
        of_each = vmap(grad_and_value(loss, has_aux=True), (None, 0))
        gradients, (_, metrics) = of_each(dict(zip(names, model.values, strict=True)), self.data.train[group])
        return [gradients[name] for name in names], {name: metric.mean() for name, metric in metrics.items()}

    @torch.no_grad()
    def moments(self, model: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and variance c_e of the classifier's per-sample gradients (FedILC §3.2, §5)."""
        train = self.data.train
        pieces = torch.split(torch.arange(len(train), device=train.y.device), self.piece)
        sums = [head_sums(self.network, self.task, model, train[index]) for index in pieces]
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
            first, second = head_sums(self.network, self.task, params, part)
            return (away * (second - 2 * mean * first)).sum() / len(part), {}

        names = self.network.parameter_names
        gradient, _ = self.full_gradient(Working(model, names), slope, received, size=self.piece)
        return dict(zip(names, gradient, strict=True))
