"""Health of a program: exit code 0 when gRPC's health service at `ADDRESS` says that it serves."""

import signal
import sys

signal.alarm(15)  # on an overloaded machine, checks must not pile up

import grpc  # noqa: E402
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse  # noqa: E402
from grpc_health.v1.health_pb2_grpc import HealthStub  # noqa: E402

with grpc.insecure_channel(sys.argv[1], options=[("grpc.enable_http_proxy", 0)]) as channel:
    answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=5)
sys.exit(answer.status != HealthCheckResponse.SERVING)
