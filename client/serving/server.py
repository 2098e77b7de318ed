"""A site's models over the Open Inference Protocol (gRPC), for Triton's, KServe's and other clients of it.

What is served is what was evaluated last: `client.host.Host` writes a `Snapshot` at every evaluation, and here the
method's client half makes its models from the newest one, through the same code.
"""

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from math import prod
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from client.serving.inference_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from client.serving.inference_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from client.serving.intake import Intake
from client.serving.messages import (
    INPUT,
    MOST_FIELDS,
    Refused,
    T,
    answers,
    encoded,
    invalid,
    outputs_of,
    parsed,
    samples,
    short,
    too_many_fields,
    typed,
)
from client.serving.models import POLL, Models, Served
from common.errors import UserError
from common.suggest import unknown

UNSUPPORTED = {"classification", "shared_memory_region"}
"""Parameters of Triton's extensions that change what an input or output means."""
INFER = "/inference.GRPCInferenceService/ModelInfer"
LARGEST_REQUEST = 256 * 2**20
SMALL = 64 * 2**10
"""Bytes: of a request other than `ModelInfer`, and of all but the values in one that is."""
COMING_IN, PATIENCE = 8, 5.0
"""Of `ModelInfer`: requests that come in at a time, and seconds after which one gives way to others."""
SMALL_COMING_IN, SMALL_PATIENCE = 8, 1.0
"""The same of all other calls together, health's among them."""
WAITING, WAITING_BYTES = 64, 2**30
"""Requests that wait for the model, and their bytes; what comes beyond them is refused."""
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


class Service(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The protocol's six calls. Its names are the protocol's."""

    def __init__(self, models: Models, max_batch: int) -> None:
        self.models, self.max_batch = models, max_batch
        self._one_by_one = ThreadPoolExecutor(1)
        self._waiting: list[int] = []
        """Bytes of the requests that wait for the model, or that it works on."""

    async def ServerLive(self, request: ServerLiveRequest, context: ServicerContext) -> ServerLiveResponse:  # noqa: N802
        """Whether there is a server."""
        return ServerLiveResponse(live=True)

    async def ServerReady(self, request: ServerReadyRequest, context: ServicerContext) -> ServerReadyResponse:  # noqa: N802
        """Whether there is a model."""
        return ServerReadyResponse(ready=self.models.served is not None)

    async def ServerMetadata(  # noqa: N802
        self, request: ServerMetadataRequest, context: ServicerContext
    ) -> ServerMetadataResponse:
        """Name and version of the program."""
        return ServerMetadataResponse(name="perennial", version=version("perennial"))

    async def ModelReady(self, request: ModelReadyRequest, context: ServicerContext) -> ModelReadyResponse:  # noqa: N802
        """Whether there is such a model; as Triton's, no error where there is none."""
        try:
            self._find(request.name, request.version)
        except Refused:
            return ModelReadyResponse(ready=False)
        return ModelReadyResponse(ready=True)

    async def ModelMetadata(  # noqa: N802
        self, request: ModelMetadataRequest, context: ServicerContext
    ) -> ModelMetadataResponse:
        """Names, types and shapes of what goes in and comes out."""
        served = self._find(request.name, request.version)
        return ModelMetadataResponse(
            name=request.name,
            versions=[served.version],
            platform="pytorch",
            inputs=[
                ModelMetadataResponse.TensorMetadata(
                    name=INPUT, datatype="FP32", shape=[-1, *served.scenario.input_shape]
                )
            ],
            outputs=[
                ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=shape)
                for name, (datatype, shape) in outputs_of(served.scenario).items()
            ],
        )

    async def ModelInfer(self, data: bytes, context: ServicerContext) -> ModelInferResponse:  # noqa: N802
        """Probabilities, class and label of each sample; raw where the request was raw."""
        served = self.models.served
        largest = SMALL + 4 * self.max_batch * prod(served.scenario.input_shape) if served else LARGEST_REQUEST
        if len(data) > largest:
            invalid(f"the request has {len(data)} bytes, but {self.max_batch} samples take at most {largest}")
        too_long = self._waiting and sum(self._waiting) + len(data) > WAITING_BYTES
        if too_long or len(self._waiting) >= WAITING:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(self._waiting)} requests with {sum(self._waiting)} bytes are waiting already; "
                "try again later",
            )
        self._waiting.append(len(data))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._one_by_one, self._infer, data)
        finally:
            self._waiting.remove(len(data))

    def _infer(self, data: bytes) -> ModelInferResponse:
        if too_many_fields(data):
            invalid(f"the request, or a message in it, has more than {MOST_FIELDS} fields; send values packed")
        request = parsed(data, ModelInferRequest.FromString)
        served = self._find(request.model_name, request.model_version)
        described = outputs_of(served.scenario)
        wanted = [output.name for output in request.outputs] or list(described)
        for output in request.outputs:
            if output.name not in described:
                invalid(unknown("output", short(output.name), described))
            if wanted.count(output.name) > 1:
                invalid(f"output {output.name!r} is asked for more than once")
            if extra := UNSUPPORTED & output.parameters.keys():
                invalid(f"output {output.name!r} has the parameter {extra.pop()!r}, which is not supported")
        x = samples(request, served.scenario.input_shape, self.max_batch)
        try:
            logits = served.logits(request.model_name, x)
        except (RuntimeError, MemoryError) as error:  # no memory left on the GPU, say
            reason = short(" ".join(str(error).split()), 200)
            raise Refused(
                grpc.StatusCode.INTERNAL, f"the model failed over this request ({type(error).__name__}: {reason})"
            ) from error
        if not logits.isfinite().all():
            invalid(f"values of {INPUT!r} are so large that the model's answer is not finite")
        found = answers(logits, served.scenario)
        raw = bool(request.raw_input_contents)
        return ModelInferResponse(
            model_name=request.model_name,
            model_version=served.version,
            id=request.id,
            outputs=[
                ModelInferResponse.InferOutputTensor(
                    name=name,
                    datatype=described[name][0],
                    shape=[len(logits), *described[name][1][1:]],
                    contents=None if raw else typed(described[name][0], found[name]),
                )
                for name in wanted
            ],
            raw_output_contents=[encoded(found[name]) for name in wanted] if raw else [],
        )

    def _find(self, name: str, wanted: str) -> Served:
        served = self.models.served
        if served is None:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE, "no model is there yet; training writes one when it evaluates"
            )
        if name not in served.models:
            raise Refused(grpc.StatusCode.NOT_FOUND, unknown("model", short(name), served.models))
        if wanted not in ("", served.version):
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"model {name!r} has version {served.version!r}, not {short(wanted)!r}"
            )
        return served


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets few requests come in at a time, and looks at their lengths before they are parsed; that of `ModelInfer`
    is left to the service.

    To gRPC each request is a stream of one, for it would read any other before it asks.
    """

    def __init__(self) -> None:
        self._large, self._small = Intake(COMING_IN, PATIENCE), Intake(SMALL_COMING_IN, SMALL_PATIENCE)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        answer = handler.unary_stream or handler.unary_unary
        large = details.method == INFER
        intake = self._large if large else self._small

        async def request(stream: AsyncIterator[bytes]) -> Any:
            data = await intake.read(stream)
            if large:
                return data
            if len(data) > SMALL:
                invalid(f"the request has {len(data)} bytes, and {SMALL} are the most for this call")
            return parsed(data, handler.request_deserializer)

        async def checked(stream: AsyncIterator[bytes], context: ServicerContext) -> Any:
            return await answered(context, answer(await answered(context, request(stream)), context))

        make = (
            grpc.stream_stream_rpc_method_handler if handler.unary_stream else grpc.stream_unary_rpc_method_handler
        )
        return make(checked, None, handler.response_serializer)


def credentials(certificate: Path | None, key: Path | None) -> grpc.ServerCredentials | None:
    """TLS from two PEM files; None for neither. Raises `UserError` for half of them, or what is not a pair."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UserError("--certificate and --key-file belong together; give both or neither")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
        return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise UserError(f"{certificate} and {key} are no certificate and key in PEM form ({reason})") from None


