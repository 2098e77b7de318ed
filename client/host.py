"""From a Flower message to a method's client half and back; holds what lasts as long as the process."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from client.node.site import OwnSite
from client.request import Request, checked
from client.secagg import Participant, Vault
from client.serving.snapshot import Snapshot, results_of
from client.state import FileStates, Kept, Version, before_message, digest, needed, valid
from client.trainer import Client, Received, Reply, Site
from common.asked import name_of
from common.config import Task, parse_task
from common.data.examples import ClientData
from common.errors import UserError
from common.memory import must_fit, samples_must_fit
from common.models import Tensors, network
from common.modules import defined_in
from common.secagg import ACTIONS, KEYS, TERMS
from common.split import record as reference
from common.wire import CLIENT, CONFIG, METRICS, MODEL, NUM_EXAMPLES, from_record, records, to_record


@lru_cache
def client_class(module: str) -> type[Client[Any]]:
    """The client half of a method: the one `Client` subclass that its file defines."""
    found: type[Client[Any]] = defined_in(f"client.methods.{module}", Client)
    return found


def client_half(task: Task, site: Site, kept: Kept) -> Client[Any]:
    """The client half of a task's method, at a site that keeps this."""
    return client_class(task.method.module())(site, task.method, dict(kept))


def pick_device(wish: str) -> torch.device:
    """The device of a name; "auto" is the first GPU where there is one. Raises `UserError`."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wish)
    except RuntimeError:  # its own words list every kind of accelerator that PyTorch has been built for
        raise UserError(f"device {wish!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise UserError(f"device {wish!r} cannot be used here ({reason}); use auto, cpu or cuda:N") from None
    return device


def site_data(task: Task, number: int, own: OwnSite | None, data_root: Path | None) -> ClientData:
    """The data of client number `number`, or those of an own site. Raises `UserError`."""
    ids = task.scenario.client_ids
    if not 0 <= number < len(ids):
        raise UserError(f"partition-id {number} is not possible; the scenario has clients 0 to {len(ids) - 1}")
    data = own.load(task) if own else task.scenario.client_data(number, task.seed, data_root)
    if task.left_out:
        return data.without(task.scenario.train_environments.index(task.left_out))
    if not len(data.train):
        raise UserError(f"{ids[number]} has no training samples")
    return data


@dataclass
class Host:
    """Serves one or many clients in this process: data, networks and kept state stay resident.

    `states` holds versions by `RUN/CLIENT`: a plain dict in the local runtime, files elsewhere. A host with an
    `own` site has its data alone.
    """

    states: MutableMapping[str, list[Version]]
    data_root: Path | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    own: OwnSite | None = None
    _sites: dict[tuple[str, int], Site] = field(default_factory=dict)
    _text: str = ""
    """The task that the sites are of."""

    def site(self, text: str, task: Task, number: int) -> Site:
        """Client number `number` of the task, its data loaded once per process. Raises `UserError`."""
        if self._text != text:
            must_fit(task.model, task.scenario.input_shape, task.scenario.classes)
            samples_must_fit(task.scenario.drawn_samples, task.scenario.input_shape)
            self._sites.clear()  # what the last run needed is let go
            self._text = text
        if (text, number) not in self._sites:
            data = site_data(task, number, self.own, self.data_root).to(self.device)
            net = network(task.model, task.scenario.input_shape, task.scenario.classes, self.device)
            self._sites[text, number] = Site(task.scenario.client_ids[number], data, net, task.seed)
        return self._sites[text, number]

    def handle(self, message: Message, number: int = 0) -> Message:
        """Answer a message as client number `number`, or as the client that the own site is.

        Raises `UserError` or `ValueError`, and changes nothing, where no server of this project asks so.
        """
        request = checked(message)
        task = parse_task(request.task)
        action = message.metadata.message_type
        if self.own:
            number = self.own.number(task)
            if action == "query":  # a run begins, and the site's files may have changed since the last one
                self._sites.clear()
        site = self.site(request.task, task, number)
        if action == "query":
            count = {NUM_EXAMPLES: len(site.data.train)} if len(site.data.train) else {}
            reply = Reply(metrics=count, settings={CLIENT: site.client})
        elif action in task.method.actions or action in ACTIONS:
            reply = self._act(message, request, action, task, site)
        else:
            raise ValueError(
                f"{task.method.name} has no action {action[:80]!r}, only {', '.join(task.method.actions)}"
            )
        return Message(_content(reply), reply_to=message)

    def _act(self, message: Message, request: Request, action: str, task: Task, site: Site) -> Reply:
        arrays = {
            name: self._here(from_record(record)) for name, record in records(message.content, ArrayRecord).items()
        }
        references: list[Tensors] = []
        while (name := reference(len(references))) in arrays:
            references.append(arrays.pop(name))
        received = Received(
            round=request.round,
            arrays=arrays,
            references=references,
            settings=request.settings,
        )
        place = f"{request.run}/{site.client}"
        participant = Participant(place, self._vault)
        if strangers := received.arrays.get(KEYS, {}).keys() - set(task.scenario.client_ids):
            raise ValueError(f"the request has a key of {min(strangers)[:80]!r}, which is no client of the run")
        if action in ACTIONS:
            return Reply(participant.answer(action, received), {NUM_EXAMPLES: len(site.data.train)})
        made_by = digest(name_of(message))
        versions = before_message(valid(self.states.get(place, []), request.resumed), made_by)
        if versions and versions[-1].round > request.round:
            # A run that goes back says so with `resumed`. An older version would undo the newer ones.
            newest_round = versions[-1].round
            raise ValueError(f"the request is of round {request.round}, and this site has done {newest_round}")
        before: Kept = (
            {name: self._here(tensors) for name, tensors in versions[-1].kept.items()} if versions else {}
        )
        client = client_half(task, site, before)
        reply = client.answer(action, received)
        if TERMS in received.arrays:
            reply = replace(reply, arrays=participant.masked(received, reply.arrays[MODEL]))
        after = client.kept
        if after.keys() != before.keys() or any(after[name] is not before[name] for name in after):
            part = versions[-1].part + 1 if versions and versions[-1].round == request.round else 0
            newest = Version(request.round, len(request.resumed), after, part, made_by)
            self.states[place] = needed([*versions, newest], request.checkpoints)
        if action == "evaluate":
            self._vault.forget(place)  # of a round that went on without this client
        if action == "evaluate" and isinstance(self.states, FileStates):
            results = results_of(reply)
            snapshot = Snapshot(
                request.task, site.client, self.data_root, received, after, self.own, request.run, results
            )
            snapshot.save(self.states.folder / place)
        return reply

    @cached_property
    def _vault(self) -> Vault:
        return Vault(self.states.folder if isinstance(self.states, FileStates) else None)

    def _here(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}


def _content(reply: Reply) -> RecordDict:
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        name: to_record(tensors) for name, tensors in reply.arrays.items()
    }
    content[METRICS] = MetricRecord(dict(reply.metrics))
    if reply.settings:
        content[CONFIG] = ConfigRecord(dict(reply.settings))
    return RecordDict(content)
