"""A real gRPC server on the models of a site, called through the generated stub."""

import asyncio
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from threading import Event
from time import sleep, time_ns
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from perennial.client.serving import models as served_models
from perennial.client.serving.inference import Limits
from perennial.client.serving.inference_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelReadyRequest,
    ServerLiveRequest,
    ServerMetadataRequest,
    ServerReadyRequest,
)
from perennial.client.serving.inference_pb2_grpc import GRPCInferenceServiceStub
from perennial.client.serving.intake import Intake
from perennial.client.serving.messages import Refused, encoded, samples, too_many_fields
from perennial.client.serving.models import Catalogue, Choice, Models, newest
from perennial.client.serving.server import INFER, Server, credentials
from perennial.client.site_data import OwnSite
from perennial.client.snapshot import FILE, Snapshot, file_name, snapshots_in
from perennial.client.trainer import Client, Received, Reply, in_pieces
from perennial.common.config import load_config
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.methods import METHODS
from perennial.common.models.network import network
from perennial.common.utils.addresses import Address
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.deployment import certs
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.tiny_federation import Toy, WireGrid, toy_config

HERE = Address("127.0.0.1", 0)
SITE, CLIENT = "site-1", "client-0"
"""The folder of `WireGrid`'s first node, and its client."""


def train(path: Path, method: str, *settings: str, rounds: int = 1) -> None:
    """A run over bytes, of clients with their states on disk below `path`."""
    config = toy_config(method, *settings, rounds=rounds)
    folder = RunFolder.create(path / f"run-{len(list(path.iterdir()))}", config)
    run_rounds(config, folder, WireGrid(config, path), start(config))


def snapshot_of(site: Path) -> Path:
    [path] = site.glob(f"*/*/{FILE}")
    return path


class Served:
    """A server on a state folder, and a stub that calls it."""

    def __init__(self, state: Path, **options: Any) -> None:
        self.said: list[str] = []
        limits = options.pop("limits", Limits())
        data_root = options.pop("data_root", None)
        self.models = Models(Choice(state), self.said.append, device="cpu", data_root=data_root)
        self.server = Server(Catalogue([self.models]), HERE, limits=limits, **options)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.stub = GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.server.stop(grace=None)

    def infer(self, x: Tensor, name: str = "perennial") -> Tensor:
        """Probabilities, raw on the way there and back."""
        response = self.stub.ModelInfer(raw(x, name))
        return torch.from_numpy(np.frombuffer(response.raw_output_contents[0], "<f4").reshape(len(x), -1).copy())

    def refused(self, request: ModelInferRequest) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            self.stub.ModelInfer(request)
        return caught.value.code(), caught.value.details()


def raw(x: Tensor, name: str = "perennial") -> ModelInferRequest:
    tensor = ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=x.shape)
    return ModelInferRequest(
        model_name=name, id="7", inputs=[tensor], raw_input_contents=[x.numpy().astype("<f4").tobytes()]
    )


def typed(x: Tensor, name: str = "perennial") -> ModelInferRequest:
    contents = InferTensorContents(fp32_contents=x.flatten().tolist())
    tensor = ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=x.shape, contents=contents)
    return ModelInferRequest(model_name=name, inputs=[tensor])


Evaluated = dict[str, dict[str, Tensor]]
"""By client and model: probabilities of its first test environment, from within its own evaluation."""


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    """What the clients of the run that follows evaluate last."""
    found: Evaluated = {}
    original = Client.evaluate

    @torch.no_grad()
    def evaluate(self: Client[Any], received: Received) -> Reply:
        x = self.data.test["p=0.1"].x
        models = self.models(received)
        found[self.client] = {name: in_pieces(predict, x).softmax(dim=1) for name, predict in models.items()}
        return original(self, received)

    monkeypatch.setattr(Client, "evaluate", evaluate)
    return found


X = Toy().client_data(0, 0, None).test["p=0.1"].x


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State of a site that has taken part in two rounds of Ditto."""
    path = tmp_path_factory.mktemp("ditto")
    train(path, "ditto", rounds=2)
    return path / SITE


@pytest.fixture(scope="module")
def served(state: Path) -> Iterator[Served]:
    """A server on that state, for batches of at most 64."""
    one = Served(state, limits=Limits(max_batch=64))
    one.server.refresh()
    yield one
    one.close()


@pytest.fixture
def started() -> Iterator[Callable[..., Served]]:
    """Servers of a test's own, not yet refreshed."""
    with ExitStack() as stack:

        def start_one(path: Path, **options: Any) -> Served:
            one = Served(path, **options)
            stack.callback(one.close)
            return one

        yield start_one


# ---------------------------------------------------------------------- what is served


@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_is_served_is_what_was_evaluated(
    method: str, tmp_path: Path, evaluated: Evaluated, started: Callable[..., Served]
) -> None:
    train(tmp_path, method, rounds=2)
    one = started(tmp_path / SITE)
    one.server.refresh()
    names = METHODS[method].evaluates
    assert evaluated[CLIENT].keys() == set(names)
    for name in names:
        assert torch.equal(one.infer(X, name), evaluated[CLIENT][name])
    assert torch.equal(one.infer(X), evaluated[CLIENT][names[-1]])


