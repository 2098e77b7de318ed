"""Federated GroupDRO, server half: the clients' weights, and the mean of their models."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from perennial.common.config import RunConfig
from perennial.common.methods.group import GROUP, GroupTraining
from perennial.common.models import Tensors
from perennial.common.wire import MODEL
from perennial.strategies.exchange import AcceptedReply, Payload, PerClient
from perennial.strategies.uniform import UniformStrategy

G = TypeVar("G", bound=GroupTraining)


class GroupDROStrategy(UniformStrategy[G]):
    """`q_i ← q_i exp(η_q risk_i)`, then `q ← q / Σq`; client i is sent N q_i (Sagawa et al. 2020).

    A client that is not asked, or whose reply is not used, keeps its q_i but for the normalisation. Under
    `preset=code`, as in the authors' code, the risks are those of a client's first round for ever, and the mean
    of the models is weighted by the new q_i, too.
    """

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        super().__init__(run, run_id)
        clients = run.scenario.client_ids
        self.q = {client: 1 / len(clients) for client in clients}
        self.first_risks: dict[str, float] = {}

    def state_dict(self) -> dict[str, Tensors]:
        return {"q": _tensors(self.q), "first-risks": _tensors(self.first_risks)}

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.q, self.first_risks = (
            {client: float(value) for client, value in state.get(record, {}).items()}
            for record in ("q", "first-risks")
        )

    def training_payload(self, model: Tensors) -> PerClient:
        """The model and the client's weight."""
        scale = 1 if self.hparams.literal_weights else len(self.q)
        return lambda client: {MODEL: model, GROUP: {"weight": torch.tensor(scale * self.q[client])}}

    def expect(self, model: Tensors) -> Payload:
        """The model and the client's risk."""
        return {MODEL: model, GROUP: {"risk": torch.zeros(())}}

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        def followed() -> Iterator[AcceptedReply]:
            for reply in replies:
                self.follow(reply)
                yield reply

        means = super().combined(server_round, followed())
        total = sum(self.q.values())
        self.q = {client: q / total for client, q in self.q.items()}
        self.notes.append({"kind": "groups", "round": server_round, "q": dict(self.q)})
        return means

    def follow(self, reply: AcceptedReply) -> None:
        """`q_i ← q_i exp(η_q risk_i)`."""
        risk = float(reply[GROUP]["risk"])
        if self.hparams.preset == "code":
            risk = self.first_risks.setdefault(reply.client, risk)
        # No risk is negative, and e^710 is no float: whatever a client reports, Σq stays finite and above 0.
        self.q[reply.client] *= math.exp(min(max(self.hparams.group_rate * risk, 0.0), 700.0))

    def weight(self, reply: AcceptedReply) -> float:
        return self.q[reply.client] if self.hparams.preset == "code" else 1.0


def _tensors(values: Mapping[str, float]) -> Tensors:
    return {client: torch.tensor(value, dtype=torch.float64) for client, value in values.items()}
