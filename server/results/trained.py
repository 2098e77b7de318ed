"""The models of a run that has ended, as ordinary PyTorch modules."""

from __future__ import annotations

import shlex
import warnings
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from perennial.client.host import client_half, site_data, site_of
from perennial.client.serving import models as serving
from perennial.client.serving.messages import few, image_column
from perennial.client.state import FileStates, Kept, valid
from perennial.client.trainer import Client, Predictor, Received
from perennial.common.config import RunConfig
from perennial.common.data.columns import CategoryColumn
from perennial.common.data.environments import unit_range
from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.data.scenarios.wilds import Texts
from perennial.common.data.site_files import Found
from perennial.common.models.network import Network
from perennial.common.models.torch_state import CPU, plain_torch
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_tensors
from perennial.common.utils.samples import padded, parts_of, vocabulary_of
from perennial.common.utils.suggestions import unknown
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.arrays import as_array, numbers, shape_text
from perennial.server.frames import frame_table, with_bytes
from perennial.server.groups import filled
from perennial.server.run.folder import RunFolder, reason
from perennial.strategies.registry import strategy_for

GLOBAL = "global"
BATCH = 1024
"""Samples of which a model is asked at once."""


class Predicting(nn.Module):
    """A prediction that no single network makes; it has no weights of its own."""

    def __init__(self, predict: Predictor) -> None:
        super().__init__()
        self._predict = predict

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, `task.outputs`) for samples (n, *input_shape)."""
        return self._predict(x)


@plain_torch()
def model_of(
    folder: RunFolder, config: RunConfig, name: str | None, client: str | None, round_: int | None = None
) -> nn.Module:
    """A run's model by its name, the server's or a client's, after the last round or that of a checkpoint.

    Raises `UserError` as `Result.model` does.
    """
    names, clients = config.method.evaluates, config.scenario.client_ids
    name = names[-1] if name is None else name
    if name not in names:
        raise UserError(unknown("model", name, names))
    if client is not None and client not in clients:
        raise UserError(unknown("client", client, clients))
    network = Network(config.model, config.scenario.input_shape, config.predicts.outputs, CPU)
    if name == PERSONAL and client is not None:
        predict = _personal(folder, config, client, network, round_)
    else:
        received = _saved(folder, config) if name == GLOBAL and round_ is None else None
        received = received or _received(folder, config, client, round_)
        if name == PERSONAL or received is None:
            raise UserError(f"each client has a {name} model of its own; say which, such as client={clients[0]!r}")
        with torch.no_grad():
            predict = _half(config, client or clients[0], network, {}).untrained(received)[name]
    return module_of(predict, network)


def module_of(predict: Predictor, network: Network) -> nn.Module:
    """A prediction as a module: the network with its weights, where that is what it is."""
    if isinstance(predict, nn.Module):  # merged already, to be served
        return predict
    return network.module(predict.args[0]) if isinstance(predict, partial) else Predicting(predict)


@plain_torch()
def predictions(module: nn.Module, x: Any, scenario: Scenario) -> npt.NDArray[np.float32]:
    """What a model's task predicts of raw rows (n, ...). Raises `UserError` where they do not fit the scenario."""
    task = scenario.task
    with torch.no_grad():
        parts = [task.predictions(module(part)) for part in torch.split(samples(x, scenario), BATCH)]
    return torch.cat(parts).numpy()


