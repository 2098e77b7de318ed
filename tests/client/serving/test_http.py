"""HTTP beside gRPC: the same answers, who may call, bounds, and the page in a real browser."""

import asyncio
import base64
import http.client
import io
import json
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import tritonclient.http
from chromium import CHROMIUM, browser
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from perennial.client.serving import models as served_models
from perennial.client.serving.access import Callers, read_tokens
from perennial.client.serving.http import Api
from perennial.client.serving.inference import Limits
from perennial.client.serving.inference_pb2 import ModelInferRequest, ServerLiveRequest
from perennial.client.serving.inference_pb2_grpc import GRPCInferenceServiceStub
from perennial.client.serving.messages import Refused
from perennial.client.serving.models import Catalogue, Choice, Models, named_choice
from perennial.client.serving.rest import Request, message
from perennial.client.serving.server import Server, Tls, credentials
from perennial.client.snapshot import FILE, Snapshot, file_name, snapshots_in
from perennial.client.trainer import Received
from perennial.common.config import load_config
from perennial.common.models.network import network
from perennial.common.utils.addresses import Address
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.deployment import certs

HERE = Address("127.0.0.1", 0)
TABLE: dict[str, Any] = {"inputs": ("age", "weight"), "labels": ("young", "old"), "mean": (10, 1000)}
PICTURES: dict[str, Any] = {"inputs": (3, 16, 16), "labels": ("cat", "dog")}
MARKUP = "<img src=x onerror=alert(1)>"
ROWS = [[3.0, 700.0], [19.0, 1900.0], [11.0, 950.0]]
TOKEN = "a-token-of-twenty-letters"


def snapshot(folder: Path, round_: int = 3, seed: int = 0, run: str = "run-1", **scenario: Any) -> None:
    """What a site has evaluated: an untrained model of a table, unless said otherwise."""
    config = load_config(
        options={"method": "fedavg", "scenario": {"name": "own-data", "sites": ("north",), **(scenario or TABLE)}}
    )
    net = network(config.model, config.scenario.input_shape, config.scenario.classes)
    results = {"global/test": {"home": (20, 0.85), "away": (10, 0.4)}}
    received = Received(round_, {"model": net.initial(seed)})
    Snapshot(config.task(), "north", None, received, {}, None, run, results).save(folder / run / "north")


class Serving:
    """A server with HTTP, on a state folder or several choices."""

    def __init__(self, *entries: tuple[str, Choice], **options: Any) -> None:
        self.said: list[str] = []
        models = [Models(choice, self.said.append, name=name, device="cpu") for name, choice in entries]
        file = options.pop("token_file", None)
        callers = Callers(file, self.said.append)
        http = options.pop("http", HERE)
        self.server = Server(Catalogue(models), HERE, http=http, metrics=HERE, callers=callers, **options)
        self.server.refresh()
        self.url = str(Address(http.host, self.server.http_port))

    def ask(self, path: str, body: Any = None, token: str = "", **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        connection = http.client.HTTPConnection(self.url, timeout=60)
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text)

    def metric(self, name: str, **labels: str) -> float | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.metrics_port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        found = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
        return found[0] if found else None


@pytest.fixture
def start() -> Iterator[Callable[..., Serving]]:
    with ExitStack() as stack:

        def start_one(*entries: tuple[str, Choice], **options: Any) -> Serving:
            one = Serving(*entries, **options)
            stack.callback(lambda: one.server.stop(grace=None))
            return one

        yield start_one


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table")
    snapshot(path)
    return path


@pytest.fixture(scope="module")
def open_server(table: Path) -> Iterator[Serving]:
    """Everybody may call it, for at most 64 rows."""
    one = Serving(("", Choice(table)), limits=Limits(max_batch=64))
    yield one
    one.server.stop(grace=None)


def rows(data: Any = ROWS, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "input", "datatype": "FP32", "shape": [len(ROWS), 2], "data": data}], **more}


INFER = "/v2/models/perennial/infer"

# ---------------------------------------------------------------------- the same answers


def test_json_columns_binary_data_and_triton_s_client_get_the_same_answer(open_server: Serving) -> None:
    status, plain = open_server.ask(INFER, rows(id="7"))
    assert (status, plain["id"], plain["model_name"], plain["model_version"]) == (200, "7", "perennial", "3")
    outputs = {output["name"]: output for output in plain["outputs"]}
    assert [outputs[name]["shape"] for name in ("probabilities", "class", "label")] == [[3, 2], [3], [3]]
    expected = np.array(outputs["probabilities"]["data"], np.float32).reshape(3, 2)
    assert outputs["label"]["data"] == [("young", "old")[number] for number in outputs["class"]["data"]]
    columns = [
        {"name": name, "datatype": "FP32", "shape": shape, "data": [row[place] for row in ROWS]}
        for place, name, shape in ((1, "weight", [3, 1]), (0, "age", [3]))
    ]
    flat = [number for row in ROWS for number in row]
    for body in (rows(flat), {"inputs": columns}):
        assert open_server.ask(INFER, body)[1]["outputs"] == plain["outputs"]
    client = tritonclient.http.InferenceServerClient(open_server.url)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("perennial", "3")
    assert not client.is_model_ready("perennial", "4")
    for binary in (True, False):
        samples = tritonclient.http.InferInput("input", [3, 2], "FP32")
        samples.set_data_from_numpy(np.array(ROWS, np.float32), binary_data=binary)
        wanted = [tritonclient.http.InferRequestedOutput(name, binary) for name in ("label", "probabilities")]
        for asked in (None, wanted):
            answer = client.infer("perennial", [samples], model_version="3", outputs=asked)
            assert np.array_equal(answer.as_numpy("probabilities"), expected)
            labels = [text.decode() if isinstance(text, bytes) else text for text in answer.as_numpy("label")]
            assert labels == outputs["label"]["data"]
    with pytest.raises(InferenceServerException, match="unknown model 'perenial'; did you mean 'perennial'"):
        client.infer("perenial", [samples])
    metadata = open_server.ask("/v2/models/perennial/versions/3")[1]
    assert metadata == client.get_model_metadata("perennial")
    assert metadata["parameters"] == {"columns": ["age", "weight"]}
    client.close()
    found = by_grpc(open_server, np.array(ROWS, np.float32), "FP32")
    assert found["probabilities"] == expected.tolist()
    assert found["label"] == outputs["label"]["data"]
    assert found["unknown"].startswith(
        "[StatusCode.NOT_FOUND] unknown model 'perenial'; did you mean 'perennial'?"
    )


