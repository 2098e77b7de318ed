"""What a node does with a message: from its settings to a host, which answers."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from logging import ERROR, INFO
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from perennial.client.host import Host, pick_device
from perennial.client.node.survey import is_survey, respond
from perennial.client.site_data import OwnSite
from perennial.client.state import FileStates
from perennial.common.config import parse_task
from perennial.common.data.dialect import Dialect
from perennial.common.flower.names import log
from perennial.common.survey import SHAPE
from perennial.common.utils.errors import UserError
from perennial.common.utils.tracebacks import NAME, Tracebacks
from perennial.common.wire import CLIENT, CONFIG, METRICS, NUM_EXAMPLES, REFUSED, RUN, TASK, records


def answer(
    message: Message, settings: Mapping[str, str], must_be_allowed: Callable[[], object] = lambda: None
) -> Message:
    """Answer a message at a node with these settings (`perennial.client.node.settings`). Raises `UserError`.

    A site that cannot or, by `must_be_allowed`, may not take part in a run or a survey is told so, and its first
    answer says why.
    """
    first = message.metadata.message_type in ("query", SHAPE)
    try:
        must_be_allowed()
        own = own_site(settings)
        if is_survey(message):
            return respond(message, own, settings)
        number = 0 if own else partition(settings)
        host = _host(settings["state-dir"], settings["data-root"], settings["device"], own)
        reply = host.handle(message, number)
    except UserError as error:
        if not first:
            raise
        what = "survey" if is_survey(message) else "run"
        log(ERROR, "perennial: this site takes no part in the %s: %s", what, error)
        who = ConfigRecord({CLIENT: _client(message, settings), REFUSED: error.told})
        return Message(RecordDict({CONFIG: who, METRICS: MetricRecord()}), reply_to=message)
    except OSError as error:  # a full disk, say; what the site kept before is still there
        log(ERROR, "perennial: %s: %s", error.filename, error.strerror)
        raise UserError(f"this site cannot read or write one of its files: {error.strerror or error}") from None
    except Exception as error:
        _tracebacks(settings["state-dir"]).first(error)  # stays here; the server gets kind and message
        raise
    if first:
        _say_hello(message, reply)
    return reply


def simulated(settings: Mapping[str, str], message: Message, context: Context) -> Message:
    """Answer a message as one of the nodes of Flower's simulation, which all have these settings."""
    return answer(message, {**settings, **{name: str(value) for name, value in context.node_config.items()}})


def own_site(settings: Mapping[str, str]) -> OwnSite | None:
    """The site with its own data that the settings describe; None where they name a part of a scenario.

    Raises `UserError`.
    """
    if bool(settings.get("data")) == ("partition-id" in settings):
        raise UserError("a site has either data of its own (data and name) or a partition-id")
    if "partition-id" in settings:
        return None
    if not settings.get("name"):
        raise UserError("a site with data of its own needs a name, one of those that the server announces")
    label, environment = (settings.get(key, "") for key in ("label-column", "environment-column"))
    dialect = Dialect(*(settings.get(key, "") for key in ("separator", "decimal", "encoding")))
    return OwnSite(Path(settings["data"]), settings["name"], label, environment, dialect)


def partition(settings: Mapping[str, str]) -> int:
    """The number of the scenario's client that a node is. Raises `UserError`."""
    text = settings["partition-id"]
    if not text.isdecimal():
        raise UserError(f"partition-id {text!r} is not possible; write a whole number from 0")
    return int(text)


@lru_cache
def _tracebacks(states: str) -> Tracebacks:
    return Tracebacks(Path(states) / NAME)


@lru_cache
def _host(states: str, data_root: str, device: str, own: OwnSite | None) -> Host:
    torch.set_num_threads(1)
    return Host(FileStates(Path(states)), Path(data_root) if data_root else None, pick_device(device), own)


def _client(message: Message, settings: Mapping[str, str]) -> str:
    """Who it is that cannot take part, as far as that is known."""
    if "name" in settings:
        return settings["name"]
    try:
        task = parse_task(str(records(message.content, ConfigRecord)[CONFIG][TASK]))
        return task.scenario.client_ids[partition(settings)]
    except (UserError, IndexError, KeyError):
        return ""


def _say_hello(message: Message, reply: Message) -> None:
    config = records(message.content, ConfigRecord)[CONFIG]
    task, client = parse_task(str(config[TASK])), records(reply.content, ConfigRecord)[CONFIG][CLIENT]
    samples = records(reply.content, MetricRecord)[METRICS].get(NUM_EXAMPLES)
    does = f"with {samples} training samples" if samples else "and only tests"
    what = f"{task.method.name} on {task.scenario.name}"
    log(INFO, "perennial: %s is in run %s, %s, %s", client, config[RUN], what, does)
