"""Replies and requests with anything wrong in them, made from honest ones by hypothesis."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import strategies as st

from perennial.client.host import Host
from perennial.common.config import RunConfig
from perennial.common.flower.arrays import carried
from perennial.common.methods import METHODS
from perennial.common.wire import CONFIG, METRICS, TASK
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.strategies.evaluation import Evaluation
from perennial.strategies.exchange import AcceptedReply, Exchange
from perennial.strategies.screening import FLOAT32_MAX, Limits
from perennial.testing.bad_replies import pickles
from perennial.testing.tiny_federation import SpoilingGrid, Toy, toy_config


class Ranked(Toy):
    """The toy scenario, evaluated with areas."""

    name: Literal["toy-with-areas"] = "toy-with-areas"  # type: ignore[assignment]

    @property
    def ranking_batch(self) -> int:
        return 4


SPECIAL = {
    "fedavg+secagg": ("fedavg", "toy", "privacy.mechanism=secagg"),
    "fedavg+fixed": ("fedavg", "toy", "privacy.mechanism=fixed"),
    "fedavg+areas": ("fedavg", "toy-with-areas"),
    "fedavg+scores": ("fedavg", "toy", "scores=on"),
}
SUBJECTS = [*sorted(METHODS), *SPECIAL]
"""Every method, one in the two kinds of privacy, one with rankings, and one with counts by score."""

# ---------------------------------------------------------------------- honest exchanges


@dataclass(frozen=True)
class Asked:
    """One action of a method as the server sees it: an exchange, what it checks, an honest request and reply."""

    exchange: Exchange
    limits: Limits
    check: Callable[[AcceptedReply], object]
    request: Message
    reply: RecordDict


def subject_config(subject: str) -> RunConfig:
    """A run of two small rounds."""
    method, scenario, *settings = SPECIAL.get(subject, (subject, "toy"))
    if "local_steps" in METHODS[method].model_fields:
        settings.append("local_steps=2")
    return toy_config(method, *settings, "evaluate_every=1", rounds=2, scenario={"name": scenario, "samples": 8})


@lru_cache
def honest(subject: str, folder: Path) -> dict[str, Asked]:
    """A method's actions, from a run."""
    config = subject_config(subject)
    here, said = LocalRuntime(config), {}
    asked: dict[str, Asked] = {}

    def remember(request: Message, reply: Message) -> Message:
        if not reply.has_error():
            said[request.metadata.message_type] = (request, carried(reply.content))
        return reply

    original = Exchange._accepted

    def noted(self: Exchange, replies: Any, limits: Limits, quorum: float, check: Any = None) -> Any:
        yield from original(self, replies, limits, quorum, check)
        if self.action in said:
            asked[self.action] = Asked(self, limits, check or (lambda _: None), *said[self.action])

    here.grid = SpoilingGrid(here.grid, remember)  # type: ignore[assignment]
    Exchange._accepted = noted  # type: ignore[method-assign]
    try:
        here.run(RunFolder.create(folder / subject, config))
    finally:
        Exchange._accepted = original  # type: ignore[method-assign]
    return asked


# ---------------------------------------------------------------------- what may be wrong

INTEGERS = st.sampled_from([-1, 0, 1, 2, 7, 10**7, 10**7 + 1, 2**31, 2**62, 2**63 - 1, -(2**63)])
FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, 5e-324, -0.0, 0.5, 1.0, -1.0, 1e9, 1e30, 3.4e38, 1e308])
CRAFTED = st.sampled_from(
    [
        "<class '" + ".x'>:<'" * 20_000 + "z",
        "<class '" * 20_000,
        "<class 'a'>:<'" + "'>" * 50_000,
        "\x1b[2J\r\n" * 1000,
        "\u202e\u2028\0",
        "../" * 40,
        "9" * 5000,
        " " * 100_000,
        "",
    ]
)
TEXTS = CRAFTED | st.text(max_size=20) | st.sampled_from(["client-0", "client-1", "test", "p=0.1"])
NAMES = TEXTS.map(lambda text: text[:150]) | st.sampled_from(
    ["model", "personal", "num-examples", "personal/accuracy", "global/test/count", "a/b/c/d", "x" * 101]
)
LISTS = st.one_of(
    st.lists(INTEGERS, max_size=5),
    st.lists(FLOATS, max_size=5),
    st.sampled_from([[0] * 4096, [0.0] * 4096, [2**62] * 4096, [1] * 20_000]),
)
NUMBERS = INTEGERS | FLOATS | LISTS
VALUES = st.one_of(
    NUMBERS, TEXTS, st.lists(st.text(max_size=10), max_size=5), st.binary(max_size=20), st.booleans(),
    st.just("x" * 2_000_000), st.just(["y"] * 10_000),
)  # fmt: skip
ERRORS = st.builds(Error, st.sampled_from([0, 1, 2, 3, 4, 5, 99, -1, 2**31 - 1]), TEXTS)


