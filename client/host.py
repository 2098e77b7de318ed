"""From a Flower message to a method's client half and back; holds what lasts as long as the process."""

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict

from perennial.client.captured import Graphs
from perennial.client.cohort import (
    StackedData,
    Work,
    answers,
    asked_form,
    evenly,
    shape,
    stack_reply,
    stackable,
    stacks,
    whole,
    window,
)
from perennial.client.request import Request, checked
from perennial.client.secure_aggregation import Participant, Vault
from perennial.client.shelf import Row, Shelf, form_of
from perennial.client.site_data import OwnSite
from perennial.client.snapshot import Snapshot, results_of
from perennial.client.state import RESIDENT, FileStates, Kept, Version, before_message, digest, needed, valid
from perennial.client.trainer import Client, Received, Reply, Role, Site
from perennial.common import plugins
from perennial.common.config import Engine, Task, parse_task
from perennial.common.data.examples import ClientData, must_be_samples
from perennial.common.data.scenario import Scenario
from perennial.common.flower.names import log
from perennial.common.flower.request_id import name_of
from perennial.common.methods.base import Method, Sum
from perennial.common.models.memory import must_fit, samples_must_fit
from perennial.common.models.network import Network, network
from perennial.common.models.torch_state import products
from perennial.common.privacy.secure_aggregation import ACTIONS, KEYS, TERMS
from perennial.common.selection import SUMS, place_of, split_off
from perennial.common.selection import record as reference
from perennial.common.stacks import Requests, StackReply, content_of
from perennial.common.utils.discovery import defined_in, names_in
from perennial.common.utils.errors import UserError
from perennial.common.utils.seeding import torch_generator
from perennial.common.utils.suggestions import unknown
from perennial.common.utils.tensors import Tensors, change_marks, must_be_records
from perennial.common.wire import CLIENT, FROZEN, NUM_EXAMPLES, PERSONAL, from_record, records

RESIDENT_BYTES = 2**31
"""What the data of more than `RESIDENT` clients may take in a process, that all of them stay."""


@lru_cache
def client_class(method: type[Method]) -> type[Client[Any]]:
    """The client half of a method: a plug-in's own, or the one `Client` subclass of its file in `client/methods/`.

    Raises `UserError` for a plug-in that has none, or two, whose family is none of ours, or that evaluates a model
    which its half does not have.
    """
    found: type[Client[Any]] | None = plugins.half(method, "client", Client)
    module = next(iter(plugins.of(method)), "")
    if module and not found:
        if not method.family:
            raise UserError(
                f"plug-in {module!r}: method {method.model_fields['name'].default!r} has no client half; "
                f"define a subclass of LocalTrainer or Client in {module} or in {module}.client"
            )
        if method.family not in (ours := names_in("perennial.client.methods")):
            raise UserError(f"plug-in {module!r}: {method.__name__}: {unknown('family', method.family, ours)}")
    found = found or defined_in(f"perennial.client.methods.{method.module()}", Client)
    assert found
    if module and (missing := _without_a_model(method, found)):
        also = f" or keeps = frozenset({{{PERSONAL!r}}})" if missing == PERSONAL else ""
        raise UserError(
            f"plug-in {module!r}: {method.__name__}.evaluates: {missing!r} is not possible, since "
            f"{found.__name__} has no such model; give it a method `models` that answers one{also}, or "
            "evaluate 'global'"
        )
    return found


def _without_a_model(method: type[Method], half: type[Client[Any]]) -> str:
    """A name in `evaluates` for which the half would evaluate the received model; empty where there is none."""
    if any(getattr(half, name) is not getattr(Client, name) for name in ("models", "evaluated", "evaluate")):
        return ""
    own = half.personal is not Client.personal or any(fnmatch(PERSONAL, name) for name in method.keeps)
    known = {"global", PERSONAL} if own else {"global"}
    return next((name for name in method.evaluates if name not in known), "")


def client_half(task: Task, site: Site, kept: Kept) -> Client[Any]:
    """The client half of a task's method, at a site that keeps this."""
    return client_class(type(task.method))(site, task.method, dict(kept))


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
    _must_be_announced(data, task.scenario, ids[number])
    if ids[number] in task.test_sites:
        return _for_testing(data, task, ids[number])
    if task.left_out:
        return data.without(task.scenario.train_environments.index(task.left_out))
    if not len(data.train):
        raise UserError(f"{ids[number]} has no training samples")
    return data


