"""CGPFL-Heur, server half: CGPFL whose number of contexts minimises a generalisation bound."""

from flwr.app import MetricRecord
from torch import Tensor

from perennial.common.methods.cgpfl_heur import CGPFLHeur
from perennial.common.wire import NUM_EXAMPLES, numbers
from perennial.strategies.methods.cgpfl import CGPFLStrategy
from perennial.strategies.methods.clustering import balancing, capacity, clusters_by_bound, costs


class CGPFLHeurStrategy(CGPFLStrategy[CGPFLHeur]):
    """After the first round `K = argmin c √K + μ cost(K)` over K ≤ N/2, with `c = √((d/m) log(e m/d))`
    (thesis (3.27)); then CGPFL with this K."""

    def number(self, server_round: int, points: Tensor, metrics: MetricRecord) -> int:
        if self.contexts and server_round > self.hparams.heur_rounds:
            return len(self.contexts)
        half = max(1, len(points) // 2)
        curve = costs(points, min(self.hparams.contexts or half, half), self.seed)
        means = numbers(metrics)
        parameters = sum(self.sent[name].numel() for name in self.network.parameter_names)
        factor = capacity(parameters, means[NUM_EXAMPLES])
        mu = self.mu(curve, factor, means.get("smoothness", 0.0))
        number = clusters_by_bound(curve, factor, mu)
        self.notes.append(
            {
                "kind": "heuristic",
                "round": server_round,
                "contexts": number,
                "mu": mu,
                "capacity": factor,
                "cost": curve,
            }
        )
        return number

    def mu(self, curve: list[float], factor: float, smoothness: float) -> float:
        """μ as set, or by the rule that is set."""
        if self.hparams.mu == "auto":
            return balancing(curve, factor)
        if self.hparams.mu == "lambda":
            return self.hparams.proximity + smoothness / 2
        return self.hparams.mu
