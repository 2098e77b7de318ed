"""AND-mask, server half: a step where the clients agree which way to go."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from perennial.common.methods.and_mask import SIGNS, AndMask
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.mean import StreamingMean
from perennial.strategies.methods.fedsgd import FedSGDStrategy

ROUNDING = 1e-6
"""Of a mean of signs, in float32 or in the whole steps of secure aggregation."""


class AndMaskStrategy(FedSGDStrategy[AndMask]):
    """`w ← w − η m ⊙ ḡ`, `m = 1{|1/E Σ_e sign g_e| ≥ τ}`, ḡ the uniform mean of the g_e = ∇R_e.

    E clients answered (Parascandolo et al. 2021, §2.3 and their code). In the mean of signs a client, whatever it
    sends, has one vote.
    """

    robust = True

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        signs = StreamingMean()

        def counted() -> Iterator[AcceptedReply]:
            for reply in replies:
                signs.add({name: part.sign() for name, part in reply[GRADIENT].items()})
                yield reply

        means = super().combined(server_round, counted())
        return {**means, SIGNS: signs.result()} if means else {}

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """A step along `m ⊙ ḡ`."""
        mean, signs = means[GRADIENT], means[SIGNS]
        least = self.hparams.agreement - ROUNDING
        masks = {name: signs[name].abs() >= least for name in self.network.parameter_names}
        agreed = {name: masked(mean[name], mask, self.hparams.rescale) for name, mask in masks.items()}
        return super().update(model, {**means, GRADIENT: agreed})


def masked(gradient: Tensor, mask: Tensor, rescale: bool) -> Tensor:
    """`m ⊙ g`, with `rescale` over the share of ones in m; zeros where there is none."""
    share = mask.double().mean().item() if rescale else 1.0
    return torch.where(mask, gradient / (share or 1.0), 0.0)