TRITON = """
import json, sys
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("perennial", "3")
values = np.load(sys.argv[3], allow_pickle=sys.argv[2] == "BYTES")
samples = triton.InferInput("input", values.shape, sys.argv[2])
samples.set_data_from_numpy(values)
answer = client.infer("perennial", [samples], model_version="3")
found = {"probabilities": answer.as_numpy("probabilities").tolist()}
found["label"] = [text.decode() for text in answer.as_numpy("label")]
try:
    client.infer("perenial", [samples])
except InferenceServerException as error:
    found["unknown"] = str(error)
print(json.dumps(found))
"""


def by_grpc(one: Serving, values: Any, datatype: str) -> Any:
    """What Triton's client gets; in a process of its own, for it brings the protocol's messages, too."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, values)
        command = [sys.executable, "-c", TRITON, f"127.0.0.1:{one.server.port}", datatype, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_file_of_a_picture_is_read_as_those_of_a_site_s_own_data(
    tmp_path: Path, start: Callable[..., Serving]
) -> None:
    snapshot(tmp_path, **PICTURES)
    one = start(("", Choice(tmp_path)))
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    small = np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR))
    numbers = (small.transpose(2, 0, 1).astype(np.float32) / 255).ravel().tolist()
    given = {"name": "input", "datatype": "FP32", "shape": [1, 3, 16, 16], "data": numbers}
    expected = one.ask(INFER, {"inputs": [given]})[1]["outputs"]
    text = base64.b64encode(file.getvalue()).decode()
    given = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [text]}
    given["parameters"] = {"content_type": "base64"}
    assert one.ask(INFER, {"inputs": [given]})[1]["outputs"] == expected
    [found] = by_grpc(one, np.array([file.getvalue()], object), "BYTES")["probabilities"]
    assert found == expected[0]["data"]
    eps = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n").decode()
    for data, sentence in (
        (["!"], "input 'input' has data that are no base64"),
        ([eps], "picture 0 of input 'input' cannot be read (cannot identify image file)"),
        ([text, text], "input 'input' has 2 pictures, but shape [1] takes 1"),
        ([1], "input 'input' has data that are no list of texts"),
    ):
        assert one.ask(INFER, {"inputs": [{**given, "data": data}]}) == (400, {"error": sentence})


def test_rows_with_the_file_of_a_picture_are_answered_as_numbers_are(
    tmp_path: Path, start: Callable[..., Serving]
) -> None:
    columns = {
        "age": {"kind": "number", "mean": 40, "scale": 20, "missing": False},
        "ward": {"kind": "category", "categories": ["a", "b"]},
    }
    pictures = {"image_column": "scan", "image_shape": (1, 4, 4), "mean": (0.5,), "scale": (0.25,)}
    snapshot(tmp_path, inputs=("age", "ward"), labels=("no", "yes"), columns=columns, **pictures)
    one = start(("", Choice(tmp_path)))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    scan = {"name": "scan", "datatype": "BYTES", "shape": [1], "data": [text]}
    scan["parameters"] = {"content_type": "base64"}
    row = [
        scan,
        {"name": "ward", "datatype": "BYTES", "shape": [1], "data": ["b"]},
        {"name": "age", "datatype": "FP32", "shape": [1], "data": [60]},
    ]
    status, answer = one.ask(INFER, {"inputs": row})
    assert status == 200, answer
    numbers = [*(pixels.ravel() / np.float32(255)).tolist(), 1.0, 0.0, 1.0, 0.0]  # pictures from 0 to 1
    given = {"name": "input", "datatype": "FP32", "shape": [1, 20], "data": numbers}
    assert one.ask(INFER, {"inputs": [given]})[1] == answer
    about = one.ask("/v2/models/perennial")[1]
    assert about["parameters"]["columns"] == ["age", "ward", "scan"]
    wrong = {**scan, "data": [base64.b64encode(b"no picture").decode()]}
    for inputs, sentence in (
        ([wrong, *row[1:]], "picture 0 of input 'scan' cannot be read (cannot identify image file)"),
        ([scan, row[2]], "column 'ward' is missing"),
        ([{**scan, "shape": [2], "data": [text, text]}, *row[1:]], "the columns have 1 to 2 rows"),
    ):
        status, answer = one.ask(INFER, {"inputs": inputs})
        assert status == 400
        assert sentence in answer["error"]


def test_as_many_texts_as_samples_come_as_typed_contents(tmp_path: Path, start: Callable[..., Serving]) -> None:
    kinds = {name: {"kind": "category", "categories": ["u"]} for name in ("a", "b")}
    snapshot(tmp_path, inputs=("a", "b"), labels=("no", "yes"), columns=kinds, run="table")
    snapshot(tmp_path, **PICTURES, run="pictures")
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    sites = [named_choice(f"{run}={run}/north", tmp_path) for run in ("table", "pictures")]
    one = start(*sites, limits=Limits(max_batch=100))
    with grpc.insecure_channel(f"127.0.0.1:{one.server.port}") as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer

        def request(model: str, names: str, count: int, text: bytes) -> ModelInferRequest:
            made = ModelInferRequest(model_name=model)
            for name in names.split():
                made.inputs.add(name=name, datatype="BYTES", shape=[100]).contents.bytes_contents.extend(
                    [text] * count
                )
            return made

        for model, names, text in (("table", "a b", b"u"), ("pictures", "input", file.getvalue())):
            assert list(infer(request(model, names, 100, text)).outputs[1].shape) == [100]
        with pytest.raises(grpc.RpcError) as caught:
            infer(request("table", "a b", 101 + 64, b""))
        assert caught.value.details() == (
            "the request, or a message in it, has more than 68 fields beside 200 texts; send values packed"
        )


def test_texts_in_a_picture_are_not_unpacked_beyond_a_bound(tmp_path: Path, start: Callable[..., Serving]) -> None:
    """64 kB of a PNG may be 64 MB of text, which takes longer to unpack than the picture."""
    snapshot(tmp_path, **PICTURES)
    texts, file = PngInfo(), io.BytesIO()
    for number in range(2):
        texts.add_text(f"text {number}", "x" * 2**19 + "x", zip=True)
    Image.new("RGB", (9, 7)).save(file, "PNG", pnginfo=texts)
    given = {
        "name": "input",
        "datatype": "BYTES",
        "shape": [1],
        "data": [base64.b64encode(file.getvalue()).decode()],
    }
    status, answer = start(("", Choice(tmp_path))).ask(INFER, {"inputs": [given]})
    assert status == 400
    assert "picture 0 of input 'input' cannot be read" in answer["error"]
    assert len(file.getvalue()) < 2**12


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_pixels_are_decoded_than_a_request_may_have(
    count: int, tmp_path: Path, start: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.client.serving.messages.MOST_PIXELS", 63 * count - 1)
    convert, decoded = Image.Image.convert, list[Any]()
    monkeypatch.setattr("PIL.Image.Image.convert", lambda *it: decoded.append(it) or convert(*it))
    snapshot(tmp_path, **PICTURES)
    file = io.BytesIO()
    Image.new("RGB", (9, 7)).save(file, "PNG")
    files = count * (struct.pack("<I", len(file.getvalue())) + file.getvalue())
    size = {"binary_data_size": len(files)}
    given = {"name": "input", "datatype": "BYTES", "shape": [count], "parameters": size}
    head = json.dumps({"inputs": [given]}).encode()
    body = head + files
    status, answer = start(("", Choice(tmp_path))).ask(
        INFER, body, **{"Inference-Header-Content-Length": str(len(head))}
    )
    assert status == 400
    assert answer["error"] == (
        f"input 'input' has pictures of more than {63 * count - 1} pixels together; send fewer or smaller ones"
    )
    assert len(decoded) == count - 1


def test_texts_in_place_of_numbers_take_no_room() -> None:
    """An array of texts would have the longest one's room for each of them."""
    data = ["a" * 20_000, *[""] * 399]
    request = Request.model_validate(rows(data))
    tracemalloc.start()
    with pytest.raises(Refused, match="data that are no numbers, row by row"):
        message(request, b"", "model", "")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


