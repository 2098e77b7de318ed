"""FedPAC, server half: mean featurizer, class centroids, and a combination of the classifiers for each client."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from perennial.common.config import RunConfig
from perennial.common.methods.fedpac import CENTROIDS, STATISTICS, FedPAC
from perennial.common.utils.tensors import Tensors, part
from perennial.common.wire import HEAD, MODEL
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Payload, PerClient
from perennial.strategies.mean import StreamingMean
from perennial.strategies.methods.fedrep import split_network
from perennial.strategies.screening import Rejected

Floats = npt.NDArray[np.float64]


class FedPACStrategy(MethodStrategy[FedPAC]):
    """`φ^{t+1} = Σ_u (n_u / Σn) φ_u`, `c_k = Σ_u n_{u,k} μ_{u,k} / Σ_u n_{u,k}`, `h_u^{t+1} = Σ_j a_{uj} h_j`.

    a_u solves the quadratic programme of `combination` (Xu et al. 2023). The classifier in the global arrays, the
    mean of those sent, is for clients that have not been in a cohort yet.
    """

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` for a model whose featurizer has nothing to be shared."""
        super().__init__(run, run_id)
        split = split_network(run)
        classes, width = split.outputs, split.width
        self.heads: dict[str, Tensors] = {}
        """Combined classifiers by client id."""
        self.centroids = {"mean": torch.zeros(classes, width), "count": torch.zeros(classes)}

    def state_dict(self) -> dict[str, Tensors]:
        return {CENTROIDS: self.centroids, **self.heads}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.centroids = state[CENTROIDS]
        self.heads = {client: head for client, head in state.items() if client != CENTROIDS}

    def payload(self, model: Tensors) -> PerClient:
        shared, head = part(model, "featurizer"), part(model, "classifier")
        return lambda client: {MODEL: shared, HEAD: self.heads.get(client, head)}

    def training_payload(self, model: Tensors) -> PerClient:
        payload = self.payload(model)
        return lambda client: {**payload(client), CENTROIDS: self.centroids}

    def expect(self, model: Tensors) -> Payload:
        statistics = {"mean": self.centroids["mean"], "variance": torch.zeros(())}
        return {MODEL: model, STATISTICS: statistics, CENTROIDS: self.centroids}

    def check(self, reply: AcceptedReply) -> None:
        """Raises `Rejected` for a variance that is too small, and samples by class that are not the client's."""
        if (variance := float(reply[STATISTICS]["variance"])) < 0:
            raise Rejected(f"the variance {variance:g} is below 0")
        counts, n = reply[CENTROIDS]["count"].double(), reply.num_examples
        if (counts < 0).any() or (counts != counts.round()).any() or counts.sum() != n:
            raise Rejected(f"samples by class that are not its {n}: {counts.tolist()!s:.100}")
        # E‖z‖²_k ≥ ‖μ_k‖², so V ≥ Σ_k ‖s_k‖² (1/p(k) − 1) / n; a tenth of 1/p(k) is left for rounding. Of a class
        # that it lacks, s_k is 0.
        squares = reply[STATISTICS]["mean"].double().square().sum(dim=1)
        if variance < (least := float((squares * (0.9 * n / counts.clamp(min=1e-9) - 1)).sum() / n)):
            raise Rejected(f"the variance {variance:g} is below the {least:g} between its own classes")

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        """The mean model; what else came is combined by client and by class."""
        mean = StreamingMean()
        heads: dict[str, Tensors] = {}
        statistics: list[Tensors] = []
        centroids: list[Tensors] = []
        for reply in replies:
            mean.add(reply[MODEL], self.weight(reply))
            heads[reply.client] = part(reply[MODEL], "classifier")
            statistics.append(reply[STATISTICS])
            centroids.append(reply[CENTROIDS])
        if not heads:
            return {}
        self.heads |= combined(heads, statistics)
        self.centroids = merged(self.centroids, centroids)
        return {MODEL: mean.result()}


def combined(heads: Mapping[str, Tensors], statistics: Iterable[Tensors]) -> dict[str, Tensors]:
    """`h_u ← Σ_j a_{uj} h_j` for each client u; `statistics` in the order of `heads`."""
    pairs = [(sent["mean"].flatten().tolist(), float(sent["variance"])) for sent in statistics]
    means, variances = (np.array(column) for column in zip(*pairs, strict=True))
    found = {}
    for own, client in enumerate(heads):
        mean = StreamingMean()
        for head, weight in zip(heads.values(), combination(own, means, variances), strict=True):
            if weight > 0:
                mean.add(head, float(weight))
        found[client] = mean.result()
    return found


def combination(own: int, means: Floats, variances: Floats) -> Floats:
    """The a ≥ 0, Σ_j a_j = 1, that minimises `Σ_j a_j² V_j + ‖Σ_j a_j (s_u − s_j)‖²`, for the client u = `own`.

    `means` (m, n) holds the s_j, `variances` (m,) the V_j. The objective is ‖B a‖² for a matrix B, and the x ≥ 0
    that minimises `‖B x‖² + (Σ_j x_j − 1)²` is a multiple of its minimiser: for x = r a that is
    r² ‖B a‖² + (r − 1)², which for each r > 0 is least where ‖B a‖ is. So one call of a non-negative
    least-squares solver is exact. Where it finds no end, which rounding can bring about, a client keeps its own.
    """
    from scipy.optimize import nnls

    matrix = np.vstack([np.diag(np.sqrt(variances)), (means[own] - means).T])
    matrix /= max(float(np.linalg.norm(matrix)), np.finfo(float).tiny)
    system = np.vstack([matrix, np.ones(len(variances))])
    try:
        solution, _ = nnls(system, np.append(np.zeros(len(matrix)), 1), maxiter=100 * len(variances))
    except RuntimeError:
        solution = np.eye(len(variances))[own]
    weights: Floats = solution / solution.sum()
    return weights


def merged(before: Tensors, sent: Iterable[Tensors]) -> Tensors:
    """`c_k = Σ_u n_{u,k} μ_{u,k} / Σ_u n_{u,k}`; a class of which nobody has samples keeps its centroid."""
    mean, count = (torch.zeros_like(tensor, dtype=torch.float64) for tensor in before.values())
    for centroids in sent:
        number = centroids["count"].cpu()
        mean += centroids["mean"].cpu() * number[:, None]
        count += number
    known = count > 0
    return {
        "mean": torch.where(known[:, None], (mean / count[:, None]).float(), before["mean"]),
        "count": torch.where(known, count.float(), before["count"]),
    }
