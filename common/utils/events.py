"""Events: one line of JSON each, in a run's own log, and with `--log-format json` on standard error."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from perennial.common.utils.errors import UserError

VARIABLE = "PERENNIAL_LOG_FORMAT"
"""Of the environment: text or json; also for the programs that a command becomes or starts."""

_log = logging.getLogger("perennial")
_log.setLevel(logging.INFO)
_log.propagate = False
_log.addHandler(logging.NullHandler())  # without another one, logging would print warnings


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "event", …}`, the time in UTC; and what is known: run, round, client, action, seconds."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        known = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        return json.dumps({**known, **getattr(record, "known", {})}, default=str)


def tell(event: str, *, level: int = logging.INFO, **known: Any) -> None:
    """An event, and what is known of it."""
    _log.log(level, "%s", event, extra={"known": known})


def is_json() -> bool:
    """Whether standard error is for machines."""
    return os.environ.get(VARIABLE) == "json"


def set_format(name: str) -> None:
    """What standard error has from now on, "text" or "json"."""
    os.environ[VARIABLE] = name
    for handler in [one for one in _log.handlers if isinstance(one, logging.StreamHandler)]:
        if not isinstance(handler, logging.FileHandler):
            _log.removeHandler(handler)
    if name == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
        _log.addHandler(handler)


class LogFile(RotatingFileHandler):
    """A file of a log, without which its program goes on: that it cannot be written is said once."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """One sentence on standard error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            sentence = f"{self.baseFilename} cannot be written: {error.strerror}; the program goes on without it"
            if is_json():
                tell(sentence, level=logging.WARNING)
            else:
                with suppress(OSError):  # standard error may be on the same disk
                    print(f"perennial: {sentence}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Also where the disk has no room for the rest."""
        with suppress(OSError):
            super().close()


@contextmanager
def logged_to(file: Path) -> Iterator[None]:
    """All events are also added to a file. Raises `UserError` where a folder has its name."""
    if file.is_dir():
        raise UserError(f"{file} is a folder, and the log goes into a file of this name; move it away")
    handler = LogFile(file, encoding="utf-8")
    handler.setFormatter(JsonFormatter())
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()
