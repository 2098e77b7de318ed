"""What `perennial serve` tells Prometheus."""

from perennial.client.serving.models import NAME, Catalogue
from perennial.common.tasks import HEADLINES
from perennial.common.utils.prometheus import Metrics

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
COUNTED = ("OK", "INTERNAL", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
"""Of how a request ends, what is counted from 0."""


class ServingMetrics(Metrics):
    """Counters of one server."""

    def __init__(self) -> None:
        super().__init__()
        codes = "Requests for an inference, by protocol and gRPC's name of how they ended."
        self.requests = self.counter("perennial_inference_requests_total", codes, "protocol", "code")
        times = "Time from a request's arrival to its answer, of those that were answered well."
        self.seconds = self.histogram("perennial_inference_duration_seconds", times, "protocol", buckets=BUCKETS)
        self.samples = self.counter("perennial_inference_samples_total", "Samples answered.")
        waiting = "Requests that wait for the model or are in it."
        self.waiting = self.gauge("perennial_inference_waiting", waiting)
        self.unauthenticated = self.counter("perennial_unauthenticated_total", "Calls without a valid token.")
        self.ready = self.gauge("perennial_model_ready", "1 where a model is served.", "model")
        self.round = self.gauge("perennial_model_round", "The round that is served.", "model")
        self.written = self.gauge("perennial_model_timestamp_seconds", "When that was evaluated.", "model")
        self.measures = {
            name: self.gauge(
                f"perennial_{name}",
                f"The {measure.title} at this site when it was evaluated.",
                *("model", "environment"),
            )
            for name, measure in HEADLINES.items()
        }

        for protocol in ("grpc", "http"):  # a rate sees no first failure of a counter that begins with it
            for code in COUNTED:
                self.requests.labels(protocol, code)

    def show(self, catalogue: Catalogue) -> None:
        """What is served now."""
        for gauge in self.measures.values():
            gauge.clear()
        for entry in catalogue.entries:
            name = entry.name or NAME
            self.ready.labels(name).set(entry.served is not None)
            if not (served := entry.served):
                continue
            self.round.labels(name).set(int(served.version))
            self.written.labels(name).set(served.written)
            gauge = self.measures[served.task.headline.name]
            for environment, (_, value) in served.snapshot.results.get(f"{served.headline}/test", {}).items():
                gauge.labels(name, environment).set(value)
