"""What is served, exported and predicted of each task: the same numbers, under the task's own names."""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pandas as pd
import pytest
import torch
import tritonclient.http
from chromium import CHROMIUM, browser
from stays import Stays
from torch import Tensor
from typer.testing import CliRunner

from perennial.client.serving.inference_pb2 import ModelInferRequest, ModelMetadataRequest
from perennial.client.serving.inference_pb2_grpc import GRPCInferenceServiceStub
from perennial.client.serving.metrics import ServingMetrics
from perennial.client.serving.models import Catalogue, Choice, Models, Served, load, newest
from perennial.client.serving.server import Server
from perennial.client.snapshot import Snapshot, results_of
from perennial.client.trainer import Received, Reply
from perennial.common.config import RunConfig, load_config
from perennial.common.data.scenario import Scenario
from perennial.common.methods import METHODS
from perennial.common.models.network import network
from perennial.common.models.torch_state import CPU
from perennial.common.tasks import HEADLINES, Classes, Event, Labels, Numbers
from perennial.common.tasks.own_metric import METRIC
from perennial.common.utils.addresses import Address
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import save_tensors
from perennial.common.utils.tensors import Tensors
from perennial.server.cli.main import app
from perennial.server.results.exported import some_cells
from perennial.server.results.result import Result
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds
from perennial.server.run.loop import start as start_of
from perennial.testing.tiny_federation import Toy, WireGrid, toy_config

HERE = Address("127.0.0.1", 0)
CELLS: dict[str, list[Any]] = {"age": [63, None, 41], "ward": ["lung", "", "heart"]}
ONE: dict[str, Any] = {"targets": ("days",), "mean": (7.5,), "scale": (2.0,)}
COUNTS: dict[str, Any] = {"targets": ("visits", "falls"), "kind": "poisson"}
LABELS, EVENT = Stays(target="labels", targets=("fall", "fever")), Stays(target="event")
NUMBERS: dict[str, Scenario] = {"two": Stays(), "one": Stays(**ONE), "counts": Stays(**COUNTS)}
SCENARIOS = {**NUMBERS, "labels": LABELS, "event": EVENT}
each = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


def configured(scenario: Scenario) -> RunConfig:
    return load_config(options={"method": "fedavg", "scenario": scenario.model_dump(mode="json"), "rounds": 3})


def initial(config: RunConfig) -> Tensors:
    scenario = config.scenario
    return network(config.model, scenario.input_shape, scenario.task.outputs).initial(1)


def evaluated(state: Path, scenario: Scenario) -> Served:
    """What a site of this scenario serves: a model that has not been trained."""
    config = configured(scenario)
    results = {"global/test": {"away": (10, 1.25)}}
    received = Received(3, {"model": initial(config)})
    client = scenario.client_ids[0]
    Snapshot(config.task(), client, None, received, {}, None, "run", results).save(state / "run" / client)
    found = newest(state, None, None)
    assert found
    return load(found, None, CPU)


def features(cells: dict[str, list[Any]]) -> Tensor:
    """Rows as `Stays` prepares them, by hand."""
    rows = []
    for age, ward in zip(cells["age"], cells["ward"], strict=True):
        number = 48.0 if age is None else age
        rows.append(
            [(number - 50) / 10, age is None, ward == "heart", ward == "lung", ward not in ("heart", "lung")]
        )
    return torch.tensor(rows, dtype=torch.float32)


def expected(served: Served, x: Tensor) -> Tensor:
    """A prediction of the outputs, written anew from what the task announces."""
    outputs, task = served.models["global"](x).double(), served.scenario.task
    if isinstance(task, Labels):
        return 1 / (1 + (-outputs).exp())
    if isinstance(task, Event):
        return (1 - 1 / (1 + (-outputs).exp())).cumprod(dim=1)
    assert isinstance(task, Numbers)
    if task.kind == "poisson":
        return outputs.exp()
    return outputs * torch.tensor(task.scale) + torch.tensor(task.mean)


class Serving:
    """A server over REST and gRPC on a state folder."""

    def __init__(self, state: Path) -> None:
        self.said: list[str] = []
        models = Models(Choice(state), self.said.append, device="cpu")
        self.server = Server(Catalogue([models]), HERE, http=HERE)
        self.server.refresh()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.stub = GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.server.stop(grace=None)

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=60)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text)