class Server:
    """The gRPC server, with gRPC's own health service beside the protocol's.

    All calls are answered in one thread, in which a caller who says nothing costs nothing; the model works in
    another.
    """

    def __init__(
        self, models: Models, host: str, port: int, *, max_batch: int, tls: grpc.ServerCredentials | None = None
    ) -> None:
        """Listens at once; port 0 is any free one. Raises `UserError` where it cannot."""
        self.models = models
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        try:
            self.port = self._wait(self._start(host, port, max_batch, tls))
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    async def _start(self, host: str, port: int, max_batch: int, tls: grpc.ServerCredentials | None) -> int:
        options = [
            ("grpc.max_receive_message_length", LARGEST_REQUEST),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_connection_age_ms", int(1000 * AGE)),
            ("grpc.max_connection_age_grace_ms", int(1000 * GRACE)),
            ("grpc.so_reuseport", 0),  # else a second server could take half of the requests
        ]
        self.grpc, self.health = (
            grpc.aio.server(interceptors=[Guard()], options=options),
            health.aio.HealthServicer(),
        )
        add_GRPCInferenceServiceServicer_to_server(Service(self.models, max_batch), self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            found: int = self.grpc.add_secure_port(address, tls) if tls else self.grpc.add_insecure_port(address)
        except RuntimeError:
            raise UserError(
                f"cannot listen on {address}; is the port taken, or the address not this machine's?"
            ) from None
        await self._show_health()
        await self.grpc.start()
        return found

    def refresh(self) -> None:
        """Look for a newer snapshot."""
        self.models.refresh()
        self._wait(self._show_health())

    def stop(self, grace: float | None = 5.0) -> None:
        """Take no more requests; those that are there have some seconds."""
        self._wait(self.grpc.stop(grace))
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _show_health(self) -> None:
        states = health_pb2.HealthCheckResponse
        for service in ("", "inference.GRPCInferenceService"):
            await self.health.set(service, states.SERVING if self.models.served else states.NOT_SERVING)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def serve(server: Server) -> None:
    """Serve, and look for newer snapshots, until SIGTERM or SIGINT."""
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server.refresh()
    while not stop.wait(POLL):
        server.refresh()
    server.stop()