def _arrays(draw: Any, content: RecordDict) -> RecordDict:
    """One tensor of one record."""
    names = [name for name, record in content.items() if isinstance(record, ArrayRecord) and record]
    if not names:
        return content
    name = draw(st.sampled_from(sorted(names)))
    arrays = dict(content[name])
    key = draw(st.sampled_from(sorted(arrays)))
    good = arrays.pop(key)
    what = draw(st.sampled_from(["drop", "add", "rename", "header", "shape", "dtype", "stype", "bytes", "values"]))
    kind = np.dtype(good.dtype if good.dtype in ("float32", "float64", "int64", "uint8") else "float32")
    short = good.shape if len(good.shape) < 5 and all(0 <= side < 100 for side in good.shape) else (2,)
    match what:
        case "add":
            arrays |= {key: good, draw(NAMES): good}
        case "rename":
            arrays[draw(NAMES)] = good
        case "header":
            at, noise = draw(st.integers(0, 128)), draw(st.binary(max_size=40))
            data = good.data[:at] + noise + good.data[at + len(noise) :]
            arrays[key] = Array(good.dtype, good.shape, good.stype, data)
        case "shape":
            shape = draw(st.lists(INTEGERS, max_size=4).map(tuple) | st.just((1,) * 1000))
            arrays[key] = Array(good.dtype, shape, good.stype, good.data)
        case "dtype":
            arrays[key] = Array(draw(st.sampled_from(["float64", "object", "O", ">f4", "<U9", ""]) | TEXTS),
                                good.shape, good.stype, good.data)  # fmt: skip
        case "stype":
            arrays[key] = Array(good.dtype, good.shape, draw(TEXTS), good.data)
        case "bytes":
            data = draw(st.binary(max_size=200) | st.sampled_from(_bytes(good)))
            arrays[key] = Array(good.dtype, good.shape, good.stype, data)
        case "values":
            number = draw(FLOATS if kind.kind == "f" else INTEGERS)
            with np.errstate(all="ignore"):
                fill = np.array(number).astype(kind)
            arrays[key] = Array(np.full(short, fill, kind))
    return RecordDict({**content, name: ArrayRecord(arrays)})


def _bytes(good: Array) -> list[bytes]:
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }"
    lies = [head % shape for shape in ("10**9,", "1000000000,", "-1,", "0,", "9" * 900 + ",", "")]
    npy = [b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() for text in lies]
    return [*npy, *pickles(Path("/nowhere")).values(), good.data[:-1], good.data + bytes(2000), b"", b"PK\x03\x04"]


def _records(draw: Any, content: RecordDict) -> RecordDict:
    """A record is missing, one too many, or of another kind."""
    records: dict[str, Any] = dict(content)
    name = draw(st.sampled_from(sorted(records)) if records else NAMES)
    match draw(st.sampled_from(["drop", "add", "kind", "empty"])):
        case "drop":
            records.pop(name, None)
        case "add":
            records[draw(NAMES)] = draw(st.sampled_from([ArrayRecord(), MetricRecord(), ConfigRecord()]))
        case "kind":
            records[name] = draw(st.sampled_from([MetricRecord({"x": 1}), ConfigRecord({"x": 1}), ArrayRecord()]))
        case "empty" if name in records:
            records[name] = type(records[name])()
    return RecordDict(records)


def _numbers(draw: Any, content: RecordDict) -> RecordDict:
    """A metric is another, or one too many."""
    metrics = content.get(METRICS)
    metrics = dict(metrics) if isinstance(metrics, MetricRecord) else {}
    name = draw(st.sampled_from(sorted(metrics)) if metrics else NAMES)
    match draw(st.sampled_from(["drop", "value", "value", "element", "add", "many", "endless"])):
        case "drop":
            metrics.pop(name, None)
        case "value":
            metrics[name] = draw(NUMBERS)
        case "element" if isinstance(metrics.get(name), list) and metrics[name]:
            values = list(metrics[name])  # type: ignore[arg-type]
            at = draw(st.integers(0, len(values) - 1))
            values[at] = type(values[0])(draw(INTEGERS if isinstance(values[0], int) else FLOATS))
            metrics[name] = values
        case "add":
            metrics[draw(NAMES)] = draw(NUMBERS)
        case "many":
            metrics |= {f"m{number}": number for number in range(draw(st.sampled_from([10, 99, 101, 1000])))}
        case "endless":
            metrics[name] = [0.5] * 300_000
    return RecordDict({**content, METRICS: MetricRecord(metrics)})