@pytest.fixture
def start() -> Iterator[Callable[[Path], Serving]]:
    with ExitStack() as stack:

        def start_one(state: Path) -> Serving:
            one = Serving(state)
            stack.callback(one.close)
            return one

        yield start_one


def columns(cells: dict[str, list[Any]]) -> dict[str, Any]:
    """A request over REST with raw rows."""
    kinds = {"age": "FP32", "ward": "BYTES"}
    inputs = [
        {"name": name, "datatype": kinds[name], "shape": [len(data)], "data": data} for name, data in cells.items()
    ]
    return {"inputs": inputs}


INFER = "/v2/models/perennial/infer"


@each
def test_raw_rows_are_answered_alike_over_rest_and_grpc(
    scenario: Scenario, tmp_path: Path, start: Callable[[Path], Serving]
) -> None:
    served = evaluated(tmp_path, scenario)
    one, width = start(tmp_path), len(scenario.task.parts)
    status, answer = one.ask(INFER, columns(CELLS))
    assert status == 200, answer
    [output] = answer["outputs"]
    name = {"labels": "probabilities", "event": "survival"}.get(scenario.task.name, "value")
    assert (output["name"], output["datatype"], output["shape"]) == (name, "FP32", [3, width])
    found = torch.tensor(output["data"], dtype=torch.float64).reshape(3, width)
    torch.testing.assert_close(found, expected(served, features(CELLS)), rtol=1e-6, atol=1e-6)

    x = features(CELLS)
    given = ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=x.shape)
    request = ModelInferRequest(
        model_name="perennial", inputs=[given], raw_input_contents=[x.numpy().astype("<f4").tobytes()]
    )
    response = one.stub.ModelInfer(request)
    assert [(out.name, out.datatype, list(out.shape)) for out in response.outputs] == [(name, "FP32", [3, width])]
    values = np.frombuffer(response.raw_output_contents[0], "<f4").tolist()
    assert values == output["data"]


def test_metadata_and_page_name_the_targets(tmp_path: Path, start: Callable[[Path], Serving]) -> None:
    evaluated(tmp_path, Stays())
    one = start(tmp_path)
    document = one.ask("/v2/models/perennial")[1]
    assert document["outputs"] == [{"name": "value", "datatype": "FP32", "shape": [-1, 2]}]
    assert document["parameters"]["targets"] == ["days", "euros"]
    assert document["parameters"]["columns"] == ["age", "ward"]
    metadata = one.stub.ModelMetadata(ModelMetadataRequest(name="perennial"))
    assert [(out.name, out.datatype, list(out.shape)) for out in metadata.outputs] == [("value", "FP32", [-1, 2])]
    [_, shown] = one.ask("/served")[1]["models"]
    assert shown["prediction"]["parts"] == ["days", "euros"]
    assert (shown["prediction"]["name"], shown["prediction"]["probability"]) == ("value", False)
    assert shown["measure"] == "mean absolute error"
    assert shown["measured"] == {"away": {"count": 10, "value": 1.25, "text": "1.250"}}


def test_a_site_s_metrics_have_the_headline_s_name(tmp_path: Path, start: Callable[[Path], Serving]) -> None:
    evaluated(tmp_path, Stays())
    registry = start(tmp_path).server.metrics.registry
    labels = {"model": "perennial", "environment": "away"}
    assert registry.get_sample_value("perennial_mean_absolute_error", labels) == 1.25
    assert registry.get_sample_value("perennial_accuracy", labels) is None


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (
            {**columns(CELLS), "outputs": [{"name": "probabilities"}]},
            "unknown output 'probabilities' (there are: value)",
        ),
        (
            {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 5], "data": [3e38] * 5}]},
            "values of 'input' are so large that the model's answer is not finite",
        ),
    ],
)
def test_what_is_wrong_with_a_request(
    request_: Any, sentence: str, tmp_path: Path, start: Callable[[Path], Serving]
) -> None:
    evaluated(tmp_path, Stays())
    status, answer = start(tmp_path).ask(INFER, request_)
    assert (status, answer["error"]) == (400, sentence)


