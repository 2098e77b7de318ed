"""A site's models over the Open Inference Protocol (gRPC), for Triton's, KServe's and other clients of it.

What is served is what was evaluated last: `client.host.Host` writes a `Snapshot` at every evaluation, and here the
method's client half makes its models from the newest one, through the same code.
"""

import asyncio
import signal
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import islice
from math import prod
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn, TypeVar

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from torch import Tensor

from client.host import client_half, pick_device, site_data
from client.serving.inference_pb2 import (
    InferTensorContents,
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
from client.serving.snapshot import FILE, Snapshot
from client.trainer import Predictor, Site, in_pieces
from common.config import parse_task
from common.data.examples import ClientData
from common.data.scenario import Scenario
from common.errors import UserError
from common.models import Network
from common.suggest import unknown

NAME = "perennial"
"""The model of this name is the method's headline one; each also has its own name, e.g. "personal"."""
INPUT = "input"
PROBABILITIES, CLASS, LABEL = "probabilities", "class", "label"
CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}
"""The field of `InferTensorContents` that holds values of a datatype."""
UNSUPPORTED = {"classification", "shared_memory_region"}
"""Parameters of Triton's extensions that change what an input or output means."""

INFER = "/inference.GRPCInferenceService/ModelInfer"
LARGEST_REQUEST = 256 * 2**20
SMALL = 64 * 2**10
"""Bytes: of a request other than `ModelInfer`, and of all but the values in one that is."""
MOST_FIELDS = 64
"""Of a request, and of each message in it; a client of the protocol sends about ten."""
WAITING = 64
"""Requests that wait for the model; what comes beyond them is refused."""
PIECE = 2**16
"""Values that become an array at once, without a moment for other callers."""
LONGEST_NAME, MOST_SHOWN = 64, 8
"""What a sentence quotes of a request: letters of a name, items of a list."""
AGE, GRACE = 600.0, 60.0
"""Seconds after which a connection is closed to new calls, and to those that have not ended."""
POLL, RETRY = 1.0, 30.0
"""Seconds between two looks for a newer snapshot, and between two attempts to load one that failed."""

T = TypeVar("T")
Say = Callable[[str], object]
"""Tells the operator a sentence."""
Values = np.ndarray[Any, Any] | list[bytes]


# ---------------------------------------------------------------------- from a snapshot to its models


class OnDemand(ClientData):
    """A client's data, read when a method first asks for them; most make their models without."""

    def __init__(self, read: Callable[[], ClientData]) -> None:
        self.__dict__["_read"] = cache(read)  # frozen, as all `ClientData`

    def __getattr__(self, part: str) -> Any:
        return getattr(self._read(), part)


@dataclass(frozen=True)
class Served:
    """The models of one snapshot."""

    models: Mapping[str, Predictor]
    scenario: Scenario
    version: str
    """The round in which they were evaluated."""
    device: torch.device

    def logits(self, name: str, x: Tensor) -> Tensor:
        """Logits (n, classes) of samples (n, *input_shape) in the units of the site's data, on the CPU.

        Not for two threads at once: the models may share a network.
        """
        return in_pieces(self.models[name], self.scenario.prepare(x).to(self.device)).cpu()

    def check(self) -> None:
        """Raises `ValueError` unless each model says something finite of every class."""
        sample = torch.zeros(1, *self.scenario.input_shape)
        for name in self.models:
            logits = self.logits(name, sample)
            if logits.shape != (1, self.scenario.classes) or not logits.isfinite().all():
                raise ValueError(f"model {name!r} does not give {self.scenario.classes} finite logits")


