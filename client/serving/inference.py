"""Answers to requests, one after another and within bounds, whatever protocol they came by."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from time import perf_counter

import grpc
import numpy as np

from perennial.client.serving import inference_pb2 as pb
from perennial.client.serving import messages
from perennial.client.serving.messages import Refused, invalid, short
from perennial.client.serving.metrics import ServingMetrics
from perennial.client.serving.models import Catalogue, Served
from perennial.common.data.columns import CategoryColumn
from perennial.common.utils.samples import vocabulary_of
from perennial.common.utils.suggestions import unknown

UNSUPPORTED = {"classification", "shared_memory_region"}
"""Parameters of Triton's extensions that change what an input or output means."""
LARGEST_REQUEST = 256 * 2**20
SMALL = 64 * 2**10
"""Bytes: of a request other than one for an inference, and of all but the values in one that is."""
PICTURES = 16 * 2**20
"""Bytes of the files in a request, where a model takes pictures."""
WAITING_BYTES = 2**30
"""Of the requests that wait for the model."""


@dataclass(frozen=True)
class Limits:
    """What a server takes on."""

    max_batch: int = 1024
    """Samples in a request."""
    max_waiting: int = 64
    """Requests that wait for the model; what comes beyond them is refused."""
    timeout: float = 30.0
    """Seconds that a caller waits for the model."""


