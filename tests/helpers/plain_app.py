"""A plain app's network, data and Grid."""

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from torch import nn

from perennial.common.flower.arrays import carried
from perennial.server.run.grid import LocalGrid
from perennial.testing.tiny_federation import Toy


class Net(nn.Module):
    """A network as anybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(2, 8)
        self.act = nn.ReLU()
        self.fc = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.act(self.hidden(x)))  # type: ignore[no-any-return]


def toy_data(context: Context) -> Any:
    own = Toy().client_data(int(context.node_config["partition-id"]), 0, None)
    return (own.train.x, own.train.y, own.train.environment), (
        own.test["p=0.9"].x.numpy(),
        own.test["p=0.9"].y.numpy(),
    )


class PlainGrid(LocalGrid):
    """As Flower's own: messages in bytes, all replies at once, and what a client keeps is Flower's to keep."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:  # type: ignore[override]
        replies = []
        for message in messages:
            of = message.metadata
            sent = Message(carried(message.content), of.dst_node_id, of.message_type, group_id=of.group_id)
            context = self.contexts[of.dst_node_id]
            context.state = carried(context.state)
            try:
                reply = self.app(sent, context)
            except Exception as error:
                replies.append(Message(Error(2, f"{type(error)}:<{str(error)!r}>"), reply_to=message))
                continue
            replies.append(reply if reply.has_error() else Message(carried(reply.content), reply_to=message))
        return replies[::-1]


def first() -> ArrayRecord:
    return ArrayRecord(Net().state_dict())