def samples(x: Any, scenario: Scenario) -> Tensor:
    """Raw rows as a model takes them, (n, *input_shape): a frame's columns by their names, bytes divided by 255.

    Raises `UserError` where they do not fit the scenario.
    """
    pictures = image_column(scenario)
    names = (*scenario.column_names, *pictures)
    if frame := hasattr(x, "columns") and any(isinstance(name, str) for name in x.columns):
        if lacking := [name for name in names if name not in x.columns]:
            raise UserError(f"x has no column {lacking[0]!r}; a model of this run takes {few(names)}")
        x = x[list(names)] if names else x
    if isinstance(scenario, OwnData) and names:
        if not frame:
            raise UserError(
                f"x must be a pandas data frame (`uv pip install pandas`) with the columns {few(names)}, not "
                f"{type(x).__name__}"
            )
        from perennial.common.data.tables import text_cells

        table = frame_table("x", x)
        for name in pictures:
            table = with_bytes("x", table, name)
        found = scenario.samples("", Found("x", table, (), None, names))
        for name, column in scenario.cells.items():
            if isinstance(column, CategoryColumn):
                _warn_of(name, set(text_cells(table, name, "x")), column)
        return scenario.prepare(found)
    shape = scenario.input_shape
    if isinstance(scenario, OwnData) and scenario.text_column:
        if frame and scenario.text_column not in x.columns:
            raise UserError(f"x has no column {scenario.text_column!r} of texts")
        texts = list(x[scenario.text_column]) if frame else list(x)
        if any(not isinstance(text, str) or not text for text in texts) or not texts:
            raise UserError("x must be texts, none of them empty, or a frame with a column of them")
        return scenario.ids(texts)
    if isinstance(scenario, Texts) and not frame and len(x) and all(isinstance(text, str) and text for text in x):
        return scenario.ids(x)
    if parts_of(shape) or padded(shape):
        return torch.from_numpy(filled("x", x, shape))
    array = as_array("predict", "x", x)
    if array.dtype.kind not in "fiub" or array.shape[1:] != tuple(scenario.input_shape) or not len(array):
        raise UserError(
            f"x must be numbers of shape n x {shape_text(scenario.input_shape)}, not {array.dtype} of shape "
            f"{shape_text(array.shape)}"
        )
    if most := vocabulary_of(scenario.input_shape):
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= most:
            raise UserError(f"x must be whole numbers from 0 to {most - 1}, as the run's ids of tokens")
        return torch.tensor(array.astype(np.int64))
    found = torch.tensor(numbers("x", array, names if frame else ()))
    return scenario.prepare(unit_range(found if found.dtype == torch.uint8 else found.float()))


def _warn_of(name: str, texts: set[str], column: CategoryColumn) -> None:
    """Warn where all texts of a column, "" for an empty cell, are unknown: they may be spelt in another way."""
    if (texts := texts - {""}) and texts.isdisjoint(column.places()):
        warnings.warn(
            f"x: no row has a category of column {name!r} that the run knows, {few(column.categories)}, but "
            f"{few(sorted(texts))}; all count as unknown, so if they mean the same, spell them alike",
            stacklevel=6,  # whoever calls predict or predict_proba
        )


def _personal(
    folder: RunFolder, config: RunConfig, client: str, network: Network, round_: int | None
) -> Predictor:
    """A client's own model, made from what it keeps, as its last evaluation, or that in a round, made it."""
    if config.runtime == "deployment":
        raise UserError(f"the personal model of {client} is at its site, where perennial serve answers")
    if config.runtime == "simulation":
        if round_ is not None:
            raise UserError(f"best: Flower's simulation has {client}'s own model of the last round alone")
        path = serving.newest(folder.path / "clients", None, client)
        if path is None:
            raise UserError(f"{folder.path / 'clients'} has no model of {client}")
        return serving.load(path, config.data_folder, CPU).models[PERSONAL]
    received, last = _received(folder, config, client, round_), folder.load_checkpoint(round_)
    assert received
    kept = FileStates(folder.clients).get(f"{last.run_id}/{client}", [])
    versions = [version for version in valid(kept, folder.resumes()) if version.round <= last.round]
    with torch.no_grad():
        found = _half(config, client, network, versions[-1].kept if versions else {}).evaluated(received)
    if PERSONAL not in found:
        raise UserError(f"{client} only tests in this run, and has no personal model; adapt=N makes one")
    return found[PERSONAL]


def _half(config: RunConfig, client: str, network: Network, kept: Kept) -> Client[Any]:
    number = config.scenario.client_ids.index(client)
    data = serving.OnDemand(lambda: site_data(config, number, None, config.data_folder))
    return client_half(config, site_of(config, client, data, network), kept)


def _saved(folder: RunFolder, config: RunConfig) -> Received | None:
    """What all clients are sent to evaluate the common model, of a run whose checkpoints are gone or elsewhere."""
    path = folder.path / "models" / f"{GLOBAL}.safetensors"
    if folder.checkpoints() or not path.is_file():
        return None
    try:
        return Received(config.rounds, {MODEL: load_tensors(path)})
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)})") from None


def _received(folder: RunFolder, config: RunConfig, client: str | None, round_: int | None) -> Received | None:
    """What a client is sent to evaluate, after the last checkpoint or that of a round; for all, None where each
    gets another."""
    if not folder.checkpoints():
        raise UserError(
            f"{folder.path} has no checkpoint to make its models from (a study deletes those of runs that have "
            f"ended); perennial run --config {shlex.quote(str(folder.path / 'config.toml'))} makes the run again"
        )
    last = folder.load_checkpoint(round_)
    strategy = strategy_for(config, last.run_id)
    strategy.load_state_dict(last.strategy)
    payload = strategy.payload(last.arrays)
    if not callable(payload):
        return Received(last.round, dict(payload))
    return Received(last.round, dict(payload(client))) if client else None
