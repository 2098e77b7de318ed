"""A site's models over the Open Inference Protocol, for Triton's, KServe's and other clients of it.

What is served is what was evaluated last: `client.host.Host` writes a `Snapshot` at every evaluation, and here the
method's client half makes its models from the newest one, through the same code. gRPC is here, HTTP in `http.py`;
both ask `Inference`.
"""

import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import uvicorn
from grpc.aio import ServicerContext
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from perennial.client.serving import inference_pb2 as pb
from perennial.client.serving import inference_pb2_grpc as pb_grpc
from perennial.client.serving.access import Callers
from perennial.client.serving.http import CONNECTIONS, Api, Listening
from perennial.client.serving.inference import LARGEST_REQUEST, SMALL, Inference, Limits
from perennial.client.serving.intake import Intake
from perennial.client.serving.messages import Refused, T, invalid, parsed, too_many_fields
from perennial.client.serving.metrics import ServingMetrics
from perennial.client.serving.models import POLL, Catalogue
from perennial.common.utils.addresses import Address
from perennial.common.utils.errors import UserError
from perennial.common.utils.prometheus import expose
from perennial.common.utils.version import __version__

SERVICE = "/inference.GRPCInferenceService"
INFER = f"{SERVICE}/ModelInfer"
OPEN = (f"{SERVICE}/ServerLive", f"{SERVICE}/ServerReady", "/grpc.health.v1.Health/")
"""Calls that take no token."""
COMING_IN, PATIENCE = 8, 5.0
"""Of `ModelInfer`: requests that come in at a time, and seconds after which one gives way to others."""
SMALL_COMING_IN, SMALL_PATIENCE = 8, 1.0
"""The same of all other calls together, health's among them."""
AGE, GRACE = 600.0, 60.0
"""Seconds after which a connection is closed to new calls, and to those that have not ended."""


async def answered(context: ServicerContext, work: Awaitable[T]) -> T:
    """What `work` gives, or the code and the sentence of a `Refused`.

    The call is aborted when that exception is gone: it holds all that led to it, and aborting within its handler
    would make a cycle, in which a request of many megabytes lies until Python looks for cycles.
    """
    try:
        return await work
    except Refused as refused:
        code, sentence = refused.code, str(refused)
    return await context.abort(code, sentence)  # type: ignore[no-any-return]