def test_a_whole_number_of_any_size_is_a_number() -> None:
    """JavaScript writes 1e20 so, and no integer of NumPy has it."""
    sent = message(Request.model_validate(rows([10**20, -1, 0.5, 2, 3, 4])), b"", "model", "")
    assert np.frombuffer(sent.raw_input_contents[0], "<f4").tolist() == [np.float32(1e20), -1, 0.5, 2, 3, 4]


@pytest.mark.parametrize(("kind", "cells"), [("FP32", [None, 61]), ("BYTES", [None, "a"])])
def test_rows_of_one_cell_are_a_column(kind: str, cells: list[Any]) -> None:
    found = []
    for shape, data in (([2], cells), ([2, 1], [[cell] for cell in cells])):
        tensor = {"name": "age", "datatype": kind, "shape": shape, "data": data}
        found.append(message(Request.model_validate({"inputs": [tensor]}), b"", "m", "").raw_input_contents[0])
    assert found[0] == found[1]


def column(name: str, length: int) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": [length], "data": [1] * length}


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "the body is no request of the protocol (Invalid JSON: EOF while parsing an object"),
    "another document": ([1], "the body is no request of the protocol ("),
    "no inputs": ({}, "the body is no request of the protocol (inputs: a value is missing)"),
    "a text": (rows([["a", "b"]] * 3), "input 'input' has data that are no numbers, row by row"),
    "a boolean": (rows([True, False] * 3), "input 'input' has data that are no numbers, row by row"),
    "rows of two lengths": (rows([[1, 2], [3], [4, 5]]), "input 'input' has data that are no numbers, row by row"),
    "too few": (rows([1, 2]), "input 'input' has 8 bytes, but shape [3, 2] of FP32 takes 24"),
    "no data": (rows(None), "input 'input' has 0 bytes, but shape [3, 2] of FP32 takes 24"),
    "too large": (rows([1e300] * 6), "input 'input' has values that are not finite"),
    "an integer without end": (rows([10**400] * 6), "input 'input' has data that are no numbers, row by row"),
    "a negative size": (
        {"inputs": [{**rows()["inputs"][0], "data": None, "parameters": {"binary_data_size": -1}}]},
        "input 'input' has binary_data_size -1, but 0 bytes are left behind the JSON",
    ),
    "a shape beyond 64 bits": (
        {"inputs": [{**rows()["inputs"][0], "shape": [10**30, 2]}]},
        "input 'input' has a shape of impossible numbers",
    ),
    "another column": (
        {"inputs": [column("age", 1), column("size", 1)]},
        "column 'weight' is missing, and the model has no column 'size'",
    ),
    "columns of two lengths": (
        {"inputs": [column("age", 1), column("weight", 2)]},
        "the columns have 1 to 2 rows, but all must have as many",
    ),
    "pictures for a table": (
        {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
        "input 'input' has datatype 'BYTES', but the model takes 'FP32'",
    ),
    "an unknown output": (rows(outputs=[{"name": "clas"}]), "unknown output 'clas'; did you mean 'class'?"),
    "Triton's classification": (
        rows(outputs=[{"name": "class", "parameters": {"classification": 1}}]),
        "output 'class' has the parameter 'classification', which is not supported",
    ),
    "bytes of nobody": (b"{}" * 9, "the body is no request of the protocol (Invalid JSON: trailing characters"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_request_is_said_in_one_sentence(wrong: str, open_server: Serving) -> None:
    body, sentence = WRONG[wrong]
    status, answer = open_server.ask(INFER, body)
    assert status == 400
    assert answer["error"].startswith(sentence)
    assert "\n" not in answer["error"]
    assert len(answer["error"]) < 500


@pytest.mark.parametrize("length", ["-1", "x", "9" * 12, "0" * 13, "0" * 12 + "9" * 5000])
def test_a_length_of_the_json_that_cannot_be_is_one_sentence(length: str, open_server: Serving) -> None:
    status, answer = open_server.ask(INFER, b"{}", **{"Inference-Header-Content-Length": length})
    assert status == 400
    assert answer["error"].startswith("the header Inference-Header-Content-Length is '")
    assert answer["error"].endswith("but the body has 2 bytes")


def test_what_is_not_there_is_404_or_405_and_said(open_server: Serving) -> None:
    for path, body, status, sentence in (
        ("/v2/models/nobody", None, 404, "unknown model 'nobody' (there are: global, perennial)"),
        ("/v2/models/perennial/versions/9", None, 404, "model 'perennial' has version '3', not '9'"),
        ("/v1/models", None, 404, "there is no such path; the protocol's begin with /v2"),
        ("/v2/models/perennial", {}, 405, "Method Not Allowed"),
    ):
        found, answer = open_server.ask(path, body)
        assert found == status
        assert answer["error"].startswith(sentence)
    assert open_server.ask("/v2/models/nobody/ready")[0] == 503
    assert open_server.ask("/v2")[1]["name"] == "perennial"


# ---------------------------------------------------------------------- who may call


def test_with_tokens_only_who_shows_one_gets_answers_and_health_is_open(
    table: Path, tmp_path: Path, start: Callable[..., Serving]
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# who may call\nward {TOKEN}\n")
    one = start(("", Choice(table)), token_file=file, health=HERE)
    assert one.ask("/v2/health/live")[0] == one.ask("/v2/health/ready")[0] == 200
    sentence = "; send the header 'Authorization: Bearer TOKEN'"
    for path, body in ((INFER, rows()), ("/v2", None), ("/v2/models/perennial", None), ("/served", None)):
        assert one.ask(path, body) == (401, {"error": f"this server wants a token{sentence}"})
        assert one.ask(path, body, "wrong") == (401, {"error": f"the token is none of this server's{sentence}"})
        assert one.ask(path, body, TOKEN)[0] == 200
    assert one.ask("/v2", Authorization=f"Basic {TOKEN}")[0] == 401
    with grpc.insecure_channel(f"127.0.0.1:{one.server.port}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(ServerLiveRequest()).live
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(ModelInferRequest(model_name="perennial"), metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert caught.value.details().endswith(sentence)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(ModelInferRequest(model_name="x"), metadata=(("authorization", f"bearer {TOKEN}"),))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(f"127.0.0.1:{one.server.health_port}") as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            GRPCInferenceServiceStub(channel).ServerLive(ServerLiveRequest())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert one.metric("perennial_unauthenticated_total") == 11
    one.server.refresh()
    assert one.said[-1] == "11 calls were not let in for want of a valid token, the last from 127.0.0.1"
    file.write_text("lab another-token-of-letters\n")
    one.server.refresh()
    assert one.said[-1] == "tokens were read anew: lab"
    assert one.ask("/v2", None, TOKEN)[0] == 401
    assert one.ask("/v2", None, "another-token-of-letters")[0] == 200
    for text in ("", "lab short\n"):
        file.write_text(text)
        one.server.refresh()
        assert one.said[-1].endswith("the tokens before stay: lab")
        assert one.ask("/v2", None, "another-token-of-letters")[0] == 200
    file.unlink()
    one.server.refresh()
    assert one.said[-1].endswith("cannot be read (No such file or directory); the tokens before stay: lab")
    assert not any(secret in line for line in one.said for secret in (TOKEN, "another-token", "wrong", "short"))


def test_every_token_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, compared = tmp_path / "tokens", list[bytes]()
    file.write_text("".join(f"name-{number} token-number-{number:05}\n" for number in range(5)))
    callers = Callers(file, lambda _: None)

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        assert len(a) == len(b) == 32
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert callers.name("Bearer token-number-00001", "x") == "name-1"
    with pytest.raises(Refused):
        callers.name("Bearer token-number-00009", "x")
    assert len(compared) == 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ward", "line 1 is not NAME TOKEN"),
        ("ward short", "line 1 is not NAME TOKEN"),
        (f"w/ard {TOKEN}", "line 1 is not NAME TOKEN"),
        (f"ward {TOKEN}\n\nward {TOKEN}x", "line 3: the name 'ward' is there twice"),
        ("# nobody", "has no token; write lines NAME TOKEN"),
    ],
)
def test_what_is_wrong_with_a_token_file_is_said_without_the_token(
    text: str, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_tokens(file)
    assert sentence in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.crt, server.crt, server.key; and callers' good.crt, expired.crt and stranger.crt, of one key."""
    folder = tmp_path_factory.mktemp("authority") / "made"
    certs.make(folder, 0, [], 1)
    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "caller.key").write_bytes(certs._pem(key))
    now = datetime.now(UTC)
    for name, issuer, by, days in (
        ("good", ca.subject, signer, 1), ("expired", ca.subject, signer, -1), ("stranger", ca.subject, key, 1),
    ):  # fmt: skip
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=days))
            .sign(by, hashes.SHA256())
        )
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(certs.Encoding.PEM))
    return folder