def test_samples_are_prepared_and_classes_named_as_the_scenario_says(
    state: Path, started: Callable[..., Served], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "prepare", lambda _, x: x / 4)
    monkeypatch.setattr(Toy, "class_names", ("nay", "yea"))
    one = started(state)
    one.server.refresh()
    metadata = one.stub.ModelMetadata(ModelMetadataRequest(name="perennial"))
    assert [(out.name, out.datatype, list(out.shape)) for out in metadata.outputs] == [
        ("probabilities", "FP32", [-1, 2]), ("class", "INT64", [-1]), ("label", "BYTES", [-1]),
    ]  # fmt: skip
    response = one.stub.ModelInfer(typed(4 * X[:5]))
    probabilities, classes, labels = (out.contents for out in response.outputs)
    monkeypatch.undo()
    assert list(probabilities.fp32_contents) == served.infer(X[:5]).flatten().tolist()
    names = [(b"nay", b"yea")[number] for number in classes.int64_contents]
    assert set(names) == {b"nay", b"yea"}
    assert list(labels.bytes_contents) == names


def test_the_site_s_data_are_read_only_where_the_method_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("ditto", "ftfa"):
        (tmp_path / method).mkdir()
        train(tmp_path / method, method)

    def no_data(*_: object) -> None:
        raise UserError("the data are not there")

    monkeypatch.setattr(Toy, "client_data", no_data)
    said: list[str] = []
    ditto, ftfa = (Models(Choice(tmp_path / method / SITE), said.append) for method in ("ditto", "ftfa"))
    ditto.refresh()
    assert ditto.served is not None
    ftfa.refresh()
    assert ftfa.served is None
    assert said[-1].endswith(f"{FILE} cannot be served (the data are not there); no model is served")


def test_a_site_s_own_rows_are_asked_for_as_they_are_in_its_file(
    tmp_path: Path, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[age, 100.0 * age] for age in range(20)]
    lines = [f"{age},{weight},{'old' if age > 9 else 'young'}" for age, weight in rows]
    (tmp_path / "south.csv").write_text("\n".join(["age,weight,label", *lines]))
    own = {
        "name": "own-data",
        "sites": ("north", "south"),
        "inputs": ("age", "weight"),
        "labels": ("young", "old"),
    }
    config = load_config(
        options={"method": "per-fedavg", "scenario": {**own, "mean": (10, 1000), "scale": (5, 500)}},
    )
    net = network(config.model, (2,), 2)
    received = Received(3, {"model": net.initial(0)})
    monkeypatch.chdir(tmp_path)
    snapshot = Snapshot(config.task(), "south", None, received, {}, OwnSite(Path("south.csv"), "south"))
    snapshot.save(tmp_path / "run" / "south")
    monkeypatch.chdir("/")
    one = started(tmp_path)
    one.server.refresh()
    x = torch.tensor(rows)
    standard = (x - torch.tensor([10.0, 1000])) / torch.tensor([5.0, 500])
    assert torch.equal(one.infer(x, "global"), net.predict(received["model"], standard).softmax(dim=1))
    response = one.stub.ModelInfer(typed(x, "personal"))  # fine-tuned on these rows
    assert set(response.outputs[2].contents.bytes_contents) == {b"young", b"old"}
    (tmp_path / "south.csv").unlink()
    os.utime(tmp_path / "run" / "south" / FILE, (0, 0))
    one.server.refresh()
    assert one.said[-1].endswith("cannot be served (there is no south.csv); still serving round 3")


def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = {"a/b.weight": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}
    received = Received(4, {"none": {}, "model": tensors}, {"played": [1, 2], "players": ["a", "b"], "rate": 0.5})
    Snapshot("{}", "client-1", Path("data"), received, {"personal": tensors}).save(tmp_path / "run" / "client-1")
    found = Snapshot.load(tmp_path / "run" / "client-1" / FILE, torch.device("cpu"))
    assert (found.task, found.client, found.data_root) == ("{}", "client-1", Path("data").absolute())
    assert (found.received.round, found.received.settings) == (4, received.settings)
    assert list(found.received.arrays) == ["none", "model"]
    for back in (found.received["model"], found.kept["personal"]):
        assert list(back) == list(tensors)
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_snapshot_that_is_overwritten_in_place_changes_nothing_that_was_read(tmp_path: Path) -> None:
    """Nor does a file that shrinks end the process, as it would with a memory map (SIGBUS)."""
    tensors = {"w": torch.arange(2000.0)}
    Snapshot("{}", "client-1", None, Received(1, {"model": tensors}), {"personal": tensors}).save(tmp_path)
    found = Snapshot.load(tmp_path / FILE, torch.device("cpu"))
    size = (tmp_path / FILE).stat().st_size
    with (tmp_path / FILE).open("r+b") as file:
        file.write(bytes(size))
    for back in (found.received["model"], found.kept["personal"]):
        assert torch.equal(back["w"], tensors["w"])
    os.truncate(tmp_path / FILE, 0)
    assert torch.equal(found.kept["personal"]["w"], tensors["w"])


def test_the_local_runtime_writes_none(tmp_path: Path) -> None:
    config = toy_config("ditto", rounds=2)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    assert not list(tmp_path.rglob(FILE))


# ---------------------------------------------------------------------- the protocol


