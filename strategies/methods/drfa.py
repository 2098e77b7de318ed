"""DRFA, server half: clients drawn by a mixture λ that follows their losses."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from perennial.common.config import RunConfig
from perennial.common.methods.drfa import DRFA, LOSS, SNAPSHOT, SNAPSHOT_STEP
from perennial.common.utils.seeding import numpy_generator
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, to_record
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import MetricMeans
from perennial.strategies.mean import StreamingMean
from perennial.strategies.methods.simplex import project, told
from perennial.strategies.robust import RobustMean


class DRFAStrategy(MethodStrategy[DRFA]):
    """`min_w max_λ Σ_u λ_u R(w; D_u)` over the simplex (Deng et al. 2020, Algorithm 1).

    With m clients per draw: `w^{t+1} = 1/m Σ_{u ∈ D} w_u` and `w′ = 1/m Σ_{u ∈ D} w_u^{(t′)}` for a multiset D
    drawn by λ; then `λ ← Π(λ + τ γ v)` with `v_u = N/m R(w′; D_u)` for u in a uniform draw V, else 0. N counts
    those who train.
    """

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        clients = run.training_clients
        self.mixture = dict.fromkeys(clients, 1 / len(clients))
        """λ by client id."""
        self.trained: StreamingMean | RobustMean = StreamingMean()
        self.metrics = MetricMeans()

    def state_dict(self) -> dict[str, Tensors]:
        return {"mixture": {"lambda": torch.tensor(list(self.mixture.values()), dtype=torch.float64)}}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.mixture = dict(zip(self.mixture, state["mixture"]["lambda"].tolist(), strict=True))

    def ask(self, server_round: int, cohort: list[str], grid: Grid) -> Sequence[Message]:
        """Train the clients that λ draws, then ask the cohort V for its losses of the mean snapshot."""
        drawn = self.draw(server_round, len(cohort))
        self.enrol(grid, drawn)
        drawn = Counter({client: times for client, times in drawn.items() if self.trains(client)})
        generator = numpy_generator(self.run.seed, "server", server_round, SNAPSHOT)
        step = int(generator.integers(1, self.hparams.local_steps, endpoint=True))
        self.trained, self.metrics, snapshot = self.mean(self.sent), MetricMeans(), self.mean(self.sent)
        for reply in self.exchange(
            grid,
            server_round,
            list(drawn),
            "train",
            {MODEL: self.sent},
            expect={MODEL: self.sent, SNAPSHOT: self.sent},
            settings={SNAPSHOT_STEP: step},
        ):
            self.trained.add(reply[MODEL], drawn[reply.client])
            snapshot.add(reply[SNAPSHOT], drawn[reply.client])
            self.metrics.add(reply)
        if not snapshot.weight:  # nobody answered, and quorum = 0 lets the run go on
            return self.messages(server_round, [], "train.loss", {})
        payload, expect = {SNAPSHOT: snapshot.result()}, {LOSS: {LOSS: torch.zeros(())}}
        return self.messages(server_round, cohort, "train.loss", payload, expect=expect)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        losses = {reply.client: float(reply[LOSS][LOSS]) for reply in self.accepted(replies)}
        silent = self.exchanges[-1].left_out
        rate = self.hparams.local_steps * self.hparams.mixture_rate
        self.mixture = ascend(self.mixture, losses, silent, rate)
        own, overall = told(self.mixture, self.exchanges)
        self.notes.append({"kind": "mixture", "round": server_round, "lambda": own, **overall})
        return to_record(self.trained.result()) if self.trained.weight else None, self.metrics.result()

    def draw(self, server_round: int, size: int) -> Counter[str]:
        """The multiset D: `size` independent draws by λ, from (seed, round) alone, as a cohort's."""
        weights = np.array(list(self.mixture.values()))
        generator = numpy_generator(self.run.seed, "server", server_round, "mixture")
        return Counter(generator.choice(list(self.mixture), size, p=weights / weights.sum()).tolist())


def ascend(
    mixture: Mapping[str, float], losses: Mapping[str, float], silent: Collection[str], rate: float
) -> dict[str, float]:
    """`λ ← Π(λ + rate · v)`, `v_u = N/m f_u` where a loss f_u is known, else 0.

    m counts all who were asked. Those of them who stayed `silent` keep their λ; the others share the rest of the
    mass.
    """
    if not losses:
        return dict(mixture)
    scale = rate * len(mixture) / (len(losses) + len(silent))
    free = {client: weight for client, weight in mixture.items() if client not in silent}
    moved = [weight + scale * losses.get(client, 0.0) for client, weight in free.items()]
    shares = project(torch.tensor(moved, dtype=torch.float64), mass=sum(free.values()))
    return {**mixture, **dict(zip(free, shares.tolist(), strict=True))}
