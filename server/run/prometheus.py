"""What a run tells Prometheus, from the events of its own log."""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from perennial.common.utils.files import Tail

BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class RunMetrics:
    """Counters of a run, brought up to date whenever they are asked for: a collector for a registry.

    Whoever writes the log may be another process. Clients are named only where `clients` says so.
    """

    def __init__(self, log: Path, *, clients: bool = False) -> None:
        self._tail, self._clients, self._asked = Tail(log), clients, Event()
        self._registry = registry = CollectorRegistry()
        self.seconds = Histogram(
            "perennial_round_duration_seconds",
            "Time of a round: training, evaluation and checkpoint.",
            buckets=BUCKETS,
            registry=registry,
        )
        self.rounds = Counter("perennial_rounds", "Rounds done.", registry=registry)
        self.replies = Counter(
            "perennial_replies", "Replies asked for, by what came of them.", ["outcome"], registry=registry
        )
        self.bytes = Counter(
            "perennial_bytes",
            "Tensors that went down to clients and up from them.",
            ["direction"],
            registry=registry,
        )
        self.connected = Gauge("perennial_clients_connected", "Clients in the last round.", registry=registry)
        self.left_out = Gauge(
            "perennial_clients_left_out", "Of them those left out in the last round.", registry=registry
        )
        self.accuracy = Gauge(
            "perennial_accuracy",
            "Mean over clients of the accuracy in a test environment at the last evaluation.",
            ["model", "environment"],
            registry=registry,
        )
        self.round = Gauge("perennial_round", "The last round.", registry=registry)
        self.planned = Gauge("perennial_rounds_planned", "Rounds that the run takes.", registry=registry)
        self.running = Gauge("perennial_running", "1 until the run has ended.", registry=registry)
        self.stopped = Gauge("perennial_stopped", "1 if it ended before its last round.", registry=registry)
        self.last = Gauge(
            "perennial_last_round_timestamp_seconds",
            "When the last round was done, or the run began.",
            registry=registry,
        )
        self.by_client = (
            Counter("perennial_client_left_out", "Replies left out.", ["client"], registry=registry)
            if clients
            else None
        )
        for outcome in ("used", "refused", "silent"):
            self.replies.labels(outcome)

    def collect(self) -> Iterable[Metric]:
        """Everything as it is now."""
        self._asked.set()
        for line in self._tail.lines():
            # Half a line, as a full disk leaves it, and the one after it; or what a server sent in place of one.
            with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                self._add(json.loads(line))
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
            for outcome in ("used", "refused", "silent"):
                self.replies.labels(outcome).inc(row[outcome])
            for direction in ("down", "up"):
                self.bytes.labels(direction).inc(row[f"bytes_{direction}"])
        elif event == "left out" and self.by_client:
            self.by_client.labels(row["client"]).inc()
        elif event == "evaluated":
            for model, environments in row["accuracy"].items():
                for environment, value in environments.items():
                    self.accuracy.labels(model, environment).set(value)
        elif event in ("ended", "stopped"):
            self.running.set(0)
            self.stopped.set(event == "stopped")

    def _done(self, row: Mapping[str, Any]) -> None:
        self.last.set(datetime.fromisoformat(row["time"]).timestamp())
