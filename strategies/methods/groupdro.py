"""Federated GroupDRO, server half: the clients' weights, and the mean of their models."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from perennial.common.config import RunConfig
from perennial.common.methods.group_weights import GROUP, HEAVIEST, GroupTraining
from perennial.common.privacy.mechanisms import Clipping, NoMechanism
from perennial.common.privacy.secure_aggregation import VOTES
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.exchange import AcceptedReply, Payload, PerClient
from perennial.strategies.methods.simplex import told
from perennial.strategies.methods.uniform import UniformStrategy

G = TypeVar("G", bound=GroupTraining)
LEAST = 1e-100
"""The least q_i: from 0 it would never grow again, and the mean of a cohort of zeros is none."""


class GroupDROStrategy(UniformStrategy[G]):
    """`q_i ← q_i exp(η_q risk_i)`, then `q ← q / Σq`; client i is sent N q_i (Sagawa et al. 2020).

    A client that is not asked, or whose reply is not used, keeps its q_i but for the normalisation. Under
    `preset=code`, as in the authors' code, the risks are those of a client's first round for ever, and the mean
    of the models is weighted by the new q_i, too.

    Behind a privacy mechanism client i keeps `a_i = η_q Σ risk_i` itself, and the server only `level`, the ln of
    the mean of e^a_j, from which the client has `N q_i = e^(a_i − level)`. Sums of these are all it takes.
    """

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        clients = run.training_clients
        self.q = dict.fromkeys(clients, 1 / len(clients))
        self.first_risks: dict[str, float] = {}
        self.private = not isinstance(run.privacy, NoMechanism)
        self.level = 0.0
        count, clipped = float(len(clients)), isinstance(run.privacy, Clipping)
        self.most = min(HEAVIEST, count) if clipped else count
        # Of what is sent: beyond it noise would not hide it, or secure aggregation refuse it.
        self.top = self.most * (1.0 if clipped else VOTES)

    def state_dict(self) -> dict[str, Tensors]:
        if self.private:
            return {"level": _tensors({"level": self.level})}
        return {"q": _tensors(self.q), "first-risks": _tensors(self.first_risks)}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        if self.private:
            self.level = float(state["level"]["level"])
            return
        self.q, self.first_risks = (
            {client: float(value) for client, value in state.get(record, {}).items()}
            for record in ("q", "first-risks")
        )

    def training_payload(self, model: Tensors) -> Payload | PerClient:
        """The model, and the client's weight or what it finds that with."""
        scale = 1 if self.hparams.literal_weights else len(self.q)
        if self.private:
            found = {"level": self.level, "most": self.most, "top": self.top, "scale": scale / len(self.q)}
            return {MODEL: model, GROUP: _tensors(found)}
        return lambda client: {MODEL: model, GROUP: {"weight": torch.tensor(scale * self.q[client])}}

    def expect(self, model: Tensors) -> Payload:
        """The model, and the client's risk or its weight before and after."""
        found = _tensors({"before": 0.0, "after": 0.0}) if self.private else {"risk": torch.zeros(())}
        return {MODEL: model, GROUP: found}

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        def followed() -> Iterator[AcceptedReply]:
            for reply in replies:
                self.follow(reply)
                yield reply

        means = super().combined(server_round, followed())
        total = sum(self.q.values())
        self.q = {client: max(q / total, LEAST) for client, q in self.q.items()}
        own, overall = told(self.q, self.exchanges)
        self.notes.append({"kind": "groups", "round": server_round, "q": own, **overall})
        return means

    def follow(self, reply: AcceptedReply) -> None:
        """`q_i ← q_i exp(η_q risk_i)`."""
        risk = float(reply[GROUP]["risk"])
        if self.hparams.preset == "code":
            risk = self.first_risks.setdefault(reply.client, risk)
        # No risk is negative, and e^710 is no float: whatever a client reports, Σq stays finite and above 0.
        self.q[reply.client] *= math.exp(min(max(self.hparams.group_rate * risk, 0.0), 700.0))

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        if self.private:
            self.rise({name: float(mean) for name, mean in means[GROUP].items()})
        return super().update(model, means)

    def rise(self, means: Mapping[str, float]) -> None:
        """The next `level`, from the mean weights of those who answered, in units of `most`, before and after.

        The weights of all clients have the mean 1, of which the absent have what is left; if nobody is absent that
        is known to be nothing, and what noise did in earlier rounds is forgotten.
        """
        exchange, clients = next(each for each in self.exchanges if each.action == "train"), len(self.q)
        answered = len(exchange.samples)
        before, after = (self.most * means[name] * answered / clients for name in ("before", "after"))
        absent = max(0.0, 1 - before) if answered < clients else 0.0
        self.level += math.log(max(absent + after, 0.5))  # at least 1 but for noise
        self.notes.append({"kind": "groups", "round": exchange.round, "level": self.level})

    def weight(self, reply: AcceptedReply) -> float:
        return self.q[reply.client] if self.hparams.preset == "code" else 1.0


def _tensors(values: Mapping[str, float]) -> Tensors:
    return {client: torch.tensor(value, dtype=torch.float64) for client, value in values.items()}