def test_with_a_client_ca_only_whom_it_vouches_for_gets_through(
    table: Path, authority: Path, start: Callable[..., Serving]
) -> None:
    tls = credentials(authority / "server.crt", authority / "server.key", authority / "ca.crt")
    one = start(("", Choice(table)), tls=tls, health=HERE)
    ca, key = (authority / "ca.crt").read_bytes(), (authority / "caller.key").read_bytes()
    for caller in ("good", "expired", "stranger", ""):
        context = ssl.create_default_context(cafile=authority / "ca.crt")
        chain = (authority / f"{caller}.crt").read_bytes() if caller else None
        if caller:
            context.load_cert_chain(authority / f"{caller}.crt", authority / "caller.key")
        shown = grpc.ssl_channel_credentials(ca, key if caller else None, chain)
        connection = http.client.HTTPSConnection("localhost", one.server.http_port, timeout=60, context=context)
        with grpc.secure_channel(f"localhost:{one.server.port}", shown) as channel:
            stub = GRPCInferenceServiceStub(channel)
            if caller == "good":
                connection.request("GET", "/v2")
                assert connection.getresponse().status == 200
                assert stub.ServerLive(ServerLiveRequest()).live
            else:
                with pytest.raises(OSError):  # noqa: PT011, PT012 - TLS's alert, or the end after it
                    connection.request("GET", "/v2")
                    connection.getresponse()
                with pytest.raises(grpc.RpcError) as caught:
                    stub.ServerLive(ServerLiveRequest(), timeout=60)
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        connection.close()
    with grpc.insecure_channel(f"127.0.0.1:{one.server.health_port}") as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1


