"""Federated GroupDRO, server half: the clients' weights, and the mean of their models."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common.config import RunConfig
from common.methods.groupdro import GROUP, GroupTraining
from common.models import Tensors
from common.wire import MODEL, from_record
from strategies.exchange import AcceptedReply, Payload
from strategies.uniform import UniformStrategy

G = TypeVar("G", bound=GroupTraining)


class GroupDROStrategy(UniformStrategy[G]):
    """`q_i ← q_i exp(η_q risk_i)`, then `q ← q / Σq`; client i is sent N q_i (Sagawa et al. 2020).

    A client that is not asked, or whose reply is not used, keeps its q_i but for the normalisation. Under
    `preset=code`, as in the authors' code, the risks are those of a client's first round for ever, and the mean
    of the models is weighted by the new q_i, too.
    """

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

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model and the client's weight down, the model and its risk up: one number more each way."""
        cohort, self.sent = self.sample(server_round, grid), from_record(arrays)
        scale = 1 if self.hparams.literal_weights else len(self.q)

        def payload(client: str) -> Payload:
            return {MODEL: self.sent, GROUP: {"weight": torch.tensor(scale * self.q[client])}}

        expect = {MODEL: self.sent, GROUP: {"risk": torch.zeros(())}}
        return self.messages(server_round, cohort, "train", payload, expect=expect)

    def weight(self, reply: AcceptedReply) -> float:
        """Takes in the client's risk; its weight in the mean."""
        code, risk = self.hparams.preset == "code", float(reply[GROUP]["risk"])
        if code:
            risk = self.first_risks.setdefault(reply.client, risk)
        # No risk is negative, and e^710 is no float: whatever a client reports, Σq stays finite and above 0.
        growth = min(max(self.hparams.group_rate * risk, 0.0), 700.0)
        self.q[reply.client] *= math.exp(growth)
        return self.q[reply.client] if code else 1.0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = super().aggregate_train(server_round, replies)
        total = sum(self.q.values())
        self.q = {client: q / total for client, q in self.q.items()}
        self.notes.append({"kind": "groups", "round": server_round, "q": dict(self.q)})
        return found


def _tensors(values: Mapping[str, float]) -> Tensors:
    return {client: torch.tensor(value, dtype=torch.float64) for client, value in values.items()}
