"""`perennial export`: files whose answers are the served ones."""

import builtins
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from messy_tables import hospitals
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from perennial.client.serving import rest
from perennial.client.serving.messages import answers, samples
from perennial.client.serving.models import load, newest
from perennial.client.snapshot import Snapshot
from perennial.client.trainer import Received
from perennial.common.config import load_config
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.cli.main import app
from perennial.server.results.exported import find_model, some_cells
from perennial.testing.tiny_federation import Toy, toy_config

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CPU = torch.device("cpu")


def ask(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def session(path: Path) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra perennial[onnx]")
    return onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four messy tables, described, and a run of Ditto on them."""
    folder = tmp_path_factory.mktemp("export")
    hospitals(folder / "hospitals")
    assert ask("describe", folder / "hospitals", "--impute", "median", "--out", folder / "run.toml")[0] == 0
    words = ["--config", folder / "run.toml", "--data-root", folder / "hospitals", "--set", "local_steps=2"]
    code, said = ask("run", *words, "--method", "ditto", "--rounds", "1", "--out", folder / "runs" / "first")
    assert code == 0, said
    return folder


@pytest.mark.slow
def test_the_commands_and_the_code_of_the_page(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra perennial[onnx]")
    monkeypatch.chdir(here)
    page = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^perennial (export .+)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        code, said = ask(*shlex.split(command))
        assert code == 0, said
    [code_block] = [
        block for block in re.findall(r"```python\n(.+?)```", page, re.DOTALL) if "onnxruntime" in block
    ]
    found: dict[str, Any] = {}
    exec(code_block, found)
    assert found["probabilities"].shape == (2, 2)
    assert set(found["labels"]) <= {"ill", "well"}
    # The tensors make the same network again, from what the file says of itself.
    with safe_open("va.safetensors", "pt") as file:
        about = json.loads(file.metadata()["perennial"])
    assert (about["model"], about["client"], about["round"], about["classes"]) == (
        *("personal", "va", 1),
        ["ill", "well"],
    )
    net = network(model_settings(about["network"]), tuple(about["input_shape"]), 2)
    again = net.module(load_file("va.safetensors"))
    x = torch.randn(5, *about["input_shape"])
    assert torch.equal(again(x), find_model(here / "runs" / "first", PERSONAL, "va").module(x))


SCENARIO = {
    "name": "own-data",
    "sites": ["here", "there"],
    "inputs": ["age", "pain", "class", "old"],
    "labels": ["no", "yes", "perhaps"],
    "columns": {
        "age": {"kind": "number", "mean": 50.1, "scale": 8.3, "fill": 48, "missing": True},
        "pain": {"kind": "category", "categories": ["none", "some"]},
        "class": {"kind": "number", "mean": 3, "fill": 1},
        "old": {"kind": "number", "mean": 0.5, "scale": 3},
    },
}


def site(state: Path, scenario: dict[str, Any], *settings: str) -> Path:
    """A site's state folder with the models of an evaluation; its snapshot."""
    file = state.with_suffix(".toml")
    file.write_text(tomli_w.dumps({"method": "ditto", "rounds": 3, "scenario": scenario}))
    config = load_config(file, settings=settings)
    net = network(config.model, config.scenario.input_shape, config.scenario.classes)
    kept = {PERSONAL: net.initial(1, "own")}
    received = Received(3, {MODEL: net.initial(1)})
    Snapshot(config.task(), "here", None, received, kept, run="run").save(state / "run" / "here")
    found = newest(state, None, None)
    assert found
    return found


def served(path: Path, name: str, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `perennial serve` answers."""
    model = load(path, None, CPU)
    request, _ = rest.parsed(json.dumps({"inputs": list(inputs)}).encode(), None)
    x = samples(rest.message(request, b"", "perennial", ""), model.scenario, 100)
    return answers(model.outputs(name, x), model.scenario.task)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global", "personal"])
def test_raw_rows_are_answered_as_they_are_served(tmp_path: Path, name: str) -> None:
    path = site(tmp_path / "state", SCENARIO)
    code, said = ask("export", tmp_path / "state", "--model", name, "-o", tmp_path / "m.onnx")
    assert code == 0, said
    assert "within" in said
    cells = some_cells(OwnData.model_validate(SCENARIO), 40)
    assert np.isnan(cells["age"]).any()
    assert not np.isnan(cells["old"]).any()
    inputs = [
        {"name": column, "datatype": "BYTES" if values.dtype == object else "FP32", "shape": [40],
         "data": [None if value != value else value for value in values.tolist()]}
        for column, values in cells.items()
    ]  # fmt: skip
    expected = served(path, name, inputs)
    probabilities, classes, labels = session(tmp_path / "m.onnx").run(
        ["probabilities", "class_out", "label"], cells
    )
    np.testing.assert_allclose(probabilities, expected["probabilities"], atol=1e-6)
    assert classes.tolist() == expected["class"].tolist()
    assert [text.encode() for text in labels] == expected["label"]
    # One row alone.
    one = {column: values[:1] for column, values in cells.items()}
    np.testing.assert_allclose(session(tmp_path / "m.onnx").run(None, one)[0], probabilities[:1], atol=1e-6)


@pytest.mark.slow
def test_an_output_has_a_name_that_no_column_has(tmp_path: Path) -> None:
    site(tmp_path / "state", {"name": "own-data", "sites": ["here", "there"], "inputs": ["class", "class_out"]})
    code, said = ask("export", tmp_path / "state", "-o", tmp_path / "m.onnx")
    assert code == 0, said
    names = [output.name for output in session(tmp_path / "m.onnx").get_outputs()]
    assert names == ["probabilities", "class_out_out", "label"]


@pytest.mark.slow
def test_numbers_in_the_sites_units_and_several_networks(tmp_path: Path) -> None:
    """Without columns: `mean` and `scale` are inside; of FedRoD's personal model, two networks are."""
    scenario = {"name": "own-data", "inputs": [3], "mean": [1.0, 2.0, 3.0], "scale": [2.0, 3.0, 4.0]}
    path = site(tmp_path / "state", {**scenario, "sites": ["here", "there"]})
    code, said = ask("export", tmp_path / "state", "-o", tmp_path / "m.onnx")
    assert code == 0, said
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    given = {"name": "input", "datatype": "FP32", "shape": [7, 3], "data": x.tolist()}
    found = session(tmp_path / "m.onnx").run(["probabilities"], {"input": x})[0]
    np.testing.assert_allclose(found, served(path, "personal", [given])["probabilities"], atol=1e-6)


@pytest.mark.slow
def test_a_model_of_more_than_one_network(tmp_path: Path) -> None:
    from perennial.server.local import LocalRuntime
    from perennial.server.run.folder import RunFolder

    config = toy_config("fedrod", rounds=1)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config), None)
    words = ("export", tmp_path / "run", "--client", "client-0")
    code, said = ask(*words, "--format", "torch", "-o", tmp_path / "m")
    assert (code, "more than one network" in said, (tmp_path / "m").exists()) == (2, True, False)
    code, said = ask(*words, "-o", tmp_path / "m.onnx")
    assert code == 0, said
    x = torch.randn(4, *Toy().input_shape)
    with torch.no_grad():
        expected = find_model(tmp_path / "run", None, "client-0").module(x).softmax(dim=1)
    found = session(tmp_path / "m.onnx").run(["probabilities"], {"input": x.numpy()})[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Of a run whose checkpoints are gone, the common model is still there.
    before = find_model(tmp_path / "run", "global").module(x)
    rmtree(tmp_path / "run" / "checkpoint")
    assert torch.equal(find_model(tmp_path / "run", "global").module(x), before)
    code, said = ask(*words, "-o", tmp_path / "m.onnx")
    assert (code, "has no checkpoint" in said) == (2, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("runs/first",), "say whose with --client: cleveland, hungary, switzerland, va"),
        (("runs/first", "--client", "vb"), "client 'vb'"),
        (("runs/first", "--model", "best"), "model 'best'"),
        (("runs/first", "--run", "abc"), "--run abc goes with a site's state folder"),
        (("runs",), "is neither a run folder nor a site's state folder"),
        (("nowhere",), "is neither a run folder nor a site's state folder"),
    ],
)
def test_what_is_not_there(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], sentence: str
) -> None:
    monkeypatch.chdir(here)
    code, said = ask("export", *words, "-o", "m.onnx")
    assert (code, sentence in " ".join(said.split())) == (2, True), said
    assert not Path("m.onnx").exists()


