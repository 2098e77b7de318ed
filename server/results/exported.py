"""A model as a file for other programs: as ONNX with the preparation of raw rows inside, or as tensors."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perennial.client.serving.messages import INPUT, image_column
from perennial.client.serving.models import Choice, load
from perennial.common.config import Task, parse_task
from perennial.common.data.columns import AnyColumn, CategoryColumn, NumberColumn
from perennial.common.data.scenario import Scenario
from perennial.common.models.torch_state import CPU
from perennial.common.tasks import PredictionTask
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import save_tensors, write_bytes
from perennial.common.utils.samples import blank, vocabulary_of
from perennial.common.utils.suggestions import unknown
from perennial.common.wire import PERSONAL
from perennial.server.results.trained import Predicting, model_of, module_of
from perennial.server.run.folder import RunFolder

OPSET, OPSET_ML = 20, 3
CHECKED = 64
"""Rows for which the file's answers are compared with the model's."""
CLOSE = 1e-4
"""How far two probabilities may be apart, or two numbers in units of the largest."""
FEATURES = "perennial:features"
Cells = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FoundModel:
    """A model that was found, and what it is."""

    module: nn.Module
    """From prepared samples (n, *input_shape) to outputs (n, `prediction_task.outputs`)."""
    task: Task
    name: str
    """As the method calls it, such as "global"."""
    client: str
    """Whose it is, or was evaluated by; empty: nobody's in particular."""
    round: int
    changed: tuple[str, ...] = ()
    """Modules, plug-ins and sites' data that have changed since the run began."""

    @property
    def scenario(self) -> Scenario:
        """Whose samples it takes. Raises `UserError` where it must be said whose."""
        return self.task.scenario.at(self.client)

    @property
    def prediction_task(self) -> PredictionTask:
        """What it predicts."""
        return self.task.predicts

    def about(self) -> dict[str, Any]:
        """What somebody needs to know who has the file alone."""
        scenario = self.scenario.model_dump(mode="json")
        prepared = {key: scenario[key] for key in ("mean", "scale") if scenario.get(key)}
        columns = {name: column.model_dump(mode="json") for name, column in self.scenario.cells.items()}
        return {
            "method": self.task.method.name,
            "scenario": self.scenario.name,
            "model": self.name,
            "client": self.client,
            "round": self.round,
            "network": self.task.model.model_dump(mode="json"),
            "input_shape": list(self.scenario.input_shape),
            **({"vocabulary": ids} if (ids := vocabulary_of(self.scenario.input_shape)) else {}),
            "task": self.prediction_task.name,
            **self.prediction_task.facts,
            "inputs": list(self.scenario.column_names),
            "columns": columns,
            **prepared,
        }


def find_model(
    place: Path,
    name: str | None = None,
    client: str | None = None,
    run: str | None = None,
    data_root: Path | None = None,
) -> FoundModel:
    """The model of this name (by default the method's main one) of a run folder, or of a site's state folder.

    Raises `UserError` where there is none.
    """
    if (place / "config.toml").is_file():
        if run:
            raise UserError(f"--run {run} goes with a site's state folder, and {place} is a run folder")
        folder = RunFolder.open(place)
        config = folder.config()
        if data_root:
            config = config.model_copy(update={"data_root": str(data_root)})
        name = name or config.method.evaluates[-1]
        if name == PERSONAL and client is None:
            raise UserError(
                f"each client of {place} has a {name} model of its own; say whose with --client: "
                f"{', '.join(config.scenario.client_ids[:20])}"
            )
        module = model_of(folder, config, name, client)
        last = max(folder.checkpoints(), default=config.rounds)
        return FoundModel(module, config, name, client or "", last, tuple(folder.other_inputs(config)))
    path = Choice(place, run, client).path() if place.is_dir() else None
    if path is None:
        raise UserError(
            f"{place} is neither a run folder nor a site's state folder with a model that was evaluated"
        )
    served = load(path, data_root, CPU)
    name = name or served.headline
    if name not in served.models:
        raise UserError(unknown("model", name, served.models))
    module = module_of(served.models[name], served.network)
    return FoundModel(module, parse_task(served.snapshot.task), name, served.snapshot.client, int(served.version))


def write_torch(found: FoundModel, file: Path) -> str:
    """The model's tensors by their state-dict names as safetensors, with `FoundModel.about` in the metadata.

    Returns a sentence. Raises `UserError` where the model is not one network.
    """
    if isinstance(found.module, Predicting):
        raise UserError(
            f"the {found.name} model of {found.task.method.name} is more than one network, whose tensors "
            "would be of no use alone; --format onnx writes it"
        )
    save_tensors(file, found.module.state_dict(), {"perennial": json.dumps(found.about())})
    return "the tensors, for prepared samples"