def test_a_rate_that_is_not_finite_is_refused(tmp_path: Path, start: Callable[[Path], Serving]) -> None:
    """Its logarithm is finite."""
    served = evaluated(tmp_path, Stays(**COUNTS))
    x = torch.full((1, 5), 1e4)
    outputs = served.outputs("global", torch.cat([x, -x]))
    assert outputs.isfinite().all()
    assert outputs.max() > 100
    data = (x if outputs[0].max() > 100 else -x).tolist()
    given = {"name": "input", "datatype": "FP32", "shape": [1, 5], "data": data}
    status, answer = start(tmp_path).ask(INFER, {"inputs": [given]})
    assert (status, "is not finite" in answer["error"]) == (400, True)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
def test_the_page_shows_values_by_target_in_their_own_unit(
    tmp_path: Path, start: Callable[[Path], Serving]
) -> None:
    served = evaluated(tmp_path / "state", Stays())
    one = start(tmp_path / "state")
    with browser(tmp_path, f"http://127.0.0.1:{one.server.http_port}/") as page:
        page.until("document.readyState == 'complete' && !document.querySelector('main').hidden")
        text = page.run("document.body.innerText")
        for words in ("Mean absolute error at site client-0", "away", "1.250"):
            assert words in text
        page.run("document.querySelector('[data-name=age]').value = '63'")
        page.run("document.querySelector('[data-name=ward]').value = 'lung'")
        page.run("document.querySelector('#try button').click()")
        page.until(
            "document.querySelectorAll('#answer tr').length > 2 || document.getElementById('error').textContent"
        )
        rows = page.run("[...document.querySelectorAll('#answer tr')].map(row => row.innerText)")
    values = expected(served, features({"age": [63], "ward": ["lung"]}))[0].tolist()
    assert rows[0].split() == ["Target", "Value"]
    for row, name, value in zip(rows[1:], ("days", "euros"), values, strict=True):
        assert row.split()[0] == name
        assert float(row.split()[1]) == pytest.approx(value, rel=1e-3)


# ---------------------------------------------------------------------- what an evaluation leaves


def test_results_are_the_headline_measure() -> None:
    task = Numbers(("days", "euros"))
    outputs = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    targets = torch.tensor([[2.0, 10.0], [2.0, 26.0]])
    sums = {name: own.tolist() for name, own in task.sums(outputs, targets).items()}
    nothing = [0.0, 0.0]
    metrics = {f"global/test/{name}": nothing + own for name, own in sums.items()}
    reply = Reply(metrics={**metrics, "global/test/count": [0, 2]}, settings={"test": ["home", "away"]})
    assert results_of(reply, task) == {"global/test": {"away": (2, (1 + 0 + 0 + 6) / 4)}}
    right = Reply(metrics={"global/test/count": [20, 0], "global/test/correct": [17, 0]}, settings=reply.settings)
    assert results_of(right, Classes(2)) == {"global/test": {"home": (20, 0.85)}}


@pytest.mark.parametrize("scenario", [Stays(), LABELS, EVENT], ids=["numbers", "labels", "event"])
def test_what_was_evaluated_is_served_and_written_down(scenario: Scenario, tmp_path: Path) -> None:
    """After two rounds over bytes: the measure of the served models is the one that the run's log has."""
    task = scenario.task
    config = load_config(options={"method": "ditto", "scenario": scenario.model_dump(mode="json"), "rounds": 2})
    folder = RunFolder.create(tmp_path / "run", config)
    run_rounds(config, folder, WireGrid(config, tmp_path), start_of(config))
    found = newest(tmp_path / "site-1", None, None)
    assert found
    served = load(found, None, CPU)
    away = scenario.client_data(0, config.seed, None).test["away"]
    for name in ("global", "personal"):
        outputs = served.outputs(name, away.x)
        own = task.value(40, {key: sums.tolist() for key, sums in task.sums(outputs, away.y).items()})
        count, value = served.snapshot.results[f"{name}/test"]["away"]
        assert (count, value) == (40, pytest.approx(own, rel=1e-6))
        logged = folder.summary()["models"][name]["final"]["clients"]["client-0"]["away"]
        assert value == pytest.approx(logged, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in sorted(METHODS) if "numbers" in METHODS[name].tasks])