class Service(pb_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The protocol's six calls. Its names are the protocol's."""

    def __init__(self, inference: Inference) -> None:
        self.inference = inference

    async def ServerLive(self, request: pb.ServerLiveRequest, context: ServicerContext) -> pb.ServerLiveResponse:  # noqa: N802
        """Whether there is a server."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: pb.ServerReadyRequest, context: ServicerContext
    ) -> pb.ServerReadyResponse:
        """Whether there is a model."""
        return pb.ServerReadyResponse(ready=self.inference.catalogue.ready)

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: ServicerContext
    ) -> pb.ServerMetadataResponse:
        """Name and version of the program."""
        return pb.ServerMetadataResponse(name="perennial", version=__version__)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: ServicerContext) -> pb.ModelReadyResponse:  # noqa: N802
        """Whether there is such a model; as Triton's, no error where there is none."""
        return pb.ModelReadyResponse(ready=self.inference.ready(request.name, request.version))

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: ServicerContext
    ) -> pb.ModelMetadataResponse:
        """Names, types and shapes of what goes in and comes out."""
        return self.inference.metadata(request.name, request.version)

    async def ModelInfer(self, data: bytes, context: ServicerContext) -> pb.ModelInferResponse:  # noqa: N802
        """Probabilities, class and label of each sample; raw where the request was raw."""
        size, most = len(data), self.inference.limits.max_batch
        if size > (largest := self.inference.largest()):
            invalid(f"the request has {size} bytes, but {most} samples take at most {largest}")
        return await self.inference.queued(size, lambda: self._answer(data))

    def _answer(self, data: bytes) -> pb.ModelInferResponse:
        most, texts = self.inference.fields()
        if too_many_fields(data, most, texts):
            beside = f" beside {texts} texts" if texts else ""
            invalid(f"the request, or a message in it, has more than {most} fields{beside}; send values packed")
        return self.inference.answer(parsed(data, pb.ModelInferRequest.FromString))


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for a token, lets few requests come in at a time, and looks at their lengths before they are parsed;
    that of `ModelInfer` is left to the service.

    To gRPC each request is a stream of one, for it would read any other before it asks.
    """

    def __init__(self, inference: Inference, callers: Callers, large: Intake) -> None:
        self._inference, self._callers = inference, callers
        self._large, self._small = large, Intake(SMALL_COMING_IN, SMALL_PATIENCE)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        answer = handler.unary_stream or handler.unary_unary
        is_open = details.method.startswith(OPEN)

        def let_in(context: ServicerContext) -> None:
            if not is_open:
                shown = dict(context.invocation_metadata() or ()).get("authorization")
                peer = context.peer().partition(":")[2].rpartition(":")[0]  # of ipv4:127.0.0.1:40000
                self._callers.name(shown if isinstance(shown, str) else None, peer)

        async def infer(stream: AsyncIterator[bytes], context: ServicerContext) -> Any:
            with self._inference.counted("grpc"):
                let_in(context)
                return await answer(await self._large.read(stream), context)

        async def small(stream: AsyncIterator[bytes], context: ServicerContext) -> Any:
            let_in(context)
            data = await self._small.read(stream)
            if len(data) > SMALL:
                invalid(f"the request has {len(data)} bytes, and {SMALL} are the most for this call")
            return parsed(data, handler.request_deserializer)

        async def checked(stream: AsyncIterator[bytes], context: ServicerContext) -> Any:
            if details.method == INFER:
                return await answered(context, infer(stream, context))
            return await answered(context, answer(await answered(context, small(stream, context)), context))

        make = (
            grpc.stream_stream_rpc_method_handler if handler.unary_stream else grpc.stream_unary_rpc_method_handler
        )
        return make(checked, None, handler.response_serializer)


@dataclass(frozen=True)
class Tls:
    """PEM files: the server's certificate and its key, and the CA that callers' certificates must be of."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def grpc(self) -> grpc.ServerCredentials:
        """For gRPC."""
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        ca = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def uvicorn(self) -> dict[str, Any]:
        """For uvicorn."""
        pair = {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        ca = {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED} if self.client_ca else {}
        return {**pair, **ca}


def credentials(certificate: Path | None, key: Path | None, client_ca: Path | None = None) -> Tls | None:
    """TLS; None without any file. Raises `UserError` for half of a pair, or files that are something else."""
    if (certificate is None) != (key is None):
        raise UserError("--certificate and --key-file belong together; give both or neither")
    if certificate is None or key is None:
        if client_ca:
            raise UserError("--client-ca goes with --certificate and --key-file: without TLS no caller shows any")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise UserError(
            f"{certificate} and {key} are no certificate and key in PEM form ({_reason(error)})"
        ) from None
    try:
        context.load_verify_locations(client_ca or certificate)
    except (OSError, ValueError) as error:
        raise UserError(f"--client-ca {client_ca} is no certificate in PEM form ({_reason(error)})") from None
    return Tls(certificate, key, client_ca)


def _reason(error: Exception) -> object:
    return error.strerror or error if isinstance(error, OSError) else error


class Server:
    """The gRPC server, with gRPC's own health service beside the protocol's, and where wanted HTTP's.

    All calls are answered in one thread, in which a caller who says nothing costs nothing; the model works in
    another.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        address: Address,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        http: Address | None = None,
        health: Address | None = None,
        metrics: Address | None = None,
        tls: Tls | None = None,
        callers: Callers | None = None,
    ) -> None:
        """Listens at once; port 0 is any free one. Raises `UserError` where it cannot."""
        self.catalogue, self.callers = catalogue, callers or Callers(None, print)
        self.metrics = ServingMetrics()
        self.callers.count = self.metrics.unauthenticated.inc
        self.inference = Inference(catalogue, limits, self.metrics)
        self.http_port = self.health_port = self.metrics_port = 0
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._wait(self._start(address, http, health))
            if metrics:
                self.metrics_port = expose(self.metrics.registry, metrics)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    async def _start(self, address: Address, http: Address | None, health_address: Address | None) -> None:
        options = [
            ("grpc.max_receive_message_length", LARGEST_REQUEST),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_connection_age_ms", int(1000 * AGE)),
            ("grpc.max_connection_age_grace_ms", int(1000 * GRACE)),
            ("grpc.so_reuseport", 0),  # else a second server could take half of the requests
        ]
        intake = Intake(COMING_IN, PATIENCE)
        guard = Guard(self.inference, self.callers, intake)
        self.grpc, self.health = (
            grpc.aio.server(interceptors=[guard], options=options),
            health.aio.HealthServicer(),
        )
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(Service(self.inference), self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self.port = _bind(self.grpc, address, self._tls)
        servers = [self.grpc]
        if health_address:
            servers.append(grpc.aio.server(interceptors=[guard], options=options))
            health_pb2_grpc.add_HealthServicer_to_server(self.health, servers[1])
            self.health_port = _bind(servers[1], health_address, None)
        await self._show_health()
        self._http = await self._start_http(http, intake) if http else None
        for server in servers:
            await server.start()
        self._servers = servers

    async def _start_http(self, address: Address, intake: Intake) -> tuple[uvicorn.Server, asyncio.Task[None]]:
        listener = _listener(address)
        self.http_port = listener.getsockname()[1]
        config = uvicorn.Config(
            Api(self.inference, self.callers, intake, address.loopback).app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what a caller does wrong is no event
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=5,
            **(self._tls.uvicorn() if self._tls else {}),
        )
        server = Listening(config, listener, self.inference.limits.timeout)
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        return server, task

    def refresh(self) -> None:
        """Look for newer snapshots, and for tokens."""
        self.catalogue.refresh()
        self.callers.refresh()
        self.metrics.show(self.catalogue)
        self._wait(self._show_health())

    def stop(self, grace: float | None = 5.0) -> None:
        """Take no more requests; those that are there have some seconds."""
        self._wait(self._stop(grace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()  # else gRPC, let go of at the program's end, closes a socket that the loop still reads

    async def _stop(self, grace: float | None) -> None:
        if self._http:
            server, task = self._http
            server.should_exit, server.force_exit = True, grace is None
            await task
        for one in self._servers:
            await one.stop(grace)

    async def _show_health(self) -> None:
        states = health_pb2.HealthCheckResponse
        for service in ("", "inference.GRPCInferenceService"):
            await self.health.set(service, states.SERVING if self.catalogue.ready else states.NOT_SERVING)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _bind(server: grpc.aio.Server, address: Address, tls: Tls | None) -> int:
    _listener(address).close()  # where it cannot, gRPC would write lines of its own
    try:
        place = str(address)
        port: int = server.add_secure_port(place, tls.grpc()) if tls else server.add_insecure_port(place)
    except RuntimeError:
        raise _cannot_listen(address) from None
    return port


def _listener(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family)
    except OSError:
        raise _cannot_listen(address) from None
    # asyncio does so for sockets that it makes itself; without, an answer in two pieces takes 40 ms more.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _cannot_listen(address: Address) -> UserError:
    return UserError(f"cannot listen on {address}; is the port taken, or the address not this machine's?")


def serve(server: Server) -> None:
    """Serve, and look for newer snapshots, until SIGTERM or SIGINT."""
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server.refresh()
    while not stop.wait(POLL):
        server.refresh()
    server.stop()