def _settings(draw: Any, content: RecordDict) -> RecordDict:
    """A setting is another, or one too many."""
    found = content.get(CONFIG)
    settings: dict[str, Any] = dict(found) if isinstance(found, ConfigRecord) else {}
    name = draw(st.sampled_from(sorted(settings)) if settings else NAMES)
    match draw(st.sampled_from(["drop", "value", "value", "add", "many"])):
        case "drop":
            settings.pop(name, None)
        case "value":
            settings[name] = draw(VALUES)
        case "add":
            settings[draw(NAMES)] = draw(VALUES)
        case "many":
            settings |= {f"s{number}": number for number in range(draw(st.sampled_from([10, 99, 101, 1000])))}
    return RecordDict({**content, CONFIG: ConfigRecord(settings)})


def _task(draw: Any, content: RecordDict) -> RecordDict:
    """One value somewhere in a request's task is another."""
    config = content.get(CONFIG)
    if not isinstance(config, ConfigRecord) or not isinstance(text := config.get(TASK), str):
        return content
    try:
        task = json.loads(text)
    except (ValueError, RecursionError):
        return content
    place: Any = task
    while isinstance(place, dict) and place:
        key = draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or draw(st.integers(0, 3)) == 0:
            nested: Any = json.loads("[" * 900 + "]" * 900)
            place[key] = draw(INTEGERS | TEXTS | st.sampled_from([None, [], {}, [2**62], 0.5, nested, ["../x"]]))
            break
        place = place[key]
    return RecordDict({**content, CONFIG: ConfigRecord({**config, TASK: json.dumps(task)})})


@st.composite
def hostile_reply(draw: Any, content: RecordDict) -> RecordDict | Error:
    """An honest reply with one to three things wrong in it, or an error."""
    if draw(st.integers(0, 9)) == 0:
        return draw(ERRORS)
    for _ in range(draw(st.integers(1, 3))):
        content = draw(st.sampled_from([_arrays, _arrays, _records, _numbers, _settings]))(draw, content)
    return content


@st.composite
def hostile_request(draw: Any, content: RecordDict) -> RecordDict:
    """An honest request with one to three things wrong in it."""
    for _ in range(draw(st.integers(1, 3))):
        content = draw(st.sampled_from([_arrays, _records, _settings, _settings, _task]))(draw, content)
    return content


# ---------------------------------------------------------------------- what must come of it


def judge_reply(asked: Asked, content: RecordDict | Error) -> bool:
    """Whether a reply is used. Fails unless it is used and harmless, or left out with one short line."""
    node, known = asked.request.metadata.dst_node_id, asked.exchange
    exchange = Exchange(known.action, known.round, {node: known.clients[node]}, known.expect, known.optional)
    found = Evaluation(asked.limits.run, 1)
    check = found.add if known.action == "evaluate" else asked.check
    reply = Message(content, reply_to=asked.request)
    used = list(exchange.accepted([reply], asked.limits, 0.0, check))
    assert len(used) + len(exchange.left_out) == 1
    for reason in exchange.left_out.values():
        assert reason.isprintable()
        assert 0 < len(reason) < 310
    for accepted in used:
        for tensors in accepted.arrays.values():
            assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
        for value in accepted.metrics.values():
            assert all(abs(number) <= FLOAT32_MAX for number in (value if isinstance(value, list) else [value]))
    json.dumps(found.rows(), allow_nan=False)
    assert all(0 <= accuracy <= 1 for accuracy in found.test_means().values())
    return bool(used)


def files(folder: Path) -> dict[str, bytes]:
    """What lies below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def judge_request(host: Host, home: Path, request: Message, content: RecordDict) -> bool:
    """Whether a request is answered. Fails unless it leaves everything outside its run's folder as it was, and
    everything at all if it is not answered."""
    before, metadata = files(home), request.metadata
    message = Message(content, metadata.dst_node_id, metadata.message_type, group_id=metadata.group_id)
    answered = False
    with suppress(Exception):  # an error reply, as a SuperNode makes it
        host.handle(message, 1)
        answered = True
    after = files(home)
    if not answered:
        assert after == before
    assert all(path.startswith("state/") for path in after)
    others = {path: data for path, data in before.items() if path.startswith("state/another-run/")}
    assert others.items() <= after.items()
    return answered