def test_a_client_ca_goes_with_tls_and_is_a_certificate(authority: Path) -> None:
    with pytest.raises(UserError, match="--client-ca goes with --certificate and --key-file"):
        credentials(None, None, authority / "ca.crt")
    pair = authority / "server.crt", authority / "server.key"
    for other in ("server.key", "none.crt"):
        with pytest.raises(UserError, match=r"--client-ca .+ is no certificate in PEM form \(.+\)"):
            credentials(*pair, authority / other)
    assert credentials(*pair, authority / "ca.crt") == Tls(*pair, authority / "ca.crt")


@pytest.mark.parametrize(
    "name", ["..", "../..", "..%2f..%2fetc%2fpasswd", "%2e%2e%5c", "%00", "run-1%2fnorth", "a" * 5000, "%ff", "~"]
)
def test_the_name_of_a_model_is_no_path(name: str, open_server: Serving) -> None:
    for path in (f"/v2/models/{name}", f"/v2/models/perennial/versions/{name}"):
        status, answer = open_server.ask(path)
        assert status in (400, 404)
        assert len(answer["error"]) < 300
    status, answer = open_server.ask(f"/v2/models/{name}/infer", rows())
    assert status in (400, 404, 405)


def test_a_page_of_another_origin_reads_no_answer(open_server: Serving) -> None:
    """Nor may it send anything that a form cannot: a browser asks before, and is told nothing that allows it."""
    connection = http.client.HTTPConnection(open_server.url, timeout=60)
    asked = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    for method, path in (("OPTIONS", INFER), ("GET", "/served"), ("POST", INFER)):
        connection.request(method, path, json.dumps(rows()) if method == "POST" else None, asked)
        response = connection.getresponse()
        response.read()
        assert not [name for name, _ in response.getheaders() if name.lower().startswith("access-control")]
        assert method != "OPTIONS" or response.status == 405
    connection.close()