class Inference:
    """All models, which work in one thread; the others only pass requests on."""

    def __init__(self, catalogue: Catalogue, limits: Limits, metrics: ServingMetrics) -> None:
        self.catalogue, self.limits, self.metrics = catalogue, limits, metrics
        self._one_by_one = ThreadPoolExecutor(1)
        self._waiting: list[int] = []
        """Bytes of the requests that wait for the model, or that it works on."""
        metrics.waiting.set_function(lambda: len(self._waiting))

    def find(self, name: str, wanted: str) -> tuple[Served, str]:
        """The snapshot that a model is of, and the method's name for it. Raises `Refused`."""
        found = self.catalogue.find(name)
        if found is None:
            names = self.catalogue.names()
            if not names:
                raise Refused(
                    grpc.StatusCode.UNAVAILABLE, "no model is there yet; training writes one when it evaluates"
                )
            raise Refused(grpc.StatusCode.NOT_FOUND, unknown("model", short(name), names))
        if wanted not in ("", found[0].version):
            raise Refused(
                grpc.StatusCode.NOT_FOUND,
                f"model {name!r} has version {found[0].version!r}, not {short(wanted)!r}",
            )
        return found

    def ready(self, name: str, wanted: str) -> bool:
        """Whether there is such a model; as Triton's, no error where there is none."""
        try:
            self.find(name, wanted)
        except Refused:
            return False
        return True

    def metadata(self, name: str, wanted: str) -> pb.ModelMetadataResponse:
        """Names, types and shapes of what goes in and comes out. Raises `Refused`."""
        served, _ = self.find(name, wanted)
        described = {messages.INPUT: (messages.datatype_of(served.scenario), [-1, *served.scenario.input_shape])}
        inputs, outputs = (
            [
                pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=shape)
                for name, (datatype, shape) in tensors.items()
            ]
            for tensors in (described, messages.outputs_of(served.task))
        )
        return pb.ModelMetadataResponse(
            name=name, versions=[served.version], platform="pytorch", inputs=inputs, outputs=outputs
        )

    def largest(self) -> int:
        """Bytes of the largest request that one of the models could answer."""
        scenarios = [entry.served.scenario for entry in self.catalogue.entries if entry.served]
        sizes = [
            SMALL
            + max(
                (8 if vocabulary_of(scenario.input_shape) else 4)
                * self.limits.max_batch
                * prod(scenario.input_shape),
                PICTURES * messages.has_pictures(scenario),
            )
            + (128 + self.limits.max_batch * messages.LONGEST_TEXT * bool(scenario.cells))
            * len(scenario.column_names)
            for scenario in scenarios
        ]
        return min(max(sizes, default=SMALL), LARGEST_REQUEST)

    def fields(self) -> tuple[int, int]:
        """The most fields in a message of a request, of named columns two for each, and texts beside these."""
        scenarios = [entry.served.scenario for entry in self.catalogue.entries if entry.served]
        columns = max([len(scenario.column_names) for scenario in scenarios], default=0)
        inputs = [
            sum(isinstance(column, CategoryColumn) for column in scenario.cells.values())
            + messages.has_pictures(scenario)
            for scenario in scenarios
        ]
        return messages.MOST_FIELDS + 2 * columns, self.limits.max_batch * max(inputs, default=0)

    async def queued(self, size: int, work: Callable[[], messages.T]) -> messages.T:
        """What the model's thread makes of a request of so many bytes. Raises `Refused`."""
        waiting = self._waiting
        too_long = waiting and sum(waiting) + size > WAITING_BYTES
        if too_long or len(waiting) >= self.limits.max_waiting:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(waiting)} requests with {sum(waiting)} bytes are waiting already; try again later",
            )

        def attempt() -> messages.T | Refused:
            try:
                return work()
            except Refused as refused:  # without its traceback, which would hold the request
                return Refused(refused.code, str(refused), refused.status)

        waiting.append(size)
        done = self._one_by_one.submit(attempt)
        done.add_done_callback(lambda _: waiting.remove(size))  # also if nobody waits for it any more
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(done), self.limits.timeout)
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the model has not answered within {self.limits.timeout:g} seconds; try again later",
            ) from None
        if not isinstance(found, Refused):
            return found
        try:
            raise found
        finally:
            del found, done  # no cycle of an exception and a variable

    def answer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        """What the model's task answers to each sample; raw where the request was raw. In the model's thread.

        Raises `Refused`.
        """
        served, own = self.find(request.model_name, request.model_version)
        scenario, task = served.scenario, served.task
        described = messages.outputs_of(task)
        wanted = [output.name for output in request.outputs] or list(described)
        for output in request.outputs:
            if output.name not in described:
                invalid(unknown("output", short(output.name), described))
            if wanted.count(output.name) > 1:
                invalid(f"output {output.name!r} is asked for more than once")
            if extra := UNSUPPORTED & output.parameters.keys():
                invalid(f"output {output.name!r} has the parameter {extra.pop()!r}, which is not supported")
        x = messages.samples(request, scenario, self.limits.max_batch)
        try:
            outputs = served.outputs(own, x)
        except (RuntimeError, MemoryError) as error:  # no memory left on the GPU, say
            reason = short(" ".join(str(error).split()), 200)
            raise Refused(
                grpc.StatusCode.INTERNAL, f"the model failed over this request ({type(error).__name__}: {reason})"
            ) from error
        asked = {name: _text(request.parameters[name]) for name in task.asks if name in request.parameters}
        found = messages.answers(outputs, task, asked)
        if not (outputs.isfinite().all() and np.isfinite(found[task.prediction.name]).all()):
            invalid(f"values of {messages.INPUT!r} are so large that the model's answer is not finite")
        self.metrics.samples.inc(len(outputs))
        raw = bool(request.raw_input_contents)
        return pb.ModelInferResponse(
            model_name=request.model_name,
            model_version=served.version,
            id=request.id,
            outputs=[
                pb.ModelInferResponse.InferOutputTensor(
                    name=name,
                    datatype=described[name][0],
                    shape=np.shape(found[name]),
                    contents=None if raw else messages.typed(described[name][0], found[name]),
                )
                for name in wanted
            ],
            raw_output_contents=[messages.encoded(found[name]) for name in wanted] if raw else [],
        )

    @contextmanager
    def counted(self, protocol: str) -> Iterator[None]:
        """Counts an inference, with its time and how it ended."""
        begun, code = perf_counter(), "OK"
        try:
            yield
        except Refused as refused:
            code = refused.code.name
            raise
        except BaseException:  # the caller has left, most often
            code = "CANCELLED"
            raise
        finally:
            self.metrics.requests.labels(protocol, code).inc()
            if code == "OK":
                self.metrics.seconds.labels(protocol).observe(perf_counter() - begun)


def _text(parameter: pb.InferParameter) -> str:
    """A request's parameter, of whichever type it was sent as."""
    kind = parameter.WhichOneof("parameter_choice")
    return str(getattr(parameter, kind)) if kind else ""
