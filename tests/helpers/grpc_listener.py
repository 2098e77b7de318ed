"""A gRPC server that only listens, with TLS or without."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc


@contextmanager
def listening(certs: Path | None = None, host: str = "127.0.0.1") -> Iterator[int]:
    """Its port; with the server certificate of a `perennial certs` folder, or in plaintext."""
    server = grpc.server(ThreadPoolExecutor(1))
    if certs:
        pair = ((certs / "server.key").read_bytes(), (certs / "server.crt").read_bytes())
        port = server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port(f"{host}:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
