"""The name of a request, by which a client knows one that comes again, though as another message.

Nothing here imports PyTorch.
"""

from collections.abc import Iterable
from uuid import uuid4

from flwr.app import ConfigRecord, Message

RECORD, NAME = "request", "name"


def give_name(messages: Iterable[Message]) -> None:
    """Give all requests of an exchange one name; name and node together say which request it is."""
    name = uuid4().hex
    for message in messages:
        message.content[RECORD] = ConfigRecord({NAME: name})


def ask_again(message: Message) -> Message:
    """The same request once more. Flower hands out no message twice, so it is a new one."""
    of = message.metadata
    return Message(message.content, of.dst_node_id, of.message_type, ttl=of.ttl, group_id=of.group_id)


def name_of(message: Message) -> str:
    """A request's name; that of one without is its message's id, which is empty in the local runtime."""
    record = message.content.get(RECORD)
    name = record.get(NAME) if isinstance(record, ConfigRecord) else None
    return str(name or message.metadata.message_id)