def test_calls_that_are_taken_back_at_once_keep_nobody_waiting(open_server: Serving) -> None:
    """Each is a RST_STREAM of HTTP/2, most of them while the request is at work (CVE-2023-44487)."""
    with grpc.insecure_channel(f"127.0.0.1:{open_server.server.port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(2000):
            infer.future(b"\x0a\x09perennial").cancel()
        assert GRPCInferenceServiceStub(channel).ServerLive(ServerLiveRequest(), timeout=60).live
    assert open_server.ask(INFER, rows())[0] == 200
    assert open_server.server.inference._waiting == []


def test_another_name_of_this_machine_is_refused(open_server: Serving) -> None:
    """A page from elsewhere whose name comes to mean this machine reads nothing here."""
    for name in (
        *("elsewhere.example", "elsewhere.example:80", "127.0.0.1.elsewhere.example", "[::1].elsewhere.example"),
        *("[elsewhere.example]", "localhost:80@elsewhere.example", "192.0.2.7", "::1", ""),
    ):
        status, answer = open_server.ask("/served", Host=name)
        assert (status, repr(name) in answer["error"]) == (400, True)
    for name in ("localhost", "localhost:1", "127.0.0.1", "[::1]:8000"):
        assert open_server.ask("/served", Host=name)[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "0:0:0:0:0:0:0:1"])
def test_every_address_of_this_machine_alone_can_be_listened_on(
    host: str, tmp_path: Path, start: Callable[..., Serving]
) -> None:
    one = start(("", Choice(tmp_path)), http=Address(host, 0))
    assert one.ask("/v2/health/live") == (200, {"live": True})
    assert one.ask("/v2/health/live", Host="elsewhere.example")[0] == 400


# ---------------------------------------------------------------------- bounds


