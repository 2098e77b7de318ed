"""What `perennial serve` tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from perennial.client.serving.models import NAME, Catalogue

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
COUNTED = ("OK", "INTERNAL", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
"""Of how a request ends, what is counted from 0."""


class ServingMetrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "perennial_inference_requests_total",
            "Requests for an inference, by protocol and gRPC's name of how they ended.",
            ["protocol", "code"],
            registry=registry,
        )
        self.seconds = Histogram(
            "perennial_inference_duration_seconds",
            "Time from a request's arrival to its answer, of those that were answered well.",
            ["protocol"],
            buckets=BUCKETS,
            registry=registry,
        )
        self.samples = Counter("perennial_inference_samples_total", "Samples answered.", registry=registry)
        self.waiting = Gauge(
            "perennial_inference_waiting", "Requests that wait for the model or are in it.", registry=registry
        )
        self.unauthenticated = Counter(
            "perennial_unauthenticated_total", "Calls without a valid token.", registry=registry
        )
        self.ready = Gauge("perennial_model_ready", "1 where a model is served.", ["model"], registry=registry)
        self.round = Gauge("perennial_model_round", "The round that is served.", ["model"], registry=registry)
        self.written = Gauge(
            "perennial_model_timestamp_seconds", "When that was evaluated.", ["model"], registry=registry
        )
        self.accuracy = Gauge(
            "perennial_accuracy",
            "Accuracy at this site when it was evaluated.",
            ["model", "environment"],
            registry=registry,
        )

        for protocol in ("grpc", "http"):  # a rate sees no first failure of a counter that begins with it
            for code in COUNTED:
                self.requests.labels(protocol, code)

    def show(self, catalogue: Catalogue) -> None:
        """What is served now."""
        self.accuracy.clear()
        for entry in catalogue.entries:
            name = entry.name or NAME
            self.ready.labels(name).set(entry.served is not None)
            if not (served := entry.served):
                continue
            self.round.labels(name).set(int(served.version))
            self.written.labels(name).set(served.written)
            for environment, (count, right) in served.snapshot.results.get(f"{served.headline}/test", {}).items():
                self.accuracy.labels(name, environment).set(right / count)
