"""The Control API of a SuperLink (gRPC), which the `flwr` command line speaks: runs, nodes, and a run's events."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import grpc
from flwr.common.serde import run_from_proto
from flwr.proto import control_pb2
from flwr.proto.control_pb2_grpc import ControlStub
from flwr.proto.runtime_pb2 import PushTaskEventsRequest
from flwr.proto.task_pb2 import TaskEvent
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes as key_bytes

from perennial.common.flower.names import Run

__all__ = ["EventStream", "TaskEvent", "ask", "channel", "key_bytes", "push_event", "runs_in", "status_of"]


def channel(address: str, insecure: bool, certificates: bytes | None) -> grpc.Channel:
    """A channel to the Control API at `HOST:PORT`; `certificates` are the root ones, as PEM."""
    asked = RuntimeVersionClientInterceptor(component_name="perennial")
    return create_channel(address, insecure, certificates, interceptors=[asked])


def ask(channel: grpc.Channel, method: str, seconds: float, **fields: Any) -> Any:
    """The answer to a call, such as `ListRuns` with `run_id=1`. Raises `grpc.RpcError`."""
    request = getattr(control_pb2, f"{method}Request")(**fields)
    return getattr(ControlStub(channel), method)(request, timeout=seconds)


def runs_in(answer: Any) -> Sequence[Run]:
    """The runs in an answer to `ListRuns`."""
    return [run_from_proto(run) for run in answer.run_dict.values()]


def status_of(run: Run) -> str:
    """Flower's word on a run, e.g. `running` or `finished:completed`."""
    return ":".join(filter(None, (run.status.status, run.status.sub_status)))


class EventStream:
    """The events of a run, as they come.

    The stub is made at once: one that is made while its channel is closed ends the process.
    """

    def __init__(self, channel: grpc.Channel, run_id: int) -> None:
        self._stub, self._run_id = ControlStub(channel), run_id

    def after(self, number: int) -> Iterator[TaskEvent]:
        """Those after the one of a number, until the run has ended. Raises `grpc.RpcError`."""
        request = control_pb2.StreamRunEventsRequest(run_id=self._run_id, after_task_event_id=number)
        for found in self._stub.StreamRunEvents(request):
            yield cast(TaskEvent, found.task_event)


def push_event(stub: Any, name: str, data: str) -> None:
    """Add an event to the run of a ServerApp, whose Runtime API stub this is."""
    stub.PushTaskEvents(PushTaskEventsRequest(events=[TaskEvent(event=name, data=data)]))
