"""The predictor that looks at nothing: the constant that is best for every client's training targets."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from perennial.common.config import RunConfig
from perennial.common.data.examples import ClientData
from perennial.common.models.torch_state import plain_torch
from perennial.common.tasks import PredictionTask, checked_sums, sums_of
from perennial.common.tasks.base import Summed, added_sums
from perennial.common.utils.errors import UserError
from perennial.server.selection.summary import Evaluation, Row
from perennial.server.study.batch import Selected


def constant_rows(client: str, data: ClientData, task: PredictionTask, targets: Tensor | None = None) -> list[Row]:
    """One client's evaluation rows, as a run would log them.

    It says what is best for its own training targets, or for `targets`: those of others, if it trains on nothing.
    """
    outputs = task.constant(data.train.y if targets is None else targets)
    splits = {"validation": {"validation": data.validation}, "test": data.test}
    return [
        {
            "client": client,
            "split": split,
            "environment": list(parts),
            "count": [len(part) for part in parts.values()],
            **_columns(task, outputs, [part.y for part in parts.values()]),
        }
        for split, parts in splits.items()
    ]


def _columns(task: PredictionTask, outputs: Tensor, targets: Sequence[Tensor]) -> Row:
    sums = [task.sums(outputs.expand(len(y), -1), y) for y in targets]
    found = {name: [value for own in sums for value in own[name].tolist()] for name in task.columns}
    return checked_sums(task, found, [len(y) for y in targets])


def constant_summary(clients: Iterable[tuple[str, ClientData]], task: PredictionTask) -> dict[str, Any]:
    """How good it is on the clients' data, as a run's summary has it.

    A client that trains on nothing says what is best for all that train.
    """
    rows, visited, targets = list[Row](), dict[str, ClientData](), list[Tensor]()
    for client, data in clients:
        if len(data.train):
            rows += constant_rows(client, data, task)
            targets.append(data.train.y)
        else:
            visited[client] = data
    for client, data in visited.items():
        rows += constant_rows(client, data, task, torch.cat(targets))
    return Evaluation(rows, task).summary()


@plain_torch()  # the runs take up the data that are read here
def constant_predictor(config: RunConfig, seed: int) -> Selected:
    """Its accuracies on the data that a run with a seed is evaluated on.

    Raises `UserError` when the data set is not there, or nobody has test samples.
    """
    from perennial.client.host import site_data

    task = config.model_copy(update={"seed": seed})
    evaluated = set(task.evaluated)
    clients = (
        (client, site_data(task, number, None, config.data_folder))
        for number, client in enumerate(config.scenario.client_ids)
        if client in evaluated
    )
    found = constant_summary(clients, config.predicts)
    if found["worst"] is None:
        raise UserError(
            f"no client of {config.scenario.name} has test samples with seed {seed}, so there is nothing to "
            "compare; give some (test_fraction)"
        )
    return Selected.model_validate({"round": 0, **found})


@plain_torch()
def constant_sums(configs: Sequence[RunConfig], adapt: int) -> dict[str, list[list[Summed]]]:
    """By site and seed, its sums on tests at a site left out, at one that adapts, and at one that trains.

    A site that is left out hears what is best for the other sites, the others say what is best for their own.
    `configs` are those of the seeds. Raises `UserError` where a site has no more than `adapt` samples.
    """
    from perennial.client.host import site_data

    found: dict[str, list[list[Summed]]] = {}
    for config in configs:
        scenario = config.scenario
        data = [site_data(config, number, None, config.data_folder) for number in range(scenario.clients)]
        for number, site in enumerate(scenario.client_ids):
            alone = config.model_copy(update={"test_sites": (site,), "adapt": adapt})
            few = site_data(alone, number, None, config.data_folder)
            others = torch.cat([own.train.y for own in data[:number] + data[number + 1 :]])
            unseen = _tested(config.predicts, constant_rows(site, few, config.predicts, others))
            adapted = _tested(config.predicts, constant_rows(site, few, config.predicts) if adapt else ())
            own = _tested(config.predicts, constant_rows(site, data[number], config.predicts))
            found.setdefault(site, []).append([unseen, adapted, own])
    return found


def _tested(task: PredictionTask, rows: Sequence[Row]) -> Summed:
    tests = [row for row in rows if row["split"] == "test"]
    return added_sums(task, [own for row in tests for own in sums_of(task, row).values()])