def write_onnx(found: FoundModel, file: Path) -> str:
    """The model as ONNX, from raw cells or samples to the outputs of `perennial serve`; returns a sentence.

    Before it is written, onnxruntime's answers are compared with the model's. Raises `UserError` where the extra
    is not installed, or the model cannot be written so.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 # which PyTorch's exporter needs
    except ImportError as error:
        raise UserError(
            f"--format onnx needs the extra perennial[onnx], which is not installed ({error}); "
            "in the project's folder: uv sync --inexact --extra onnx"
        ) from None
    if image_column(found.scenario):
        raise UserError(
            "--format onnx is not possible for rows with a picture beside other columns; perennial serve answers "
            "such rows, and --format torch writes the tensors"
        )
    model = _whole(found)
    onnx.checker.check_model(model)
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    cells = some_cells(found.scenario)
    task, name = found.prediction_task, found.prediction_task.prediction.name
    (answers,) = session.run([names_in_file(found.scenario)[name]], cells)
    with torch.no_grad():
        expected = task.predictions(found.module(samples(found.scenario, cells))).numpy()
    apart = float(np.abs(answers - expected).max())
    if not task.prediction.probability:
        apart /= float(np.abs(expected).max()) or 1.0
    if not apart <= CLOSE:
        raise UserError(f"onnxruntime's answers are up to {apart:.1e} from the model's own; nothing was written")
    write_bytes(file, content)
    return (
        f"takes {_described(found.scenario)}; onnxruntime's answers to {CHECKED} made-up samples are "
        f"within {apart:.1e} of the model's own"
    )


def names_in_file(scenario: Scenario) -> dict[str, str]:
    """The outputs' names in the file, by those of `perennial serve`: a column may have one of these already."""
    found: dict[str, str] = {}
    for name in scenario.task.answer_tensors:
        found[name] = name
        while found[name] in scenario.column_names:
            found[name] += "_out"
    return found


def some_cells(scenario: Scenario, rows: int = CHECKED) -> dict[str, Cells]:
    """Made-up cells or samples by input, empty cells and unknown categories among them."""
    random = np.random.default_rng(0)
    if not scenario.column_names:
        if most := vocabulary_of(scenario.input_shape):
            return {INPUT: random.integers(most, size=(rows, *scenario.input_shape))}
        return {INPUT: random.random((rows, *scenario.input_shape), np.float32)}
    made: dict[str, Cells] = {}
    for name in scenario.column_names:
        column = scenario.cells.get(name, NumberColumn())
        if isinstance(column, CategoryColumn):
            choices = [*column.places(), "", "no category of this name"]
            made[name] = np.array([choices[row % len(choices)] for row in range(rows)], object)
            continue
        made[name] = (column.mean + column.scale * random.standard_normal(rows)).astype(np.float32)
        if column.fill is not None:
            made[name][random.random(rows) < 0.2] = np.nan
    return made


def samples(scenario: Scenario, cells: Mapping[str, Cells]) -> Tensor:
    """Cells or samples by input, prepared as `perennial serve` prepares them: (n, *input_shape)."""
    if not scenario.column_names:
        return scenario.prepare(torch.from_numpy(cells[INPUT]))
    parts = []
    for name in scenario.column_names:
        column, values = scenario.cells.get(name), cells[name]
        if isinstance(column, CategoryColumn):
            parts.append(column.features([str(text) for text in values]))
        else:
            parts.append(column.features(values.astype(np.float64)) if column else values[:, None])
    return scenario.prepare(torch.from_numpy(np.concatenate(parts, axis=1)))


def _described(scenario: Scenario) -> str:
    if not scenario.column_names:
        return f"one input {INPUT!r} of samples of size {'x'.join(map(str, scenario.input_shape))}"
    texts = [name for name, column in scenario.cells.items() if isinstance(column, CategoryColumn)]
    return f"raw rows, one input for each of {len(scenario.column_names)} columns" + (
        f" (text: {', '.join(texts)})" if texts else ""
    )


# ---------------------------------------------------------------------- ONNX


class _Answering(nn.Module):
    """The model, before it what a scenario does to all samples alike, after it what its task makes of outputs."""

    def __init__(self, module: nn.Module, scenario: Scenario) -> None:
        super().__init__()
        self._module, self._scenario = module, scenario

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*self._scenario.task.answer(self._module(self._scenario.prepare(x))).values(),)


def _whole(found: FoundModel) -> Any:
    """Columns, network and answers as one ONNX model."""
    from onnx import compose, helper

    network = compose.add_prefix(_network(found), "network/")
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", OPSET_ML)]
    before, after = (
        helper.make_model(graph, opset_imports=opsets, ir_version=network.ir_version)
        for graph in (_columns(found.scenario), _answers(found.scenario))
    )
    answers = [(own.name, given.name) for own, given in zip(network.graph.output, after.graph.input, strict=True)]
    model = compose.merge_models(before, network, io_map=[(FEATURES, network.graph.input[0].name)])
    model = compose.merge_models(model, after, io_map=answers)
    model.producer_name = "perennial"
    model.doc_string = f"The {found.name} model of {found.task.method.name} after round {found.round}"
    helper.set_model_props(model, {"perennial": json.dumps(found.about())})
    return model