def test_every_method_s_models_of_numbers_are_served_as_they_were_evaluated(method: str, tmp_path: Path) -> None:
    config = toy_config(f"{method}/numbers", rounds=2)
    run_rounds(config, RunFolder.create(tmp_path / "run", config), WireGrid(config, tmp_path), start_of(config))
    found = newest(tmp_path / "site-1", None, None)
    assert found
    served, task = load(found, None, CPU), config.predicts
    assert served.models.keys() == set(config.method.evaluates)
    for name in served.models:
        for environment, part in config.scenario.client_data(0, config.seed, None).test.items():
            values = task.predictions(served.outputs(name, part.x)).double()
            error = (values - part.y.double()).abs().mean().item()
            assert served.snapshot.results[f"{name}/test"][environment][1] == pytest.approx(error, rel=1e-5)


def test_a_snapshot_of_an_older_version_shows_no_results(tmp_path: Path) -> None:
    """It has counts of right answers, which would be read as the measure."""
    evaluated(tmp_path, Stays())
    path = newest(tmp_path, None, None)
    assert path
    written = path.read_bytes()
    path.write_bytes(written.replace(b'"measured"', b'"results" '))
    assert Snapshot.load(path, CPU).results == {}
    path.write_bytes(written)
    assert Snapshot.load(path, CPU).results == {"global/test": {"away": [10, 1.25]}}


def test_every_headline_has_a_gauge() -> None:
    families = {family.name for family in ServingMetrics().registry.collect()}
    tasks = [scenario.task for scenario in (Toy(), *SCENARIOS.values())]
    assert {task.headline.name for task in tasks} == set(HEADLINES) - {METRIC.name}
    assert {f"perennial_{name}" for name in HEADLINES} <= families


# ---------------------------------------------------------------------- exported and predicted


