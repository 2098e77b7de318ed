"""Metrics for Prometheus, and a port of their own for them. Its client is imported once there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perennial.common.utils.addresses import Address
from perennial.common.utils.errors import UserError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Metrics in a registry of their own."""

    def __init__(self) -> None:
        import prometheus_client

        self._client = prometheus_client
        self.registry = prometheus_client.CollectorRegistry()

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A number that only grows."""
        return self._client.Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A number that goes up and down."""
        return self._client.Gauge(name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        """How many measurements are in each bucket; `buckets` are their upper ends."""
        return self._client.Histogram(name, text, labels, buckets=buckets, registry=self.registry)


def expose(registry: CollectorRegistry, address: Address) -> int:
    """Answer scrapes at `http://HOST:PORT/metrics` until the process ends; the port. Raises `UserError`."""
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise UserError(f"--metrics {address}: cannot listen there ({error.strerror or error})") from None
    port: int = server.server_port
    return port
