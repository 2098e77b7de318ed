"""Health of a Flower program: exit code 0 when `ADDRESS` of its `--health-server-address` says that it serves."""

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

with grpc.insecure_channel(sys.argv[1]) as channel:
    answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=3)
sys.exit(answer.status != HealthCheckResponse.SERVING)
