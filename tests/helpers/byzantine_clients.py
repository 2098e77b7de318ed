"""Clients that answer in good form and with wrong numbers, alone or in agreement, to be set upon a run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from flwr.app import Message, RecordDict
from scripted_clients import payload
from torch import Tensor

from perennial.client.trainer import Site
from perennial.common.config import Task
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import to_record
from perennial.server.local import LocalRuntime
from perennial.server.run.grid import LocalGrid

ATTACKS = ("sign-flip", "tenfold", "alie", "ipm", "label-flip")
ALIE_DEVIATIONS = 1.5
"""z: how many standard deviations from the mean; the papers' own z is below 0.3 for 8 clients."""
IPM_SCALE = 2.0
"""ε: the hostile send −ε times the mean of the honest updates."""


def wrong(attack: str, start: Tensors, own: Tensors, honest: Sequence[Tensors]) -> Tensors:
    """What a hostile client sends in place of `own`, which was made of `start`; it has seen all `honest` ones.

    ALIE: Baruch et al. 2019, Algorithm 3. IPM: Xie et al. 2020, §3.
    """

    def update(tensors: Tensors, name: str) -> Tensor:
        return tensors[name] - start[name] if name in start else tensors[name]

    found = {}
    for name, tensor in own.items():
        if not tensor.is_floating_point():
            found[name] = tensor
            continue
        mine, theirs = update(own, name), torch.stack([update(other, name) for other in honest])
        spread = theirs.std(dim=0) if len(honest) > 1 else torch.zeros_like(mine)
        sent = {
            "sign-flip": -mine,
            "tenfold": -10 * mine,
            "alie": theirs.mean(dim=0) - ALIE_DEVIATIONS * spread,
            "ipm": -IPM_SCALE * theirs.mean(dim=0),
        }[attack]
        found[name] = start[name] + sent if name in start else sent
    return found


class AttackedGrid(LocalGrid):
    """A local grid, some of whose clients do to every record that they send in training what the attack says."""

    def __init__(self, inner: LocalGrid, hostile: set[int], attack: str) -> None:
        super().__init__(inner.app, len(inner.contexts), inner.ahead)
        self.hostile, self.attack = hostile, attack
        """Numbers of the hostile clients."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        requests = list(messages)
        replies = super().send_and_receive(requests, timeout=timeout)
        if not requests or not requests[0].metadata.message_type.startswith("train"):
            yield from replies
            return
        pairs = list(zip(requests, replies, strict=True))
        sent = [payload(reply) for request, reply in pairs if not self._wrong(request)]
        for request, reply in pairs:
            if self._wrong(request):
                start, content = payload(request), RecordDict(dict(reply.content))
                for name, own in payload(reply).items():
                    honest = [other[name] for other in sent if name in other] or [own]
                    content[name] = to_record(wrong(self.attack, start.get(name, {}), own, honest))
                reply = Message(content, reply_to=request)
            yield reply

    def _wrong(self, request: Message) -> bool:
        return request.metadata.dst_node_id - 1 in self.hostile


def attack(here: LocalRuntime, attack: str, hostile: Sequence[int]) -> None:
    """Set these clients of a local runtime upon its run."""
    if attack != "label-flip":
        here.grid = AttackedGrid(here.grid, set(hostile), attack)
        return
    site, last, poisoned = here.host.site, here.config.scenario.classes - 1, dict[int, Site]()

    def flipped(text: str, task: Task, number: int) -> Site:
        found = site(text, task, number)
        if number not in hostile:
            return found
        if number not in poisoned:
            train = replace(found.data.train, y=last - found.data.train.y)
            poisoned[number] = replace(found, data=replace(found.data, train=train))
        return poisoned[number]

    here.host.site = flipped  # type: ignore[method-assign]