def _must_be_announced(data: ClientData, scenario: Scenario, client: str) -> None:
    where, announced = f"scenario {scenario.name!r}, data of {client}", scenario.test_environments
    if strangers := [name for name in data.test if name not in announced]:
        raise UserError(f"{where}: {unknown('test environment', strangers[0], announced)}")
    ours = type(scenario).client_data.__module__.startswith("perennial.")  # of which some give each its own ones
    if missing := [name for name in announced if name not in data.test and not ours]:
        raise UserError(
            f"{where}: test environment {missing[0]!r} is missing; give it, if need be without samples"
        )
    parts = {"train": data.train, "validation": data.validation}
    for name, part in {**parts, **{f"test {name!r}": part for name, part in data.test.items()}}.items():
        must_be_samples(f"{where}, {name}", part, scenario.input_shape, scenario.task)
    for name, part in parts.items():
        last = len(scenario.train_environments) - 1
        if len(part) and not 0 <= part.environment.min() <= part.environment.max() <= last:
            found = f"{part.environment.min()} to {part.environment.max()}"
            raise UserError(f"{where}, {name}: environment has {found}; it must be 0 to {last}")


def _for_testing(data: ClientData, task: Task, client: str) -> ClientData:
    there = len(data.train) + len(data.validation)
    if task.adapt and task.adapt >= there:
        raise UserError(
            f"adapt: {task.adapt} is not possible at {client}; it must be less than its {there} samples that are "
            "not for testing anyway"
        )
    order = torch.randperm(there, generator=torch_generator(task.seed, client, "adapt"))
    train, test = task.scenario.train_environments, task.scenario.test_environments
    return data.for_testing(train, test, order[: task.adapt])