def test_server_and_model_are_described(served: Served) -> None:
    stub = served.stub
    assert stub.ServerLive(ServerLiveRequest()).live
    assert stub.ServerReady(ServerReadyRequest()).ready
    assert stub.ServerMetadata(ServerMetadataRequest()).name == "perennial"
    for name in ("perennial", "global", "personal"):
        metadata = stub.ModelMetadata(ModelMetadataRequest(name=name, version="2"))
        assert (metadata.name, list(metadata.versions), metadata.platform) == (name, ["2"], "pytorch")
        [given] = metadata.inputs
        assert (given.name, given.datatype, list(given.shape)) == ("input", "FP32", [-1, 2])
        assert [(out.name, out.datatype, list(out.shape)) for out in metadata.outputs] == [
            ("probabilities", "FP32", [-1, 2]), ("class", "INT64", [-1]),
        ]  # fmt: skip
    ready = {
        (name, version): stub.ModelReady(ModelReadyRequest(name=name, version=version)).ready
        for name in ("perennial", "ensemble")
        for version in ("", "2", "1")
    }
    assert {key for key, value in ready.items() if value} == {("perennial", ""), ("perennial", "2")}


def test_typed_values_get_typed_answers_and_raw_ones_raw(served: Served) -> None:
    for x in (X, X[:1]):
        expected = served.infer(x)
        response = served.stub.ModelInfer(typed(x))
        assert (response.model_name, response.model_version, response.id) == ("perennial", "2", "")
        assert not response.raw_output_contents
        probabilities, classes = response.outputs
        assert (list(probabilities.shape), list(classes.shape)) == ([len(x), 2], [len(x)])
        assert list(probabilities.contents.fp32_contents) == expected.flatten().tolist()
        assert list(classes.contents.int64_contents) == expected.argmax(dim=1).tolist()
        response = served.stub.ModelInfer(raw(x))
        assert response.id == "7"
        assert [out.HasField("contents") for out in response.outputs] == [False, False]
        assert np.frombuffer(response.raw_output_contents[1], "<i8").tolist() == expected.argmax(dim=1).tolist()


def test_raw_bytes_have_their_length_before_them() -> None:
    assert encoded([b"no", b""]) == b"\x02\0\0\0no\0\0\0\0"


def test_outputs_come_as_asked_for(served: Served) -> None:
    request = raw(X)
    for name in ("class", "probabilities"):
        request.outputs.add(name=name)
    both = served.stub.ModelInfer(request)
    assert [out.name for out in both.outputs] == ["class", "probabilities"]
    del request.outputs[1]
    one = served.stub.ModelInfer(request)
    assert [out.name for out in one.outputs] == ["class"]
    assert list(one.raw_output_contents) == list(both.raw_output_contents)[:1]


def changed(**how: Any) -> ModelInferRequest:
    """A raw request for one sample with other fields of its input."""
    request = raw(X[:1])
    if "shape" in how:
        request.inputs[0].shape[:] = how.pop("shape")
    for name, value in how.items():
        setattr(request.inputs[0], name, value)
    return request


def with_output(name: str, parameter: str = "") -> ModelInferRequest:
    request = raw(X[:1])
    output = request.outputs.add(name=name)
    if parameter:
        output.parameters[parameter].int64_param = 1
    return request


def with_raw(*contents: bytes) -> ModelInferRequest:
    request = raw(X[:1])
    request.raw_input_contents[:] = contents
    return request


def in_another_field() -> ModelInferRequest:
    request = typed(X[:1])
    request.inputs[0].contents.Clear()
    request.inputs[0].contents.fp64_contents.extend([1, 2])
    return request


def twice() -> ModelInferRequest:
    request = typed(X[:1])
    request.raw_input_contents.append(b"\0" * 8)
    return request


def two_inputs() -> ModelInferRequest:
    request = raw(X[:1])
    request.inputs.append(request.inputs[0])
    return request


