"""The predictor that looks at nothing: every client's most frequent training label."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from perennial.common.config import RunConfig
from perennial.common.data.examples import ClientData
from perennial.common.models.torch_state import plain_torch
from perennial.common.utils.errors import UserError
from perennial.server.selection.summary import Evaluation, Row
from perennial.server.study.batch import Counts, Selected


def constant_rows(client: str, data: ClientData, counts: Tensor | None = None) -> list[Row]:
    """One client's evaluation rows, as a run would log them; of equally frequent labels the smallest counts.

    It says its own most frequent one, or that of `counts`, of each class: that of others, if it trains on nothing.
    """
    label = int((torch.bincount(data.train.y) if counts is None else counts).argmax())
    splits = {"validation": {"validation": data.validation}, "test": data.test}
    return [
        {
            "client": client,
            "split": split,
            "environment": list(parts),
            "count": [len(part) for part in parts.values()],
            "correct": [int((part.y == label).sum()) for part in parts.values()],
        }
        for split, parts in splits.items()
    ]


def constant_summary(clients: Iterable[tuple[str, ClientData]], classes: int) -> dict[str, Any]:
    """Its accuracies on the clients' data, as a run's summary has them.

    A client that trains on nothing says what is most frequent among all that train.
    """
    rows, visited, counts = list[Row](), dict[str, ClientData](), torch.zeros(classes, dtype=torch.int64)
    for client, data in clients:
        if len(data.train):
            rows += constant_rows(client, data)
            counts += torch.bincount(data.train.y, minlength=classes)
        else:
            visited[client] = data
    rows += [row for client, data in visited.items() for row in constant_rows(client, data, counts)]
    return Evaluation(rows).summary()


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
    found = constant_summary(clients, config.scenario.classes)
    if found["worst"] is None:
        raise UserError(
            f"no client of {config.scenario.name} has test samples with seed {seed}, so there is nothing to "
            "compare; give some (test_fraction)"
        )
    return Selected.model_validate({"round": 0, **found})


@plain_torch()
def constant_counts(configs: Sequence[RunConfig], adapt: int) -> dict[str, list[list[Counts]]]:
    """By site and seed, what it gets right at a site left out, at one that adapts, and at one that trains.

    A site that is left out hears the other sites' most frequent label, the others say their own. `configs` are
    those of the seeds. Raises `UserError` where a site has no more than `adapt` samples.
    """
    from perennial.client.host import site_data

    found: dict[str, list[list[Counts]]] = {}
    for config in configs:
        scenario = config.scenario
        data = [site_data(config, number, None, config.data_folder) for number in range(scenario.clients)]
        labels = [torch.bincount(own.train.y, minlength=scenario.classes) for own in data]
        for number, site in enumerate(scenario.client_ids):
            alone = config.model_copy(update={"test_sites": (site,), "adapt": adapt})
            few = site_data(alone, number, None, config.data_folder)
            unseen = _right(constant_rows(site, few, sum(labels) - labels[number]))
            adapted = _right(constant_rows(site, few)) if adapt else (0, 0)
            found.setdefault(site, []).append([unseen, adapted, _right(constant_rows(site, data[number]))])
    return found


def _right(rows: Sequence[Row]) -> Counts:
    tests = [row for row in rows if row["split"] == "test"]
    return sum(sum(row["correct"]) for row in tests), sum(sum(row["count"]) for row in tests)