def test_who_waits_is_limited_and_nobody_waits_for_long(
    table: Path, start: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bounds for both protocols together."""
    go_on, working = Event(), Event()
    original = served_models.Served.outputs
    one = start(("", Choice(table)), limits=Limits(max_waiting=1, timeout=0.2))

    def slow(self: served_models.Served, name: str, x: torch.Tensor) -> torch.Tensor:
        working.set()
        go_on.wait()
        return original(self, name, x)

    monkeypatch.setattr(served_models.Served, "outputs", slow)
    try:
        late = {"error": "the model has not answered within 0.2 seconds; try again later"}
        assert one.ask(INFER, rows()) == (504, late)
        assert working.is_set()
        status, answer = one.ask(INFER, rows())  # the first is in the model still
        assert status == 429
        assert answer["error"].startswith("1 requests with ")
        with grpc.insecure_channel(f"127.0.0.1:{one.server.port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                GRPCInferenceServiceStub(channel).ModelInfer(ModelInferRequest(model_name="perennial"))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert one.metric("perennial_inference_waiting") == 1
    finally:
        go_on.set()
    while one.metric("perennial_inference_waiting"):
        time.sleep(0.01)
    assert one.ask(INFER, rows())[0] == 200
    ends = [("http", code) for code in ("OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")]
    counts = [
        one.metric("perennial_inference_requests_total", protocol=protocol, code=code)
        for protocol, code in (*ends, ("grpc", "RESOURCE_EXHAUSTED"))
    ]
    assert counts == [1, 1, 1, 1]
    assert one.metric("perennial_inference_duration_seconds_count", protocol="http") == 1


def test_under_more_load_than_it_can_take_everybody_gets_an_answer(
    table: Path, start: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = served_models.Served.outputs

    def slow(self: served_models.Served, name: str, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return original(self, name, x)

    monkeypatch.setattr(served_models.Served, "outputs", slow)
    one = start(("", Choice(table)), limits=Limits(max_waiting=2))
    with ThreadPoolExecutor(16) as callers:
        found = Counter(status for status, _ in callers.map(lambda _: one.ask(INFER, rows()), range(100)))
    assert found.keys() == {200, 429}
    assert one.ask(INFER, rows())[0] == 200
    assert one.metric("perennial_inference_requests_total", protocol="http", code="OK") == found[200] + 1
    assert (
        one.metric("perennial_inference_requests_total", protocol="http", code="RESOURCE_EXHAUSTED") == found[429]
    )


def test_a_body_that_is_too_long_is_not_read(open_server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perennial.client.serving.rest.LARGEST_JSON", 1000)
    largest = open_server.server.inference.largest()
    assert largest == 2**16 + 4 * 64 * 2 + 128 * 2
    sentence = f"the body has more than {largest} bytes; send fewer samples"
    host, _, port = open_server.url.partition(":")
    head = f"POST {INFER} HTTP/1.1\r\nHost: {host}\r\n"
    for promise, body in (
        (f"Content-Length: {2**40}\r\n", b""),
        ("Transfer-Encoding: chunked\r\n", b"%x\r\n" % (largest + 1) + b" " * (largest + 1) + b"\r\n"),
    ):
        with socket.create_connection((host, int(port)), timeout=60) as caller:
            caller.sendall(f"{head}{promise}\r\n".encode() + body)
            answer = b""
            while piece := caller.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"error": sentence}
    text = b" " * 2000 + json.dumps(rows()).encode()
    status, answer = open_server.ask(INFER, text)
    assert (status, answer["error"].partition(",")[0]) == (400, f"the JSON has {len(text)} bytes")
    assert open_server.ask(INFER, b"x", **{"Content-Encoding": "gzip"})[0] == 415
    for length in ("-1", "x", "99"):
        status, answer = open_server.ask(INFER, b"{}", **{"Inference-Header-Content-Length": length})
        assert (status, answer["error"].partition(",")[0]) == (
            400, f"the header Inference-Header-Content-Length is {length!r}",
        )  # fmt: skip


def test_who_says_nothing_or_half_a_request_is_shown_out(
    table: Path, start: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.client.serving.http.HEAD", 0.2)
    monkeypatch.setattr("perennial.client.serving.http.BODY", 0.2)
    one = start(("", Choice(table)))
    host, _, port = one.url.partition(":")
    head = f"POST {INFER} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 10\r\n\r\n".encode()
    for said, answer in ((b"", b""), (b"GET / HT", b""), (head + b"{", b"HTTP/1.1 408 ")):
        with socket.create_connection((host, int(port)), timeout=60) as caller:
            caller.sendall(said)
            try:
                found = caller.recv(13)
            except ConnectionResetError:
                found = b""
            assert found == answer
    assert one.ask("/v2")[0] == 200


def test_who_begins_no_tls_is_shown_out(
    table: Path, authority: Path, start: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.client.serving.http.HEAD", 0.2)
    one = start(("", Choice(table)), tls=credentials(authority / "server.crt", authority / "server.key"))
    with socket.create_connection(("127.0.0.1", one.server.http_port), timeout=20) as caller:
        assert caller.recv(1) == b""


@pytest.mark.slow
def test_a_request_may_take_as_long_as_its_body_and_the_model_may(
    table: Path, start: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD", "BODY", "MARGIN"):
        monkeypatch.setattr(f"perennial.client.serving.http.{name}", 0.2)

    async def slow(*_: object) -> JSONResponse:
        await asyncio.sleep(1)
        return JSONResponse({})

    monkeypatch.setattr(Api, "server", slow)
    assert start(("", Choice(table)), limits=Limits(timeout=60)).ask("/v2") == (200, {})
    with pytest.raises(http.client.RemoteDisconnected):
        start(("", Choice(table)), limits=Limits(timeout=0.2)).ask("/v2")


# ---------------------------------------------------------------------- several models, and going back


def test_several_runs_are_served_by_name_and_a_fixed_round_beside_the_newest(
    tmp_path: Path, start: Callable[..., Serving]
) -> None:
    snapshot(tmp_path, 1, run="a")
    snapshot(tmp_path, 5, seed=5, run="b", **PICTURES)
    texts = ("first=a/north@1", "newest=a", "other=b/north")
    one = start(*[named_choice(text, tmp_path) for text in texts])
    assert sorted(one.server.catalogue.names()) == [
        "first", "first.global", "newest", "newest.global", "other", "other.global",
    ]  # fmt: skip
    before = one.ask("/v2/models/first/infer", rows())[1]["outputs"]
    for round_ in range(2, 9):
        snapshot(tmp_path, round_, seed=round_, run="a")
    one.server.refresh()
    assert one.ask("/v2/models/first/infer", rows())[1]["outputs"] == before
    assert one.ask("/v2/models/newest/infer", rows())[1]["model_version"] == "8"
    assert one.ask("/v2/models/newest/infer", rows())[1]["outputs"] != before
    assert one.ask("/v2/models/other")[1]["inputs"][0]["shape"] == [-1, 3, 16, 16]
    assert [path.name for path in snapshots_in(tmp_path / "a" / "north")] == [file_name(n) for n in (6, 7, 8)]
    again = start(named_choice("first=a/north@1", tmp_path))
    assert again.ask("/v2/models/first/infer", rows())[1]["outputs"] == before
    with pytest.raises(UserError, match=r"holds no round 2; there are: 6, 7, 8"):
        Models(named_choice("x=a/north@2", tmp_path)[1], print)
    with pytest.raises(UserError, match=r"--model 'a/north' is not NAME=RUN/CLIENT"):
        named_choice("a/north", tmp_path)


def test_one_command_goes_back_and_another_forward(tmp_path: Path, start: Callable[..., Serving]) -> None:
    for run, round_ in (("old", 9), ("new", 1), ("new", 2), ("new", 3)):
        snapshot(tmp_path, round_, run=run)
    one = start(("", Choice(tmp_path)))

    def rollback(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["rollback", "--state", str(tmp_path), *arguments])
        one.server.refresh()
        return result.stdout if result.exit_code == 0 else f"{result.exit_code} {result.stderr}"

    def version() -> str:
        return str(one.ask("/v2/models/perennial")[1]["versions"][0])

    assert version() == "3"
    for expected, run in (("2", "new"), ("1", "new"), ("9", "old")):
        assert rollback().startswith(f"round {expected} of {tmp_path / run / 'north'} is served from now on")
        assert version() == expected
    assert "holds no model of north before the one that is served" in rollback()
    snapshot(tmp_path, 4, run="new")  # training goes on, and is not followed
    one.server.refresh()
    assert version() == "9"
    assert rollback("--newest") == "the newest model is served again\n"
    assert version() == "4"
    assert rollback("--newest") == "the newest model is served already\n"
    rollback("--to", "3")
    assert version() == "3"
    assert "of round 77; it holds those of round 9, 2, 3, 4" in rollback("--to", "77")
    assert rollback("--to", "3", "--newest").startswith("2 ")
    assert version() == "3"
    restarted = start(("", Choice(tmp_path)))
    assert restarted.ask("/v2/models/perennial")[1]["versions"] == ["3"]
    assert (tmp_path / "new" / "north" / FILE).samefile(tmp_path / "new" / "north" / file_name(4))


# ---------------------------------------------------------------------- the page


def test_what_the_page_shows_is_what_is_served(open_server: Serving) -> None:
    models = {one["name"]: one for one in open_server.ask("/served")[1]["models"]}
    assert models.keys() == {"global", "perennial"}
    shown = models["perennial"]
    assert (shown["version"], shown["run"], shown["site"], shown["method"]) == ("3", "run-1", "north", "fedavg")
    assert shown["measure"] == "accuracy"
    assert shown["measured"] == {
        "home": {"count": 20, "value": 0.85, "text": "85.0 %"},
        "away": {"count": 10, "value": 0.4, "text": "40.0 %"},
    }
    assert shown["input"] == {"kind": "table", "shape": [2], "columns": ["age", "weight"]}
    assert open_server.metric("perennial_accuracy", model="perennial", environment="home") == 0.85
    assert open_server.metric("perennial_model_round", model="perennial") == 3


ROW = (
    "Object.fromEntries([...document.querySelectorAll('#answer tr')]"
    ".map(row => [row.cells[0].innerText, row.cells[1].innerText]))"
)
ANSWERED = "document.querySelectorAll('#answer tr').length > 2 || document.getElementById('error').textContent"


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
def test_in_a_browser_one_gives_the_token_tries_a_row_and_a_picture(
    tmp_path: Path, start: Callable[..., Serving]
) -> None:
    state = tmp_path / "state"
    snapshot(state, 2, run="rows", inputs=("age", MARKUP), labels=("young", MARKUP), mean=(10, 1000))
    snapshot(state, 5, run="pictures", **PICTURES)
    (tmp_path / "tokens").write_text(f"me {TOKEN}\n")
    Image.new("RGB", (8, 6), (200, 30, 90)).save(tmp_path / "picture.png")
    one = start(
        *[named_choice(text, state) for text in ("table=rows/north", "photos=pictures/north")],
        token_file=tmp_path / "tokens",
    )
    with browser(tmp_path, f"http://{one.url}/") as page:
        page.until("document.readyState == 'complete' && !document.getElementById('login').hidden")
        page.run("document.getElementById('token').value = 'wrong-wrong-wrong'")
        page.run("document.querySelector('#login button').click()")
        assert "none of this server's" in page.until("document.getElementById('error').textContent")
        page.run(f"document.getElementById('token').value = '{TOKEN}'")
        page.run("document.querySelector('#login button').click()")
        page.until("!document.querySelector('main').hidden")
        assert page.run("document.getElementById('model').value") == "table"
        text = page.run("document.body.innerText")
        for word in ("round 2 of run rows", "north", "fedavg", "own-data", "home", "85.0 %", "away", "40.0 %"):
            assert word in text
        page.run("document.querySelector('[data-name=age]').value = '19'")
        page.run(f"document.querySelector('[data-name=\"{MARKUP}\"]').value = '1900'")
        page.run("document.querySelector('#try button').click()")
        page.until(ANSWERED)
        row = {"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [19, 1900]}
        answer = one.ask("/v2/models/table/infer", {"inputs": [row]}, TOKEN)[1]["outputs"]
        shown = page.run(ROW)
        assert [shown[name] for name in ("young", MARKUP)] == [f"{100 * p:.1f} %" for p in answer[0]["data"]]
        assert page.run("document.images.length") == 0  # names are only text

        page.run("{ const m = document.getElementById('model'); m.value = 'photos'; m.onchange() }")
        page.choose("#fields input", tmp_path / "picture.png")
        page.run("document.querySelector('#try button').click()")
        page.until(ANSWERED)
        file = base64.b64encode((tmp_path / "picture.png").read_bytes()).decode()
        given = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [file]}
        given["parameters"] = {"content_type": "base64"}
        answer = one.ask("/v2/models/photos/infer", {"inputs": [given]}, TOKEN)[1]["outputs"]
        shown = page.run(ROW)
        assert [shown[name] for name in ("cat", "dog")] == [f"{100 * p:.1f} %" for p in answer[0]["data"]]
        events = [(event["method"], event["params"]) for event in page.events]
        asked = [params["request"]["url"] for method, params in events if method == "Network.requestWillBeSent"]
        assert {url for url in asked if not url.startswith((f"http://{one.url}/", "blob:", "about:"))} == set()
        complaints = [params["entry"]["text"] for method, params in events if method == "Log.entryAdded"]
        assert [text for text in complaints if "401" not in text and "404" not in text] == []
