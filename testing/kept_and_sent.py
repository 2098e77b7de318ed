"""What really left a site of what it keeps: its decoded replies against its kept tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor

from perennial.common.methods.base import BUFFERS, CHANGE, EVERY, FIRST, Method
from perennial.common.utils.tensors import Tensors

OPTIMIZERS = "optimizer-*"
"""What a client keeps beside what its method has it keep, with `optimizer.keep`."""

Records = Mapping[str, Tensors]


@dataclass(frozen=True)
class Sent:
    """A request and its reply as they arrived, and what the client kept before and after."""

    client: int
    received: Records
    arrays: Records
    before: Records
    after: Records


def check(method: type[Method], replies: list[Sent], buffers: tuple[str, ...]) -> None:
    """That what clients sent of what they keep is what the method declares: nothing more, and nothing less."""
    for record in sorted({record for reply in replies for record in reply.after}):
        assert any(fnmatch(record, name) for name in (*method.keeps, OPTIMIZERS)), (
            f"{record} is kept and not in `keeps`"
        )
        when = dict(method.sends).get(record, "never")
        everyone = {
            reply.client: [seen_of(record, one) for one in replies if one.client == reply.client]
            for reply in replies
        }
        where = f"{method.__name__} keeps {record!r}, sent {when}; found by client and reply: {everyone}"
        for own in everyone.values():
            told = [names for names, _ in own]
            if when == "never":
                assert not any(told), where
            elif when == FIRST:
                assert told[0] == own[0][1] != set(), where
                assert not any(told[1:]), where
            elif when == CHANGE:
                assert all(moved_alike(record, reply) for reply in replies), where
            elif when == BUFFERS:
                assert all(names == tellable & set(buffers) for names, tellable in own), where
        if when == EVERY:
            assert any(names for own in everyone.values() for names, _ in own), where


def seen_of(record: str, reply: Sent) -> tuple[set[str], set[str]]:
    """Names of a kept record's tensors, as they were before or are after, that are in a reply; and of all that
    could be told. Constant ones cannot, nor those that the client was sent itself."""

    def tellable(kept: Tensors) -> dict[str, Tensor]:
        return {n: t for n, t in kept.items() if is_telling(t) and not is_in(t, reply.received)}

    after = tellable(reply.after.get(record, {}))
    either = [*after.items(), *tellable(reply.before.get(record, {})).items()]
    return {name for name, tensor in either if is_in(tensor, reply.arrays)}, set(after)


def moved_alike(record: str, reply: Sent) -> bool:
    """Whether each tensor of a kept record, 0 at first, moved by what one of those sent differs from what came."""
    changes = [
        tensor - reply.received[name][key]
        for name, tensors in reply.arrays.items()
        for key, tensor in tensors.items()
        if key in reply.received.get(name, {})
    ]
    return all(
        any(
            change.shape == tensor.shape
            and torch.allclose(tensor - reply.before.get(record, {}).get(name, 0), change, atol=1e-6)
            for change in changes
        )
        for name, tensor in reply.after[record].items()
    )


def is_in(tensor: Tensor, records: Records) -> bool:
    """Whether one of the records tells a tensor."""
    return any(is_copy(tensor, value) for tensors in records.values() for value in tensors.values())


def is_telling(tensor: Tensor) -> bool:
    """Whether two such tensors are hardly equal by accident."""
    return tensor.numel() > 1 and not bool((tensor == tensor.flatten()[0]).all())


def is_copy(kept: Tensor, sent: Tensor) -> bool:
    """Whether one tells the other: equal or, where so many numbers cannot be by accident, a multiple."""
    if kept.shape != sent.shape or not is_telling(kept):
        return False
    one, other = kept.flatten().double(), sent.flatten().double()
    if one.numel() < 8:
        return torch.equal(one, other)
    return bool((one @ other).abs() > (1 - 1e-13) * one.norm() * other.norm() > 0)
