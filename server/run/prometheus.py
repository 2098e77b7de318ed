"""What a run tells Prometheus, from the events of its own log."""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from perennial.common.tasks import HEADLINES
from perennial.common.utils.errors import printable
from perennial.common.utils.files import Tail
from perennial.common.utils.parsing import from_json

BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
OUTCOMES = ("used", "refused", "silent")


class RunMetrics:
    """Counters of a run, brought up to date whenever they are asked for: a collector for a registry.

    Whoever writes the log may be another process. Clients are named only where `clients` says so.
    """

    def __init__(self, log: Path, *, clients: bool = False) -> None:
        self._tail, self._asked = Tail(log), Event()
        self._registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"perennial_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"perennial_{name}", about, labels, registry=registry)

        about = "Time of a round: training, evaluation and checkpoint."
        self.seconds = Histogram("perennial_round_duration_seconds", about, buckets=BUCKETS, registry=registry)
        self.rounds = counter("rounds", "Rounds done.")
        self.replies = counter("replies", "Replies asked for, by what came of them.", "outcome")
        self.bytes = counter("bytes", "Tensors that went down to clients and up from them.", "direction")
        self.connected = gauge("clients_connected", "Clients in the last round.")
        self.left_out = gauge("clients_left_out", "Of them those left out in the last round.")
        self.measures = {
            name: gauge(
                name,
                f"Mean over clients of the {measure.title} in a test environment at the last evaluation.",
                *("model", "environment"),
            )
            for name, measure in HEADLINES.items()
        }
        self.round = gauge("round", "The last round.")
        self.planned = gauge("rounds_planned", "Rounds that the run takes.")
        self.running = gauge("running", "1 until the run has ended.")
        self.stopped = gauge("stopped", "1 if it ended before its last round.")
        self.last = gauge("last_round_timestamp_seconds", "When the last round was done, or the run began.")
        self.by_client = counter("client_left_out", "Replies left out.", "client") if clients else None
        for outcome in OUTCOMES:
            self.replies.labels(outcome)

    def collect(self) -> Iterable[Metric]:
        """Everything as it is now."""
        self._asked.set()
        for line in self._tail.lines():
            # Half a line, as a full disk leaves it, and the one after it; or what a server sent in place of one.
            with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
                self._add(from_json(line))
        return self._registry.collect()

    def tell_end(self, seconds: float) -> None:
        """Wait for one more question, `seconds` at most, if there ever was one: whoever asks learns of the end."""
        if self._asked.is_set():
            self._asked.clear()
            if self._asked.wait(seconds):
                time.sleep(1)  # the answer has to leave

    def _add(self, row: Mapping[str, Any]) -> None:
        event = row.get("event")
        if event == "run":
            self.planned.set(row["rounds"])
            self._done(row)
            self.running.set(1)
            self.stopped.set(0)
        elif event == "round":
            self.seconds.observe(row["seconds"])
            self.rounds.inc()
            self.round.set(row["round"])
            self.connected.set(row["connected"])
            self.left_out.set(row["left_out"])
            self._done(row)
            for outcome in OUTCOMES:
                self.replies.labels(outcome).inc(row[outcome])
            for direction in ("down", "up"):
                self.bytes.labels(direction).inc(row[f"bytes_{direction}"])
        elif event == "left out" and self.by_client:
            self.by_client.labels(printable(row["client"])).inc()
        elif event == "evaluated":
            for name in HEADLINES.keys() & row:
                for model, environments in row[name].items():
                    for environment, value in environments.items():
                        self.measures[name].labels(printable(model), printable(environment)).set(value)
        elif event in ("ended", "stopped"):
            self.running.set(0)
            self.stopped.set(event == "stopped")

    def _done(self, row: Mapping[str, Any]) -> None:
        self.last.set(datetime.fromisoformat(row["time"]).timestamp())