def site_of(task: Task, client: str, data: ClientData, net: Network) -> Site:
    """What stands at a client of a task."""
    role: Role = "trains"
    if client in task.test_sites:
        role = "adapts" if task.adapt and not task.method.cannot_adapt() else "tests"
    return Site(
        client,
        data,
        net,
        task.seed,
        task=task.predicts,
        role=role,
        training=task,
        augmentation=task.augmentation(),
    )


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
    engine: Engine = "loop"
    stay: Container[int] = ()
    """Clients that are needed again and again, whose data are let go after those of others."""
    _sites: OrderedDict[int, Site] = field(default_factory=OrderedDict)
    _held: int = 0
    """Bytes of the sites, about."""
    _text: str = ""
    """The task that the sites are of."""
    _stacked: StackedData = field(default_factory=StackedData)
    _graphs: Graphs = field(default_factory=Graphs)
    _shelves: dict[tuple[str, str], Shelf] = field(default_factory=dict)
    """What the clients of stacks keep, by record and form."""

    def site(self, text: str, task: Task, number: int) -> Site:
        """Client number `number` of the task. Raises `UserError`.

        Its data are loaded once per process; again only if others have been needed since, more than `RESIDENT` of
        them and with more than `RESIDENT_BYTES`.
        """
        if self._text != text:
            must_fit(task.model, task.scenario.input_shape, task.predicts.outputs)
            samples_must_fit(task.scenario.drawn_samples, task.scenario.input_shape)
            client_class(type(task.method))
            self._sites.clear()  # what the last run needed is let go
            self._held = 0
            self._stacked.clear()
            self._graphs.clear()
            self._text = text
        if number not in self._sites:
            self._sites[number] = self._load(task, number)
            self._held += _size(self._sites[number])
            while len(self._sites) > RESIDENT and self._held > RESIDENT_BYTES:
                oldest = next(iter(self._sites))
                others = (own for own in self._sites if own not in self.stay and own != number)
                self._held -= _size(self._sites.pop(next(others, oldest)))
        self._sites.move_to_end(number)
        return self._sites[number]

    def _load(self, task: Task, number: int) -> Site:
        """A client with its data, read anew. Raises `UserError`."""
        data = site_data(task, number, self.own, self.data_root).to(self.device)
        key = task.model, task.scenario.input_shape, task.predicts.outputs
        net = network(*key, self.device, task.precision == "bf16")
        return site_of(task, task.scenario.client_ids[number], data, net)

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
                self._held = 0
        site = self.site(request.task, task, number)
        if action == "query":
            trains = site.role == "trains" and len(site.data.train)
            count = {NUM_EXAMPLES: len(site.data.train)} if trains else {}
            frozen = {FROZEN: own} if (own := site.network.frozen_digest) else {}
            reply = Reply(metrics=count, settings={CLIENT: site.client, **frozen})
        elif action in ACTIONS:
            participant = Participant(f"{request.run}/{site.client}", self._vault)
            received = self._received(message.content, request, task)
            reply = Reply(participant.answer(action, received), {NUM_EXAMPLES: len(site.data.train)})
        elif action != "evaluate" and site.role != "trains":
            raise ValueError(f"{site.client} trains nothing in this run, and {action[:80]!r} is asked for")
        elif action in task.method.actions:
            received = self._received(message.content, request, task)
            work = self._work(request, action, task, site, received, digest(name_of(message)))
            before = {name: self._own(tensors) for name, tensors in work.before.items()}
            reply = self._act(replace(work, before=before))
        else:
            raise ValueError(
                f"{task.method.name} has no action {action[:80]!r}, only {', '.join(task.method.actions)}"
            )
        return Message(content_of(reply.arrays, reply.metrics, reply.settings), reply_to=message)

    def ahead(self, requests: Requests, numbers: Sequence[int]) -> Iterator[StackReply | int]:
        """The replies of clients with these numbers, stack by stack; of a request that `handle` must answer its
        place.

        Nothing is raised: where a stack fails, each of its clients does its own work, and the one that fails is
        known. What a stack's clients keep is stored once all of it has succeeded.
        """
        for places in evenly(range(len(requests)), self._window(requests)):
            alone = set(places)
            for stack in self._stacks(requests, numbers, places):
                nodes = [requests.asked[place][0] for place, _ in stack]
                if reply := self._together([work for _, work in stack], nodes):
                    alone.difference_update(place for place, _ in stack)
                    yield reply
            yield from sorted(alone)

    def _window(self, requests: Requests) -> int:
        try:
            return window(parse_task(checked(requests[0]).task), self.device) if len(requests) > 1 else 1
        except (UserError, ValueError):
            return 1

    def _stacks(
        self, requests: Requests, numbers: Sequence[int], places: Sequence[int]
    ) -> Iterator[list[tuple[int, Work]]]:
        """The works of stacks with the places of their requests."""
        alike: dict[Hashable, list[tuple[int, Work]]] = {}
        asked: dict[int, tuple[type[Client[Any]] | None, Request, Task, Received, str]] = {}
        """Which half does what has been asked for, if it can for a stack, by the records of the request."""
        action = requests.action
        for place in places if len(places) > 1 else ():
            try:
                _, arrays = requests.asked[place]
                if id(arrays) not in asked:
                    message = requests[place]
                    request = checked(message)
                    task = parse_task(request.task)
                    received = self._received(message.content, request, task)
                    found = client_class(type(task.method))
                    # Each augmented picture has its own draws.
                    alone = not task.model.stacks or ((task.augment or task.mix) and action != "evaluate")
                    able = None if alone or not stackable(found, action, arrays) else found
                    asked[id(arrays)] = able, request, task, received, asked_form(request, action, received)
                half, request, task, received, form = asked[id(arrays)]
                if half:
                    site = self.site(request.task, task, numbers[place])
                    # Who adapts trains, whatever it is asked for.
                    if site.role == "adapts" or not half.can_stack(site.network):
                        continue
                    work = self._work(request, action, task, site, received, form=form)
                    alike.setdefault(shape(work, half), []).append((place, work))
            except Exception:  # this client's own trouble, which it has again where it is asked alone
                continue
        for works in alike.values():
            yield from stacks(works, self.engine)

    def _together(self, works: Sequence[Work], nodes: Sequence[int]) -> StackReply | None:
        """The reply of a stack's clients; none where it has failed."""
        half = client_class(type(works[0].task.method))
        try:
            with products(works[0].task.tf32):
                reply, kept = answers(half, works, self._stacked.train(works), self._graphs)
            found = stack_reply(reply, nodes)
            self._store_stack(works, kept)
        except (Exception, SystemExit) as error:
            doing = f"{len(works)} clients do {works[0].action} one by one"
            log(WARNING, "perennial: %s, since as a stack it failed: %r", doing, error)
            return None
        return found

    def _store_stack(self, works: Sequence[Work], kept: Mapping[str, Tensors]) -> None:
        """As `_store`, of a stack's clients; `kept` as `answers` gives it."""
        new = {name: whole(tensors, len(works)) for name, tensors in kept.items() if tensors}
        must_be_records(new, f"the client half of {works[0].task.method.name!r}: self.kept")
        rows: dict[str, Sequence[Any]] = {}
        for name, tensors in new.items():
            like = {own: tensor[0] for own, tensor in tensors.items()}
            shelf = self._shelves.setdefault((name, form_of(like)), Shelf(like))
            rows[name] = shelf.put(tensors, len(works))
        if not kept and not works[0].before and works[0].action != "evaluate":
            return
        for place, work in enumerate(works):
            after: Kept = {name: rows[name][place] if name in rows else work.before[name] for name in kept}
            if rows or after.keys() != work.before.keys():
                self._add_version(work, after)
            self._done(work)

    def _work(
        self,
        request: Request,
        action: str,
        task: Task,
        site: Site,
        received: Received,
        made_by: str = "",
        form: str = "",
    ) -> Work:
        place = f"{request.run}/{site.client}"
        kept = self.states.get(place)
        versions = before_message(valid(kept, request.resumed), made_by) if kept else []
        if versions and versions[-1].round > request.round:
            # A run that goes back says so with `resumed`. An older version would undo the newer ones.
            newest_round = versions[-1].round
            raise ValueError(f"the request is of round {request.round}, and this site has done {newest_round}")
        before = versions[-1].kept if versions else {}
        return Work(request, action, task, site, received, place, versions, made_by, before, form)

    def _received(self, content: RecordDict, request: Request, task: Task) -> Received:
        arrays = {name: self._here(from_record(record)) for name, record in records(content, ArrayRecord).items()}
        references: list[Tensors] = []
        while (name := reference(len(references))) in arrays:
            references.append(arrays.pop(name))
        if KEYS in arrays and (strangers := arrays[KEYS].keys() - set(task.scenario.client_ids)):
            raise ValueError(f"the request has a key of {min(strangers)[:80]!r}, which is no client of the run")
        return Received(request.round, arrays, request.settings, references)

    def _act(self, work: Work) -> Reply:
        given = [(f"received[{name!r}]", dict(tensors)) for name, tensors in work.received.arrays.items()]
        given += [(f"self.kept[{name!r}]", tensors) for name, tensors in work.before.items()]
        before = [change_marks(tensors) for _, tensors in given]
        try:
            client = client_half(work.task, work.site, work.before)
            with work.site.drawing(work.received.round, work.action), products(work.task.tf32):
                reply = client.answer(work.action, work.received)
        except SystemExit as error:  # which would end more than this client's work
            raise RuntimeError(f"the client half called sys.exit({error.code!r})") from error
        for (what, tensors), then in zip(given, before, strict=True):
            if change_marks(tensors) != then:  # in the local runtime the server's, or an older version's
                half = f"the client half of {work.task.method.name!r}"
                raise UserError(
                    f"{half} changes {what} in place in {work.action!r}; make a new record of new tensors"
                )
        if TERMS in work.received.arrays:
            participant = Participant(work.place, self._vault)
            own, sums, metrics = _terms(work, reply)
            masked = participant.masked(work.received, own, sums, work.action)
            reply = replace(reply, arrays=masked, metrics=metrics)
        self._store(work, client.kept)
        if work.action == "evaluate" and isinstance(self.states, FileStates):
            results = results_of(reply, work.task.predicts)
            snapshot = Snapshot(
                work.request.task, work.site.client, self.data_root, work.received, client.kept, self.own,
                work.request.run, results,
            )  # fmt: skip
            snapshot.save(self.states.folder / work.place)
        return reply

    def _store(self, work: Work, after: Kept) -> None:
        """What a client keeps, once its work has succeeded."""
        before = work.before
        if after.keys() != before.keys() or any(after[name] is not before[name] for name in after):
            changed = {name: tensors for name, tensors in after.items() if tensors is not before.get(name)}
            where = f"the client half of {work.task.method.name!r}: self.kept"
            must_be_records(changed, where)
            empty = [name for name, tensors in changed.items() if not tensors]
            if empty and plugins.of(type(work.task.method)):  # ours do without what no file has
                raise UserError(f"{where}: {empty[0]!r} holds nothing; keep a tensor in it, or leave it out")
            self._add_version(work, after)
        self._done(work)

    def _add_version(self, work: Work, after: Kept) -> None:
        request, versions = work.request, work.versions
        part = versions[-1].part + 1 if versions and versions[-1].round == request.round else 0
        newest = Version(request.round, len(request.resumed), after, part, work.made_by)
        self.states[work.place] = needed([*versions, newest], request.checkpoints)

    def _done(self, work: Work) -> None:
        if work.action == "evaluate" and TERMS not in work.received.arrays:
            self._vault.forget(work.place)  # of a round that went on without this client

    @cached_property
    def _vault(self) -> Vault:
        return Vault(self.states.folder if isinstance(self.states, FileStates) else None)

    def _here(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _own(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """One client's kept tensors, which a row is not once it is free."""
        own = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return {name: tensor.clone() for name, tensor in own.items()} if isinstance(tensors, Row) else own


def _size(site: Site) -> int:
    """Bytes of a client's data, about, with what its Python objects take."""
    data = site.data
    parts = [data.train, data.validation, *data.test.values()]
    return 2**14 + sum(tensor.nbytes for part in parts for tensor in (part.x, part.y, part.environment))


def _terms(work: Work, reply: Reply) -> tuple[Mapping[str, Tensors], Sequence[Sum], Mapping[str, Any]]:
    """The records of a reply that leave as parts of sums, which these are, and the metrics beside them."""
    scenario, method = work.task.scenario, work.task.method
    if work.action == "evaluate":
        own, metrics = split_off(reply.metrics, method.evaluates, place_of(scenario))
        return own, SUMS, metrics
    numbers = {name: float(v) for name, v in reply.metrics.items() if isinstance(v, (int, float))}
    return method.terms(reply.arrays, numbers), method.summed(), reply.metrics