WRONG = {
    "no input": (ModelInferRequest(model_name="perennial"), "the inputs are [], but the model has one, 'input'"),
    "two inputs": (two_inputs(), "the inputs are ['input', 'input'], but the model has one, 'input'"),
    "another name": (changed(name="x"), "the inputs are ['x'], but the model has one, 'input'"),
    "another datatype": (
        changed(datatype="FP64"), "input 'input' has datatype 'FP64', but the model takes 'FP32'",
    ),
    "no batch": (
        changed(shape=[2]),
        "input 'input' has shape [2], but the model takes [-1, 2]; a single sample has the shape [1, ...]",
    ),
    "another rank": (changed(shape=[1, 1, 2]), "input 'input' has shape [1, 1, 2], but the model takes [-1, 2]"),
    "another shape": (changed(shape=[1, 3]), "input 'input' has shape [1, 3], but the model takes [-1, 2]"),
    "a negative shape": (
        changed(shape=[-1, 2]), "input 'input' has a batch of -1, but 1 to 64 samples are possible",
    ),
    "an empty batch": (changed(shape=[0, 2]), "input 'input' has a batch of 0, but 1 to 64 samples are possible"),
    "a huge batch": (
        changed(shape=[2**62, 2]), f"input 'input' has a batch of {2**62}, but 1 to 64 samples are possible",
    ),
    "too few bytes": (with_raw(b"\0" * 7), "input 'input' has 7 bytes, but shape [1, 2] of FP32 takes 8"),
    "too many bytes": (with_raw(b"\0" * 16), "input 'input' has 16 bytes, but shape [1, 2] of FP32 takes 8"),
    "raw for two inputs": (
        with_raw(b"\0" * 8, b"\0" * 8),
        "input 'input' has its values more than once; give one raw_input_contents, or contents",
    ),
    "raw and typed": (
        twice(), "input 'input' has its values more than once; give one raw_input_contents, or contents",
    ),
    "no values": (with_raw(), "input 'input' has 0 values, but shape [1, 2] takes 2"),
    "another field": (
        in_another_field(), "input 'input' has its values in fp64_contents, but FP32 is in fp32_contents",
    ),
    "NaN": (raw(torch.tensor([[0, float("nan")]])), "input 'input' has values that are not finite"),
    "infinity": (typed(torch.tensor([[0, float("inf")]])), "input 'input' has values that are not finite"),
    "too large": (
        raw(torch.tensor([[3e38, 3e38], [3e38, -3e38], [-3e38, 3e38], [-3e38, -3e38]])),
        "values of 'input' are so large that the model's answer is not finite",
    ),
    "an unknown output": (
        with_output("classes"),
        "unknown output 'classes'; did you mean 'class'? (there are: class, probabilities)",
    ),
    "Triton's classification": (
        with_output("probabilities", "classification"),
        "output 'probabilities' has the parameter 'classification', which is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_request_is_said_in_one_sentence(wrong: str, served: Served) -> None:
    request, sentence = WRONG[wrong]
    assert served.refused(request) == (grpc.StatusCode.INVALID_ARGUMENT, sentence)


def test_unknown_models_and_versions_are_not_found(served: Served) -> None:
    sentences = {
        "ensemble": "unknown model 'ensemble' (there are: global, perennial, personal)",
        "personal": "model 'personal' has version '2', not '1'",
    }
    for name, sentence in sentences.items():
        request = raw(X, name)
        request.model_version = "1"
        assert served.refused(request) == (grpc.StatusCode.NOT_FOUND, sentence)
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.ModelMetadata(ModelMetadataRequest(name=name, version="1"))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, sentence)


def test_callers_at_the_same_time_get_their_own_answers(served: Served) -> None:
    pieces = [(x, name) for x in torch.split(X, 3) for name in ("global", "personal")] * 4
    expected = [served.infer(*piece) for piece in pieces]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda piece: served.infer(*piece), pieces))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_sentence_quotes_no_more_than_it_needs(served: Served) -> None:
    long = "x" * 30_000
    for request in (
        raw(X[:1], long),
        changed(name=long),
        changed(datatype=long),
        changed(shape=[1] * 5_000),
        with_output(long),
        ModelInferRequest(model_name="personal", model_version=long),
        typed(X[:1], long),
    ):
        code, sentence = served.refused(request)
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert len(sentence) < 300, sentence
        assert "…" in sentence


def test_an_output_is_given_once(served: Served) -> None:
    request = raw(X[:1])
    for _ in range(2):
        request.outputs.add(name="class")
    assert served.refused(request) == (
        grpc.StatusCode.INVALID_ARGUMENT, "output 'class' is asked for more than once",
    )  # fmt: skip


def test_values_are_counted_before_they_are_converted() -> None:
    request = typed(torch.zeros(1000, 1000))
    request.inputs[0].shape[:] = [4, 2]
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match=r"has 1000000 values, but shape \[4, 2\] takes 8"):
            samples(request, OwnData(), 64)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_many_values_are_converted_piece_by_piece_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perennial.client.serving.messages.PIECE", 7)
    assert torch.equal(samples(typed(X[:50]), OwnData(), 64), X[:50])


def test_a_request_longer_than_the_model_s_largest_is_not_parsed(served: Served) -> None:
    """64 samples of two numbers, and 64 kB for everything else."""
    request = raw(X[:1])
    request.raw_input_contents[0] = bytes(100_000)
    code, sentence = served.refused(request)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert re.fullmatch(r"the request has 1000\d\d bytes, but 64 samples take at most 66048", sentence)


