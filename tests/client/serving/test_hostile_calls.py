"""Whatever a caller sends over HTTP or gRPC, there is an answer or one sentence. `benchmarks/fuzz.py --calls`."""

import json
from typing import Any

import pytest
from hostile_calls import HONEST, hostile_json, hostile_message, judge_json, judge_message, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perennial.client.serving.inference import Inference

HOW = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def inference(tmp_path_factory: pytest.TempPathFactory) -> Inference:
    return serving(tmp_path_factory.mktemp("served"))


@HOW
@given(st.data())
def test_over_http(inference: Inference, data: Any) -> None:
    judge_json(inference, *data.draw(hostile_json()))


@HOW
@given(st.data())
def test_over_grpc(inference: Inference, data: Any) -> None:
    judge_message(inference, data.draw(hostile_message()))


@pytest.mark.parametrize("model", ["numbers", "rows"])
def test_honest_requests_are_answered(model: str, inference: Inference) -> None:
    assert judge_json(inference, model, json.dumps(HONEST[model]).encode(), None)