def test_what_a_run_keeps_is_not_written_over(here: Path) -> None:
    run = here / "runs" / "first"
    kept = {name: (run / name).read_bytes() for name in ("config.toml", "models/global.safetensors")}
    for name in kept:
        code, said = ask("export", run, "--model", "global", "--format", "torch", "-o", run / name)
        assert (code, "keeps; give another name" in " ".join(said.split())) == (2, True), said
    assert {name: (run / name).read_bytes() for name in kept} == kept
    own = here / "table.csv"
    own.write_text("age\n")
    assert ask("export", run, "--model", "global", "--format", "torch", "-o", own)[0] == 2
    assert own.read_text() == "age\n"


def test_without_the_extra_one_sentence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    code, said = ask("export", here / "runs" / "first", "--model", "global", "-o", here / "n.onnx")
    assert (code, "needs the extra perennial[onnx]" in said) == (2, True), said
    assert not (here / "n.onnx").exists()


@pytest.mark.slow
def test_answers_that_differ_are_not_written(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra perennial[onnx]")
    monkeypatch.setattr(
        "perennial.server.results.exported.samples", lambda scenario, cells: torch.zeros(64, *scenario.input_shape)
    )
    code, said = ask("export", here / "runs" / "first", "--model", "global", "-o", tmp_path / "m.onnx")
    assert (code, "nothing was written" in said) == (2, True), said
    assert not (tmp_path / "m.onnx").exists()
