"""Metrics for Prometheus on a port of their own."""

from prometheus_client import CollectorRegistry, start_http_server

from perennial.common.utils.addresses import Address
from perennial.common.utils.errors import UserError


def expose(registry: CollectorRegistry, address: Address) -> int:
    """Answer scrapes at `http://HOST:PORT/metrics` until the process ends; the port. Raises `UserError`."""
    try:
        server, _ = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise UserError(f"--metrics {address}: cannot listen there ({error.strerror or error})") from None
    port: int = server.server_port
    return port
