"""What a server says is data until it has been checked, as what a site says is at the server."""

from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message

from perennial.common import wire
from perennial.common.wire import CONFIG, LONGEST_NAME

PROTOCOL_KEYS = {wire.TASK, wire.RUN, wire.ROUND, wire.KEPT, wire.RESUMED}
LAST_ROUND = 1_000_000
"""As a run's `rounds` at most."""
MOST_ROUNDS, MOST_RECORDS, MOST_SETTINGS = 1000, 20_000, 100
MOST_BYTES = 2**21
"""Of the task and a method's settings."""


@dataclass(frozen=True)
class Request:
    """What every request says."""

    task: str
    """JSON."""
    run: str
    """The run's id, which is a folder's name at the site."""
    round: int
    checkpoints: list[int]
    """Those that the server still holds."""
    resumed: list[int]
    """After which rounds the run was taken up again."""
    settings: dict[str, wire.Scalar]
    """The method's own."""


def checked(message: Message) -> Request:
    """A message's request. Raises `ValueError` for one that no server of this project sends."""
    arrays, config = (
        wire.records(message.content, ArrayRecord),
        wire.records(message.content, ConfigRecord).get(CONFIG),
    )
    config = config or ConfigRecord()
    if missing := PROTOCOL_KEYS - config.keys():
        raise ValueError(f"the request's record {CONFIG!r} lacks {', '.join(sorted(missing))}")
    if len(arrays) > MOST_RECORDS or len(config) - len(PROTOCOL_KEYS) > MOST_SETTINGS:
        raise ValueError(f"the request has more than {MOST_RECORDS} records or {MOST_SETTINGS} settings")
    for name in (*arrays, *config):
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise ValueError(f"the request's {name[:LONGEST_NAME]!r} is no name of at most {LONGEST_NAME} letters")
    task, run = config[wire.TASK], config[wire.RUN]
    if not isinstance(task, str) or wire.record_bytes(config) > MOST_BYTES:
        raise ValueError(f"the request's task is no text, or with the settings more than {MOST_BYTES} bytes")
    if not isinstance(run, str) or not wire.RUN_ID.fullmatch(run):
        raise ValueError(f"the request's run id {run!r:.80} is no name for a folder")
    kept, resumed = (_rounds(key, config[key]) for key in (wire.KEPT, wire.RESUMED))
    (number,) = _rounds(wire.ROUND, [config[wire.ROUND]])
    settings: dict[str, Any] = {key: value for key, value in config.items() if key not in PROTOCOL_KEYS}
    for key, value in settings.items():
        if any(isinstance(item, bytes) for item in (value if isinstance(value, list) else [value])):
            raise ValueError(f"the request's setting {key!r} has bytes in place of numbers or text")
    return Request(task, run, number, kept, resumed, settings)


def _rounds(key: str, values: object) -> list[int]:
    """A list of rounds. Raises `ValueError`."""
    if not isinstance(values, list) or len(values) > MOST_ROUNDS:
        raise ValueError(f"the request's {key!r} is no list of at most {MOST_ROUNDS} rounds")
    for value in values:
        if type(value) is not int or not 0 <= value <= LAST_ROUND:
            raise ValueError(f"the request's {key!r}: {value!r:.80} is no round from 0 to {LAST_ROUND}")
    return values