def newest(folder: Path, run: str | None, client: str | None) -> Path | None:
    """The newest snapshot below a state folder, of a run and a client where they are named.

    Raises `UserError` where several clients have one and none is named.
    """
    found = [
        path
        for path in folder.glob(f"*/*/{FILE}")
        if run in (None, path.parent.parent.name) and client in (None, path.parent.name)
    ]
    clients = sorted({path.parent.name for path in found})
    if len(clients) > 1:
        raise UserError(
            f"{folder} has models of {len(clients)} clients; choose with --client: {', '.join(clients)}"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


@torch.no_grad()
def load(path: Path, data_root: Path | None, device: torch.device) -> Served:
    """Make the models of a snapshot as the client's evaluation made them.

    Raises `UserError` where a method makes them from the site's data, which are not there, and nearly anything
    for a damaged file.
    """
    snapshot = Snapshot.load(path, device)
    task = parse_task(snapshot.task)
    scenario = task.scenario
    number, root = scenario.client_ids.index(snapshot.client), data_root or snapshot.data_root
    data = OnDemand(lambda: site_data(task, number, snapshot.own, root).to(device))
    # A network of its own: the one before goes on serving while this one may be fine-tuned.
    net = Network(task.model, scenario.input_shape, scenario.classes, device)
    site = Site(snapshot.client, data, net, task.seed)
    models = client_half(task, site, snapshot.kept).models(snapshot.received)
    models[NAME] = models[task.method.evaluates[-1]]
    served = Served(models, scenario, str(snapshot.received.round), device)
    served.check()
    return served


class Models:
    """What is served: the models of the newest snapshot that could be loaded."""

    def __init__(
        self,
        folder: Path,
        say: Say,
        *,
        run: str | None = None,
        client: str | None = None,
        data_root: Path | None = None,
        device: str = "auto",
    ) -> None:
        """Raises `UserError` for a device that cannot be used, or where a choice of clients is left open."""
        self.folder, self.run, self.client, self.data_root = folder, run, client, data_root
        self.device = pick_device(device)
        self.served: Served | None = None
        self._say, self._said = say, ""
        self._tried: tuple[object, ...] = ()
        self._again = float("inf")
        """When what has been tried is to be tried again."""
        newest(folder, run, client)

    def refresh(self) -> None:
        """Load the newest snapshot, unless that has been done; if it fails, the old models stay.

        It is tried again when the file has changed, and after `RETRY` seconds: what was amiss may be beside it,
        the site's data for one.
        """
        path = None
        try:
            path = newest(self.folder, self.run, self.client)
            if path is None:
                self._tell(f"waiting for a model below {self.folder}; {self._others()}")
                return
            status = path.stat()
            found = path, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
            if found != self._tried or time.monotonic() >= self._again:
                self._tried, self._again = found, time.monotonic() + RETRY
                self.served = load(path, self.data_root, self.device)
                self._again = float("inf")
                self._tell(
                    f"serving round {self.served.version} of {path.parent}: {', '.join(self.served.models)}"
                )
        except Exception as error:  # whatever is wrong with the new one, the old one can be served
            kept = f"still serving round {self.served.version}" if self.served else "no model is served"
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._tell(f"{path or self.folder} cannot be served ({' '.join(reason.split())}); {kept}")

    def _others(self) -> str:
        places = sorted(
            path.parent.relative_to(self.folder).as_posix() for path in self.folder.glob(f"*/*/{FILE}")
        )
        there = f"there are {', '.join(places)}" if places else "there is none"
        return f"a client writes it when it evaluates ({there})"

    def _tell(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._say(sentence)


# ---------------------------------------------------------------------- the protocol


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """Why a request has no other answer: gRPC's code and one sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def invalid(sentence: str) -> NoReturn:
    """Refuse a request that is wrong in itself."""
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, sentence)


@asynccontextmanager
async def refusals(context: ServicerContext) -> AsyncIterator[None]:
    """Answers with the code and the sentence of a `Refused`."""
    try:
        yield
    except Refused as refused:
        await context.abort(refused.code, str(refused))


class Service(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The protocol's six calls. Its names are the protocol's."""

    def __init__(self, models: Models, max_batch: int) -> None:
        self.models, self.max_batch = models, max_batch
        self._one_by_one = ThreadPoolExecutor(1)
        self._waiting = 0

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
        async with refusals(context):
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
        async with refusals(context):
            served = self.models.served
            largest = SMALL + 4 * self.max_batch * prod(served.scenario.input_shape) if served else LARGEST_REQUEST
            if len(data) > largest:
                invalid(f"the request has {len(data)} bytes, but {self.max_batch} samples take at most {largest}")
            if self._waiting >= WAITING:
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{WAITING} requests are waiting already; try again later"
                )
            self._waiting += 1
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._one_by_one, self._infer, data)
            finally:
                self._waiting -= 1

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


def short(text: str, most: int = LONGEST_NAME) -> str:
    """A text of the caller's as a sentence may quote it."""
    return text if len(text) <= most else text[: most - 1] + "…"


def few(items: Sequence[object]) -> str:
    """A list of the caller's as a sentence may quote it."""
    more = ["…"] * (len(items) > MOST_SHOWN)
    return f"[{', '.join([repr(item) for item in islice(items, MOST_SHOWN)] + more)}]"


def too_many_fields(data: bytes) -> bool:
    """Whether a `ModelInferRequest` on the wire is not what a client of the protocol makes.

    Parsing takes up to fifty times the bytes of a message that is all empty parts; they are counted before.
    """
    levels: list[tuple[memoryview, Mapping[int, Any]]] = [(memoryview(data), REPEATED)]
    for message, inside in levels:
        for count, (number, content) in enumerate(fields(message)):
            if count == MOST_FIELDS:
                return True
            if number in inside and content is not None:
                levels.append((content, inside[number]))
    return False


REPEATED: Mapping[int, Any] = {5: {5: {}}, 6: {}}
"""Numbers of the fields with lists in them: `inputs`, and in these `contents`; `outputs`."""


def fields(message: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Number and content of each field of a protobuf message as far as it is one; None: a number."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80 or shift > 63:
                return value

    try:
        while at < len(message):
            number, kind = divmod(varint(), 8)
            size = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, 0)
            if kind == 0:
                varint()
            yield number, message[at : at + size] if kind == 2 else None
            at += size
    except IndexError:  # cut off; whoever parses it says so
        return