@pytest.mark.parametrize("tag", [b"\x22\x00", b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x2a\x04\x2a\x02\x42\x00"])
def test_a_request_that_is_all_empty_parts_is_not_parsed(tag: bytes, served: Served) -> None:
    """`parameters`, `inputs`, `outputs`, `raw_input_contents` and `inputs` with `contents`, also after a group."""
    infer = served.channel.unary_unary(INFER)
    for group in (b"", b"\x53\x54"):
        with pytest.raises(grpc.RpcError) as caught:
            infer(group + tag * 10_000)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == (
            "the request, or a message in it, has more than 64 fields; send values packed"
        )


def test_all_other_calls_are_short(served: Served) -> None:
    names = ["ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata"]
    for method in [*(f"/inference.GRPCInferenceService/{name}" for name in names), "/grpc.health.v1.Health/Check"]:
        call = served.channel.unary_unary(method)
        for data, sentence in (
            (b"\x0a\x00" * 40_000, "the request has 80000 bytes, and 65536 are the most for this call"),
            (b"\x0a\x01", "the bytes of the request are no message of the protocol"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(data)
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, sentence)


# ---------------------------------------------------------------------- under load


def alive(one: Served) -> bool:
    """Whether health and live answer a newcomer."""
    with grpc.insecure_channel(f"127.0.0.1:{one.server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        live = GRPCInferenceServiceStub(channel).ServerLive(ServerLiveRequest(), timeout=20).live
    return bool(live and check.status == health_pb2.HealthCheckResponse.SERVING)


def test_callers_who_say_nothing_silence_nobody(
    state: Path, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers and no message, to every kind of call, and more of them than come in at a time."""
    monkeypatch.setattr("perennial.client.serving.server.PATIENCE", 0.2)
    monkeypatch.setattr("perennial.client.serving.server.SMALL_PATIENCE", 0.2)
    one, leave = started(state), Event()
    one.server.refresh()

    def nothing() -> Iterator[bytes]:
        leave.wait()
        yield from ()

    methods = [INFER, "/inference.GRPCInferenceService/ServerLive", "/grpc.health.v1.Health/Check"]
    with grpc.insecure_channel(f"127.0.0.1:{one.server.port}") as channel:
        idle = [channel.stream_unary(method).future(nothing()) for method in methods for _ in range(20)]
        try:
            assert all(alive(one) for _ in range(5))
            assert one.infer(X).shape == (len(X), 2)
            assert {call.code() for call in idle if call.done()} <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert sum(not call.done() for call in idle) >= 8
        finally:
            leave.set()


def test_a_call_without_a_request_is_refused(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        served.channel.stream_unary(INFER)(iter(()))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the call ended without a request"


@pytest.mark.parametrize("method", [INFER, "/inference.GRPCInferenceService/ServerLive"])
def test_a_request_that_was_refused_leaves_no_bytes_behind(method: str, served: Served) -> None:
    """Not even until Python looks for cycles, which it does by the number of objects, not by their size."""
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(5):
            with pytest.raises(grpc.RpcError, match=r"the request has 2000000 bytes"):
                served.channel.unary_unary(method)(bytes(2_000_000))
        assert alive(served)
        assert tracemalloc.get_traced_memory()[0] < 3_000_000
    finally:
        tracemalloc.stop()
        gc.enable()


class Caller:
    """A call whose request comes in when the test says so."""

    def __init__(self, intake: Intake) -> None:
        self.read, self.come = False, asyncio.Event()
        self.call = asyncio.ensure_future(intake.read(self._stream()))

    async def _stream(self) -> AsyncIterator[bytes]:
        self.read = True
        await self.come.wait()
        yield b"7"


def test_few_requests_come_in_at_a_time_and_the_newest_first() -> None:
    """One that has left, whether it was waiting or had just got its turn, keeps no place."""

    async def crowd() -> None:
        intake = Intake(2, patience=3600)
        callers = []
        for _ in range(6):
            callers.append(Caller(intake))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert [caller.read for caller in callers] == [True, True, False, False, False, False]
        callers[4].call.cancel()
        callers[0].come.set()
        while len(intake._turns) == 4:
            await asyncio.sleep(0)
        assert not callers[5].read
        callers[5].call.cancel()  # it has got its turn, and has not begun
        await asyncio.sleep(0.01)
        assert [caller.read for caller in callers] == [True, True, False, True, False, False]
        for caller in callers:
            caller.come.set()
        found = await asyncio.gather(*(caller.call for caller in callers), return_exceptions=True)
        assert [answer == b"7" for answer in found] == [True, True, True, True, False, False]
        last = Caller(intake), Caller(intake), Caller(intake)
        await asyncio.sleep(0.01)
        assert [caller.read for caller in last] == [True, True, False]

    asyncio.run(crowd())


def test_who_is_slow_gives_way_if_somebody_waits() -> None:
    async def crowd() -> None:
        intake = Intake(1, patience=0.01)
        slow = Caller(intake)
        await asyncio.sleep(0.05)
        assert not slow.call.done()
        second = Caller(intake)
        second.come.set()
        assert await second.call == b"7"
        with pytest.raises(Refused, match=r"has not come in within 0.01 seconds, and others wait"):
            await slow.call

    asyncio.run(crowd())


def test_who_says_nothing_for_long_is_shown_out(
    state: Path, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perennial.client.serving.server.AGE", 0.2)
    monkeypatch.setattr("perennial.client.serving.server.GRACE", 0.2)
    one, leave = started(state), Event()

    def nothing() -> Iterator[bytes]:
        leave.wait()
        yield from ()

    idle = one.channel.stream_unary(INFER).future(nothing())
    try:
        assert idle.exception(timeout=60) is not None
    finally:
        leave.set()
    assert one.stub.ServerLive(ServerLiveRequest(), wait_for_ready=True).live


def test_while_the_model_works_health_answers_and_who_waits_is_limited(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, go_on, working = served_models.Served.outputs, Event(), Event()

    def slow(self: served_models.Served, name: str, x: Tensor) -> Tensor:
        working.set()
        go_on.wait()
        return original(self, name, x)

    monkeypatch.setattr(served_models.Served, "outputs", slow)
    monkeypatch.setattr(served.server.inference, "limits", Limits(max_batch=64, max_waiting=1))
    try:
        first = served.stub.ModelInfer.future(raw(X))
        assert working.wait(60)
        assert alive(served)
        assert served.refused(raw(X)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"1 requests with {len(raw(X).SerializeToString())} bytes are waiting already; try again later",
        )
        monkeypatch.setattr(served.server.inference, "limits", Limits(max_batch=64))
        monkeypatch.setattr("perennial.client.serving.inference.WAITING_BYTES", 100)
        code, sentence = served.refused(raw(torch.zeros(64, *X.shape[1:])))
        assert (code, sentence[:15]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1 requests with")
    finally:
        go_on.set()
    assert first.result(timeout=60).model_version == "2"
    assert served.stub.ModelInfer(raw(X)).model_version == "2"


def test_a_model_that_fails_says_so_in_one_sentence(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate much.")

    monkeypatch.setattr(served_models.Served, "outputs", full)
    assert served.refused(raw(X)) == (
        grpc.StatusCode.INTERNAL,
        "the model failed over this request (OutOfMemoryError: CUDA out of memory. Tried to allocate much.)",
    )


# ---------------------------------------------------------------------- malformed requests, drawn

names = st.sampled_from(["input", "perennial", "personal", "class", "probabilities", "", "2"]) | st.text(
    max_size=99
)
floats = st.floats(width=32)
tensors = st.builds(
    ModelInferRequest.InferInputTensor,
    name=st.just("input") | names,
    datatype=st.sampled_from(["FP32", "FP32", "FP64", "INT64", "BYTES", "fp32"]) | names,
    shape=st.just([1, 2]) | st.lists(st.integers(-3, 5) | st.integers(-(2**63), 2**63 - 1), max_size=4),
    parameters=st.just({}) | st.dictionaries(names, st.just(InferParameter(int64_param=1)), max_size=2),
    contents=st.none()
    | st.builds(InferTensorContents, fp32_contents=st.lists(floats, max_size=6))
    | st.builds(
        InferTensorContents,
        bool_contents=st.lists(st.booleans(), max_size=2),
        int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
        fp64_contents=st.lists(st.floats(), max_size=2),
        fp32_contents=st.lists(floats, max_size=2),
        bytes_contents=st.lists(st.binary(max_size=9), max_size=2),
    ),
)
requests = st.builds(
    ModelInferRequest,
    model_name=st.just("perennial") | names,
    model_version=st.just("") | names,
    id=names,
    parameters=st.just({}) | st.dictionaries(names, st.just(InferParameter(string_param="x")), max_size=2),
    inputs=st.lists(tensors, min_size=1, max_size=1) | st.lists(tensors, max_size=70),
    outputs=st.just([])
    | st.lists(st.builds(ModelInferRequest.InferRequestedOutputTensor, name=names), max_size=3),
    raw_input_contents=st.just([]) | st.lists(st.just(bytes(8)) | st.binary(max_size=64), max_size=3),
)
ANSWERS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(requests.map(lambda request: request.SerializeToString()) | st.binary(max_size=200))
def test_whatever_is_asked_there_is_an_answer_or_one_sentence(served: Served, data: bytes) -> None:
    call = served.channel.unary_unary(INFER).future(data, timeout=60)
    if call.exception():
        assert call.code() in ANSWERS, call.details()
        assert 10 < len(call.details()) < 600
        assert "\n" not in call.details()
    else:
        request, response = ModelInferRequest.FromString(data), ModelInferResponse.FromString(call.result())
        assert {out.name for out in response.outputs} <= {"probabilities", "class"}
        assert all(out.shape[0] == request.inputs[0].shape[0] for out in response.outputs)
    assert served.stub.ServerLive(ServerLiveRequest(), timeout=60).live


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(requests)
def test_what_a_client_of_the_protocol_makes_is_counted_right(request_: ModelInferRequest) -> None:
    """Field after field of a list; a list of numbers is one."""
    parts = [len(t.parameters) + len(t.contents.bytes_contents) for t in request_.inputs]
    most = max([len(request_.inputs) + len(request_.outputs) + 9, *(part + 9 for part in parts)])
    assert most > 64 or not too_many_fields(request_.SerializeToString())
    assert too_many_fields(request_.SerializeToString()) or len(request_.inputs) <= 64


# ---------------------------------------------------------------------- following the training


def health(one: Served) -> list[int]:
    stub = health_pb2_grpc.HealthStub(one.channel)
    services = ("", "inference.GRPCInferenceService")
    return [stub.Check(health_pb2.HealthCheckRequest(service=service)).status for service in services]


def test_before_the_first_training_it_waits(tmp_path: Path, started: Callable[..., Served]) -> None:
    one = started(tmp_path / SITE)
    one.server.refresh()
    states = health_pb2.HealthCheckResponse
    assert one.stub.ServerLive(ServerLiveRequest()).live
    assert not one.stub.ServerReady(ServerReadyRequest()).ready
    assert not one.stub.ModelReady(ModelReadyRequest(name="perennial")).ready
    assert health(one) == [states.NOT_SERVING] * 2
    code, sentence = one.refused(raw(X))
    assert (code, sentence) == (
        grpc.StatusCode.UNAVAILABLE, "no model is there yet; training writes one when it evaluates",
    )  # fmt: skip
    train(tmp_path, "fedavg")
    one.server.refresh()
    assert one.stub.ServerReady(ServerReadyRequest()).ready
    assert health(one) == [states.SERVING] * 2
    assert one.infer(X).shape == (len(X), 2)
    place = snapshot_of(tmp_path / SITE).parent
    assert one.said == [
        f"waiting for a model below {tmp_path / SITE}; a client writes it when it evaluates (there is none)",
        f"serving round 1 of {place}: global, perennial",
    ]


def test_a_newer_snapshot_takes_the_older_one_s_place(
    tmp_path: Path, started: Callable[..., Served], evaluated: Evaluated
) -> None:
    train(tmp_path, "per-fedavg")
    one = started(tmp_path / SITE)
    one.server.refresh()
    before, loaded = evaluated[CLIENT]["personal"], one.models.served
    one.server.refresh()
    assert one.models.served is loaded  # nothing new: nothing is done
    train(tmp_path, "per-fedavg", rounds=4)
    assert torch.equal(one.infer(X), before)
    one.server.refresh()
    assert not torch.equal(evaluated[CLIENT]["personal"], before)
    assert torch.equal(one.infer(X), evaluated[CLIENT]["personal"])
    assert one.stub.ModelMetadata(ModelMetadataRequest(name="perennial")).versions == ["4"]


def test_what_failed_is_tried_again_later_or_when_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, "ftfa")
    path, original, said = snapshot_of(tmp_path / SITE), Toy.client_data, list[str]()
    tries = list[None]()

    def no_data(*_: object) -> None:
        tries.append(None)
        raise UserError("the data are not there")

    monkeypatch.setattr(Toy, "client_data", no_data)
    models = Models(Choice(tmp_path / SITE), said.append)
    for _ in range(2):
        models.refresh()
    assert len(tries) == 1
    before = path.stat()
    with path.open("r+b") as file:  # in place, and as old as it was
        file.write(file.read()[:0])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    models.refresh()
    assert len(tries) == 2
    monkeypatch.setattr("perennial.client.serving.models.RETRY", 0.0)
    os.utime(path)
    for _ in range(2):
        models.refresh()
    assert len(tries) == 4
    assert models.served is None
    monkeypatch.setattr(Toy, "client_data", original)
    models.refresh()
    assert models.served is not None
    assert [text.partition(" of ")[0].partition(" cannot")[0] for text in said] == [str(path), "serving round 1"]
    loaded = models.served
    models.refresh()
    assert models.served is loaded


@pytest.mark.parametrize("damage", ["empty", "rubbish", "cut", "lacks a tensor", "of another program", "diverged"])
def test_a_damaged_snapshot_leaves_the_old_model_serving(
    damage: str, state: Path, tmp_path: Path, started: Callable[..., Served]
) -> None:
    shutil.copytree(state, tmp_path / SITE)
    path = snapshot_of(tmp_path / SITE)
    one = started(tmp_path / SITE)
    one.server.refresh()
    expected, whole, good = one.infer(X), path.read_bytes(), Snapshot.load(path, torch.device("cpu"))
    model = good.received["model"]
    if damage == "lacks a tensor":
        arrays = {"model": {name: model[name] for name in list(model)[1:]}}
        replace(good, received=replace(good.received, arrays=arrays)).save(path.parent)
    elif damage == "of another program":
        replace(good, task=good.task.replace("ditto", "dito")).save(path.parent)
    elif damage == "diverged":
        arrays = {"model": {name: tensor * float("nan") for name, tensor in model.items()}}
        replace(good, received=replace(good.received, arrays=arrays)).save(path.parent)
    else:
        beside = path.with_name(".new")
        beside.write_bytes({"empty": b"", "rubbish": b"rubbish" * 9, "cut": whole[:-1]}[damage])
        beside.replace(path)
    for _ in range(3):
        one.server.refresh()
    assert torch.equal(one.infer(X), expected)
    assert len(one.said) == 2  # the first one's loading, and this
    assert one.said[-1].startswith(f"{path} cannot be served (")
    assert one.said[-1].endswith("); still serving round 2")
    assert "\n" not in one.said[-1]
    replace(good, received=replace(good.received, round=9)).save(path.parent)
    one.server.refresh()
    assert one.models.served is not None
    assert one.models.served.version == "9"


def test_of_several_runs_the_newest_is_served_and_of_several_clients_the_one_that_is_named(
    state: Path, tmp_path: Path
) -> None:
    source = snapshot_of(state)
    paths = {}
    for time, (run, client) in enumerate([("b", "client-0"), ("a", "client-0"), ("c", "client-1")]):
        path = paths[run] = tmp_path / run / client / FILE
        path.parent.mkdir(parents=True)
        shutil.copy(source, path)
        os.utime(path, (time, time))
    assert newest(tmp_path, None, "client-0") == paths["a"]
    assert newest(tmp_path, "b", None) == paths["b"]
    assert newest(tmp_path, None, "client-1") == paths["c"]
    assert newest(tmp_path, "b", "client-1") is None
    sentence = f"{tmp_path} has models of 2 clients; choose with --client: client-0, client-1"
    with pytest.raises(UserError) as caught:
        newest(tmp_path, None, None)
    assert str(caught.value) == sentence
    said: list[str] = []
    models = Models(Choice(tmp_path, "b", "client-1"), said.append)
    models.refresh()
    assert said == [
        f"waiting for a model below {tmp_path}; a client writes it when it evaluates "
        "(there are a/client-0, b/client-0, c/client-1)"
    ]


def test_a_clock_that_is_set_back_makes_no_newer_snapshot_older(state: Path, tmp_path: Path) -> None:
    made = Snapshot.load(snapshot_of(state), torch.device("cpu"))
    folder = tmp_path / "run" / "client-0"
    ahead = time_ns() + 3600 * 10**9
    for number in range(1, 6):
        replace(made, received=replace(made.received, round=number)).save(folder)
        if number == 3:
            for path in folder.iterdir():
                os.utime(path, ns=(ahead, ahead))
    assert [path.name for path in snapshots_in(folder)][-2:] == [file_name(4), file_name(5)]
    later = tmp_path / "later" / "client-0"
    made.save(later)
    assert newest(tmp_path, None, "client-0") == later / FILE


# ---------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.crt, server.crt and server.key."""
    folder = tmp_path_factory.mktemp("certificates") / "made"
    certs.make(folder, 0, [], 1)
    return folder


def test_with_tls_only_who_trusts_the_certificate_gets_through(state: Path, pair: Path) -> None:
    tls = credentials(pair / "server.crt", pair / "server.key")
    server = Server(Catalogue([Models(Choice(state), lambda _: None)]), HERE, tls=tls)
    try:
        trusted = grpc.ssl_channel_credentials((pair / "ca.crt").read_bytes())
        with grpc.secure_channel(f"localhost:{server.port}", trusted) as channel:
            assert GRPCInferenceServiceStub(channel).ServerLive(ServerLiveRequest()).live
        with grpc.insecure_channel(f"localhost:{server.port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                GRPCInferenceServiceStub(channel).ServerLive(ServerLiveRequest())
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop(grace=None)


def test_once_stopped_its_loop_is_at_rest(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it reads a socket that gRPC has closed at the program's end: a traceback after every other SIGTERM."""
    server = Server(Catalogue([Models(Choice(state), lambda _: None)]), HERE)
    loop, end = server._loop, server._loop.stop
    monkeypatch.setattr(loop, "stop", lambda: (sleep(0.3), end()))
    server.stop(grace=None)
    assert not loop.is_running()


def test_half_a_pair_or_a_wrong_one_is_refused(pair: Path, tmp_path: Path) -> None:
    assert credentials(None, None) is None
    with pytest.raises(UserError, match="--certificate and --key-file belong together; give both or neither"):
        credentials(pair / "server.crt", None)
    for certificate, key in (("server.crt", "ca.key"), ("server.crt", "none.key"), ("server.key", "server.key")):
        with pytest.raises(UserError, match=r"are no certificate and key in PEM form \(.+\)"):
            credentials(pair / certificate, pair / key)


def test_what_the_command_cannot_do_it_says(state: Path, served: Served, tmp_path: Path) -> None:
    for client in ("client-0", "client-1"):
        (tmp_path / "run" / client).mkdir(parents=True)
        shutil.copy(snapshot_of(state), tmp_path / "run" / client / FILE)
    sentences = {
        ("--state", str(tmp_path)): "has models of 2 clients; choose with --client: client-0, client-1",
        (
            "--state",
            str(state),
            "--port",
            str(served.server.port),
        ): f"cannot listen on 127.0.0.1:{served.server.port}",
        ("--state", str(state), "--certificate", "x.crt"): "belong together",
        ("runs/first",): "serve: 'runs/first' is not possible; name a site's state folder with --state, or take",
        ("--state", str(state), "--device", "tpu"): "device 'tpu' is unknown",
    }
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).touch()
    sentences["--state", str(tmp_path / "run")] = "run is a run folder, and no site's state folder; `perennial exp"
    for arguments, sentence in sentences.items():
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == 2, result.output
        assert sentence in result.stderr


def test_a_token_file_that_others_can_read_is_taken_with_a_remark(
    state: Path, served: Served, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ward 0123456789abcdef\n")
    tokens.chmod(0o640)
    line = ["serve", "--state", str(state), "--token-file", str(tokens), "--port", str(served.server.port)]
    result = CliRunner().invoke(app, line)  # it ends, because the port is taken
    sentence = f"perennial: --token-file {tokens} can be read by others (mode 0640); say `chmod 600 {tokens}`\n"
    assert result.stderr.startswith(sentence)


@pytest.mark.slow
def test_the_command_starts_before_the_training_follows_it_and_ends_on_sigterm(tmp_path: Path) -> None:
    code = "import perennial.testing.tiny_federation; from perennial.server.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--state", str(tmp_path / SITE), "--port", "0"]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(command, stderr=PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        try:
            listening = re.fullmatch(r"perennial: listening on 127.0.0.1, port (\d+), without TLS\n", next(lines))
            assert listening
            assert next(lines).startswith("perennial: waiting for a model below ")
            with grpc.insecure_channel(f"127.0.0.1:{listening[1]}") as channel:
                stub = GRPCInferenceServiceStub(channel)
                assert not stub.ServerReady(ServerReadyRequest()).ready
                for rounds in (1, 2):
                    train(tmp_path, "ditto", rounds=rounds)
                    assert f"serving round {rounds} of " in next(lines)
                    assert stub.ModelInfer(raw(X)).model_version == str(rounds)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
