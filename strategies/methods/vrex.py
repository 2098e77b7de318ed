"""V-REx, server half: a step that also brings the clients' risks together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from perennial.common.methods.vrex import PRODUCT, RISK, VREx
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.methods.fedsgd import FedSGDStrategy
from perennial.strategies.screening import Rejected


class VRExStrategy(FedSGDStrategy[VREx]):
    """Descends on `R̄ + λ/E Σ_e (R_e − R̄)²` of the E clients that answered (Krueger et al. 2021, eq 8).

    The gradient is `ḡ + 2λ (1/E Σ_e R_e g_e − R̄ ḡ)` with g_e = ∇R_e, so gradients and risks are all it takes.
    """

    robust = True

    def check(self, reply: AcceptedReply) -> None:
        if abs(risk := _risk(reply)) > self.run.largest:
            raise Rejected(f"metric 'risk' is {risk:g}, and largest={self.run.largest:g} is the limit")

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0

    def mean_risk(self, risks: Sequence[float]) -> float:
        """R̄, or what the run's `aggregation` makes of the R_e."""
        if self.run.aggregation.rule == "mean":
            return fmean(risks)  # exact, and not only to the last bit
        found = self.mean()
        for risk in risks:
            found.add({"risk": torch.tensor(risk, dtype=torch.float64)})
        return float(found.result()["risk"])

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        risks = []

        def with_product() -> Iterator[AcceptedReply]:
            for reply in replies:
                # In float64, since what is left of the difference may be small.
                own = {name: part.double() for name, part in reply[GRADIENT].items()}
                product = {name: _risk(reply) * part for name, part in own.items()}
                risks.append(_risk(reply))
                yield replace(reply, arrays={**reply.arrays, GRADIENT: own, PRODUCT: product})

        means = super().combined(server_round, with_product())
        if not means:
            return {}
        return {**means, RISK: {RISK: torch.tensor(self.mean_risk(risks), dtype=torch.float64)}}

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """A step along `ḡ + 2λ (1/E Σ_e R_e g_e − R̄ ḡ)`."""
        mean, risk = dict(means[GRADIENT]), float(means[RISK][RISK])
        weight = self.hparams.penalty
        if self.exchanges[-1].round <= self.hparams.anneal_rounds:
            weight = min(weight, 1.0)
        for name in mean:
            mean[name] = mean[name] + 2 * weight * (means[PRODUCT][name] - risk * mean[name])
        gradient = {name: tensor.to(model[name].dtype) for name, tensor in mean.items()}
        return super().update(model, {**means, GRADIENT: gradient})


def _risk(reply: AcceptedReply) -> float:
    """R_e at the model that the client was sent. Raises `Rejected` where it does not say."""
    found = reply.metrics.get("risk")
    if not isinstance(found, (int, float)):
        raise Rejected("the metric 'risk' is missing")
    return float(found)
