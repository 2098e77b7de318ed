"""Bodies of REST and gRPC that a caller of `perennial serve` may send, drawn by hypothesis; and their judge."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict
from hostile_files import VALUES, changed, hostile_bytes
from hypothesis import strategies as st

from perennial.client.serving import rest
from perennial.client.serving.inference import Inference, Limits
from perennial.client.serving.inference_pb2 import ModelInferRequest
from perennial.client.serving.messages import Refused
from perennial.client.serving.metrics import ServingMetrics
from perennial.client.serving.models import Catalogue, Choice, Models
from perennial.client.serving.server import Service
from perennial.client.snapshot import Snapshot
from perennial.client.trainer import Received
from perennial.common.config import load_config
from perennial.common.models.network import network

SCENARIOS: Mapping[str, dict[str, Any]] = {
    "numbers": {"inputs": ("age", "weight")},
    "pictures": {"inputs": (3, 16, 16)},
    "rows": {
        "inputs": ["age", "pain"],
        "columns": {
            "age": {"kind": "number", "mean": 50, "scale": 8, "fill": 48, "missing": True},
            "pain": {"kind": "category", "categories": ["none", "some"]},
        },
    },
}
MOST = 16
"""Samples of a request."""


def serving(folder: Path) -> Inference:
    """Untrained models of a table of numbers, of pictures, and of rows of numbers and names."""
    entries = []
    for name, own in SCENARIOS.items():
        scenario = {"name": "own-data", "sites": ("north",), "labels": ("no", "yes"), **own}
        config = load_config(options={"method": "fedavg", "scenario": scenario})
        net = network(config.model, config.scenario.input_shape, config.scenario.classes)
        received = Received(3, {"model": net.initial(0)})
        place = folder / name / "run" / "north"
        Snapshot(config.task(), "north", None, received, {}, None, "run", {}).save(place)
        entries.append(Models(Choice(folder / name), lambda _: None, name=name, device="cpu"))
    inference = Inference(Catalogue(entries), Limits(max_batch=MOST), ServingMetrics())
    inference.catalogue.refresh()
    assert all(entry.served for entry in entries)
    return inference


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


HONEST: Mapping[str, dict[str, Any]] = {
    "numbers": {
        "id": "1",
        "parameters": {"binary_data_output": False},
        "inputs": [_tensor("input", "FP32", [2, 2], [[3.0, 700.0], [4.0, 1.0]])],
        "outputs": [{"name": "class", "parameters": {"binary_data": False}}],
    },
    "pictures": {
        "inputs": [{**_tensor("input", "BYTES", [1], ["aGk="]), "parameters": {"content_type": "base64"}}]
    },
    "rows": {
        "inputs": [_tensor("age", "FP32", [2], [3.5, None]), _tensor("pain", "BYTES", [2], ["some", "never"])]
    },
}
DEEP = [b"[" * 100_000, b'{"inputs":' * 50_000, b'{"inputs":[{"data":' + b"[" * 199 + b"]" * 199 + b"}]}"]


@st.composite
def hostile_json(draw: st.DrawFn) -> tuple[str, bytes, str | None]:
    """A model's name, the body of a request over HTTP, and the header that says where its JSON ends."""
    model = draw(st.sampled_from(sorted(HONEST)))
    body = json.dumps(HONEST[model])
    for _ in range(draw(st.integers(0, 2))):
        body = json.dumps(changed(draw, json.loads(body)))
    data = body.encode()
    kind = draw(st.sampled_from(["json", "json", "json", "bytes", "behind", "deep", "number"]))
    if kind == "bytes":
        data = draw(hostile_bytes(data))
    elif kind == "behind":
        data += draw(st.binary(max_size=64))
    elif kind == "deep":
        data = draw(st.sampled_from(DEEP))
    elif kind == "number":
        digits = draw(
            st.sampled_from(["9" * 5000, "1e999", "-0", "1e-999", "0." + "1" * 5000, "NaN", "-Infinity"])
        )
        data = data.replace(draw(st.sampled_from([b"3.0", b'"1"', b"2", b"false", b"null"])), digits.encode())
    lengths = st.integers(0, len(data) + 1).map(str) | st.sampled_from(["", "-1", "٣", "1" * 13, "0x1"])
    header = draw(st.none() | st.none() | st.just(str(len(body))) | lengths)
    path = draw(st.just(model) | st.just(model) | st.sampled_from([str(value) for value in VALUES]))
    return path, data, header


@st.composite
def hostile_message(draw: st.DrawFn) -> bytes:
    """The bytes of a request over gRPC."""
    model = draw(st.sampled_from(sorted(HONEST)))
    found = ModelInferRequest(model_name=model)
    for tensor in HONEST[model]["inputs"]:
        field = {"FP32": "fp32Contents", "BYTES": "bytesContents"}[tensor["datatype"]]
        flat = [cell for row in tensor["data"] for cell in (row if isinstance(row, list) else [row])]
        cells = [0.0 if cell is None else cell for cell in flat]
        own = {key: tensor[key] for key in ("name", "datatype", "shape")}
        if field == "bytesContents":
            cells = ["aGk="] * len(cells)
        found.inputs.append(ParseDict({**own, "contents": {field: cells}}, ModelInferRequest.InferInputTensor()))
    data: bytes = found.SerializeToString()
    return draw(st.just(data) | hostile_bytes(data) | st.binary(max_size=200))


def judge_json(inference: Inference, path: str, body: bytes, header: str | None) -> bool:
    """Whether it was answered; if not, then refused in one sentence. Whatever else is raised is an error."""
    try:
        asked, behind = rest.parsed(body, header)
        answer, length = rest.reply(asked, inference.answer(rest.message(asked, behind, path, "")))
    except Refused as refused:
        _must_be_a_sentence(refused)
        return False
    json.loads(answer[:length])
    return True


def judge_message(inference: Inference, data: bytes) -> bool:
    """The same of a message."""
    try:
        Service(inference)._answer(data)
    except Refused as refused:
        _must_be_a_sentence(refused)
        return False
    return True


def _must_be_a_sentence(refused: Refused) -> None:
    text = str(refused)
    assert 10 < len(text) < 600, text
    assert "\n" not in text
    assert "should not happen" not in text
    text.encode()
