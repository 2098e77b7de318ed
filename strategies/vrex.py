"""V-REx, server half: a step that also brings the clients' risks together."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import torch

from perennial.common.methods.vrex import PRODUCT, RISK, VREx
from perennial.common.models import Tensors
from perennial.common.wire import GRADIENT
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.fedsgd import FedSGDStrategy
from perennial.strategies.screening import Rejected


class VRExStrategy(FedSGDStrategy[VREx]):
    """Descends on `R̄ + λ/E Σ_e (R_e − R̄)²` of the E clients that answered (Krueger et al. 2021, eq 8).

    The gradient is `ḡ + 2λ (1/E Σ_e R_e g_e − R̄ ḡ)` with g_e = ∇R_e, so gradients and risks are all it takes.
    """

    robust = True

    def check(self, reply: AcceptedReply) -> None:
        if abs(risk := _risk(reply)) > self.run.largest:
            raise Rejected(f"metric 'risk' is {risk:g}, and largest={self.run.largest:g} is the limit")

    def mean_risk(self, risks: Sequence[float]) -> float:
        """R̄, or what the run's `aggregation` makes of the R_e."""
        if self.run.aggregation.rule == "mean":
            return fmean(risks)  # exact, and not only to the last bit
        found = self.mean()
        for risk in risks:
            found.add({"risk": torch.tensor(risk, dtype=torch.float64)})
        return float(found.result()["risk"])

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        gradient, product, risks = self.mean(), self.mean(), []
        for reply in replies:
            # In float64, since what is left of the difference may be small.
            own = {name: reply[GRADIENT][name].double() for name in self.network.parameter_names}
            gradient.add({**reply[GRADIENT], **own})
            product.add({name: _risk(reply) * part for name, part in own.items()})
            risks.append(_risk(reply))
        if not risks:
            return {}
        risk = torch.tensor(self.mean_risk(risks), dtype=torch.float64)
        return {GRADIENT: gradient.result(), PRODUCT: product.result(), RISK: {RISK: risk}}

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """A step along `ḡ + 2λ (1/E Σ_e R_e g_e − R̄ ḡ)`."""
        mean, risk = dict(means[GRADIENT]), float(means[RISK][RISK])
        weight = self.hparams.penalty
        if self.exchanges[-1].round <= self.hparams.anneal_rounds:
            weight = min(weight, 1.0)
        for name in self.network.parameter_names:
            mean[name] = mean[name] + 2 * weight * (means[PRODUCT][name] - risk * mean[name])
        return super().update(model, {GRADIENT: {n: tensor.to(model[n].dtype) for n, tensor in mean.items()}})


def _risk(reply: AcceptedReply) -> float:
    """R_e at the model that the client was sent. Raises `Rejected` where it does not say."""
    found = reply.metrics.get("risk")
    if not isinstance(found, (int, float)):
        raise Rejected("the metric 'risk' is missing")
    return float(found)
