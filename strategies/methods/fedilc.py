"""FedILC, server half: the clients' gradients combined, and Fishr's penalty, whose gradient takes an exchange."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from perennial.common.config import RunConfig
from perennial.common.data.examples import Examples
from perennial.common.mathematics.gradient_variance import head_sums, spread, variance
from perennial.common.methods.fedilc import CLIENTS, PULL, VARIANCE, FedILC, Fishr
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import GRADIENT, MODEL, to_record
from perennial.strategies.exchange import AcceptedReply, MetricMeans
from perennial.strategies.mean import StreamingMean
from perennial.strategies.methods.fedsgd import FedSGDStrategy
from perennial.strategies.robust import RobustMean


class FedILCStrategy(FedSGDStrategy[FedILC]):
    """`w ← w − η · direction(M + λ ∇L_Fishr)`, M the plain or the geometric mean of the g_e (FedILC §3.2).

    `∇L_Fishr = (2/E) Σ_e J_eᵀ (c_e − c̄)` over the E clients that answered, all with the same weight. The
    clients give its terms in a second exchange, or in the same one at the c̄ of the round before (`stale`), or it
    is computed here from all their data (`central`). Zhu et al. 2022, Algorithms 1, 2.
    """

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` for a classifier of several layers, and where the server cannot have the data."""
        super().__init__(run, run_id)
        self.fishr = self.hparams if isinstance(self.hparams, Fishr) and self.hparams.penalty else None
        self.mode = self.fishr.fishr_mode if self.fishr else ""
        if self.fishr and set(self.network.classifier_names) != {"classifier.weight", "classifier.bias"}:
            fields = type(run.model).model_fields
            knobs = [f"model.{name}=0" for name in ("head_hidden", "head_layers") if name in fields]
            other = knobs[0] if knobs else "another model.classifier"
            raise UserError(
                f"model {run.model.name!r}: {self.hparams.name} needs a classifier of one linear layer, whose "
                f"gradients' variances have a closed form; take {other}"
            )
        if self.mode == "central" and run.runtime != "local":
            raise UserError(
                "method.fishr_mode: 'central' is for runtime local, where the server can read all clients' data; "
                "take 'exact'"
            )
        self.variances: dict[str, Tensor] = {}
        """c_e by client, of this round."""
        self.before: Tensors = {}
        """c̄ of the round before, in mode `stale`."""
        self.pulls: StreamingMean | RobustMean = StreamingMean()
        self.means: dict[str, Tensors] = {}
        """Of this round's first exchange: M, and the buffers'."""
        self.metrics = MetricMeans()

    def state_dict(self) -> dict[str, Tensors]:
        return {**super().state_dict(), "before": self.before}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        super().load_state_dict(state)
        self.before = state.get("before", {})

    def weight(self, reply: AcceptedReply) -> float:
        return 1.0

    # ------------------------------------------------------------------ a round

    def ask(self, server_round: int, cohort: list[str], grid: Grid) -> Sequence[Message]:
        """Gradients and variances up; then c̄ down to those who answered."""
        self.cohort, self.variances = cohort, {}
        self.pulls, self.metrics = self.mean(), MetricMeans()
        params = {name: self.sent[name] for name in self.network.parameter_names}
        payload, expect = {MODEL: self.sent}, dict(self.expect(self.sent))
        if self.mode in ("exact", "stale"):
            expect[VARIANCE] = {
                VARIANCE: torch.zeros(sum(self.sent[n].numel() for n in self.network.classifier_names))
            }
        if self.before:
            payload[VARIANCE] = self.before
            if self.hparams.geometric_mean("clients"):
                expect[PULL] = params
        replies = self.exchange(
            grid, server_round, cohort, "train", payload, expect=expect, settings={CLIENTS: len(cohort)}
        )
        self.means = self.combined(server_round, replies)
        mean = self._mean_variance(server_round)
        if self.mode == "stale":
            self.before = mean or self.before
        if self.mode != "exact" or not mean:
            return []
        return self.messages(
            server_round, list(self.variances), "train.fishr", {VARIANCE: mean}, expect={PULL: params}
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if not self.means:
            return None, self.metrics.result()
        if self.mode == "exact":
            for reply in self.accepted(replies):
                self.pulls.add(reply[PULL])
        gradient = self.means[GRADIENT]
        if self.fishr:
            slope = self.fishr.slope(len(self.cohort))
            pull = self._central() if self.mode == "central" else self.pulls.result() if self.pulls.weight else {}
            for name, part in pull.items():
                gradient[name] = gradient[name] + slope * part.to(gradient[name].device)
        return to_record(self.update(self.sent, self.means)), self.metrics.result()

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        """M, and the mean of the buffers; takes in what else the replies bring. Empty if nobody answered."""
        geometric = self.hparams.geometric_mean("clients")

        def taken() -> Iterator[AcceptedReply]:
            for reply in replies:
                self.metrics.add(reply)
                if geometric:
                    geometric.add(reply[GRADIENT])
                if VARIANCE in reply.arrays:
                    self.variances[reply.client] = reply[VARIANCE][VARIANCE]
                if PULL in reply.arrays:
                    self.pulls.add(reply[PULL])
                yield replace(reply, arrays={n: reply[n] for n in reply.arrays if n not in (VARIANCE, PULL)})

        means = super().combined(server_round, taken())
        if means and geometric:
            found = geometric.result()
            self.notes.append({"kind": "geometric", "round": server_round, **_compared(found, means[GRADIENT])})
            return {**means, GRADIENT: found}
        return means

    # ------------------------------------------------------------------ inside

    def _mean_variance(self, server_round: int) -> Tensors:
        """c̄ of this round, whose spread goes into the log; empty where nobody sent a c_e."""
        if not self.variances:
            return {}
        variances = torch.stack(list(self.variances.values()))
        self.notes.append({"kind": "fishr", "round": server_round, "spread": float(spread(variances))})
        if self.run.aggregation.rule == "mean":
            return {VARIANCE: variances.mean(dim=0)}
        mean = self.mean()
        for own in variances:
            mean.add({VARIANCE: own})
        return mean.result()

    @cached_property
    def _data(self) -> dict[str, Examples]:
        """Every client's training data: what a server has only where all clients are in its process."""
        run = self.run
        found = {
            client: run.scenario.client_data(number, run.seed, run.data_folder)
            for number, client in enumerate(run.scenario.client_ids)
        }
        if run.left_out:
            place = run.scenario.train_environments.index(run.left_out)
            found = {client: data.without(place) for client, data in found.items()}
        return {client: data.train for client, data in found.items()}

    def _central(self) -> Tensors:
        """Half of ∇L_Fishr by autograd through all clients' variances at once, as the authors' code does it."""
        names = self.network.parameter_names
        params = {name: self.sent[name].detach().clone() for name in self.sent}
        leaves = [params[name].requires_grad_() for name in names]
        task = self.run.predicts
        variances = [
            variance(
                *head_sums(self.network, task, params, self._data[client]),
                len(self._data[client]),
            )
            for client in self.cohort
        ]
        gradient = torch.autograd.grad(spread(torch.stack(variances)) / 2, leaves, materialize_grads=True)
        return dict(zip(names, gradient, strict=True))


def _compared(geometric: Tensors, plain: Tensors) -> dict[str, float]:
    """Cosine and ratio of the norms of the geometric and the plain mean: the former need not point downhill."""
    one, other = (torch.cat([part[name].flatten().double() for name in geometric]) for part in (geometric, plain))
    norms = float(one.norm()), float(other.norm())
    cosine = float(one @ other) / (norms[0] * norms[1]) if all(norms) else 0.0
    return {"cosine": cosine, "ratio": norms[0] / norms[1] if norms[1] else 0.0}