def _network(found: FoundModel) -> Any:
    """From features (n, *input_shape) to the numbers of the answer, as PyTorch exports it."""
    sample = blank(found.scenario.input_shape, 2)
    module = _Answering(found.module, found.scenario).eval()
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = torch.export.Dim("rows", min=1)
            program = torch.onnx.export(
                module, (sample,), dynamo=True, dynamic_shapes=({0: rows},), opset_version=OPSET, verbose=False
            )
    except torch.onnx.OnnxExporterError as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"model {found.task.model.name!r} cannot be written as ONNX ({why})") from None
    finally:
        log.setLevel(level)
    assert program
    return program.model_proto


class _Graph:
    """Nodes and constants of a part of the model, as they come."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """A node with one output, whose name it returns."""
        from onnx import helper

        output = output or f"perennial:{operator}-{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def constant(self, kind: int, values: float | Sequence[float]) -> str:
        """A number or a list of numbers, whose name it returns."""
        from onnx import helper

        name, shape = f"perennial:constant-{len(self.constants)}", np.shape(values)
        self.constants.append(helper.make_tensor(name, kind, shape, np.ravel(values)))
        return name

    def column(self, name: str, column: AnyColumn | None) -> str:
        """A column's features (n, width): `NumberColumn.features` and `CategoryColumn.features` in ONNX."""
        from onnx import TensorProto

        def wide(part: str) -> str:
            return self.add("Unsqueeze", part, self.constant(TensorProto.INT64, [1]))

        if column is None:
            return wide(name)
        if isinstance(column, CategoryColumn):
            places = column.places()
            codes: dict[str, Any] = {"keys_strings": [*places], "values_int64s": [*places.values()]}
            unknown_code = len(column.categories)
            place = self.add("LabelEncoder", name, domain="ai.onnx.ml", **codes, default_int64=unknown_code)
            width = self.constant(TensorProto.INT64, column.width)
            return self.add("OneHot", place, width, self.constant(TensorProto.FLOAT, [0, 1]))
        value = self.add("Cast", name, to=TensorProto.DOUBLE)
        empty = self.add("IsNaN", value)
        if column.fill is not None:
            value = self.add("Where", empty, self.constant(TensorProto.DOUBLE, column.fill), value)
        value = self.add("Sub", value, self.constant(TensorProto.DOUBLE, column.mean))
        value = self.add("Div", value, self.constant(TensorProto.DOUBLE, column.scale))
        parts = [value, empty] if column.missing else [value]
        features = [wide(self.add("Cast", part, to=TensorProto.FLOAT)) for part in parts]
        return self.add("Concat", *features, axis=1)


def _columns(scenario: Scenario) -> Any:
    """From raw cells, an input (n,) for each column, to features (n, width); other samples go through."""
    from onnx import TensorProto, helper

    graph, floats = _Graph(), TensorProto.FLOAT
    own = TensorProto.INT64 if vocabulary_of(scenario.input_shape) else floats
    shape: list[str | int | None] = ["rows", *scenario.input_shape]
    if scenario.column_names:
        cells = {name: scenario.cells.get(name) for name in scenario.column_names}
        parts = [graph.column(name, column) for name, column in cells.items()]
        graph.add("Concat", *parts, output=FEATURES, axis=1)
        kinds = {
            name: TensorProto.STRING if isinstance(own, CategoryColumn) else floats for name, own in cells.items()
        }
        inputs = [helper.make_tensor_value_info(name, kind, ["rows"]) for name, kind in kinds.items()]
    else:
        graph.add("Identity", INPUT, output=FEATURES)
        inputs = [helper.make_tensor_value_info(INPUT, own, shape)]
    features = helper.make_tensor_value_info(FEATURES, own, shape)
    return helper.make_graph(graph.nodes, "columns", inputs, [features], graph.constants)


def _answers(scenario: Scenario) -> Any:
    """From the numbers of the answer to the outputs of `perennial serve`, texts among them."""
    from onnx import TensorProto, helper

    graph, names = _Graph(), names_in_file(scenario)
    kinds = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64, "BYTES": TensorProto.STRING}
    given, answers = [], []
    for name, own in scenario.task.answer_tensors.items():
        kind = kinds[own.datatype]
        shape: list[str | int | None] = ["rows", *own.shape]
        if own.texts:
            texts: dict[str, Any] = {"keys_int64s": [*range(len(own.texts))], "values_strings": [*own.texts]}
            graph.add("LabelEncoder", names[own.texts_by], output=names[name], domain="ai.onnx.ml", **texts)
        else:
            given.append(helper.make_tensor_value_info(f"perennial:{name}", kind, shape))
            graph.add("Identity", f"perennial:{name}", output=names[name])
        answers.append(helper.make_tensor_value_info(names[name], kind, shape))
    return helper.make_graph(graph.nodes, "answers", given, answers)