def parsed(data: bytes, parse: Callable[[bytes], T]) -> T:
    """A request's message. Raises `Refused` where the bytes are none."""
    try:
        return parse(data)
    except DecodeError:
        invalid("the bytes of the request are no message of the protocol")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Looks at the length of every request before it is parsed; that of `ModelInfer` is left to the service."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if details.method == INFER:
            return grpc.unary_unary_rpc_method_handler(handler.unary_unary, None, handler.response_serializer)
        answer = handler.unary_stream or handler.unary_unary

        async def checked(data: bytes, context: ServicerContext) -> Any:
            async with refusals(context):
                if len(data) > SMALL:
                    invalid(f"the request has {len(data)} bytes, and {SMALL} are the most for this call")
                request = parsed(data, handler.request_deserializer)
            return await answer(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.unary_unary_rpc_method_handler
        )
        return make(checked, None, handler.response_serializer)


def samples(request: ModelInferRequest, input_shape: tuple[int, ...], max_batch: int) -> Tensor:
    """The samples (n, *input_shape) of a request. Raises `Refused` with a sentence for what is wrong with them."""
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT]:
        invalid(f"the inputs are {few([short(name) for name in names])}, but the model has one, {INPUT!r}")
    given = request.inputs[0]
    shape, expected = tuple(given.shape), f"[-1, {', '.join(map(str, input_shape))}]"
    if given.datatype != "FP32":
        invalid(f"input {INPUT!r} has datatype {short(given.datatype)!r}, but the model takes 'FP32'")
    if len(shape) != 1 + len(input_shape):
        hint = "; a single sample has the shape [1, ...]" if shape == input_shape else ""
        invalid(f"input {INPUT!r} has shape {few(shape)}, but the model takes {expected}{hint}")
    if shape[1:] != input_shape:
        invalid(f"input {INPUT!r} has shape {few(shape)}, but the model takes {expected}")
    if not 1 <= shape[0] <= max_batch:
        invalid(f"input {INPUT!r} has a batch of {shape[0]}, but 1 to {max_batch} samples are possible")
    typed_fields = [field.name for field, _ in given.contents.ListFields()]
    if request.raw_input_contents:
        if typed_fields or len(request.raw_input_contents) > 1:
            invalid(f"input {INPUT!r} has its values more than once; give one raw_input_contents, or contents")
        data = request.raw_input_contents[0]
        if len(data) != 4 * prod(shape):
            invalid(
                f"input {INPUT!r} has {len(data)} bytes, but shape {list(shape)} of FP32 takes {4 * prod(shape)}"
            )
        values = np.frombuffer(data, "<f4").astype(np.float32)
    else:
        if typed_fields not in ([], [CONTENTS["FP32"]]):
            invalid(f"input {INPUT!r} has its values in {', '.join(typed_fields)}, but FP32 is in fp32_contents")
        given_values = given.contents.fp32_contents
        if len(given_values) != prod(shape):
            invalid(f"input {INPUT!r} has {len(given_values)} values, but shape {list(shape)} takes {prod(shape)}")
        values = np.empty(len(given_values), np.float32)
        for start in range(0, len(values), PIECE):
            values[start : start + PIECE] = given_values[start : start + PIECE]
    if not np.isfinite(values).all():
        invalid(f"input {INPUT!r} has values that are not finite")
    return torch.from_numpy(values).reshape(shape)


def outputs_of(scenario: Scenario) -> dict[str, tuple[str, list[int]]]:
    """Datatype and shape of each output, by name."""
    described = {PROBABILITIES: ("FP32", [-1, scenario.classes]), CLASS: ("INT64", [-1])}
    return {**described, LABEL: ("BYTES", [-1])} if scenario.class_names else described


def answers(logits: Tensor, scenario: Scenario) -> dict[str, Values]:
    """Each output's values; the class is the one that an evaluation counts."""
    classes = logits.argmax(dim=1)
    labels = [scenario.class_names[number].encode() for number in classes] if scenario.class_names else []
    return {PROBABILITIES: logits.softmax(dim=1).numpy(), CLASS: classes.numpy(), LABEL: labels}


def typed(datatype: str, values: Values) -> InferTensorContents:
    """An output as typed contents, row-major."""
    contents = InferTensorContents()
    getattr(contents, CONTENTS[datatype]).extend(values if isinstance(values, list) else values.ravel().tolist())
    return contents


def encoded(values: Values) -> bytes:
    """An output as raw contents: little-endian and row-major; each of BYTES after its length in four bytes."""
    if isinstance(values, list):
        return b"".join(struct.pack("<I", len(text)) + text for text in values)
    return values.astype(values.dtype.newbyteorder("<")).tobytes()


# ---------------------------------------------------------------------- the server


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