@pytest.mark.slow
@each
def test_an_exported_model_answers_as_pytorch(scenario: Scenario, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra perennial[onnx]")
    served = evaluated(tmp_path / "state", scenario)
    said = CliRunner().invoke(app, ["export", str(tmp_path / "state"), "-o", str(tmp_path / "m.onnx")])
    assert said.exit_code == 0, said.output
    session = onnxruntime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    [name] = [output.name for output in session.get_outputs()]
    assert name == scenario.task.prediction.name
    cells = some_cells(scenario, 40)
    lists = {
        "age": [None if np.isnan(age) else float(age) for age in cells["age"]],
        "ward": cells["ward"].tolist(),
    }
    [values] = session.run([name], cells)
    torch.testing.assert_close(
        torch.from_numpy(values).double(), expected(served, features(lists)), rtol=1e-5, atol=1e-5
    )
    about = json.loads(session.get_modelmeta().custom_metadata_map["perennial"])
    parts = {"labels": ["fall", "fever"], "times": [2.0, 5.0, 10.0]}
    assert about["task"] == scenario.task.name
    [of] = {"targets", "labels", "times"} & about.keys()
    assert about[of] == parts.get(of, list(scenario.task.parts))
    # The task's constants were not taken from the tracing of the model.
    assert type(scenario.task.predictions(torch.zeros(1, scenario.task.outputs))) is Tensor
    [one] = session.run([name], {column: own[:1] for column, own in cells.items()})
    np.testing.assert_allclose(one, values[:1], rtol=1e-6)


def test_tensors_alone_are_read_with_what_the_file_says(tmp_path: Path) -> None:
    from safetensors import safe_open

    evaluated(tmp_path / "state", Stays())
    words = ["export", str(tmp_path / "state"), "--format", "torch", "-o", str(tmp_path / "m.safetensors")]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        about = json.loads(file.metadata()["perennial"])
    assert (about["task"], about["targets"], about["loss"]) == ("numbers", ["days", "euros"], "squared")
    assert (about["target_mean"], about["target_scale"]) == ([7.5, 12_000.0], [2.0, 3_000.0])


def result_of(path: Path, scenario: Scenario) -> Result:
    """A run that has left an untrained model."""
    config = configured(scenario)
    folder = RunFolder.create(path, config)
    (folder.path / "models").mkdir(exist_ok=True)
    save_tensors(folder.path / "models" / "global.safetensors", initial(config))
    return Result(folder.path)


@pytest.mark.parametrize("scenario", NUMBERS.values(), ids=NUMBERS)
def test_predict_has_the_targets_own_unit_and_shape(scenario: Scenario, tmp_path: Path) -> None:
    result, x = result_of(tmp_path / "run", scenario), features(CELLS)
    wanted = expected(evaluated(tmp_path / "state", scenario), x).numpy()
    found = result.predict(x.numpy())
    assert found.shape == ((3,) if len(scenario.task.parts) == 1 else (3, 2))
    np.testing.assert_allclose(found.reshape(3, -1), wanted, rtol=1e-6)
    with pytest.raises(UserError, match="predict_proba: a run on numbers has no probabilities; use predict"):
        result.predict_proba(x.numpy())


@pytest.mark.slow
def test_from_tables_of_numbers_to_values_of_new_rows(tmp_path: Path) -> None:
    """Described, trained, predicted from a frame, exported: one unit, days, all the way."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra perennial[onnx]")
    random = np.random.default_rng(0)
    (tmp_path / "sites").mkdir()
    for site in ("east", "west"):
        age, ward = random.normal(60, 12, 80), random.choice(["heart", "lung"], 80)
        days = 5 + (age - 60) / 6 + 4 * (ward == "lung") + random.normal(0, 0.2, 80)
        frame = pd.DataFrame({"age": age.round(1), "ward": ward, "days": days})
        frame.loc[::9, "age"] = np.nan
        frame.to_csv(tmp_path / "sites" / f"{site}.csv", index=False)
    file, run = tmp_path / "run.toml", tmp_path / "runs" / "first"
    for words in (
        ("describe", tmp_path / "sites", "--task", "numbers", "--label-column", "days", "--impute", "median"),
        ("run", "--config", file, "--data-root", tmp_path / "sites", "--method", "fedavg", "--rounds", "30"),
        ("export", run, "-o", tmp_path / "m.onnx"),
    ):
        out = {"describe": file, "run": run}.get(words[0])
        said = CliRunner().invoke(app, [*map(str, words), *(["--out", str(out)] if out else [])])
        assert said.exit_code == 0, said.output
    new = pd.DataFrame({"age": [60.0, 72.0, np.nan], "ward": ["heart", "lung", "heart"], "more": 1})
    values = Result(run).predict(new)
    assert values.shape == (3,)
    assert values[:2] == pytest.approx([5, 11], abs=1.0)
    session = onnxruntime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    cells = {"age": new["age"].to_numpy(np.float32), "ward": new["ward"].to_numpy(object)}
    np.testing.assert_allclose(session.run(["value"], cells)[0][:, 0], values, rtol=1e-5)


def test_predict_says_which_labels_a_row_has(tmp_path: Path) -> None:
    result, x = (
        result_of(tmp_path / "run", LABELS),
        5 * torch.randn(20, 5, generator=torch.Generator().manual_seed(0)),
    )
    wanted = expected(evaluated(tmp_path / "state", LABELS), x).numpy()
    np.testing.assert_allclose(result.predict_proba(x.numpy()), wanted, rtol=1e-6)
    found = result.predict(x.numpy())
    assert found.dtype == np.int64
    assert found.tolist() == (wanted >= 0.5).astype(int).tolist()
    assert set(found.ravel()) == {0, 1}


def test_predict_says_how_long_a_row_is_expected_to_be_without_the_event(tmp_path: Path) -> None:
    result, x = result_of(tmp_path / "run", EVENT), features(CELLS)
    survival = expected(evaluated(tmp_path / "state", EVENT), x).numpy()
    np.testing.assert_allclose(result.predict_proba(x.numpy()), survival, rtol=1e-6)
    moments = np.linspace(0, 10, 100_001)
    curves = [np.interp(moments, [0, 2, 5, 10], [1, *own]) for own in survival]
    np.testing.assert_allclose(result.predict(x.numpy()), 10 * np.mean(curves, axis=1), rtol=1e-4)


# ---------------------------------------------------------------------- survival at asked times


def asking(times: object) -> dict[str, Any]:
    return {**columns(CELLS), "parameters": {"times": times}}


def test_survival_at_times_that_are_asked_for(tmp_path: Path, start: Callable[[Path], Serving]) -> None:
    served = evaluated(tmp_path, EVENT)
    one = start(tmp_path)
    plain = one.ask(INFER, columns(CELLS))[1]["outputs"][0]["data"]
    asked = [7.5, 0, 2, 1, 10, 5]
    status, answer = one.ask(INFER, asking(", ".join(map(str, asked))))
    assert status == 200, answer
    [output] = answer["outputs"]
    assert (output["name"], output["shape"]) == ("survival", [3, 6])
    survival = expected(served, features(CELLS)).numpy()
    wanted = [np.interp(asked, [0, 2, 5, 10], [1, *own]) for own in survival]
    found = np.array(output["data"]).reshape(3, 6)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert found[:, [2, 5, 4]].ravel().tolist() == plain  # at the model's own times what they have
    assert one.ask(INFER, asking(5))[1]["outputs"][0]["data"] == plain[1::3]

    x = features(CELLS)
    given = ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=x.shape)
    request = ModelInferRequest(
        model_name="perennial", inputs=[given], raw_input_contents=[x.numpy().astype("<f4").tobytes()]
    )
    request.parameters["times"].string_param = "7.5,0,2,1,10,5"
    assert np.frombuffer(one.stub.ModelInfer(request).raw_output_contents[0], "<f4").tolist() == output["data"]
    request.parameters["times"].int64_param = 5
    [response] = one.stub.ModelInfer(request).outputs
    assert list(response.shape) == [3, 1]

    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{one.server.http_port}")
    samples = tritonclient.http.InferInput("input", list(x.shape), "FP32")
    samples.set_data_from_numpy(x.numpy())
    values = client.infer("perennial", [samples], parameters={"times": "7.5, 0"}).as_numpy("survival")
    assert values.tolist() == found[:, :2].tolist()
    client.close()


@pytest.mark.parametrize(
    "times", ["", "5,", "soon", "-1", "nan", "inf", "11", "5;7", ",".join(["1"] * 1001), True]
)
def test_impossible_times_get_one_sentence(
    times: object, tmp_path: Path, start: Callable[[Path], Serving]
) -> None:
    evaluated(tmp_path, EVENT)
    status, answer = start(tmp_path).ask(INFER, asking(times))
    assert status == 400
    assert answer["error"] == (
        f"times: {str(times)[:40]!r} is not possible; give at most 1000 numbers from 0 to 10 with commas between "
        "them"
    )


def test_other_tasks_have_no_parameter_times(tmp_path: Path, start: Callable[[Path], Serving]) -> None:
    evaluated(tmp_path, LABELS)
    one = start(tmp_path)
    assert one.ask(INFER, asking("soon"))[1] == one.ask(INFER, columns(CELLS))[1]


def test_the_answers_of_the_page_are_of_this_form() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```json\n(.+?)```", page, re.DOTALL)
    shown = [json.loads(text)["outputs"] for text in re.split(r"\n(?=\{)", block)]
    tasks = (Classes(2, names=("well", "ill")), Stays(**ONE).task, LABELS.task, EVENT.task)
    for outputs, task in zip(shown, tasks, strict=True):
        described = task.answer_tensors
        assert [one["name"] for one in outputs] == list(described)
        for one, (name, own) in zip(outputs, described.items(), strict=True):
            assert (one["datatype"], one["shape"]) == (own.datatype, [1, *own.shape])
            assert len(one["data"]) == math.prod(one["shape"])
            assert f"`{name}` `{own.datatype} [-1{', K' * len(own.shape)}]`" in page


def test_metadata_and_page_name_labels_and_times(tmp_path: Path, start: Callable[[Path], Serving]) -> None:
    for scenario, key, parts in ((LABELS, "labels", ["fall", "fever"]), (EVENT, "times", [2.0, 5.0, 10.0])):
        evaluated(tmp_path / key, scenario)
        one = start(tmp_path / key)
        document = one.ask("/v2/models/perennial")[1]
        assert document["parameters"][key] == parts
        assert [output["shape"] for output in document["outputs"]] == [[-1, len(parts)]]
        [_, shown] = one.ask("/served")[1]["models"]
        assert shown["prediction"]["parts"] == [f"{part:g}" if isinstance(part, float) else part for part in parts]
        assert shown["prediction"]["probability"] is True
